"""Write checkpoints, at once or in the background. A checkpoint is complete or invisible, and no error ends the run.

A checkpoint is written to ``iter_0000007.incomplete``, which is renamed when every rank has written its part. If the
disk is full or fails, the previous checkpoint stays valid, a warning is printed, and the next interval tries again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from typing import Any

import torch

from megatron.bcd.checkpoint import layout, optimizer_state
from megatron.bcd.checkpoint.loader import Source
from megatron.bcd.checkpoint.run_state import RunState
from megatron.bcd.checkpoint.shard_writer import ShardWrite, write_beside_shards
from megatron.bcd.config import CheckpointConfig, RunConfig
from megatron.bcd.metrics.reporter import Reporter
from megatron.bcd.model.builder import get_host_layers, unwrap_model
from megatron.bcd.optim.active_block import ActiveBlock
from megatron.bcd.runtime import atomic_io, collectives, dir_claim, rng


def claim_save_folder(root: str | None) -> dir_claim.DirClaim:
    """Claim --save for this job (`dir_claim.claim`). A collective."""
    return dir_claim.claim(root, flag="--save", contents="checkpoints", clean=layout.clean_leftovers)


def check_save_folder(config: RunConfig, source: Source | None) -> None:
    """Raise ValueError if --save has checkpoints of another run than that of --load (`source`). A collective."""
    root = config.checkpoint.save
    if root is None or config.training.skip_train:
        return
    iterations = collectives.on_rank_0(lambda: layout.candidates(root))
    is_source = source is not None and os.path.realpath(root) == os.path.realpath(source.root)
    is_resumed = is_source and source is not None and source.state is not None
    if not iterations or is_resumed:
        return
    problem = f"--save {root}: holds a run, saved up to iteration {iterations[0]}"
    if is_source:
        raise ValueError(
            f"{problem}, and --finetune starts another one with its weights; give another folder for --save"
        )
    raise ValueError(f"{problem}; give --load {root} to continue it, another folder for --save, or delete it")


class Saver:
    """Writes the checkpoints below --save. Every method is a collective unless it says otherwise."""

    def __init__(self, config: CheckpointConfig, reporter: Reporter) -> None:
        assert config.save is not None
        self.root = config.save
        self._config = config
        self._reporter = reporter
        self._is_first = torch.distributed.get_rank() == 0
        self._pending: tuple[int, ShardWrite, float] | None = None
        """Iteration, files, and start time of the save."""

    def save(self, state: RunState, active: ActiveBlock) -> bool:
        """Write checkpoint `state.iteration`; with --async-save only start to write. Return False if that failed.

        Layers in host memory that each step changes are written at once, because a copy would need as much memory.
        """
        self.finish()
        started = time.monotonic()
        folder = layout.incomplete_folder(self.root, state.iteration)
        error = collectives.first_error(atomic_io.capture_error(lambda: self._prepare(folder, state)))
        if error is not None:
            return self._abandon(state.iteration, error)
        # weights under Megatron Core's own keys, and the optimizer state of every block that has any
        host_layers, deferred = get_host_layers(active.model), optimizer_state.Deferred()
        is_async = self._config.async_save and not host_layers.are_updated
        host_layers.leave_buffers()
        is_constant = host_layers.is_on_host  # does not change before the phase ends, unless it is updated
        entries: dict[str, Any] = {
            f"model.{name}": entry for name, entry in unwrap_model(active.model).sharded_state_dict().items()
        }
        if state.optimizer_state:
            optimizer, deferred = optimizer_state.sharded_state(
                active, state.optimizer_state, is_constant=is_constant if is_async else lambda _: True
            )
            entries |= {f"optimizer.{name}": entry for name, entry in optimizer.items()}
        write = ShardWrite(entries, folder, in_background=is_async, is_constant=is_constant, deferred=deferred)
        if self._config.save_rng:
            write.add(layout.RANDOM_STATES.format(torch.distributed.get_rank()), rng.all_states())
        write.start()
        self._pending = (state.iteration, write, started)
        return True if is_async else self.finish()

    def newest(self) -> str | None:
        """Return the folder of the newest complete checkpoint, as rank 0 sees it; None if there is none."""

        def find_newest() -> str | None:
            with contextlib.suppress(OSError):
                return next((layout.iteration_folder(self.root, each) for each in layout.candidates(self.root)), None)
            return None

        return collectives.on_rank_0(find_newest)

    @property
    def is_writing(self) -> bool:
        """Whether this rank is still writing in the background. Not a collective."""
        return self._pending is not None and self._pending[1].is_writing

    def finish(self) -> bool:
        """Wait for the pending save, if any, and publish it. Return False if it failed."""
        if self._pending is None:
            return True
        (iteration, write, started), self._pending = self._pending, None

        def publish() -> None:
            layout.finish(layout.incomplete_folder(self.root, iteration), write.digests)
            layout.publish(self.root, iteration)

        error = write.finish() or collectives.on_rank_0(lambda: atomic_io.capture_error(publish))
        if error is not None:
            return self._abandon(iteration, error)
        self._prune(iteration)
        self._reporter.note(
            f"checkpoint saved to {layout.iteration_folder(self.root, iteration)} ({time.monotonic() - started:,.1f} s)"
        )
        return True

    def _prepare(self, folder: str, state: RunState) -> None:
        """Write the files of rank 0: the run state, and the files that Megatron Core expects beside the shards."""
        if not self._is_first:
            return
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        atomic_io.write(os.path.join(folder, layout.RUN_STATE), state.to_json().encode())
        write_beside_shards(folder, iteration=state.iteration)

    def _prune(self, iteration: int) -> None:
        """Delete older checkpoints, and unfinished checkpoints before the complete checkpoint `iteration`."""
        keep, retained = self._config.keep_last_checkpoints, self._config.save_retain_interval
        if keep is None and retained is not None:
            keep = 1

        def delete() -> None:
            layout.clean_leftovers(self.root, before=iteration)  # no claim cleans a folder that replica groups share
            if keep is not None:
                layout.prune(self.root, keep, retain_interval=retained)

        error = atomic_io.capture_error(delete) if self._is_first else None
        if error is not None:
            self._reporter.warning(f"older checkpoints were not deleted ({error})")

    def _abandon(self, iteration: int, error: str) -> bool:
        if self._is_first:
            shutil.rmtree(layout.incomplete_folder(self.root, iteration), ignore_errors=True)
        self._reporter.warning(
            f"checkpoint {iteration} was not saved ({error}); earlier ones stay valid, and the next save tries again"
        )
        return False
