"""The table of tools/study.py: one row per method, model and text, from results alone (docs/learning.md)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from _study_file import Method, Study
from _study_plan import Lookup, Point, budget_runs, final_runs, grid, points, tuner
from _study_runs import Result
from _study_times import Times, step_ms

SMALLEST = 1e-9
"""In place of an error of 0, which has no logarithm."""


@dataclass(frozen=True, kw_only=True)
class Multiplier:
    """Iterations until the baseline's final metric, over the baseline's iterations."""

    value: float
    relation: str = "="
    """"<=": from the validation curve, whose learning rate had not decayed yet; "<" or ">": outside what was run."""

    def __str__(self) -> str:
        return {"=": "", "<=": "≤ ", "<": "< ", ">": "> "}[self.relation] + f"{self.value:.2f}"

    def times(self, factor: float | None) -> Multiplier | None:
        """Cost to the baseline's metric, where a step costs `factor` of the baseline's."""
        return None if factor is None else replace(self, value=self.value * factor)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method on one model and one text. "Relative": the baseline is 1."""

    model: str
    data: str
    method: str
    label: str
    group: str
    failure: str = ""
    """Why there are no figures; then all others are as by default."""
    lr: float | None = None
    lr_at_edge: bool = False
    """A better learning rate may lie outside the grid."""
    rates_tried: tuple[int, int] = (0, 0)
    """Learning rates that have run, and those that are to be."""
    tests: tuple[float, ...] = ()
    """By seed."""
    seeds_wanted: int = 0
    validation: float | None = None
    relative_test: float | None = None
    """Geometric mean, over the seeds that both have, of the ratio to the baseline's."""
    multiplier: Multiplier | None = None
    length: float = 1.0
    state_bytes_per_parameter: float | None = None
    host_bytes_per_parameter: float | None = None
    relative_state: float | None = None
    step_ms: float | None = None
    relative_time: float | None = None
    arithmetic: float | None = None
    """Of a step, relative."""
    dollars: float | None = None
    """Of a run, without its evaluations."""
    num_parameters: int | None = None

    @property
    def test(self) -> float | None:
        """Mean over the seeds."""
        return statistics.fmean(self.tests) if self.tests else None

    @property
    def spread(self) -> float | None:
        """Largest minus smallest over the seeds; None with one."""
        return max(self.tests) - min(self.tests) if len(self.tests) > 1 else None


Arithmetic = Callable[[Point], float | None]
"""Of a step, in units of forward, input gradient and weight gradient of all layers, over 3 of them."""


def rows_of(study: Study, lookup: Lookup, arithmetic: Arithmetic, times: Times) -> list[Row]:
    """In the study file's order; points without any result are left out."""
    rows = []
    for point in points(study):
        baseline = replace_method(point, study.method(study.baseline))
        row = _row(study, point, baseline, lookup)
        if row is not None:
            ours, theirs = arithmetic(point), arithmetic(baseline)
            rows.append(replace(_timed(study, point, baseline, row, times), arithmetic=_over(ours, theirs)))
    return rows


def _timed(study: Study, point: Point, baseline: Point, row: Row, times: Times) -> Row:
    ms = step_ms(times, point)
    if ms is None:
        return row
    hours = ms * study.steps * row.length / 3.6e6
    dollars = hours * study.usd_per_hour if study.usd_per_hour else None
    return replace(row, step_ms=ms, relative_time=_over(ms, step_ms(times, baseline)), dollars=dollars)


def replace_method(point: Point, method: Method) -> Point:
    """Another method on the same model and text."""
    return replace(point, method=method)


