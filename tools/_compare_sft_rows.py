"""Figures of tools/compare.py --task sft from what its runs have measured. Nothing is run here.

Time of a run is its number of steps times the step's (`fastest_step_ms` of studies/results.py), without evaluations:
other work on the machine is left out, and how often is evaluated.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One finished run."""

    seed: int
    curve: tuple[tuple[int, float], ...]
    """Iteration and validation loss, ascending; the last entry is the end of the run."""
    step_ms: float
    tokens_per_step: float
    """Positions, those that no loss counts included."""
    state_bytes: int
    peak_bytes: int
    test: float | None
    commit: str = ""

    @property
    def best(self) -> tuple[int, float]:
        """Where the validation loss is lowest."""
        return min(self.curve, key=lambda point: point[1])

    @property
    def last(self) -> float:
        return self.curve[-1][1]

    def at_time(self, milliseconds: float) -> float:
        """The validation loss after so much training, interpolated; of a run that ended before, its last."""
        return _interpolated(self.curve, milliseconds / self.step_ms)

    def time_to(self, loss: float) -> float | None:
        """Milliseconds of training until the validation loss is first `loss`, interpolated; None if it never is."""
        first = self.curve[0]
        if first[1] <= loss:
            return first[0] * self.step_ms
        for (before, above), (after, below) in pairwise(self.curve):
            if below <= loss:
                return (before + (above - loss) / (above - below) * (after - before)) * self.step_ms
        return None


def _interpolated(curve: Sequence[tuple[int, float]], step: float) -> float:
    for (before, one), (after, two) in pairwise(curve):
        if step <= after:
            share = max(0.0, (step - before) / (after - before))
            return one + share * (two - one)
    return curve[-1][1]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method; means over the seeds, and their spread (largest minus smallest)."""

    method: str
    label: str
    failure: str = ""
    """Why there are no figures; then all others are as by default."""
    lr: float | None = None
    lr_at_edge: bool = False
    rates: tuple[tuple[float, float | None], ...] = ()
    """Learning rates with the validation loss that they end at (first seed); None: not finite, or failed."""
    seeds: tuple[int, ...] = ()
    best: float = math.nan
    """Lowest validation loss."""
    best_spread: float = math.nan
    last: float = math.nan
    """Validation loss at the end: at equal epochs."""
    last_spread: float = math.nan
    at_full_time: float = math.nan
    """Validation loss after the least time that full training or the method took."""
    to_full: float | None = None
    """Lowest validation loss over full training's, less 1."""
    cost: float | None = None
    """Time to full training's lowest validation loss, over full training's own."""
    num_reached: int = 0
    """Seeds that reach it at all; `cost` is of these."""
    test: float | None = None
    tokens_per_second: float = math.nan
    step_ms: float = math.nan
    state_bytes: float = math.nan
    peak_bytes: float = math.nan
    """Of the process, all libraries included."""
    commits: tuple[str, ...] = ()
    """Versions of the program that its runs had."""


def row_of(
    runs: Sequence[Trained],
    full: Mapping[int, Trained],
    *,
    method: str,
    label: str,
    lr: float,
    lr_at_edge: bool,
    rates: Sequence[tuple[float, float | None]],
) -> Row:
    """The row of a method's runs at its tuned rate, one for each seed; `full` has full training's by seed."""
    paired = [(one, full[one.seed]) for one in runs if one.seed in full]
    costs = []
    for one, other in paired:
        steps, loss = other.best
        needed = one.time_to(loss)
        costs += [needed / (steps * other.step_ms)] if needed is not None and steps else []
    tests = [one.test for one in runs if one.test is not None]
    best = [one.best[1] for one in runs]
    last = [one.last for one in runs]
    return Row(
        method=method,
        label=label,
        lr=lr,
        lr_at_edge=lr_at_edge,
        rates=tuple(rates),
        seeds=tuple(one.seed for one in runs),
        best=statistics.fmean(best),
        best_spread=max(best) - min(best),
        last=statistics.fmean(last),
        last_spread=max(last) - min(last),
        at_full_time=statistics.fmean(
            [one.at_time(other.curve[-1][0] * other.step_ms) for one, other in paired] or [math.nan]
        ),
        to_full=statistics.fmean(one.best[1] / other.best[1] - 1 for one, other in paired) if paired else None,
        cost=statistics.fmean(costs) if costs else None,
        num_reached=len(costs),
        test=statistics.fmean(tests) if tests else None,
        tokens_per_second=statistics.fmean(one.tokens_per_step / one.step_ms * 1e3 for one in runs),
        step_ms=statistics.fmean(one.step_ms for one in runs),
        state_bytes=max(one.state_bytes for one in runs),
        peak_bytes=max(one.peak_bytes for one in runs),
        commits=tuple(sorted({one.commit for one in runs if one.commit})),
    )


_HEADS = (
    "method",
    "learning rate",
    "best validation loss",
    "to full",
    "at equal epochs",
    "at equal time",
    "test",
    "tokens/s",
    "model state",
    "of full",
    "peak memory",
    "cost to full's best",
)


def table(rows: Sequence[Row], *, baseline: str, num_seeds: int = 1) -> list[str]:
    """Markdown lines, rows in the order given; `num_seeds`: that were asked for."""
    base = next((row for row in rows if row.method == baseline and not row.failure), None)
    lines = ["| " + " | ".join(_HEADS) + " |", "|---|" + "---|" * (len(_HEADS) - 1)]
    for row in rows:
        if row.failure:
            lines.append(f"| {row.label} | failed: {row.failure.replace('|', '/')} |" + " |" * (len(_HEADS) - 2))
            continue
        several = len(row.seeds) > 1
        cells = [
            row.label,
            f"{row.lr:g}" + (" *edge*" if row.lr_at_edge else ""),
            f"{row.best:.4f}" + (f" ± {row.best_spread / 2:.4f}" if several else "") + _seeds(row, num_seeds),
            "-" if row.to_full is None else f"{100 * row.to_full:+.2f} %",
            f"{row.last:.4f}" + (f" ± {row.last_spread / 2:.4f}" if several else ""),
            "-" if math.isnan(row.at_full_time) else f"{row.at_full_time:.4f}",
            "-" if row.test is None else f"{row.test:.4f}",
            f"{row.tokens_per_second:,.0f}",
            f"{row.state_bytes / 2**20:.1f} MiB",
            f"{100 * row.state_bytes / base.state_bytes:.0f} %" if base else "-",
            f"{row.peak_bytes / 2**20:,.0f} MiB",
            _cost(row, base is not None),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _seeds(row: Row, wanted: int) -> str:
    return f" *{len(row.seeds)} of {wanted} seeds*" if len(row.seeds) < wanted else ""


def _cost(row: Row, has_baseline: bool) -> str:
    if row.cost is None:
        return "not reached" if has_baseline else "-"
    return f"{row.cost:.2f}" + (
        "" if row.num_reached == len(row.seeds) else f" ({row.num_reached} of {len(row.seeds)})"
    )


def grid_lines(rows: Sequence[Row]) -> list[str]:
    """Markdown lines: the validation loss that every learning rate ends at."""
    rates = sorted({rate for row in rows for rate, _ in row.rates})
    lines = ["| learning rate | " + " | ".join(f"{rate:g}" for rate in rates) + " |", "|---|" + "---|" * len(rates)]
    for row in rows:
        known = dict(row.rates)
        cells = [
            "" if rate not in known else "diverged" if known[rate] is None else f"{known[rate]:.4f}" for rate in rates
        ]
        lines.append(f"| {row.label} | " + " | ".join(cells) + " |")
    return lines
