"""Runs of tools/study.py: identity, command, summary of what one has measured."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _machine import cpu_model
from _study_data import Text
from _study_file import Data, Method, Model, Study, render

DONE_FILE, METRICS_FILE, LOG_FILE, CHECKPOINT_FOLDER = "done.json", "metrics.jsonl", "log", "checkpoint"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training process."""

    model: Model
    data: Data
    method: Method
    lr: float
    seed: int
    budget: float
    """Its length as a share of the study's steps."""

    @property
    def about(self) -> str:
        """For people: what tells it from the study's other runs."""
        names = f"{self.model.name} {self.data.name} {self.method.name}"
        return f"{names} lr {self.lr:g} seed {self.seed} x {self.budget:g}"


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a finished run has measured; written to done.json and to the study's results."""

    model: str
    data: str
    method: str
    lr: float
    seed: int
    budget: float
    steps: int
    test: float | None
    """Of the study's metric, lower is better; None if it is not finite, or the run failed."""
    validation: float | None
    """Mean of all evaluations after the last step."""
    curve: tuple[tuple[int, float | None], ...] = ()
    """Iteration and validation metric."""
    state_bytes_per_parameter: float | None = None
    """Live model state, all ranks, maximum over the log steps."""
    host_bytes_per_parameter: float | None = None
    """State kept in host memory, likewise."""
    num_parameters: int | None = None
    step_ms: float | None = None
    """See `fastest_step_ms`; other runs may have shared the machine, so tables take `_study_times`' instead."""
    minutes: float = 0.0
    """Of wall time, since the last start."""
    command: str = ""
    commit: str = ""
    cpu: str = ""
    """The machine's; empty in results of older versions."""
    failure: str = ""
    """Why there is no test metric."""

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def read_result(values: Mapping[str, Any]) -> Result:
    """The reverse of `Result.plain`."""
    return Result(**{**values, "curve": tuple((step, value) for step, value in values["curve"])})


