"""Runs of the self-test of tools/check_machine.py: the training script under torchrun, with a model that is tiny."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _compare_runs import ROOT, CannotRun, run

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One training step of a metrics file."""

    loss: float
    grad_norm: float
    raw: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run wrote to its metrics file."""

    steps: tuple[Line, ...]

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]


def flags_of(values: Mapping[str, Any]) -> list[str]:
    """Words of a command line."""
    words: list[str] = []
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        words += [flag] if value is True else [] if value is False else [flag, str(value)]
    return words


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Starts runs on the ranks of this machine; files go to `folder`."""

    folder: Path
    num_ranks: int
    on_gpu: bool
    flags: Mapping[str, Any]
    """Of every run, beside its own."""
    seconds: float = 300.0
    """Limit of one run: what hangs must end."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables beside those of this process."""

    @property
    def num_stages(self) -> int:
        """Pipeline stages of runs that have several where they can."""
        return 1 if self.num_ranks == 1 else 2

    @property
    def weights(self) -> Path:
        """A checkpoint of the initial weights, which all runs share."""
        return self.folder / "weights"

    def prepare(self) -> None:
        """Write the data, and the initial weights that stock Megatron-LM draws on a CPU: a GPU draws others.

        Raises CannotRun."""
        command = [sys.executable, str(ROOT / "tools" / "_check_walks.py"), str(self.folder)]
        run(command, self.folder / "data.log", threads=1, environment=NO_GPU, seconds=self.seconds)
        no_step = {"train_iters": 1, "eval_iters": 0, "lr": 1e-30, "min_lr": 0, "lr_warmup_iters": 0}
        sizes = {"micro_batch_size": 2, "bcd_num_blocks": 1, "save": self.weights}
        flags = dict(self.flags) | no_step | sizes
        self._start("weights", flags, num_ranks=1, environment={**self.environment, **NO_GPU})

    def train(
        self,
        name: str,
        flags: Mapping[str, Any],
        *,
        num_ranks: int | None = None,
        on_cpu: bool = False,
        until: Callable[[], bool] | None = None,
    ) -> Run:
        """A run from the initial weights on all or so many ranks, or with --load in its flags from there.

        Raises CannotRun."""
        num_ranks = num_ranks or self.num_ranks
        stages = int(flags.get("pipeline_model_parallel_size", 1)) * int(flags.get("tensor_model_parallel_size", 1))
        from_weights = {} if "load" in flags else {"load": self.weights, "finetune": True}
        num_replicas = num_ranks // stages
        sizes = {"micro_batch_size": 2 if num_replicas <= 2 else 1}
        exact = {"deterministic_mode": True} if self.on_gpu and not on_cpu else {}
        values = dict(self.flags) | sizes | exact | from_weights | dict(flags)
        environment = {**self.environment, **(NO_GPU if on_cpu else {})}
        return self._start(name, values, num_ranks=num_ranks, environment=environment, until=until)

    def metrics(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def _start(self, name: str, flags: Mapping[str, Any], *, num_ranks: int, **options: Any) -> Run:
        metrics = self.metrics(name)
        values = dict(flags) | {"data_path": self.folder / "walks", "metrics_file": metrics}
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        run(
            [*launcher, "pretrain_gpt_bcd.py", *flags_of(values)],
            self.folder / f"{name}.log",
            threads=1,
            seconds=self.seconds,
            **options,
        )
        return read_run(metrics)


def read_run(metrics: Path) -> Run:
    """Raises CannotRun where the file lacks what a run writes."""
    try:
        lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise CannotRun(f"its metrics cannot be read ({error})") from None
    steps = [line for line in lines if "loss" in line]
    return Run(steps=tuple(Line(loss=line["loss"], grad_norm=line["grad_norm"] or 0.0, raw=line) for line in steps))
