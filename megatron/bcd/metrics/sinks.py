"""Sinks for metrics besides the console: metrics file, TensorBoard, Weights & Biases."""

import importlib
import json
import math
import os
from collections.abc import Mapping
from io import FileIO
from typing import Any

from megatron.bcd.metrics.schema import EvalMetrics, StepMetrics


def json_line(values: Mapping[str, object]) -> str:
    """`values` as one line of strict JSON, floats unrounded.

    JSON has no NaN or infinity: such a value becomes null, and `non_finite` holds it as text:
    {"loss": null, "non_finite": {"loss": "nan"}}.
    """
    broken = {k: repr(v) for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
    clean = {k: None if k in broken else v for k, v in values.items()}
    if broken:
        clean["non_finite"] = broken
    return json.dumps(clean, allow_nan=False)


class MetricsFile:
    """JSON lines, each written at once.

    Read on construction, written from the first line on: a run that does not start leaves the file as it was.
    """

    def __init__(self, path: str, *, start_iteration: int, run: str | None = None) -> None:
        """Raises ValueError naming --metrics-file if the file cannot be read on resume, or is not of `run`. Whether it
        can be written, the command line's rules have seen."""
        self._run = run
        self._path = os.path.realpath(path)  # os.replace on a link would leave its target unchanged
        self._file: FileIO | None = None
        self._kept: list[str] = []
        self._unwritten = b""
        # a pipe or device must not be renamed over
        self._in_place = os.path.exists(self._path) and not os.path.isfile(self._path)
        try:
            if os.path.isfile(self._path) and (start_iteration > 0 or run is not None):
                self._kept = self._lines_until(start_iteration)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a text file"
            raise ValueError(f"--metrics-file {path}: {reason}; give another file") from error

    def _lines_until(self, last: int) -> list[str]:
        """Lines that stay: up to iteration `last`, 0 in a new run, which replaces what an earlier start of it wrote.

        Raises ValueError for a line that is none of metrics, or of another run.
        """
        with open(self._path, encoding="utf-8") as file:
            lines = file.read().split("\n")
        kept = []
        for number, line in enumerate(lines[:-1], start=1):  # the last one is empty, or a killed run's incomplete one
            try:
                values = json.loads(line)
                stays = 0 < values["iteration"] <= last and not values.get("is_final")  # that is repeated
                run = values.get("run", self._run if last else None)  # older versions wrote no name
            except (ValueError, TypeError, KeyError, AttributeError):
                raise ValueError(
                    f"--metrics-file {self._path}: line {number} is not a line of metrics; give another file"
                ) from None
            if self._run not in (None, run) and (stays or not last):
                raise ValueError(
                    f"--metrics-file {self._path}: holds lines of another run; give another file, delete this one, or "
                    "--load that run's checkpoints to continue it"
                )
            if stays:
                kept.append(f"{line}\n")
        return kept

    def write(self, values: Mapping[str, object]) -> None:
        """Raises OSError, of a full disk for example; what could not be written goes before the next line."""
        named = values if self._run is None else {**values, "run": self._run}
        self._unwritten += (json_line(named) + "\n").encode()
        self._write_out()

    def _write_out(self) -> None:
        if self._file is None:
            self._file = self._open()
        while self._unwritten:  # unbuffered: a buffer would hold lines that a close could lose
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def _open(self) -> FileIO:
        if not self._in_place:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            aside = f"{self._path}.{os.getpid()}.tmp"
            with open(aside, "w", encoding="utf-8") as file:
                file.writelines(self._kept)
            os.replace(aside, self._path)
        return FileIO(self._path, "a")

    def close(self) -> None:
        """Raises OSError if lines are left that can't be written; may be called twice."""
        if self._unwritten:
            self._write_out()
        if self._file is not None:
            self._file.close()
            self._file = None


def step_scalars(record: StepMetrics) -> dict[str, float]:
    """Megatron's tags where they exist (its iteration-time is in seconds), else "bcd/..."."""
    scalars: dict[str, float | None] = {
        "lm loss": record.loss,
        "learning-rate": record.learning_rate,
        "grad-norm": record.grad_norm,
        "loss-scale": record.loss_scale,
        "num-zeros": record.num_zeros,
        "params-norm": record.params_norm,
        "throughput": record.tflops_per_gpu,
        "batch-size": record.global_batch_size or None,
        "consumed-samples": record.consumed_samples,
        "iteration-time": record.step_time_ms / 1000.0,
        "tokens-per-sec": record.tokens_per_second,
        "bcd/cycle": record.cycle,
        "bcd/phase": record.phase,
        "bcd/block": record.block,
        "bcd/skipped-iterations": record.skipped_iterations,
    }
    for rank, num_bytes in enumerate(record.model_state_bytes):
        scalars[f"bcd/model-state-bytes/rank {rank}"] = num_bytes
    for rank, num_bytes in enumerate(record.peak_memory_bytes):
        scalars[f"bcd/peak-memory-bytes/rank {rank}"] = num_bytes
    return {tag: value for tag, value in scalars.items() if value is not None}


def timer_scalars(record: StepMetrics) -> dict[str, float]:
    """Megatron's tags, "NAME-time": the maximum over the ranks in seconds."""
    return {f"{name}-time": max(times) / 1000.0 for name, times in record.timers_ms.items() if max(times) > 0.0}


def evaluation_scalars(record: EvalMetrics) -> dict[str, float]:
    """Megatron's tags: "lm loss validation", "lm loss validation ppl"."""
    tag = f"lm loss {record.split}"
    return {tag: record.loss, f"{tag} ppl": record.perplexity}


class TensorBoard:
    """TensorBoard events; created at the first write."""

    flag = "--tensorboard-dir"

    def __init__(self, folder: str, *, start_iteration: int) -> None:
        """Raises ValueError naming --tensorboard-dir if TensorBoard is missing."""
        try:
            self._module = importlib.import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise ValueError("--tensorboard-dir needs TensorBoard: pip install tensorboard") from error
        self._folder = folder
        # drops the points that a resumed run repeats
        self._purge_step = start_iteration + 1 if start_iteration > 0 else None
        self._writer: Any = None

    def write(self, scalars: Mapping[str, float], *, iteration: int) -> None:
        if self._writer is None:
            self._writer = self._module.SummaryWriter(self._folder, purge_step=self._purge_step)
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, iteration)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Wandb:
    flag = "--wandb-project"

    def __init__(self, **settings: Any) -> None:
        """Start a Weights & Biases run; raises ValueError naming --wandb-project if that fails."""
        try:
            module: Any = importlib.import_module("wandb")
        except ImportError as error:
            raise ValueError("--wandb-project needs Weights & Biases: pip install wandb") from error
        try:
            self._run: Any = module.init(**settings)
        except Exception as error:  # wandb's versions share no error class
            reason = " ".join(str(error).split()) or type(error).__name__
            project = settings["project"]
            raise ValueError(f"--wandb-project {project}: wandb did not start: {reason}") from error

    def write(self, scalars: Mapping[str, float], *, iteration: int) -> None:
        self._run.log(dict(scalars), step=iteration)

    def close(self) -> None:
        self._run.finish()
