"""Choose a few combinations of many options so that every allowed pair of values occurs at least once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Combination = dict[str, str]


def all_combinations(factors: Mapping[str, Iterable[str]], allowed: Callable[[Combination], bool]) -> list[Combination]:
    """Return the product of all factors' values, without combinations that are not `allowed`."""
    every = (dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values()))
    return [combination for combination in every if allowed(combination)]


def pairwise(factors: Mapping[str, Iterable[str]], allowed: Callable[[Combination], bool]) -> list[Combination]:
    """Return a few of `all_combinations`, always the same: repeatedly the one with most missing pairs."""
    holders: dict[Any, list[tuple[Combination, frozenset[Any]]]] = {}
    for combination in all_combinations(factors, allowed):
        pairs = frozenset(itertools.combinations(combination.items(), 2))
        for pair in pairs:
            holders.setdefault(pair, []).append((combination, pairs))
    missing, chosen = set(holders), []
    while missing:
        combination, pairs = max(holders[min(missing)], key=lambda holder: len(holder[1] & missing))
        chosen.append(combination)
        missing -= pairs
    return chosen
