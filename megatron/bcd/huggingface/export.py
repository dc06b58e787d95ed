"""Models in Hugging Face's format out of a run (--save-hf)."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable

import torch

from megatron.bcd.checkpoint.shard_writer import ShardWrite
from megatron.bcd.config import RunConfig
from megatron.bcd.huggingface import convert, run_network
from megatron.bcd.huggingface.core_format import CoreCheckpoint
from megatron.bcd.metrics.reporter import Reporter
from megatron.bcd.model.builder import unwrap_model
from megatron.bcd.runtime import atomic_io, collectives, device

_WEIGHTS = ".bcd-export"
"""Ends the name of the checkpoint beside the model folder."""


class Exporter:
    """Writes model folders below --save-hf. Every method is a collective.

    All ranks write their weights as a checkpoint beside the folder; rank 0 converts it and deletes it. So no rank holds
    more than its own weights and one safetensors file.
    """

    def __init__(self, config: RunConfig, reporter: Reporter, *, is_continued: bool) -> None:
        """Check what can be known before training. `is_continued`: the folder may hold models of this run.

        Raises:
            ValueError: --save-hf holds something, or transformers has no such network.
        """
        assert config.checkpoint.save_hf is not None
        self.root: str = os.path.normpath(config.checkpoint.save_hf)  # with "/" at the end, the weights would lie in it
        self._reporter = reporter
        self._is_first = torch.distributed.get_rank() == 0

        def describe() -> convert.Description:
            if not is_continued:
                convert.check_output(self.root, flag="--save-hf")
            return run_network.describe_run(config, is_on_gpu=device.has_cuda())

        self._description = collectives.on_rank_0(describe)

    def export(self, model: torch.nn.Module, *, iteration: int | None = None) -> bool:
        """Write `model` to --save-hf, or to ``iter_0000007`` in it; a warning and False if that failed."""
        started = time.monotonic()
        target = self.root if iteration is None else os.path.join(self.root, f"iter_{iteration:07d}")
        weights = target + _WEIGHTS
        error = collectives.on_rank_0(lambda: _error_of(lambda: _make_anew(weights)))
        if error is None:
            sharded = unwrap_model(model).sharded_state_dict()
            write = ShardWrite({f"model.{name}": part for name, part in sharded.items()}, weights, in_background=False)
            write.start()
            write.finish()
            error = collectives.first_error(None if write.error is None else atomic_io.describe(write.error))
        if error is None:
            error = collectives.long_on_rank_0(lambda: _error_of(lambda: self._convert(weights, target)))
        if self._is_first:
            shutil.rmtree(weights, ignore_errors=True)
        if error is not None:
            self._reporter.warning(f"--save-hf {target}: the model was not written ({error})")
            return False
        self._reporter.note(f"model written to {target} ({time.monotonic() - started:,.1f} s)")
        return True

    def _convert(self, weights: str, target: str) -> None:
        convert.to_hugging_face(CoreCheckpoint(weights), target, self._description)


def _error_of(action: Callable[[], None]) -> str | None:
    """Run `action`; the error that it raised, in one line."""
    try:
        action()
    except (OSError, RuntimeError, ValueError) as error:  # PyTorch's file writer raises RuntimeError on a full disk
        return atomic_io.describe(error)
    return None


def _make_anew(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
