"""Numbers of tools/compare.py: read from a run's metrics, and combined into the table's rows. Pure.

A variant is a method of the table, or the peer; in a round every variant has one turn, a run of its own. Times in
milliseconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

WARM_UP_STEPS = 2
"""Of every phase, not counted. Two, as the second line of a training's metrics is the mean of its first two steps."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One variant in one round."""

    step_ms: tuple[tuple[float, ...], ...]
    """By phase, those that count."""
    loss: float | None
    """Of the last step; None where it is not finite."""
    model_state_bytes: tuple[int, ...]
    """By rank, the maximum over the phases."""
    peak_memory_bytes: tuple[int, ...]
    """By rank."""

    @property
    def iteration_ms(self) -> float:
        """Mean over the phases, all of them as long, of a phase's median."""
        return statistics.fmean(statistics.median(times) for times in self.step_ms)


def turn_of(lines: Sequence[Mapping[str, Any]]) -> Turn:
    """What a metrics file says that has a line per step. Raises ValueError where a phase has no step that counts."""
    steps = [line for line in lines if "step_time_ms" in line]
    phases = [[line["step_time_ms"] for line in group] for _, group in groupby(steps, key=lambda line: line["phase"])]
    if not phases or min(map(len, phases)) <= WARM_UP_STEPS:
        raise ValueError(
            f"the metrics have {list(map(len, phases))} steps by phase: more than {WARM_UP_STEPS} are needed"
        )
    return Turn(
        step_ms=tuple(tuple(times[WARM_UP_STEPS:]) for times in phases),
        loss=steps[-1]["loss"],
        model_state_bytes=_largest(steps, "model_state_bytes"),
        peak_memory_bytes=_largest(steps, "peak_memory_bytes"),
    )


def _largest(steps: Sequence[Mapping[str, Any]], name: str) -> tuple[int, ...]:
    return tuple(max(counts) for counts in zip(*(step[name] for step in steps), strict=True))


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The planner's estimate of a variant, over all ranks."""

    model_state_bytes: int | None
    """None for the peer, whose optimizer the planner does not model."""
    peak_bytes: int | None
    """Largest rank; None where there is no cluster to plan for."""
    iteration_ms: float | None
    full_flops: float
    """Arithmetic of full training on the tokens of an iteration."""
    arithmetic: float
    """Iteration time over full training's if the layers' passes were all of it. No bound: BCD also steps fewer
    parameters, and spares an inactive head its weight gradient."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    name: str
    processes: int
    model_state_bytes: int
    """All ranks together."""
    peak_memory_bytes: int
    """Largest rank."""
    iteration_ms: float
    """Geometric mean over the rounds, so that a ratio of two rows is the mean of their ratios within the rounds."""
    tokens_per_second: float
    mfu: float | None
    ratio_to_full: float | None
    """Of the iteration times of this table."""
    loss: float | None
    planned: Planned


def row_of(
    name: str,
    turns: Sequence[Turn],
    full: Sequence[Turn] | None,
    planned: Planned,
    *,
    tokens_per_iteration: int,
    peak_flops_per_s: float | None,
) -> Row:
    """A variant's line from its turns and full training's, both by round.

    ``peak_flops_per_s`` is that of one process's device; None if not given.
    """
    iteration_ms = typical_ms(turns)
    processes = len(turns[0].model_state_bytes)
    achieved = planned.full_flops / iteration_ms * 1e3 / processes
    return Row(
        name=name,
        processes=processes,
        model_state_bytes=max(sum(turn.model_state_bytes) for turn in turns),
        peak_memory_bytes=max(max(turn.peak_memory_bytes) for turn in turns),
        iteration_ms=iteration_ms,
        tokens_per_second=tokens_per_iteration / iteration_ms * 1e3,
        mfu=None if peak_flops_per_s is None else achieved / peak_flops_per_s,
        ratio_to_full=iteration_ms / typical_ms(full) if full else None,
        loss=turns[-1].loss,
        planned=planned,
    )


def typical_ms(turns: Sequence[Turn]) -> float:
    """Geometric mean over the rounds.

    A median would be of one round here and of another there, and the ratios of three methods would not fit together.
    """
    return statistics.geometric_mean(turn.iteration_ms for turn in turns)


def ratios(turns: Sequence[Turn], others: Sequence[Turn]) -> list[float]:
    """Iteration time over the other's, round by round: a machine that is slow for a round is so for both."""
    return [turn.iteration_ms / other.iteration_ms for turn, other in zip(turns, others, strict=True)]


def rotated(names: Sequence[str], round_index: int) -> list[str]:
    """The order of a round: each is first, second, ... equally often, so a drift favours none."""
    start = round_index % len(names)
    return [*names[start:], *names[:start]]


def table_text(rows: Sequence[Row], *, on_gpu: bool) -> str:
    """Aligned columns, in the shape of the paper's tables 3 and 4."""
    largest = max(max(row.model_state_bytes, row.peak_memory_bytes) for row in rows)
    unit, size = ("GiB", 2**30) if largest >= 10 * 2**30 else ("MiB", 2**20)
    head = ["method", "GPUs" if on_gpu else "processes", f"state {unit}", "planned", f"peak {unit}"]
    head += ["planned"] * on_gpu + ["ms/iteration"] + ["planned"] * on_gpu
    head += ["tokens/s", "MFU", "ratio to full", "arithmetic", "loss"]
    lines = [head]
    for row in rows:
        planned = row.planned
        cells = [row.name, str(row.processes), _amount(row.model_state_bytes, size)]
        cells += [_amount(planned.model_state_bytes, size), _amount(row.peak_memory_bytes, size)]
        cells += [_amount(planned.peak_bytes, size)] * on_gpu + [f"{row.iteration_ms:,.1f}"]
        cells += [_number(planned.iteration_ms, ",.1f")] * on_gpu + [f"{row.tokens_per_second:,.0f}"]
        cells += [_number(row.mfu, ".1%"), _number(row.ratio_to_full, ".3f"), f"{planned.arithmetic:.3f}"]
        lines.append([*cells, _number(row.loss, ".4f")])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _amount(count: int | None, size: int) -> str:
    return "-" if count is None else f"{count / size:,.1f}"