class Commands:
    """Command and folder of every run of a study."""

    def __init__(self, study: Study, texts: Mapping[str, Text], *, data_folder: Path, folder: Path) -> None:
        self.study = study
        self._texts = texts
        self._data_folder = data_folder
        self._folder = folder

    def steps(self, run: Run) -> int:
        """Iterations of a run."""
        return max(1, round(self.study.steps * run.budget))

    def words(self, run: Run, *, data_folder: str = "DATA") -> list[str]:
        """Program and flags, without what depends on the machine."""
        program = run.method.program or run.model.program or self.study.program
        values = {"lr": run.lr, "steps": self.steps(run), "seed": run.seed, "data": data_folder}
        words = [program]
        for entry in (self.study, run.model, run.data, run.method):
            words += render(entry.flags, values, where=f"{entry.name}: flags")
        return [*words, "--lr", f"{run.lr:g}", "--seed", str(run.seed)]

    def identity(self, run: Run) -> list[str]:
        """Everything that determines a run's outcome, the code's version apart."""
        text = self._texts.get(run.data.name)
        return [*self.words(run), *([text.sha256] if text else [])]

    def folder(self, run: Run) -> Path:
        """A readable name, and a hash of the identity."""
        digest = hashlib.sha256(json.dumps(self.identity(run)).encode()).hexdigest()[:10]
        words = (run.model.name, run.data.name, run.method.name, f"lr{run.lr:g}", f"seed{run.seed}", f"x{run.budget:g}")
        return self._folder / "-".join((*words, digest))

    def shown(self, run: Run) -> str:
        """The command for people, without what depends on the machine."""
        return " ".join(["python", *self.words(run)])

    def argv(self, run: Run) -> list[str]:
        """What is started, in the project's root."""
        folder = self.folder(run)
        checkpoint = render(
            self.study.checkpoint_flags,
            {"steps": self.steps(run), "folder": str(folder / CHECKPOINT_FOLDER)},
            where="checkpoint_flags",
        )
        return [*self.start_words(run, metrics_file=folder / METRICS_FILE), *checkpoint]

    def start_words(self, run: Run, *, metrics_file: Path) -> list[str]:
        """Interpreter, program and flags with this machine's paths; nothing is saved."""
        text = self._texts.get(run.data.name)
        paths = [*(["--data-path", str(text.prefix)] if text else []), "--metrics-file", str(metrics_file)]
        return [sys.executable, *self.words(run, data_folder=str(self._data_folder)), *paths]

    @property
    def environment(self) -> dict[str, str]:
        """Of a run's process, beside what this one has."""
        return {"OMP_NUM_THREADS": str(self.study.threads), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}

    def stored(self, run: Run) -> Result | None:
        """The result of a run that has finished at any time: from its metrics, complete if done.json exists."""
        try:
            done = json.loads((self.folder(run) / DONE_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return self._result(run, minutes=done["minutes"], commit=done["commit"], cpu=done.get("cpu", ""))

    def failed(self, run: Run, reason: str) -> Result:
        """In place of a result."""
        return Result(**self._head(run), test=None, validation=None, failure=reason)

    def finish(self, run: Run, *, minutes: float, commit: str) -> Result:
        """Summarise a run that has ended well, and remember it. Raises ValueError if its metrics are not complete."""
        result = self._result(run, minutes=minutes, commit=commit, cpu=cpu_model())
        write_json(self.folder(run) / DONE_FILE, result.plain())
        return result

    def _result(self, run: Run, *, minutes: float, commit: str, cpu: str) -> Result:
        folder = self.folder(run)
        with open(folder / METRICS_FILE, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        log = (folder / LOG_FILE).read_text(encoding="utf-8", errors="replace")
        measured = summarise(lines, metric=self.study.metric, num_parameters=_parameters_in(log))
        about = {"minutes": minutes, "command": self.shown(run), "commit": commit, "cpu": cpu}
        return Result(**self._head(run), **measured, **about)

    def _head(self, run: Run) -> dict[str, Any]:
        names = {"model": run.model.name, "data": run.data.name, "method": run.method.name}
        return {**names, "lr": run.lr, "seed": run.seed, "budget": run.budget, "steps": self.steps(run)}


def summarise(lines: Sequence[dict[str, Any]], *, metric: str, num_parameters: int | None) -> dict[str, Any]:
    """Fields of `Result` from the lines of a metrics file, which may give the number of parameters too.

    Raises ValueError without training steps or without a test at the end.
    """
    steps = [line for line in lines if "step_time_ms" in line]
    tests = [line for line in lines if f"test_{metric}" in line]
    if not steps or not tests:
        raise ValueError(f"its metrics file has {len(steps)} steps and {len(tests)} lines of test_{metric}")
    key = f"validation_{metric}"
    validations = [line for line in lines if key in line]
    last = [_lower_is_better(line[key], metric) for line in validations if line["iteration"] == tests[-1]["iteration"]]
    num_parameters = steps[-1].get("num_parameters", num_parameters)
    return {
        "test": _lower_is_better(tests[-1][f"test_{metric}"], metric),
        "validation": None if None in last or not last else statistics.fmean(last),  # type: ignore[type-var]
        "curve": tuple(
            (line["iteration"], _lower_is_better(line[key], metric)) for line in validations if not line.get("is_final")
        ),
        "num_parameters": num_parameters,
        "state_bytes_per_parameter": _per_parameter(steps, "model_state_bytes", num_parameters),
        "host_bytes_per_parameter": _per_parameter(steps, "host_state_bytes", num_parameters),
        "step_ms": fastest_step_ms(steps),
    }


def fastest_step_ms(steps: Sequence[dict[str, Any]]) -> float:
    """Mean over the blocks of the tenth percentile of a block's log steps: other work on the machine only slows steps
    down, and blocks differ in their arithmetic."""
    by_block: dict[Any, list[float]] = {}
    for line in steps:
        by_block.setdefault(line.get("block"), []).append(line["step_time_ms"])
    return statistics.fmean(sorted(times)[len(times) // 10] for times in by_block.values())


def _lower_is_better(value: float | None, metric: str) -> float | None:
    """Accuracy as error; None for what is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return value if metric == "loss" else 1 - value


def _per_parameter(steps: Sequence[dict[str, Any]], key: str, num_parameters: int | None) -> float | None:
    most = max(sum(line.get(key, ())) for line in steps)
    return most / num_parameters if num_parameters else None


def _parameters_in(log: str) -> int | None:
    """From the start banner, where metrics do not say it."""
    found = re.search(r"^parameters\s+([\d,]+) ", log, re.MULTILINE)
    return int(found[1].replace(",", "")) if found else None


def write_json(path: Path, values: Any) -> None:
    """The whole file, or what was there before."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    aside.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(aside, path)
