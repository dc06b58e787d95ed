"""Writes checkpoints: complete or invisible, at once or in the background, without ever ending the run.

A checkpoint is built in ``iter_0000007.incomplete`` and renamed when every rank has written its part; a disk that is
full or gone leaves the checkpoint before it valid, a warning, and another try at the next interval.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

from megatron.bcd.checkpoint import layout, optimizer_state, random_states, run_state
from megatron.bcd.checkpoint.run_state import RunState
from megatron.bcd.checkpoint.shard_writer import Record, ShardWrite
from megatron.bcd.config import CheckpointConfig
from megatron.bcd.metrics.reporter import Reporter
from megatron.bcd.model.builder import unwrap_model
from megatron.bcd.optim.active_block import ActiveBlock
from megatron.bcd.runtime import atomic_io, collectives

_COMMON = "common.pt"


@dataclass
class _UnderWay:
    iteration: int
    write: ShardWrite
    records: dict[str, Record]
    error: str | None
    started: float


class Saver:
    """Saves below --save. Every method is a collective unless it says otherwise."""

    def __init__(self, config: CheckpointConfig, reporter: Reporter) -> None:
        assert config.save is not None
        self.root = config.save
        self._config = config
        self._reporter = reporter
        self._is_first = torch.distributed.get_rank() == 0
        self._under_way: _UnderWay | None = None

    def save(self, state: RunState, model: torch.nn.Module, active: ActiveBlock) -> bool:
        """Write checkpoint `state.iteration`; with --async-save only begin to. False where that failed at once."""
        self.finish()
        started = time.monotonic()
        aside = layout.aside_folder(self.root, state.iteration)
        records: dict[str, Record] = {}
        error = collectives.first_error(self._attempt(lambda: self._prepare(aside, state, records)))
        if error is not None:
            return self._give_up(state.iteration, error)
        error = self._attempt(lambda: self._write_random_states(aside, records))
        write = ShardWrite(_entries(model, active, state), aside, in_background=self._config.async_save)
        write.start()
        self._under_way = _UnderWay(
            iteration=state.iteration, write=write, records=records, error=error, started=started
        )
        return True if self._config.async_save else self.finish()

    def newest(self) -> str | None:
        """The newest complete checkpoint, as rank 0 sees it; None where there is none."""

        def look() -> str | None:
            with contextlib.suppress(OSError):
                for iteration in layout.candidates(self.root):
                    return layout.iteration_folder(self.root, iteration)
            return None

        return collectives.on_rank_0(look)

    @property
    def is_writing(self) -> bool:
        """Whether this rank still writes in the background. Not a collective."""
        return self._under_way is not None and self._under_way.write.is_writing

    @property
    def is_under_way(self) -> bool:
        """Whether a checkpoint was begun and not finished, the same on every rank. Not a collective."""
        return self._under_way is not None

    def finish(self) -> bool:
        """Wait for what is under way, and make it the newest checkpoint. False where that failed."""
        if self._under_way is None:
            return True
        one, self._under_way = self._under_way, None
        one.write.finish()
        error = one.error or (None if one.write.error is None else atomic_io.describe(one.write.error))
        ranks = collectives.gather_objects((error, one.records | one.write.records))
        error = next((rank[0] for rank in ranks if rank[0] is not None), None)
        if error is None and self._is_first:
            records = {name: record for rank in ranks for name, record in rank[1].items()}
            error = self._attempt(lambda: self._publish(one.iteration, records))
        error = collectives.first_error(error)
        if error is not None:
            return self._give_up(one.iteration, error)
        self._prune()
        self._reporter.note(
            f"checkpoint saved to {layout.iteration_folder(self.root, one.iteration)} "
            f"({time.monotonic() - one.started:,.1f} s)"
        )
        return True

    def _prepare(self, aside: str, state: RunState, records: dict[str, Record]) -> None:
        """Rank 0's own files: where the run stands, and what Megatron Core wants beside the shards."""
        if not self._is_first:
            return
        shutil.rmtree(aside, ignore_errors=True)
        os.makedirs(aside)
        atomic_io.write(os.path.join(aside, run_state.FILE_NAME), state.to_json().encode())
        torch.save({"iteration": state.iteration, "checkpoint_version": 3.0}, os.path.join(aside, _COMMON))
        save_config(CheckpointingConfig("torch_dist", 1), aside)
        for name in os.listdir(aside):
            with open(os.path.join(aside, name), "rb") as file:
                os.fsync(file.fileno())
            records[name] = layout.file_record(file.name)

    def _write_random_states(self, aside: str, records: dict[str, Record]) -> None:
        name = random_states.file_name(torch.distributed.get_rank())
        atomic_io.write(os.path.join(aside, name), random_states.random_states())
        records[name] = layout.file_record(os.path.join(aside, name))

    def _publish(self, iteration: int, records: dict[str, Record]) -> None:
        aside = layout.aside_folder(self.root, iteration)
        records[".metadata"] = layout.file_record(os.path.join(aside, ".metadata"))
        layout.finish(aside, records)
        layout.publish(self.root, iteration)

    def _prune(self) -> None:
        keep = self._config.keep_last_checkpoints
        error = self._attempt(lambda: layout.prune(self.root, keep)) if self._is_first and keep is not None else None
        if error is not None:
            self._reporter.warning(f"older checkpoints were not deleted ({error})")

    def _give_up(self, iteration: int, error: str) -> bool:
        if self._is_first:
            shutil.rmtree(layout.aside_folder(self.root, iteration), ignore_errors=True)
        self._reporter.warning(
            f"checkpoint {iteration} was not saved ({error}); those before it stay valid, and the next save tries again"
        )
        return False

    @staticmethod
    def _attempt(action: Any) -> str | None:
        try:
            action()
        except (OSError, RuntimeError, ValueError) as error:  # PyTorch's file writer raises RuntimeError on a full disk
            return atomic_io.describe(error)
        return None


def _entries(model: torch.nn.Module, active: ActiveBlock, state: RunState) -> dict[str, Any]:
    """Weights under the keys of plain Megatron Core, and the optimizer state of every block that has some."""
    weights = unwrap_model(model).sharded_state_dict()
    entries: dict[str, Any] = {f"model.{name}": entry for name, entry in weights.items()}
    if state.optimizer_state:
        summaries = optimizer_state.summaries_from_dict(state.optimizer_state)
        entries.update(
            {f"optimizer.{name}": entry for name, entry in optimizer_state.sharded_state(active, summaries).items()}
        )
    return entries
