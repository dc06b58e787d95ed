"""Models in Hugging Face's format out of a run (--save-hf), and adapters in peft's (--save-adapters)."""

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
    """Writes model folders below --save-hf, or adapters to --save-adapters. Every method is a collective.

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
        self.flag, asked = _asked(config)
        self.root: str = os.path.realpath(asked)  # the weights lie beside it, on the same disk
        self._reporter, self._run = reporter, run
        self._is_first = torch.distributed.get_rank() == 0

        def describe() -> None:
            _check_folder(config, self.root, run=run if is_continued else None)
            self._description = run_network.describe_run(config, is_on_gpu=device.has_cuda())  # of rank 0 alone

        collectives.on_rank_0(describe)

    def export(self, model: torch.nn.Module, *, iteration: int | None = None) -> bool:
        """Write `model` to --save-hf, or to ``iter_0000007`` in it; a warning and False if that failed."""
        started = time.monotonic()
        target = self.root if iteration is None else os.path.join(self.root, f"iter_{iteration:07d}")
        weights = target + _WEIGHTS
        error = collectives.on_rank_0(lambda: atomic_io.error_of(lambda: self._make_anew(weights)))
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
            self._reporter.warning(f"{self.flag} {target}: the model was not written ({error})")
            return False
        self._reporter.note(f"model written to {target} ({time.monotonic() - started:,.1f} s)")
        if difference is not None:
            self._reporter.warning(f"{self.flag} {target}: {difference}")
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
        """What went wrong, and what other programs read otherwise."""
        run, described = self._run if target == self.root else None, self._description
        write = convert.to_hugging_face if self.flag == "--save-hf" else convert.to_peft
        error = atomic_io.error_of(lambda: write(CoreCheckpoint(weights), target, described, run=run))
        if error is not None or described.tokenizer is None or self.flag != "--save-hf":
            return error, None
        return None, tokenizer_export.difference(described.tokenizer, target)


def _asked(config: RunConfig) -> tuple[str, str]:
    """Which flag, and its folder."""
    save_hf, save_adapters = config.checkpoint.save_hf, config.checkpoint.save_adapters
    if save_hf is not None:
        return "--save-hf", save_hf
    assert save_adapters is not None
    return "--save-adapters", save_adapters


def _run_in(folder: str) -> str | None:
    """Name of the run that writes models there; None if nothing says it."""
    try:
        with open(os.path.join(folder, RUN), encoding="utf-8") as file:
            return file.read(100).strip()
    except (OSError, ValueError):
        return None


def _check_folder(config: RunConfig, root: str, *, run: str | None) -> None:
    """Whether models may be written to `root`, the folder of --save-hf without links.

    What it holds must be of `run`, which goes on: models of other runs, and those that others made, are not replaced.

    Raises:
        ValueError: it is something else.
    """
    (flag, asked), source = _asked(config), config.checkpoint.load_hf
    if source is not None and os.path.isdir(source) and os.path.realpath(source) == root:
        raise ValueError(f"{flag} {asked} is the folder of --load-hf, whose model would be lost: give another one")
    if run is None or not os.path.isdir(root) or not os.listdir(root):
        convert.check_output(asked, flag=flag)
    elif _run_in(root) != run:
        raise ValueError(
            f"{flag} {asked} holds files that this run did not write: give its own folder, or one that is empty "
            "or absent"
        )
