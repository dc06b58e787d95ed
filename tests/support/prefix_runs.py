"""Runs of a `dist.World` with a prefix cache, and counters for them.

As in `worlds`, the ranks find these functions by name.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import Any
from unittest import mock

from megatron.bcd.config import RunConfig
from megatron.bcd.prefix_cache.store import PrefixFile
from support import worlds

FLAGS: dict[str, Any] = {"bcd_sample_ratio": 0.007, "bcd_steps_per_block": 4, "train_iters": 12, "eval_iters": 1,
                         "eval_interval": 7, "global_batch_size": 8}  # fmt: skip
"""A subset that each phase reads several times."""


def served_run(config: RunConfig) -> dict[str, Any]:
    """Run `worlds.train_run`; also return the cache's counters, and `computed`: entries by phase."""
    fills: list[int] = []
    original = PrefixFile.write

    def counting(file: PrefixFile, slots: Any, entries: Any) -> None:
        fills.append(len(slots))
        original(file, slots, entries)

    with mock.patch.object(PrefixFile, "write", counting), worlds.started(config) as run:
        run.train()
        return worlds.outcome(run) | {
            "hits": [record.prefix_cache_hits for record in run.recorder.steps],
            "bytes": [record.prefix_cache_bytes for record in run.recorder.steps],
            "warnings": run.recorder.warnings,
            "num_computed": sum(fills),
        }


def killed_in_fill(config: RunConfig, after: int) -> None:
    """End a run during a fill, after this many writes, as if it had been killed."""

    def write(file: PrefixFile, slots: Any, entries: Any) -> None:
        nonlocal after
        if not after:
            raise KeyboardInterrupt
        after -= 1
        original(file, slots, entries)

    original = PrefixFile.write
    with contextlib.suppress(KeyboardInterrupt), mock.patch.object(PrefixFile, "write", write):
        with worlds.started(config) as run:
            run.train()
        raise AssertionError("it was not killed")


def fault_on_rank(config: RunConfig, rank: int, fault: str) -> dict[str, Any]:
    """Run `worlds.train_run` with a disk that fails on one rank."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "some_file")

    is_here = os.environ["RANK"] == str(rank)
    with (
        mock.patch.object(PrefixFile, fault, fail) if is_here else contextlib.nullcontext(),
        worlds.started(config) as run,
    ):
        run.train()
        return worlds.outcome(run) | {"warnings": run.recorder.warnings}
