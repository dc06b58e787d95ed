"""Order of the turns in tools/benchmark.py, and the numbers computed from their times. Pure.

A variant is full-parameter training or one block of BCD; in a round every variant has one turn. Times in milliseconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One variant in one round: built, warmed up, timed, disposed."""

    build_ms: float
    warm_up_ms: tuple[float, ...]
    """The steps before the timed ones, the first after the switch among them."""
    step_ms: tuple[float, ...]
    dispose_ms: float
    model_state_bytes: tuple[int, ...]
    """By rank, after the last step."""

    @property
    def switch_ms(self) -> float:
        """Leaving a block and entering it, and what the first step after that takes longer than a usual one."""
        first_step_surplus = max(0.0, self.warm_up_ms[0] - statistics.median(self.step_ms))
        return self.build_ms + self.dispose_ms + first_step_surplus


@dataclass(frozen=True, kw_only=True)
class BlockFigures:
    """One block's row."""

    block: int
    layers: str
    extras: tuple[str, ...]
    full_step_ms: float
    step_ms: float
    ratio: float
    """Median over the rounds of BCD / full, each the median of its round's steps."""
    bound: float
    """The ratio that the arithmetic of the layers allows (docs/concepts.md)."""
    full_model_state_bytes: tuple[int, ...]
    """By rank."""
    model_state_bytes: tuple[int, ...]
    """By rank."""
    build_ms: float
    dispose_ms: float
    switch_ms: float
    switch_steps: float
    """`switch_ms` in BCD steps of this block."""


def rotated(variants: Sequence[T], round_index: int) -> list[T]:
    """The variants' order in a round: each is first, second, ... equally often, so a drift favours none."""
    start = round_index % len(variants)
    return [*variants[start:], *variants[:start]]


def slowest(turns: Sequence[Turn]) -> Turn:
    """One turn as all its ranks saw it: every time is the slowest rank's, the bytes stay by rank."""
    return Turn(
        build_ms=max(turn.build_ms for turn in turns),
        warm_up_ms=tuple(max(times) for times in zip(*(turn.warm_up_ms for turn in turns), strict=True)),
        step_ms=tuple(max(times) for times in zip(*(turn.step_ms for turn in turns), strict=True)),
        dispose_ms=max(turn.dispose_ms for turn in turns),
        model_state_bytes=tuple(count for turn in turns for count in turn.model_state_bytes),
    )


def typical_step_ms(turns: Sequence[Turn]) -> float:
    """Median over all timed steps of all rounds."""
    return statistics.median(time for turn in turns for time in turn.step_ms)


def paired_ratio(block_turns: Sequence[Turn], full_turns: Sequence[Turn]) -> float:
    """Median over the rounds of (median BCD step) / (median full step), both of the same round.

    A machine that is slower for some rounds slows both sides of a pair, and leaves the ratio alone.
    """
    return statistics.median(
        statistics.median(block.step_ms) / statistics.median(full.step_ms)
        for block, full in zip(block_turns, full_turns, strict=True)
    )


def block_figures(
    block_turns: Sequence[Turn],
    full_turns: Sequence[Turn],
    *,
    block: int,
    layers: str,
    extras: tuple[str, ...],
    bound: float,
) -> BlockFigures:
    """A block's row from its turns and full training's, both by round."""
    step_ms = typical_step_ms(block_turns)
    switch_ms = statistics.median(turn.switch_ms for turn in block_turns)
    return BlockFigures(
        block=block,
        layers=layers,
        extras=extras,
        full_step_ms=typical_step_ms(full_turns),
        step_ms=step_ms,
        ratio=paired_ratio(block_turns, full_turns),
        bound=bound,
        full_model_state_bytes=_largest(full_turns),
        model_state_bytes=_largest(block_turns),
        build_ms=statistics.median(turn.build_ms for turn in block_turns),
        dispose_ms=statistics.median(turn.dispose_ms for turn in block_turns),
        switch_ms=switch_ms,
        switch_steps=switch_ms / step_ms,
    )


def mean_ratio(rows: Sequence[BlockFigures], *, steps_per_block: int | None = None) -> float:
    """Mean over the blocks, which all get equally many steps; with `steps_per_block` the switches are paid for too."""
    switches = [0.0 if steps_per_block is None else row.switch_ms / steps_per_block / row.full_step_ms for row in rows]
    return statistics.fmean(row.ratio + switch for row, switch in zip(rows, switches, strict=True))


def _largest(turns: Sequence[Turn]) -> tuple[int, ...]:
    return tuple(max(counts) for counts in zip(*(turn.model_state_bytes for turn in turns), strict=True))
