"""Replica groups: worlds that train one model together, each on samples of its own, and exchange what they have changed
from time to time. torchft knows who takes part (docs/replica_groups.md)."""
