"""Write metrics to the console and to all sinks."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from megatron.bcd.config import ReportConfig
from megatron.bcd.metrics.console import evaluation_line, step_line, summary_lines
from megatron.bcd.metrics.schema import EvalMetrics, RunSummary, StepMetrics
from megatron.bcd.metrics.sinks import MetricsFile, TensorBoard, Wandb, step_scalars
from megatron.bcd.runtime import atomic_io


class Reporter:
    """Console, metrics file, TensorBoard and Weights & Biases of one run; a context manager.

    A resumed run (`start_iteration` > 0) appends to the metrics file and drops lines after `start_iteration`, because
    it repeats those steps. A new run replaces the file with its first line. With `run`, a name that every line
    contains, both reject a file of another run.

    Raises:
        ValueError: --metrics-file is not a metrics file, or a library is missing or fails to start.
    """

    def __init__(
        self,
        report: ReportConfig,
        *,
        train_iters: int,
        start_iteration: int = 0,
        run: str | None = None,
        run_config: Mapping[str, object] | None = None,
        console: Console | None = None,
    ) -> None:
        self._report = report
        self._train_iters = train_iters
        self._contents: dict[int, str] = {}
        self._switch_time_ms = 0.0
        self._switches: list[tuple[int, int]] = []
        # by default rich obeys FORCE_COLOR, which would write control characters into a log file
        self._console = console or Console(force_terminal=sys.stdout.isatty(), highlight=False)
        self._start = self._last = start_iteration
        self._busy_ms = 0.0
        file = report.metrics_file
        self._metrics = MetricsFile(file, start_iteration=start_iteration, run=run) if file else None
        self._metrics_fail = False
        self._scalar_sinks: list[TensorBoard | Wandb] = []
        if report.tensorboard_dir:
            self._scalar_sinks.append(TensorBoard(report.tensorboard_dir, start_iteration=start_iteration))
        if report.wandb_project:
            self._scalar_sinks.append(
                Wandb(
                    project=report.wandb_project,
                    name=report.wandb_exp_name or None,
                    entity=report.wandb_entity or None,
                    dir=report.wandb_save_dir or None,
                    config=dict(run_config or {}),
                )
            )

    def run_summary(self, summary: RunSummary) -> None:
        """Print the run summary, and store the blocks' layers for later lines about phases."""
        self._contents = dict(enumerate(summary.blocks))
        for line in summary_lines(summary):
            self.note(line)

    def step(self, record: StepMetrics) -> None:
        """Write one log line, one metrics line and one point of every curve."""
        # the remaining time, by the mean step so far, because blocks differ in speed
        self._busy_ms += record.step_time_ms * max(0, record.iteration - self._last)
        self._last = max(self._last, record.iteration)
        done, coming = self._last - self._start, max(0, self._train_iters - self._last)
        left = datetime.timedelta(seconds=round(self._busy_ms / max(1, done) * coming / 1000))
        self.note(step_line(record, train_iters=self._train_iters, left=f"{left} left"))
        # all switches since the last line
        values = {**dataclasses.asdict(record), "switch_time_ms": self._switch_time_ms, "switches": self._switches}
        for name in ("router_losses", "switches"):
            if not values[name]:
                del values[name]
        self._write_metrics(values)
        self._switch_time_ms, self._switches = 0.0, []
        self._write_scalars(step_scalars(record), record.iteration)

    def evaluation(self, record: EvalMetrics) -> None:
        """Write one log line, and one metrics line without `loss`, which is reserved for training losses."""
        self.note(evaluation_line(record), style="bold")
        self._write_metrics(
            {
                "iteration": record.iteration,
                "consumed_samples": record.consumed_samples,
                f"{record.split}_loss": record.loss,
                f"{record.split}_perplexity": record.perplexity,
                **({} if record.accuracy is None else {f"{record.split}_accuracy": record.accuracy}),
                **({"is_final": True} if record.is_final else {}),
            }
        )
        tag = f"lm loss {record.split}"  # Megatron-LM's
        self._write_scalars({tag: record.loss, f"{tag} ppl": record.perplexity}, record.iteration)

    def exchange(self, **numbers: int) -> None:
        """Write one metrics line about an exchange with other replica groups: `iteration` and `consumed_samples`; the
        index `group` of this group among `groups`, until the next exchange; `lineage`, a hash of all exchanges of this
        group up to this one, which is equal for groups in the same exchange; and `values`, a hash of the trained
        parameters after the exchange, over all ranks of this group.
        """
        self._write_metrics(numbers)

    def phase(self, *, iteration: int, cycle: int, phase: int, block: int, switch_time_ms: float) -> None:
        """Print one line at a switch. `iteration` is the number of steps before it."""
        contents = self._contents.get(block, "")
        self.note(
            f"-- phase {phase} at iteration {iteration}: cycle {cycle}, block {block}"
            f"{', ' if contents else ''}{contents} active (switch {switch_time_ms:,.0f} ms)"
        )
        self._switch_time_ms += switch_time_ms
        self._switches.append((iteration, block))
        self._write_scalars({"bcd/switch-time-ms": switch_time_ms}, iteration)

    def note(self, text: str, *, style: str = "") -> None:
        """Print a line, neither wrapped nor cut."""
        self._console.print(Text(" ".join(text.splitlines()), style=style), soft_wrap=True, highlight=False)

    def warning(self, text: str) -> None:
        """Print a warning that the user should act on."""
        self.note(f"warning: {text}", style="yellow")

    def _write_metrics(self, values: Mapping[str, object]) -> None:
        """Write a metrics line. A full disk must not end a run: the other ranks wait for this one."""
        if self._metrics is None:
            return
        try:
            self._metrics.write(values)
            self._metrics_fail = False
        except OSError as error:
            if not self._metrics_fail:
                self.warning(f"--metrics-file: {error.strerror}. Its lines will be written as soon as possible.")
            self._metrics_fail = True

    def _write_scalars(self, scalars: Mapping[str, float], iteration: int) -> None:
        """Write scalars to all sinks. Drop a sink that fails, because TensorBoard's writer does not recover."""
        for sink in tuple(self._scalar_sinks):
            try:
                sink.write(scalars, iteration=iteration)
            except OSError as error:
                self._scalar_sinks.remove(sink)
                self.warning(
                    f"{sink.flag}: {atomic_io.describe(error)}. Nothing is written there from iteration {iteration} on."
                )
                with contextlib.suppress(OSError):
                    sink.close()

    def close(self) -> None:
        """Close every file. May be called twice."""
        if self._metrics is not None:
            try:
                self._metrics.close()
            except OSError as error:
                self.warning(f"--metrics-file: {error.strerror}. Its last lines are lost.")
        while self._scalar_sinks:
            with contextlib.suppress(OSError):
                self._scalar_sinks.pop().close()

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SilentReporter(Reporter):
    """The reporter of all ranks but rank 0: the same interface without output, so that all ranks run the same code."""

    def __init__(self) -> None:
        pass

    def run_summary(self, *args: Any, **kwargs: Any) -> None:
        pass

    step = evaluation = exchange = phase = note = warning = close = run_summary
