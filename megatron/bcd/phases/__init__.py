"""Which block is active, and for how long (DESIGN, section 1; arXiv 2506.12037, Algorithm 1). Pure.

A pure state machine: every rank that feeds ``PhaseSchedule`` the same values takes the same decision.
"""

from megatron.bcd.phases.schedule import PhaseSchedule
from megatron.bcd.phases.settings import ORDERS, SWITCHES, PhaseSettings
from megatron.bcd.phases.state import CycleEnd, PhaseState

__all__ = ["ORDERS", "SWITCHES", "CycleEnd", "PhaseSchedule", "PhaseSettings", "PhaseState"]
