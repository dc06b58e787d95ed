"""Replica groups: worlds that train one model together, each on its own samples, and exchange their changes.

torchft decides which groups are members (docs/replica_groups.md).
"""
