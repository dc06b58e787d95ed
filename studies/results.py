"""Read study files and results, decide which runs are missing, and write the study's page."""

from __future__ import annotations

import csv
import fnmatch
import math
import os
import re
import shlex
import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
PLACEHOLDER = re.compile(r"\{(\w+)(?:([*/])(\d+(?:\.\d+)?))?\}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
"""Pattern of the names of models, texts and methods, which become parts of folder names."""
WRAPPER = textwrap.TextWrapper(120, break_long_words=False, break_on_hyphens=False)
SMALLEST = 1e-9
"""Replaces an error of 0, which has no logarithm."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A model, a text or a method of a study: its flags, and how it is run."""

    name: str
    flags: str = ""
    program: str | None = None
    text: str | None = None
    """A .txt or .jsonl file in the data folder, or "stdlib": the source of Python's standard library."""
    label: str = ""
    group: str = ""
    """Methods of a group share a colour."""
    steps: float = 1.0
    """Length of its runs, relative to the study's steps."""
    budgets: tuple[float, ...] = ()
    """More run lengths at the tuned learning rate, each with a full schedule."""
    models: tuple[str, ...] = ()
    """The models that it trains; default: all."""
    learning_rates: tuple[float, ...] = ()
    arithmetic_as: str | None = None
    """A method with the same arithmetic, for programs that the planner does not know."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """One study file; the keys are explained in docs/learning.md."""

    path: str
    program: str
    steps: int
    data: tuple[Variant, ...]
    methods: tuple[Variant, ...]
    seeds: tuple[int, ...]
    learning_rates: tuple[float, ...]
    models: tuple[Variant, ...] = (Variant(name="model"),)
    title: str = ""
    conclusion: str = ""
    """Text of the page, before the tables."""
    flags: str = ""
    checkpoint_flags: str = ""
    baseline: str = ""
    """Default: the first method."""
    tune_on: str | None = None
    extend: int = 1
    metric: str = "loss"
    jobs: int = 2
    threads: int = 1
    minutes: float = 5.0

    @property
    def name(self) -> str:
        return Path(self.path).stem

    def method(self, name: str) -> Variant:
        return next(method for method in self.methods if method.name == name)


def read_study(path: str) -> Study:
    """Read a study file. Raises ValueError naming the file and the problem."""
    try:
        entries = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        for key in ("models", "data", "methods"):
            if key in entries:
                entries[key] = tuple(_variant(str(name), value) for name, value in entries[key].items())
        study = Study(**_with_tuples(entries), path=path)
        study = study if study.baseline else replace(study, baseline=study.methods[0].name)
        if study.baseline not in (method.name for method in study.methods):
            raise ValueError(f"baseline: {study.baseline}: is none of the methods")
    except (OSError, yaml.YAMLError, TypeError, AttributeError, ValueError, IndexError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: {reason}; give a study file, such as studies/gpt_10_minutes.yaml") from None
    return study


def _variant(name: str, value: str | Mapping[str, Any] | None) -> Variant:
    """Build a variant from its entry: a mapping, or flags alone. Its name becomes a part of a folder's name."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{name}: a name has letters and digits, with _ . - between them")
    return Variant(name=name, **({"flags": value} if isinstance(value, str) else _with_tuples(value or {})))


def _with_tuples(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries with tuples in place of lists. YAML 1.1 reads the number 3e-3 as text."""
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in entries.items()}
    for key in {"learning_rates", "budgets"} & values.keys():
        values[key] = tuple(map(float, values[key]))
    return values


def fill_in(template: str, values: Mapping[str, str | float], *, where: str) -> list[str]:
    """Return the words of a command line with ``{lr}``, ``{steps/10}`` or ``{lr*0.1}`` filled in; an int stays an
    int."""

    def fill(match: re.Match[str]) -> str:
        name, operation, operand = match.groups()
        if name not in values:
            raise ValueError(f"{match[0]}: placeholders are lr, steps, seed, data, folder")
        value: Any = values[name]
        if operation is not None:
            share = value * float(operand) if operation == "*" else value / float(operand)
            value = max(1, round(share)) if isinstance(value, int) else share
        return format(value, ".6g") if isinstance(value, float) else str(value)

    try:
        return [PLACEHOLDER.sub(fill, word) for word in shlex.split(template)]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: flags: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Point:
    """A method on one model and one text."""

    model: Variant
    data: Variant
    method: Variant

    def run(self, lr: float, seed: int, budget: float | None = None) -> Run:
        return Run(point=self, lr=lr, seed=seed, budget=self.method.steps if budget is None else budget)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training process; `budget` is its length relative to the study's steps."""

    point: Point
    lr: float
    seed: int
    budget: float

    @property
    def key(self) -> tuple[str, str, str, float, int, float]:
        point = self.point
        return point.model.name, point.data.name, point.method.name, self.lr, self.seed, self.budget

    def __str__(self) -> str:
        return "{} {} {} lr {:g} seed {} x {:g}".format(*self.key)


@dataclass(frozen=True, kw_only=True)
class Result:
    """A line of the CSV file: a run, or a method's step time (a timing line)."""

    model: str
    data: str
    method: str
    lr: float | None = None
    seed: int | None = None
    budget: float | None = None
    steps: int | None = None
    test: float | None = None
    """The study's metric, lower is better (accuracy as error); None if not finite."""
    validation: float | None = None
    """Mean of the evaluations after the last step."""
    curve: tuple[tuple[int, float | None], ...] = ()
    """Iteration and validation metric, in the file as "100:2.5 200:2.1"."""
    state_bytes_per_parameter: float | None = None
    """Live model state of all ranks, maximum over the log steps."""
    host_bytes_per_parameter: float | None = None
    num_parameters: int | None = None
    peak_bytes: int | None = None
    """Peak of the largest process, over the log steps."""
    step_ms: float | None = None
    """`fastest_step_ms`; tables use those of timing lines."""
    rounds: int | None = None
    """For timing lines only: the step time is the median of this many rounds."""
    minutes: float | None = None
    commit: str = ""
    cpu: str = ""
    text_sha256: str = ""
    command: str = ""
    failure: str = ""
    """Why there is no test metric; not written to the file."""

    @property
    def key(self) -> tuple[Any, ...]:
        return self.model, self.data, self.method, self.lr, self.seed, self.budget


COLUMNS = [field.name for field in fields(Result) if field.name != "failure"]
_READ: dict[str, Callable[[str], Any]] = {"int | None": int, "float | None": float, "str": str}


def read_results(path: Path) -> list[Result]:
    """Read a file of results. Raises ValueError if it is not one."""
    if not path.exists():
        return []
    with open(path, encoding="utf-8", newline="") as file:
        try:
            return [_result(line) for line in csv.DictReader(file)]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: not a file of results: {error!r}. Remove it, or give another --results."
            ) from None


def _result(line: Mapping[str, str]) -> Result:
    values: dict[str, Any] = {}
    for field in fields(Result):
        text = line.get(field.name, "")
        if field.name == "curve":
            pairs = (pair.split(":") for pair in text.split())
            values["curve"] = tuple((int(step), float(value) if value else None) for step, value in pairs)
        elif text:
            values[field.name] = _READ[str(field.type)](text)
    return Result(**values)


def write_results(path: Path, results: Iterable[Result]) -> None:
    """Write the file atomically."""

    def text(value: Any) -> str:
        if isinstance(value, tuple):
            return " ".join(f"{step}:{text(metric)}" for step, metric in value)
        return "" if value is None else str(value)

    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([text(getattr(result, name)) for name in COLUMNS] for result in results)
    os.replace(temporary, path)


def summarise(lines: Sequence[dict[str, Any]], *, metric: str, num_parameters: int | None) -> dict[str, Any]:
    """Return fields of `Result` from a metrics file. Raises ValueError without training steps or a final test."""
    steps = [line for line in lines if "step_time_ms" in line]
    tests = [line for line in lines if f"test_{metric}" in line]
    if not steps or not tests:
        raise ValueError(f"its metrics file has {len(steps)} steps and {len(tests)} lines of test_{metric}")

    def lower_is_better(value: float | None) -> float | None:
        if value is None or not math.isfinite(value):
            return None
        return value if metric == "loss" else 1 - value

    key = f"validation_{metric}"
    validations = [line for line in lines if key in line]
    last = [lower_is_better(line[key]) for line in validations if line["iteration"] == tests[-1]["iteration"]]
    number = steps[-1].get("num_parameters", num_parameters)
    peak = {name: max(sum(line.get(name, ())) for line in steps) for name in ("model_state_bytes", "host_state_bytes")}
    return {
        "test": lower_is_better(tests[-1][f"test_{metric}"]),
        "validation": _mean(last),
        "curve": tuple(
            (line["iteration"], lower_is_better(line[key])) for line in validations if not line.get("is_final")
        ),
        "num_parameters": number,
        "state_bytes_per_parameter": peak["model_state_bytes"] / number if number else None,
        "host_bytes_per_parameter": peak["host_state_bytes"] / number if number else None,
        "peak_bytes": max(max(line.get("peak_memory_bytes", (0,))) for line in steps),
        "step_ms": fastest_step_ms(steps),
    }  # fmt: skip


def fastest_step_ms(steps: Sequence[dict[str, Any]]) -> float:
    """Return the mean over the blocks of each block's tenth percentile: other work can only slow steps down."""
    by_block: dict[Any, list[float]] = {}
    for line in steps:
        by_block.setdefault(line.get("block"), []).append(line["step_time_ms"])
    return statistics.fmean(sorted(times)[len(times) // 10] for times in by_block.values())


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


Lookup = Callable[[Run], Result | None]
"""Returns the result of a run, or None if there is none yet."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A point's learning rates with the validation metric of the first seed; inf if the run failed or diverged."""

    values: Mapping[float, float]
    todo: tuple[Run, ...]

    @property
    def best_so_far(self) -> float | None:
        best = min(self.values, key=self.values.__getitem__, default=None)
        return best if best is not None and math.isfinite(self.values[best]) else None

    @property
    def best(self) -> float | None:
        """The best rate; None while runs are missing."""
        return None if self.todo else self.best_so_far

    @property
    def at_edge(self) -> bool:
        return self.best is not None and self.best in (min(self.values), max(self.values))


def points(study: Study, only: str = "*") -> Iterator[Point]:
    """Yield every method on every model and text; `only` is a comma-separated list of patterns of method names."""
    for model in study.models:
        for data in study.data:
            for method in study.methods:
                is_wanted = any(fnmatch.fnmatchcase(method.name, pattern.strip()) for pattern in only.split(","))
                if is_wanted and (not method.models or model.name in method.models):
                    yield Point(model=model, data=data, method=method)


def tuning_point(study: Study, point: Point) -> Point:
    """Return the point whose grid determines this one's learning rate."""
    data = next(data for data in study.data if data.name == (study.tune_on or point.data.name))
    return replace(point, data=data)


def grid(study: Study, point: Point, lookup: Lookup) -> Grid:
    """Return the grid that tunes `point`. While an edge is best, up to `study.extend` more rates are added beyond
    it."""
    point = tuning_point(study, point)
    rates = sorted(point.method.learning_rates or study.learning_rates)
    is_single = len(rates) == 1
    for extension in range(study.extend + 1):
        results = [(run, lookup(run)) for run in (point.run(lr, study.seeds[0]) for lr in rates)]
        values = {
            run.lr: math.inf if result.validation is None else result.validation for run, result in results if result
        }
        current = Grid(values=values, todo=tuple(run for run, result in results if result is None))
        if extension == study.extend or not current.at_edge or is_single:
            break
        rates = sorted([*rates, rates[-1] * 2 if current.best == rates[-1] else rates[0] / 2])
    return current


def final_runs(study: Study, point: Point, lr: float) -> tuple[list[Run], list[Run]]:
    """Return the runs of a point at its tuned rate: those of all seeds, and those of other lengths."""
    others = [budget for budget in point.method.budgets if budget != point.method.steps]
    seeds = [point.run(lr, seed) for seed in study.seeds]
    return seeds, [point.run(lr, seed, budget) for seed in study.seeds for budget in others]


def missing_runs(study: Study, lookup: Lookup, only: str = "*") -> tuple[list[Run], float]:
    """Return the runs that can start now: first for tuning, then more seeds, then other lengths. Also return the total
    length of the runs that wait for a learning rate, in runs of the study's length."""
    tuning, later, waiting = [], [], 0.0
    for point in points(study, only):
        rates = grid(study, point, lookup)
        tuning += rates.todo
        seeds, budgets = final_runs(study, point, rates.best or 0.0)
        if rates.best is not None:
            later += [(0, run) for run in seeds] + [(1, run) for run in budgets]
        elif rates.todo:
            waiting += sum(run.budget for run in (*seeds[tuning_point(study, point) == point :], *budgets))
    # run every point with one seed before any with two
    later.sort(key=lambda item: (item[0], study.seeds.index(item[1].seed)))
    return [run for run in dict.fromkeys((*tuning, *(run for _, run in later))) if lookup(run) is None], waiting


@dataclass(frozen=True, kw_only=True)
class Multiplier:
    """Iterations until the baseline's final metric, relative to the baseline's iterations."""

    value: float
    relation: str = "="
    """"<=": from the validation curve, before the learning rate has decayed; "<" or ">": outside the measured range."""

    def __str__(self) -> str:
        return {"=": "", "<=": "≤ ", "<": "< ", ">": "> "}[self.relation] + f"{self.value:.2f}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method on one model and one text. "Relative" means divided by the baseline's value."""

    model: str
    data: str
    method: str
    label: str
    group: str
    failure: str = ""
    lr: float | None = None
    lr_note: str = ""
    tests: tuple[float, ...] = ()
    """Test metrics by seed."""
    seeds_wanted: int = 0
    relative_test: float | None = None
    """Geometric mean of the ratio to the baseline's test metric, over the seeds that both have."""
    multiplier: Multiplier | None = None
    state: float | None = None
    """Model state in bytes per parameter."""
    relative_state: float | None = None
    relative_time: float | None = None
    arithmetic: float | None = None
    num_parameters: int | None = None

    @property
    def test(self) -> float | None:
        return statistics.fmean(self.tests) if self.tests else None

    @property
    def spread(self) -> float | None:
        return max(self.tests) - min(self.tests) if len(self.tests) > 1 else None


class Table:
    """Builds the rows of a study from results; points without a result are left out."""

    def __init__(self, study: Study, lookup: Lookup, *, arithmetic: Callable[[Point], float | None],
                 step_ms: Callable[[Point], float | None]) -> None:  # fmt: skip
        self.study, self._lookup, self._arithmetic, self._step_ms = study, lookup, arithmetic, step_ms
        self.used: dict[tuple[Any, ...], Result] = {}
        """The results that the table uses."""
        rows = [(point, self._row(point)) for point in points(study)]
        self.rows = [self._with_costs(point, row) for point, row in rows if row is not None]

    def _results(self, runs: Iterable[Run]) -> dict[int, Result]:
        """Return the results with a finite test metric by seed."""
        results = [result for result in map(self._lookup, runs) if result is not None]
        self.used |= {result.key: result for result in results}
        return {result.seed or 0: result for result in results if result.test is not None}

    def _row(self, point: Point) -> Row | None:
        study, method = self.study, point.method
        tried = grid(study, point, self._lookup)
        self._results(tuning_point(study, point).run(lr, study.seeds[0]) for lr in tried.values)
        names = {"model": point.model.name, "data": point.data.name, "method": method.name}
        row = Row(**names, label=method.label or method.name, group=method.group)
        lr = tried.best_so_far
        seeds, budgets = final_runs(study, point, lr or 0.0)
        ours = self._results(seeds) if lr is not None else {}
        if not ours:
            if lr is None and (tried.todo or not tried.values) or lr is not None and self._lookup(seeds[0]) is None:
                return None
            failed = [self._lookup(tuning_point(study, point).run(rate, study.seeds[0])) for rate in tried.values]
            failed += [self._lookup(seeds[0])] if lr is not None else []
            reasons = (result.failure for result in failed if result and result.failure)
            return replace(row, failure=next(reasons, "no finite loss"))
        baseline = replace(point, method=study.method(study.baseline))
        base_lr = grid(study, baseline, self._lookup).best_so_far
        theirs = self._results(final_runs(study, baseline, base_lr)[0]) if base_lr is not None else {}
        todo = len(tried.todo)
        note = f" *{len(tried.values)} of {len(tried.values) + todo} rates*" if todo else ""
        note = " *edge*" if tried.at_edge and len(tried.values) > 2 else note
        state = _median(ours, "state_bytes_per_parameter")
        return replace(
            row,
            lr=lr,
            lr_note=note,
            tests=tuple(result.test for result in ours.values() if result.test is not None),
            seeds_wanted=len(study.seeds),
            relative_test=ratio(_tests(ours), _tests(theirs)),
            multiplier=self._multiplier(point, ours, budgets, theirs) if theirs else None,
            state=state,
            relative_state=_over(state, _median(theirs, "state_bytes_per_parameter")),
            num_parameters=next(iter(ours.values())).num_parameters,
        )  # fmt: skip

    def _multiplier(
        self, point: Point, ours: Mapping[int, Result], budgets: Sequence[Run], theirs: Mapping[int, Result]
    ) -> Multiplier | None:
        """Return the multiplier from runs of several lengths if there are any, or else from the validation curves."""
        if point.method.name == self.study.baseline:
            return Multiplier(value=1.0)
        ratios: list[tuple[float, float | None]] = []
        if point.method.budgets:
            target = _tests(theirs)
            lengths = {
                budget: self._results(run for run in budgets if run.budget == budget) for budget in point.method.budgets
            }
            for budget, runs in sorted({**lengths, point.method.steps: dict(ours)}.items()):
                ratios.append((budget, ratio(_tests(runs), target)))
        else:
            target = {seed: run.validation for seed, run in theirs.items()}
            curves = {seed: {**dict(run.curve), run.steps or 0: run.validation} for seed, run in ours.items()}
            for step in sorted({step for curve in curves.values() for step in curve}):
                values = {seed: curve.get(step) for seed, curve in curves.items()}
                ratios.append((step / self.study.steps, ratio(values, target)))
        known = [(length, relative) for length, relative in ratios if relative is not None]
        return crossing(known, relation="=" if point.method.budgets else "<=") if known else None

    def _with_costs(self, point: Point, row: Row) -> Row:
        baseline = replace(point, method=self.study.method(self.study.baseline))
        return replace(
            row,
            arithmetic=_over(self._arithmetic(point), self._arithmetic(baseline)),
            relative_time=_over(self._step_ms(point), self._step_ms(baseline)),
        )

    def markdown(self, *, command: str, timing: Result | None) -> str:
        """Return the page of the study; `timing` is a timing line, for its commit."""
        study = self.study
        lines = [f"# {study.title or study.name}", "", *WRAPPER.wrap(study.conclusion), ""]
        for (model, data), group in groupby(self.rows, key=lambda row: (row.model, row.data)):
            rows = list(group)
            number = next(
                (row.num_parameters for row in rows if row.method == study.baseline and row.num_parameters), None
            )
            case = f"{model}, {data}" if len(study.models) > 1 else data
            lines += [
                f"## {case}" + (f", {number:,} parameters" if number else ""),
                "",
                *table_lines(rows, metric=study.metric),
                "",
            ]
        commits, cpus = (
            {getattr(result, key) for result in self.used.values() if getattr(result, key)} for key in ("commit", "cpu")
        )
        seeds = f"{len(study.seeds)} seeds" if len(study.seeds) > 1 else "one seed"
        source = (
            f"`{command}`, commit {', '.join(sorted(commits))}; "
            f"{', '.join(sorted(cpus))}. {study.steps:,} steps, {seeds}. "
            "[Columns](../docs/learning.md#columns)."
        )
        if timing is not None:
            source += f" Step times: `--step-times {timing.rounds}` at commit {timing.commit}."
        lines += WRAPPER.wrap(source)
        return "\n".join(lines) + "\n"


def _tests(results: Mapping[int, Result]) -> dict[int, float | None]:
    return {seed: result.test for seed, result in results.items()}


def _median(results: Mapping[int, Result], key: str) -> float | None:
    values = [getattr(result, key) for result in results.values()]
    return statistics.median(values) if values and None not in values else None


def _over(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def ratio(ours: Mapping[int, float | None], theirs: Mapping[int, float | None]) -> float | None:
    """Return the geometric mean of ours / theirs over the seeds that both have, or None."""
    pairs = [(value, theirs.get(seed)) for seed, value in ours.items()]
    logs = [math.log(max(a, SMALLEST) / max(b, SMALLEST)) for a, b in pairs if a is not None and b is not None]
    return math.exp(statistics.fmean(logs)) if logs else None


def crossing(points: Sequence[tuple[float, float]], *, relation: str) -> Multiplier:
    """Return the length at which the ratio to the baseline first falls to 1, interpolated in its logarithm.

    `points`: (length, ratio), ascending.
    """
    if points[0][1] <= 1:
        return Multiplier(value=points[0][0], relation="<" if points[0][1] < 1 else relation)
    for (before, above), (after, below) in pairwise(points):
        if below <= 1:
            share = math.log(above) / (math.log(above) - math.log(below))
            return Multiplier(value=before + share * (after - before), relation=relation)
    return Multiplier(value=points[-1][0], relation=">")


def frontier(rows: Sequence[Row]) -> list[Row]:
    """Return the Pareto frontier, ascending by state: rows that no row with as much or less state beats."""
    best: list[Row] = []
    known = [row for row in rows if row.test is not None and row.state is not None]
    for row in sorted(known, key=lambda row: (row.state or 0, row.test or 0)):
        if not best or (row.test or 0) < (best[-1].test or 0):
            best.append(row)
    return best


def table_lines(rows: Sequence[Row], *, metric: str) -> list[str]:
    """Return Markdown lines with one line per row."""

    def shown(value: Any, form: str = "") -> str:
        return "-" if value is None else format(value, form) if form else str(value)

    columns: dict[str, Callable[[Row], str]] = {
        "learning rate": lambda row: f"{row.lr:g}{row.lr_note}",
        f"test {'error' if metric == 'accuracy' else metric}": lambda row: (
            f"{row.test:.4f}"
            + (f" ± {row.spread / 2:.4f}" if row.spread is not None else "")
            + (f" *{len(row.tests)} of {row.seeds_wanted} seeds*" if len(row.tests) < row.seeds_wanted else "")
        ),
        "to full": lambda row: "" if row.relative_test in (None, 1) else f"{100 * (row.relative_test - 1):+.1f} %",
        "B-F multiplier": lambda row: shown(row.multiplier),
        "state, bytes/parameter": lambda row: (
            shown(row.state, ".2f") + (f" ({100 * row.relative_state:.0f} %)" if row.relative_state is not None else "")
        ),
        "step time": lambda row: shown(row.relative_time, ".2f"),
        "arithmetic": lambda row: shown(row.arithmetic, ".2f"),
    }
    ran = [row for row in rows if not row.failure]
    columns = {name: cell for name, cell in columns.items() if any(cell(row) != "-" for row in ran)}
    best = frontier(rows)
    lines = ["| " + " | ".join(("method", *columns)) + " |", "|---|" + "---|" * len(columns)]
    for row in rows:
        label = f"**{row.label}**" if row in best else row.label
        failed = [f"failed: {row.failure.replace('|', '/')}", *[""] * (len(columns) - 1)]
        cells = failed if row.failure else [cell(row) for cell in columns.values()]
        lines.append("| " + " | ".join((label, *cells)) + " |")
    return lines
