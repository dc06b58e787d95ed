"""Models in Hugging Face's format out of a run (--save-hf)."""

from __future__ import annotations

import os
import shutil
import time

import torch

from megatron.bcd.checkpoint.shard_writer import ShardWrite
from megatron.bcd.config import RunConfig
from megatron.bcd.huggingface import convert, run_network, tokenizer_export
from megatron.bcd.huggingface.core_format import CoreCheckpoint
from megatron.bcd.huggingface.folder import RUN
from megatron.bcd.metrics.reporter import Reporter
from megatron.bcd.model.builder import frozen_on_host, unwrap_model
from megatron.bcd.runtime import atomic_io, collectives, device

_WEIGHTS = ".bcd-export"
"""Ends the name of the checkpoint beside the model folder."""


class Exporter:
    """Writes model folders below --save-hf. Every method is a collective.

    All ranks write their weights as a checkpoint beside the folder; rank 0 converts it and deletes it. So no rank holds
    more than its own weights and one safetensors file.
    """

    def __init__(self, config: RunConfig, reporter: Reporter, *, run: str, is_continued: bool) -> None:
        """Check what can be known before training.

        `run`: see `run_state.name_of_run`. `is_continued`: the folder may hold its models.

        Raises:
            ValueError: --save-hf holds something else, or is the folder of --load-hf, or transformers has no such
                network.
        """
        checkpoint = config.checkpoint
        assert checkpoint.save_hf is not None
        self.root: str = os.path.realpath(checkpoint.save_hf)  # the weights lie beside the folder, on the same disk
        self._reporter, self._run = reporter, run
        self._is_first = torch.distributed.get_rank() == 0

        def describe() -> None:
            _check_folder(str(checkpoint.save_hf), source=checkpoint.load_hf, run=run if is_continued else None)
            self._description = run_network.describe_run(config, is_on_gpu=device.has_cuda())  # of rank 0 alone

        collectives.on_rank_0(describe)

    def export(self, model: torch.nn.Module, *, iteration: int | None = None) -> bool:
        """Write `model` to --save-hf, or to ``iter_0000007`` in it. Warn and return False if that fails."""
        started = time.monotonic()
        target = self.root if iteration is None else os.path.join(self.root, f"iter_{iteration:07d}")
        weights = target + _WEIGHTS
        error = collectives.on_rank_0(lambda: atomic_io.capture_error(lambda: self._make_anew(weights)))
        if error is None:
            with frozen_on_host(model):
                parts = {f"model.{name}": part for name, part in unwrap_model(model).sharded_state_dict().items()}
                write = ShardWrite(parts, weights, in_background=False)
            write.start()
            error = write.finish()
        difference = None
        if error is None:
            error, difference = collectives.long_on_rank_0(lambda: self._convert(weights, target))
        if self._is_first:
            shutil.rmtree(weights, ignore_errors=True)
        if error is not None:
            self._reporter.warning(f"--save-hf {target}: the model was not written ({error})")
            return False
        self._reporter.note(f"model written to {target} ({time.monotonic() - started:,.1f} s)")
        if difference is not None:
            self._reporter.warning(f"--save-hf {target}: {difference}")
        return True

    def _make_anew(self, weights: str) -> None:
        if os.path.dirname(weights) == self.root and _run_in(self.root) != self._run:  # before anything else is in it
            path = os.path.join(self.root, RUN)
            os.makedirs(self.root, exist_ok=True)
            atomic_io.write(path + ".new", f"{self._run}\n".encode())
            os.replace(path + ".new", path)
        shutil.rmtree(weights, ignore_errors=True)
        os.makedirs(weights)

    def _convert(self, weights: str, target: str) -> tuple[str | None, str | None]:
        """Return what went wrong, and what other programs read otherwise."""
        run, described = self._run if target == self.root else None, self._description
        error = atomic_io.capture_error(
            lambda: convert.to_hugging_face(CoreCheckpoint(weights), target, described, run=run)
        )
        if error is not None or described.tokenizer is None:
            return error, None
        return None, tokenizer_export.difference(described.tokenizer, target)


def _run_in(folder: str) -> str | None:
    """Name of the run that writes models there; None if nothing says it."""
    try:
        with open(os.path.join(folder, RUN), encoding="utf-8") as file:
            return file.read(100).strip()
    except (OSError, ValueError):
        return None


def _check_folder(asked: str, *, source: str | None, run: str | None) -> None:
    """Check that models may be written to the folder `asked` of --save-hf. `source` is --load-hf.

    What it holds must be of `run`, which goes on: models of other runs, and those that others made, are not replaced.

    Raises:
        ValueError: it is something else.
    """
    root = os.path.realpath(asked)
    if source is not None and os.path.isdir(source) and os.path.realpath(source) == root:
        raise ValueError(f"--save-hf {asked} is the folder of --load-hf, whose model would be lost: give another one")
    if run is None or not os.path.isdir(root) or not os.listdir(root):
        convert.check_output(asked, flag="--save-hf")
    elif _run_in(root) != run:
        raise ValueError(
            f"--save-hf {asked} holds files that this run did not write: give its own folder, or one that is empty "
            "or absent"
        )
