"""Runs of a `dist.World` that save and resume, and their differences from an uninterrupted run.

As in `worlds`, the ranks find these functions by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from megatron.core import dist_checkpointing

from megatron.bcd.checkpoint import layout, shard_writer
from megatron.bcd.checkpoint.saver import Saver
from megatron.bcd.config import RunConfig
from megatron.bcd.optim.matrix_optimizer import MatrixOptimizer
from support import worlds


def with_checkpoints(config: RunConfig, **changes: Any) -> RunConfig:
    """Return `config` with other flags of its checkpoint group."""
    return dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, **changes))


def one_part(config: RunConfig, **hooks: worlds.Hook) -> dict[str, Any]:
    """Run `worlds.train_run`; also return the run's messages."""
    with worlds.started(config, **hooks) as run:
        run.train()
        said = {"notes": run.recorder.notes, "warnings": run.recorder.warnings, "iteration": run.iteration}
        return worlds.outcome(run) | said


def with_rounded_norm(config: RunConfig) -> dict[str, Any]:
    """Return `one_part` of a run that clips by a gradient norm of three digits, in whatever order its parts add up."""
    add_norm = MatrixOptimizer.add_norm

    def rounded(self: Any, norm: float) -> tuple[float, bool, int]:
        exact, is_finite, skipped = add_norm(self, norm)
        return float(f"{exact:.3g}"), is_finite, skipped

    with mock.patch.object(MatrixOptimizer, "add_norm", rounded):
        return one_part(config)


def stopped_and_resumed(config: RunConfig, stops: Sequence[int], root: str) -> list[str]:
    """Stop and save after each iteration in `stops`, resume to the end, and return differences from the whole run."""
    whole = one_part(with_checkpoints(config, save=None, async_save=False))
    load, parts = None, []
    for stop in stops:
        parts.append(one_part(with_checkpoints(config, save=root, load=load, exit_interval=stop)))
        if parts[-1]["iteration"] != stop:
            return [f"stopped after iteration {parts[-1]['iteration']} in place of {stop}"]
        load = root
    parts.append(one_part(with_checkpoints(config, save=None, async_save=False, load=root)))
    return differences(whole, parts)


def saved_in_passing(config: RunConfig, iteration: int, root: str) -> list[str]:
    """Save after `iteration` and continue; then resume from there. Return differences of both from a run without
    saving.

    With --async-save the files are written while later steps change the weights.
    """
    whole = one_part(with_checkpoints(config, save=None, async_save=False))
    saving = with_checkpoints(config, save=root, save_interval=iteration)
    with writes_held_back() as release:

        def let_write(run: worlds.RecordedRun) -> None:
            if run.iteration >= iteration:
                release.set()

        passing = one_part(saving, after_step=let_write)
    results = [f"while saving: {line}" for line in differences(whole, [passing])]
    point_to(root, iteration)
    late = one_part(with_checkpoints(config, save=None, async_save=False, load=root))
    return results + [f"resumed: {line}" for line in differences(whole, [late])]


@contextlib.contextmanager
def writes_held_back() -> Iterator[threading.Event]:
    """Delay all writes of weights in the background until the event is set, for at most a minute."""
    release = threading.Event()
    write = shard_writer.ShardWrite._write

    def write_later(self: shard_writer.ShardWrite) -> None:
        if threading.current_thread() is not threading.main_thread():
            release.wait(60)
        write(self)

    with mock.patch.object(shard_writer.ShardWrite, "_write", write_later):
        try:
            yield release
        finally:
            release.set()


@contextlib.contextmanager
def writes_wait_for_finish() -> Iterator[None]:
    """Delay writes in the background until the run waits for them (`Saver.finish`)."""
    finish = Saver.finish
    with writes_held_back() as release:

        def let_write(self: Saver) -> bool:
            release.set()
            is_saved = finish(self)
            release.clear()
            return is_saved

        with mock.patch.object(Saver, "finish", let_write):
            yield


def point_to(root: str, iteration: int) -> None:
    """Make the tracker name an older checkpoint, as if the run had been killed soon after it."""
    temporary = os.path.join(root, f"tracker_of_{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(str(iteration))
    os.replace(temporary, os.path.join(root, layout.TRACKER))


def differences(whole: dict[str, Any], parts: Sequence[dict[str, Any]]) -> list[str]:
    """Return where the concatenated `parts` differ from `whole` in any bit. Only the first part may begin late."""
    actual = []
    for name in ("steps", "metrics", "evaluations"):
        expected, seen = whole[name], [value for part in parts for value in part[name]]
        if len(parts) == 1:
            expected = expected[len(expected) - len(seen) :]
        pairs = [
            f"{name}: {seen_line} in place of {expected_line}"
            for expected_line, seen_line in zip(expected, seen, strict=False)
            if expected_line != seen_line
        ]
        actual += [f"{len(pairs)} differ, {pairs[0]}"] if pairs else []
        actual += [f"{len(seen)} {name} in place of {len(expected)}"] if len(seen) != len(expected) else []
    different = worlds.same_bits(whole["weights"], parts[-1]["weights"])
    return actual + ([f"{len(different)} weights differ: {different[:3]}"] if different else [])


def resumed_and_saved_again(config: RunConfig, root: str, copy: str) -> dict[str, Any]:
    """Resume from `root`, save what was loaded in `copy`, train to the end; return the outcome and the first
    iteration."""
    with worlds.started(with_checkpoints(config, save=copy, load=root)) as run:
        begin = {
            "began_at": run.iteration,
            "began_in": (run.state.phase_state.phase, run.state.phase_state.step_in_phase),
        }
        assert run.outputs.save()
        run.train()
        return worlds.outcome(run) | begin | {"warnings": run.recorder.warnings}


def tensors_of(checkpoint: str) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, read by Megatron Core without a model."""
    with worlds.parallel(worlds.run_config(mock_data=True, split=None)):
        loaded = dist_checkpointing.load_plain_tensors(checkpoint)
    return {name: tensor for name, tensor in loaded.items() if torch.is_tensor(tensor)}