def _row(study: Study, point: Point, baseline: Point, lookup: Lookup) -> Row | None:
    tried = grid(study, tuner(study, point), lookup)
    method = point.method
    names = {"model": point.model.name, "data": point.data.name, "method": method.name}
    head = Row(**names, label=method.label or method.name, group=method.group, length=method.steps)
    if tried.best_so_far is None:
        if tried.todo or not tried.values:
            return None
        failures = (lookup(tuner(study, point).run(lr, study.seeds[0])) for lr in tried.values)
        reason = next((result.failure for result in failures if result and result.failure), "no finite loss")
        return replace(head, failure=reason)
    results = by_seed(lookup(run) for run in final_runs(study, point, tried.best_so_far))
    if not results:
        failed = lookup(final_runs(study, point, tried.best_so_far)[0])
        return replace(head, failure=failed.failure or "no finite loss") if failed else None
    lr = grid(study, tuner(study, baseline), lookup).best_so_far
    theirs = by_seed(lookup(run) for run in final_runs(study, baseline, lr)) if lr is not None else {}
    others = [lookup(run) for run in budget_runs(study, point, tried.best_so_far)]
    relative = ratio({seed: one.test for seed, one in results.items()}, {s: one.test for s, one in theirs.items()})
    middle = {key: _median(results.values(), key) for key in _FIGURES}
    beside = {key: _median(theirs.values(), key) for key in _FIGURES}
    return replace(
        head,
        lr=tried.best_so_far,
        rates_tried=(len(tried.values), len(tried.values) + len(tried.todo)),
        lr_at_edge=tried.at_edge and len(tried.values) > 1,
        tests=tuple(one.test for one in results.values() if one.test is not None),
        seeds_wanted=len(study.seeds),
        validation=_mean([one.validation for one in results.values()]),
        relative_test=relative,
        multiplier=_multiplier(study, point, results, [one for one in others if one], theirs) if theirs else None,
        relative_state=_over(middle["state_bytes_per_parameter"], beside["state_bytes_per_parameter"]),
        num_parameters=next(iter(results.values())).num_parameters,
        **middle,
    )  # fmt: skip


_FIGURES = ("state_bytes_per_parameter", "host_bytes_per_parameter")


def by_seed(results: Iterable[Result | None]) -> dict[int, Result]:
    """Those with a finite test metric."""
    return {result.seed: result for result in results if result is not None and result.test is not None}


def _median(results: Iterable[Result], key: str) -> float | None:
    values = [getattr(result, key) for result in results]
    return statistics.median(values) if values and None not in values else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _over(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def ratio(ours: Mapping[int, float | None], theirs: Mapping[int, float | None]) -> float | None:
    """Geometric mean of ours / theirs over the seeds that both have; None without one."""
    logs = [
        math.log(max(value, SMALLEST) / max(base, SMALLEST))
        for seed, value in ours.items()
        if value is not None and (base := theirs.get(seed)) is not None
    ]
    return math.exp(statistics.fmean(logs)) if logs else None


def _multiplier(
    study: Study, point: Point, results: Mapping[int, Result], others: Sequence[Result], theirs: Mapping[int, Result]
) -> Multiplier | None:
    """From runs of several lengths where there are any, else from the validation curves."""
    if point.method.name == study.baseline:
        return Multiplier(value=1.0)
    if point.method.budgets:
        found = []
        target = {seed: one.test for seed, one in theirs.items()}
        for budget in sorted({point.method.steps, *point.method.budgets}):
            runs = by_seed([*(one for one in others if one.budget == budget),
                            *(one for one in results.values() if one.budget == budget)])  # fmt: skip
            relative = ratio({seed: one.test for seed, one in runs.items()}, target)
            found += [(budget, relative)] if relative is not None else []
        return crossing(found, relation="=") if found else None
    target = {seed: one.validation for seed, one in theirs.items()}
    curves = {seed: curve_to_end(one) for seed, one in results.items()}
    found = []
    for iteration in sorted({iteration for curve in curves.values() for iteration in curve}):
        relative = ratio({seed: curve.get(iteration) for seed, curve in curves.items()}, target)
        found += [(iteration / study.steps, relative)] if relative is not None else []
    return crossing(found, relation="<=") if found else None


def curve_to_end(result: Result) -> dict[int, float | None]:
    """The validation curve by iteration, its end the mean of all evaluations after the last step."""
    return {**dict(result.curve), result.steps: result.validation}


def crossing(found: Sequence[tuple[float, float]], *, relation: str) -> Multiplier:
    """Where the ratio to the baseline first falls to 1, interpolated in its logarithm.

    `found`: (length, ratio), ascending, at least one.
    """
    if found[0][1] <= 1:
        return Multiplier(value=found[0][0], relation="<" if found[0][1] < 1 else relation)
    for (before, above), (after, below) in pairwise(found):
        if below <= 1:
            share = math.log(above) / (math.log(above) - math.log(below))
            return Multiplier(value=before + share * (after - before), relation=relation)
    return Multiplier(value=found[-1][0], relation=">")


def frontier(rows: Sequence[Row]) -> list[Row]:
    """Rows with less test metric than every row of as little state, ascending by state: the Pareto frontier."""
    known = [row for row in rows if row.test is not None and row.state_bytes_per_parameter is not None]
    known.sort(key=lambda row: (row.state_bytes_per_parameter, row.test))
    best: list[Row] = []
    for row in known:
        if not best or row.test < best[-1].test:  # type: ignore[operator]
            best.append(row)
    return best
