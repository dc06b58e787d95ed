"""Sinks for metrics: metrics file, TensorBoard, Weights & Biases."""

import importlib
import json
import math
import os
from collections.abc import Mapping
from io import FileIO
from typing import Any

from megatron.bcd.metrics.schema import StepMetrics


def json_line(values: Mapping[str, object]) -> str:
    """Return `values` as one line of strict JSON with unrounded floats.

    JSON has no NaN or infinity. Such a value becomes null, and `non_finite` holds it as text:
    {"loss": null, "non_finite": {"loss": "nan"}}.
    """
    broken = {k: repr(v) for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
    clean = {k: None if k in broken else v for k, v in values.items()}
    if broken:
        clean["non_finite"] = broken
    return json.dumps(clean, allow_nan=False)


class MetricsFile:
    """A file of JSON lines, each written immediately.

    It is read on construction and written with the first line, so a run that fails to start does not change it.
    """

    def __init__(self, path: str, *, start_iteration: int, run: str | None = None) -> None:
        """Raises ValueError: a resumed run cannot read the file, or it belongs to another run than `run`."""
        self._path, self._run = os.path.abspath(path), run
        self._file: FileIO | None = None
        self._unwritten = b""
        self._num_kept = 0
        try:
            if os.path.isfile(path) and (start_iteration > 0 or run is not None):
                self._num_kept = self._bytes_until(start_iteration)
        except OSError as error:
            raise ValueError(f"--metrics-file {path}: {error.strerror}. Give another file.") from error

    def _bytes_until(self, last: int) -> int:
        """Return the size of the lines to keep, up to iteration `last`. A new run (`last` is 0) keeps none.

        Raises ValueError: a line does not contain metrics, or belongs to another run.
        """
        with open(self._path, "rb") as file:
            lines = file.read().split(b"\n")
        size, is_kept = 0, True
        for number, line in enumerate(lines[:-1], start=1):  # the last one is empty or incomplete
            try:
                values = json.loads(line)
                is_repeated = not last or values["iteration"] > last or values.get("is_final")
                run = values.get("run")
            except (ValueError, TypeError, KeyError, AttributeError):
                raise ValueError(
                    f"--metrics-file {self._path}: line {number} is not a line of metrics. Give another file."
                ) from None
            is_kept = is_kept and not is_repeated
            if self._run not in (None, run) and (is_kept or not last):
                raise ValueError(
                    f"--metrics-file {self._path}: holds lines of another run. Give another file, delete this one, or "
                    "--load that run's checkpoints to continue it."
                )
            size += is_kept * (len(line) + 1)
        return size

    def write(self, values: Mapping[str, object]) -> None:
        """Append a line. If the write fails with an OSError, the next call tries again."""
        named = values if self._run is None else {**values, "run": self._run}
        self._unwritten += (json_line(named) + "\n").encode()
        self._write_out()

    def _write_out(self) -> None:
        if self._file is None:
            self._file = self._open()
        while self._unwritten:  # not through a buffer, because closing it could lose lines
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def _open(self) -> FileIO:
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        file = FileIO(self._path, "a")
        if os.path.isfile(self._path):  # not a pipe or a device
            file.truncate(self._num_kept)
        return file

    def close(self) -> None:
        """Close the file. May be called twice. Raises OSError if lines remain that can't be written."""
        if self._unwritten:
            self._write_out()
        if self._file is not None:
            self._file.close()
            self._file = None


def step_scalars(record: StepMetrics) -> dict[str, float]:
    """Return the curves of a step under Megatron-LM's tags, others under "bcd/...". iteration-time is in seconds."""
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
        "bcd/skipped-layers": record.skipped_layers,
        **record.router_losses,
    }
    for name in ("model_state_bytes", "peak_memory_bytes"):
        for rank, num_bytes in enumerate(getattr(record, name)):
            scalars[f"bcd/{name.replace('_', '-')}/rank {rank}"] = num_bytes
    return {tag: value for tag, value in scalars.items() if value is not None}


class TensorBoard:
    """TensorBoard events. The file is created at the first write."""

    flag = "--tensorboard-dir"

    def __init__(self, folder: str, *, start_iteration: int) -> None:
        """Raises ValueError: TensorBoard is not installed."""
        try:
            self._module = importlib.import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise ValueError("--tensorboard-dir: TensorBoard is not installed. Run pip install tensorboard.") from error
        self._folder = folder
        # drop the points that a resumed run repeats
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
    """A Weights & Biases run."""

    flag = "--wandb-project"

    def __init__(self, **settings: Any) -> None:
        """Start the run. Raises ValueError: wandb is not installed or does not start."""
        try:
            module: Any = importlib.import_module("wandb")
        except ImportError as error:
            raise ValueError("--wandb-project: wandb is not installed. Run pip install wandb.") from error
        try:
            self._run: Any = module.init(**settings)
        except Exception as error:  # wandb's versions have no common error class
            reason = " ".join(str(error).split()) or type(error).__name__
            project = settings["project"]
            raise ValueError(f"--wandb-project {project}: wandb did not start: {reason}") from error

    def write(self, scalars: Mapping[str, float], *, iteration: int) -> None:
        self._run.log(dict(scalars), step=iteration)

    def close(self) -> None:
        self._run.finish()
