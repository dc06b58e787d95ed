"""Which runs a study needs, most valuable first, from the results that there are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from _study_file import Data, Method, Model, Study
from _study_runs import Result, Run

Lookup = Callable[[Run], Result | None]
"""The result of a run; None if it has none yet."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A method on one model and one text."""

    model: Model
    data: Data
    method: Method

    def run(self, lr: float, seed: int, budget: float | None = None) -> Run:
        """One of its runs; by default of the method's own length."""
        length = self.method.steps if budget is None else budget
        return Run(model=self.model, data=self.data, method=self.method, lr=lr, seed=seed, budget=length)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A point's learning rates with the validation metric at the first seed."""

    values: dict[float, float]
    """By rate, ascending; inf for a run that failed or diverged."""
    todo: tuple[Run, ...]
    """Runs without a result."""

    @property
    def best(self) -> float | None:
        """The tuned rate; None while runs are missing, or if none has a finite metric."""
        return None if self.todo else self.best_so_far

    @property
    def best_so_far(self) -> float | None:
        """Of the rates that have run; None if none has a finite metric."""
        if not self.values or math.isinf(min(self.values.values())):
            return None
        return min(self.values, key=self.values.__getitem__)

    @property
    def at_edge(self) -> bool:
        """Whether a better rate may lie outside."""
        return self.best is not None and self.best in (min(self.values), max(self.values))


def points(study: Study, only: str = "*") -> Iterator[Point]:
    """Every method on every model and text; `only` is a list of patterns of methods' names, with commas."""
    for model in study.models:
        for data in study.data:
            for method in study.methods:
                if method.models and model.name not in method.models:
                    continue
                if any(fnmatchcase(method.name, pattern.strip()) for pattern in only.split(",")):
                    yield Point(model=model, data=data, method=method)


def grid(study: Study, point: Point, lookup: Lookup) -> Grid:
    """The method's rates or the study's, and up to `study.extend` more beyond an edge where that is the best."""
    given = point.method.learning_rates or study.learning_rates
    rates = sorted(given)
    for extension in range(study.extend + 1):
        runs = [point.run(lr, study.seeds[0]) for lr in rates]
        found = [(run, lookup(run)) for run in runs]
        values = {run.lr: _value(result) for run, result in found if result is not None}
        current = Grid(values=values, todo=tuple(run for run, result in found if result is None))
        if extension == study.extend or not current.at_edge or len(given) == 1:
            break
        rates = sorted([*rates, rates[-1] * 2 if current.best == rates[-1] else rates[0] / 2])
    return current


def _value(result: Result) -> float:
    return math.inf if result.validation is None else result.validation


def tuner(study: Study, point: Point) -> Point:
    """The point whose grid gives this one's learning rate: itself, unless the study file says otherwise."""
    data = next(data for data in study.data if data.name == (study.tune_on or point.data.name))
    return Point(model=point.model, data=data, method=study.method(point.method.learning_rate_of or point.method.name))


def tuned(study: Study, point: Point, lookup: Lookup) -> float | None:
    """The point's learning rate; None while that is not known."""
    return grid(study, tuner(study, point), lookup).best


def final_runs(study: Study, point: Point, lr: float) -> list[Run]:
    """What is reported of a point: all seeds at its tuned rate."""
    return [point.run(lr, seed) for seed in study.seeds]


def budget_runs(study: Study, point: Point, lr: float) -> list[Run]:
    """The runs of other lengths."""
    budgets = [budget for budget in point.method.budgets if budget != point.method.steps]
    return [point.run(lr, seed, budget) for seed in study.seeds for budget in budgets]


def missing_runs(study: Study, lookup: Lookup, only: str = "*") -> list[Run]:
    """Runs without a result that can be started now: first what tunes, then further seeds, then other lengths."""
    tuning, seeds, budgets = [], [], []
    for point in points(study, only):
        tuning += grid(study, tuner(study, point), lookup).todo
        lr = tuned(study, point, lookup)
        if lr is not None:
            seeds += final_runs(study, point, lr)
            budgets += budget_runs(study, point, lr)
    for runs in (seeds, budgets):  # every point with one seed before any with two
        runs.sort(key=lambda run: study.seeds.index(run.seed))
    return [run for run in dict.fromkeys((*tuning, *seeds, *budgets)) if lookup(run) is None]


def num_later(study: Study, lookup: Lookup, only: str = "*") -> float:
    """Runs, in lengths of the study's, that wait for a learning rate."""
    total = 0.0
    for point in points(study, only):
        if tuned(study, point, lookup) is None:
            method = point.method
            num_seeds = len(study.seeds) - (tuner(study, point) == point)
            total += num_seeds * method.steps + len(study.seeds) * sum(set(method.budgets) - {method.steps})
    return total
