"""What several test files share: runs on several ranks, faults, reference implementations."""
