"""Supervised fine-tuning: records of instructions and conversations, as datasets."""
