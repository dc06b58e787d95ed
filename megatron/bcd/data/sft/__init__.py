"""Supervised fine-tuning: datasets of instructions and conversations."""
