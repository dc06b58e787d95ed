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
    """Writes model folders below --save-hf, and adapters to --save-adapters. Every method is a collective.

    All ranks write their weights as a checkpoint beside the first folder; rank 0 converts it and deletes it. So no rank
    holds more than its own weights and one safetensors file.
    """

    def __init__(self, config: RunConfig, reporter: Reporter, *, run: str, is_continued: bool) -> None:
        """Check what can be known before training.

        `run`: see `run_state.name_of_run`. `is_continued`: the folder may hold its models.

        Raises:
            ValueError: a folder holds something else, or is the folder of --load-hf, or transformers has no such
                network.
        """
        checkpoint = config.checkpoint
        asked = {"--save-hf": checkpoint.save_hf, "--save-adapters": checkpoint.save_adapters}
        # without links: the weights lie beside the folder, on the same disk
        self._roots = {flag: os.path.realpath(path) for flag, path in asked.items() if path is not None}
        self._reporter, self._run = reporter, run
        self._is_first = torch.distributed.get_rank() == 0

        def describe() -> None:
            for flag in self._roots:
                path = str(asked[flag])
                _check_folder(path, flag=flag, source=checkpoint.load_hf, run=run if is_continued else None)
            self._description = run_network.describe_run(config, is_on_gpu=device.has_cuda())  # of rank 0 alone

        collectives.on_rank_0(describe)

    @property
    def folders(self) -> str:
        """The flags and their folders, for messages."""
        return " and ".join(f"{flag} {root}" for flag, root in self._roots.items())

    def export(self, model: torch.nn.Module, *, iteration: int | None = None) -> bool:
        """Write `model` to the folders, or to ``iter_0000007`` in them; a warning and False if one failed."""
        started = time.monotonic()
        inside = "" if iteration is None else f"iter_{iteration:07d}"
        targets = {flag: os.path.join(root, inside).rstrip(os.sep) for flag, root in self._roots.items()}
        weights = next(iter(targets.values())) + _WEIGHTS
        is_inside = iteration is not None
        error = collectives.on_rank_0(
            lambda: atomic_io.capture_error(lambda: self._make_anew(weights, is_inside=is_inside))
        )
        if error is None:
            with frozen_on_host(model):
                parts = {f"model.{name}": part for name, part in unwrap_model(model).sharded_state_dict().items()}
                write = ShardWrite(parts, weights, in_background=False)
            write.start()
            error = write.finish()
        is_written = True
        for flag, target in targets.items():
            failure, difference = error, None
            if failure is None:
                failure, difference = collectives.long_on_rank_0(lambda: self._convert(weights, flag, target))  # noqa: B023
            if failure is not None:
                self._reporter.warning(f"{flag} {target}: the model was not written ({failure})")
                is_written = False
                continue
            self._reporter.note(f"model written to {target} ({time.monotonic() - started:,.1f} s)")
            if difference is not None:
                self._reporter.warning(f"{flag} {target}: {difference}")
        if self._is_first:
            shutil.rmtree(weights, ignore_errors=True)
        return is_written

    def _make_anew(self, weights: str, *, is_inside: bool) -> None:
        for root in self._roots.values():
            if is_inside and _run_in(root) != self._run:  # before anything else is in it
                path = os.path.join(root, RUN)
                os.makedirs(root, exist_ok=True)
                atomic_io.write(path + ".new", f"{self._run}\n".encode())
                os.replace(path + ".new", path)
        shutil.rmtree(weights, ignore_errors=True)
        os.makedirs(weights)

    def _convert(self, weights: str, flag: str, target: str) -> tuple[str | None, str | None]:
        """Return what went wrong, and what other programs read otherwise."""
        run, described = self._run if target == self._roots[flag] else None, self._description
        write = convert.to_hugging_face if flag == "--save-hf" else convert.to_peft
        error = atomic_io.capture_error(lambda: write(CoreCheckpoint(weights), target, described, run=run))
        if error is not None or described.tokenizer is None or flag != "--save-hf":
            return error, None
        return None, tokenizer_export.difference(described.tokenizer, target)


def _run_in(folder: str) -> str | None:
    """Name of the run that writes models there; None if nothing says it."""
    try:
        with open(os.path.join(folder, RUN), encoding="utf-8") as file:
            return file.read(100).strip()
    except (OSError, ValueError):
        return None


def _check_folder(asked: str, *, flag: str, source: str | None, run: str | None) -> None:
    """Check that models may be written to the folder `asked` of `flag`. `source` is --load-hf.

    What it holds must be of `run`, which goes on: models of other runs, and those that others made, are not replaced.

    Raises:
        ValueError: it is something else.
    """
    root = os.path.realpath(asked)
    if source is not None and os.path.isdir(source) and os.path.realpath(source) == root:
        raise ValueError(f"{flag} {asked} is the folder of --load-hf, whose model would be lost: give another one")
    if run is None or not os.path.isdir(root) or not os.listdir(root):
        convert.check_output(asked, flag=flag)
    elif _run_in(root) != run:
        raise ValueError(
            f"{flag} {asked} holds files that this run did not write: give its own folder, or one that is empty "
            "or absent"
        )
