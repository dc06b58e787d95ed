"""Few combinations of many options: every pair of values that may go together occurs in at least one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

Combination = dict[str, str]


def all_combinations(factors: Mapping[str, Iterable[str]], allowed: Callable[[Combination], bool]) -> list[Combination]:
    """The product of the values of all factors, without what is not `allowed`."""
    every = (dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values()))
    return [combination for combination in every if allowed(combination)]


def pairwise(factors: Mapping[str, Iterable[str]], allowed: Callable[[Combination], bool]) -> list[Combination]:
    """Of `all_combinations` a few, the same each time: taken is what holds most pairs that none before it holds."""
    every = {id(combination): combination for combination in all_combinations(factors, allowed)}
    pairs = {key: set(itertools.combinations(combination.items(), 2)) for key, combination in every.items()}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        best = max(every, key=lambda key: len(pairs[key] & missing))
        chosen.append(every[best])
        missing -= pairs[best]
    return chosen


def thinned(cases: Iterable[Any], *, keep_every: int) -> list[Any]:
    """For parametrize: each `keep_every`-th case runs always, the others with --long."""
    marked = []
    for number, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        marked.append(pytest.param(*values, marks=[] if number % keep_every == 0 else [pytest.mark.long]))
    return marked
