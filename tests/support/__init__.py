"""Helpers of several test files: runs on several ranks, faults, reference implementations."""
