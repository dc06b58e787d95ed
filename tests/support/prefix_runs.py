"""Runs of a `dist.World` with a prefix cache, and what is counted of them.

Like `worlds`, found by name in the ranks.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.bcd.config import RunConfig
from megatron.bcd.prefix_cache import serve
from megatron.bcd.prefix_cache.store import RecordStore
from megatron.bcd.training import pretrain
from support import worlds

FLAGS: dict[str, Any] = {"bcd_sample_ratio": 0.007, "bcd_steps_per_block": 4, "train_iters": 16, "eval_iters": 1,
                         "eval_interval": 7}  # fmt: skip
"""A subset that each phase goes over some times."""


def served_run(config: RunConfig) -> dict[str, Any]:
    """`worlds.train_run`, and what the cache did."""
    with worlds.started(config) as one:
        one.train()
        return worlds.outcome(one) | {
            "hits": [record.prefix_cache_hits for record in one.recorder.steps],
            "bytes": [record.prefix_cache_bytes for record in one.recorder.steps],
            "notes": notes_of(one),
            "warnings": one.recorder.warnings,
        }


@contextlib.contextmanager
def layers_counted() -> Iterator[dict[int, int]]:
    """How often each layer of this rank has run, evaluations left out: by its number on this stage."""
    counts: dict[int, int] = {}
    original = TransformerLayer.forward

    def counting(layer: Any, *args: Any, **kwargs: Any) -> Any:
        counts[layer.layer_number - 1] = counts.get(layer.layer_number - 1, 0) + layer.training
        return original(layer, *args, **kwargs)

    TransformerLayer.forward = counting
    try:
        yield counts
    finally:
        TransformerLayer.forward = original


def counted_run(config: RunConfig) -> dict[str, Any]:
    """`served_run`, and how often each layer had run in training and fills by the end of each phase."""
    by_phase: list[dict[int, int]] = []
    with (
        layers_counted() as counts,
        worlds.started(config, before_switch=lambda _: by_phase.append(dict(counts))) as one,
    ):
        one.train()
        by_phase.append(dict(counts))
        return {"layers": by_phase, "notes": notes_of(one), "losses": [step["loss"] for step in one.results]}


def notes_of(one: worlds.RecordedRun) -> list[str]:
    return [note for note in one.recorder.notes if note.startswith("prefix cache: phase")]


def killed_in_fill(config: RunConfig, after: int) -> None:
    """A run that ends amid a fill, when so many records are written; as if it had been killed."""

    def write(store: RecordStore, slot: int, content: Any) -> None:
        nonlocal after
        if not after:
            raise KeyboardInterrupt
        after -= 1
        original(store, slot, content)

    original = RecordStore.write
    RecordStore.write = write  # type: ignore[method-assign]
    try:
        with worlds.started(config) as one:
            one.train()
    except KeyboardInterrupt:
        return
    finally:
        RecordStore.write = original  # type: ignore[method-assign]
    raise AssertionError("it was not killed")


def damaged_in_phase(config: RunConfig, root: str) -> str:
    """A run whose cache another program writes into once its first phase with a prefix has begun; how it ends."""

    def damage(one: worlds.RecordedRun) -> None:
        for path in Path(root).rglob("shard_*.bin"):
            path.write_bytes(bytes(path.stat().st_size))

    with worlds.started(config, after_step=damage) as one:
        try:
            one.train()
        except serve.DamagedRecord as error:
            return str(error)
        finally:
            one.prefix_cache.close()
    return "went through"


def fault_on_rank(config: RunConfig, rank: int, fault: str) -> dict[str, Any]:
    """`served_run` where the disk refuses something on one rank."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "some_file")

    is_here = os.environ["RANK"] == str(rank)
    with mock.patch.object(RecordStore, fault, fail) if is_here else contextlib.nullcontext():
        return served_run(config)


def claimed(root: str) -> str:
    """The error of a job that claims this folder for its caches, or "claimed"."""
    with worlds.parallel(worlds.run_config(mock_data=True, split=None)):
        try:
            pretrain.claim_prefix_cache(root).release()
        except ValueError as refused:
            return str(refused)
        return "claimed"
