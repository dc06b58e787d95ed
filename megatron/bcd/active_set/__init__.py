"""The active block of this rank."""

from megatron.bcd.active_set.active_set import ActiveSet

__all__ = ["ActiveSet"]
