"""What the timings of tools/benchmark.py share: clock, batches, weights, machine, output."""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from io import StringIO
from typing import Any

import torch
from _machine import cpu_model
from rich.console import Console
from rich.table import Table

from megatron.bcd import data
from megatron.bcd.blocks.partition import Partition, partition_from_config
from megatron.bcd.config import RunConfig
from megatron.bcd.metrics.reporter import SilentReporter
from megatron.bcd.model.builder import build_model
from megatron.bcd.optim.active_block import ActiveBlock
from megatron.bcd.pipeline.schedule import PipelineSchedule
from megatron.bcd.runtime import device
from megatron.bcd.trainer import Trainer
from megatron.bcd.training.state import StepResult

PROG = "tools/benchmark.py"
SPARE_STEPS = 64  # more than fp16's loss scale can be halved


def check_can_write(path: str) -> None:
    """Try the folder of --json before hours are spent; raises ValueError where nothing can be written."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        raise ValueError(f"--json {path}: is a folder; give a file")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"--json {path}: {error.strerror}: {folder}; give a folder that can be written") from None


def cut(config: RunConfig, *, num_blocks: int | None, layout: str) -> Partition:
    """The blocks of another layout or number than the flags'. Raises ValueError where they don't fit the model."""
    return partition_from_config(config.replace_section("bcd", bcd_num_blocks=num_blocks, bcd_layout=layout))


class Bench:
    """The one model that all turns train, with the training loop's own step, and the batches that they share."""

    def __init__(self, config: RunConfig) -> None:
        self.components = Trainer(config, build_model, reporter=SilentReporter())
        self.state = self.components.state
        dataset = self.components.splits.train
        self.batches: Iterator[data.Batch] = (
            data.no_batches() if dataset is None else data.batches(dataset, config, consumed_samples=0)
        )
        gc.freeze()  # as the training loop does

    @property
    def active(self) -> ActiveBlock:
        """The one that is built and stepped."""
        return self.components.active

    @property
    def stage(self) -> int:
        return self.components.stage

    def use(self, active: ActiveBlock, pipeline: PipelineSchedule) -> None:
        """Train with these from the next `build` on, instead of those of the flags."""
        self.components.active, self.components.pipeline = active, pipeline

    def build(self, block: int) -> None:
        """Make `block` the active one."""
        self.active.build(block)
        self.components.lr_scheduler.optimizer = self.active.optimizer
        self.components.lr_scheduler.step(0)

    def step(self, *, num_microbatches_next: int = 0, batches: Iterator[data.Batch] | None = None) -> StepResult:
        """One training step; see `Trainer.train_step`."""
        return self.components.train_step(
            self.batches if batches is None else batches, num_microbatches_next=num_microbatches_next
        )

    def dispose(self) -> None:
        """Free what `build` made."""
        self.components.lr_scheduler.optimizer = None
        self.active.dispose()

    @torch.no_grad()
    def separate_weights(self) -> None:
        """Give each weight its own storage again.

        The distributed optimizer leaves them as views of its buffer. Full training's buffer covers all of them, so a
        block that moves its own into another would be counted, and would pay, for both.
        """
        for parameter in self.components.model.parameters():
            parameter.data = parameter.data.clone()

    def warm_up(self, num_steps: int, *, num_microbatches_next: int) -> list[float]:
        """Untimed steps, in fp16 as many more as its loss scale takes to come down: a skipped step is a short one.
        Returns the milliseconds of each all the same; another step follows directly upon them."""
        times: list[float] = []
        is_usual = False
        while not is_usual or len(times) < num_steps:
            result = self.step(num_microbatches_next=num_microbatches_next)
            times.append(result.milliseconds)
            is_usual = not result.skipped or len(times) >= SPARE_STEPS
        return times


def now() -> float:
    """Seconds, once the device has done its work."""
    device.synchronize()
    return time.perf_counter()


def now_on_all_ranks() -> float:
    """Seconds, once all ranks are here."""
    torch.distributed.barrier()
    return now()


def command_line(argv: Sequence[str], *, starts_ranks: bool = False) -> str:
    """What was typed, torchrun included, so that the figures can be had again; `starts_ranks`: the tool calls torchrun
    itself."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE")
    launcher = ["python"] if ranks is None or starts_ranks else ["torchrun", "--nproc-per-node", ranks]
    threads = os.environ.get("OMP_NUM_THREADS")
    return (f"OMP_NUM_THREADS={threads} " if threads else "") + shlex.join([*launcher, PROG, *argv])


def hardware() -> str:
    """GPU or CPU model, threads, and the versions that decide the speed."""
    target = device.current()
    if target.type == "cpu":
        name = f"{cpu_model()}, {torch.get_num_threads()} thread(s) per process of {os.cpu_count()} cores"
    else:
        name = f"{torch.get_device_module(target).get_device_name(target)}"
    return f"{name}, torch {torch.__version__}, Megatron Core {importlib.metadata.version('megatron-core')}"


def table(columns: Sequence[str], *, num_left: int) -> Table:
    """An empty table whose first `num_left` columns hold words and the others numbers."""
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        shown.add_column(column, justify="left" if index < num_left else "right", no_wrap=True)
    return shown


def print_table(shown: Table) -> None:
    """Plain text where stdout is no terminal."""
    if sys.stdout.isatty():
        Console(highlight=False).print(shown)
        return
    text = StringIO()
    Console(file=text, force_terminal=False, width=1000, highlight=False).print(shown)
    print("\n".join(line.rstrip() for line in text.getvalue().splitlines()))


def write_json(path: str, figures: dict[str, Any]) -> None:
    """Written aside and renamed, so that the file is whole or as it was."""
    aside = f"{path}.{os.getpid()}.tmp"
    with open(aside, "w", encoding="utf-8") as file:
        json.dump(figures, file, indent=1)
        file.write("\n")
    os.replace(aside, path)
