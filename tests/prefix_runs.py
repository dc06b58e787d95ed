"""Runs of a `dist.World` with a prefix cache, and what is counted of them.

Like `worlds`, found by name in the ranks.
"""

from __future__ import annotations

from typing import Any

import worlds

from megatron.bcd.config import RunConfig

FLAGS: dict[str, Any] = {"bcd_sample_ratio": 0.007, "bcd_steps_per_block": 4, "train_iters": 16, "eval_iters": 1,
                         "eval_interval": 7}  # fmt: skip
"""A subset that each phase goes over some times."""


def served_run(config: RunConfig) -> dict[str, Any]:
    """`worlds.train_run`, and what the cache did."""
    with worlds.trainer(config) as one:
        one.run()
        return worlds.outcome(one) | {
            "hits": [record.prefix_cache_hits for record in one.recorder.steps],
            "bytes": [record.prefix_cache_bytes for record in one.recorder.steps],
            "notes": [note for note in one.recorder.notes if note.startswith("prefix cache")],
            "warnings": one.recorder.warnings,
        }
