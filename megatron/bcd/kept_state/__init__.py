"""What stays of an optimizer when a phase ends: moments, and what 16-bit weights lack of their masters."""

from megatron.bcd.kept_state.kept import Kept, KeptState
from megatron.bcd.kept_state.part import MASTER, Part, parts
from megatron.bcd.kept_state.stepped import Stepped, stepped

__all__ = ["MASTER", "Kept", "KeptState", "Part", "Stepped", "parts", "stepped"]
