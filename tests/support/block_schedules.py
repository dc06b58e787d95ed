"""Block schedules from a few settings."""

from __future__ import annotations

from typing import Any

from megatron.bcd.blocks.schedule import BlockSchedule
from megatron.bcd.config import BcdConfig, TrainingConfig


def block_schedule(*, num_blocks: int, seed: int = TrainingConfig.seed, **settings: Any) -> BlockSchedule:
    """`settings` are fields of BcdConfig without their `bcd_`; the others have their defaults."""
    return BlockSchedule(
        settings=BcdConfig(**{f"bcd_{name}": value for name, value in settings.items()}),
        num_blocks=num_blocks,
        seed=seed,
    )
