"""BlockSchedule: order of blocks, switches, end of the run, learning rate."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command_line import parse

from megatron.bcd.blocks.partition import partition_from_config
from megatron.bcd.blocks.schedule import BlockSchedule, PhaseState, block_schedule_from_config
from megatron.bcd.config import ORDERS, BcdConfig, TrainingConfig

NAN, INF = float("nan"), float("inf")


def block_schedule(*, num_blocks: int, seed: int = TrainingConfig.seed, **settings: Any) -> BlockSchedule:
    """Build a schedule; `settings` are fields of BcdConfig without `bcd_`, the others have their defaults."""
    config = BcdConfig(**{f"bcd_{name}": value for name, value in settings.items()})
    return BlockSchedule(settings=config, num_blocks=num_blocks, seed=seed)


schedules = st.builds(
    block_schedule,
    num_blocks=st.integers(1, 7),
    steps_per_block=st.integers(1, 12),
    order=st.sampled_from(ORDERS),
    seed=st.integers(-5, 5),
)
plateau_schedules = st.builds(
    block_schedule,
    switch=st.just("plateau"),
    num_blocks=st.integers(1, 3),
    order=st.sampled_from(ORDERS),
    plateau_window=st.integers(1, 5),
    plateau_min_improvement=st.sampled_from([0.0, 0.01, 0.3]),
)
losses = st.floats(-4, 4) | st.sampled_from([NAN, INF, 1.0, 1.0, 2.0])


def _states(schedule: BlockSchedule, steps: int) -> list[PhaseState]:
    states = [PhaseState()]
    for _ in range(steps):
        states.append(schedule.after_step(states[-1]))
    return states


def _at(schedule: BlockSchedule, iteration: int) -> PhaseState:
    """Return the state after this many steps in phases of equal length."""
    phase, step_in_phase = divmod(iteration, schedule.least_steps(0))
    return PhaseState(phase=phase, step_in_phase=step_in_phase)


def _blocks(schedule: BlockSchedule, phases: int) -> list[int]:
    return [schedule.block(_at(schedule, phase * schedule.least_steps(0))) for phase in range(phases)]


@given(schedule=schedules, iteration=st.integers(0, 120))
def test_closed_form_equals_stepping(schedule: BlockSchedule, iteration: int) -> None:
    """The phase in closed form equals the one after stepping (invariant 7)."""
    assert _at(schedule, iteration) == _states(schedule, iteration)[-1]


@pytest.mark.parametrize("order", ORDERS)
@given(num_blocks=st.integers(1, 6))
def test_a_cycle_visits_every_block_once(order: str, num_blocks: int) -> None:
    """A cycle visits every block once, in any order."""
    schedule = block_schedule(num_blocks=num_blocks, steps_per_block=2, order=order)
    states = _states(schedule, 10 * num_blocks - 1)
    for cycle in range(5):
        begun = [state for state in states if schedule.cycle(state) == cycle and state.step_in_phase == 0]
        assert sorted(schedule.block(state) for state in begun) == list(range(num_blocks))


def test_random_order_is_random_and_the_same_everywhere() -> None:
    """Random order depends only on seed and cycle, never repeats a block, and puts each block in every place."""
    schedule = block_schedule(num_blocks=5, order="random", seed=1234)
    assert _blocks(schedule, 15) == [4, 1, 0, 2, 3, 4, 0, 2, 1, 3, 4, 2, 0, 3, 1]
    cycles = {seed: _blocks(dataclasses.replace(schedule, seed=seed), 500) for seed in (1, 2)}
    assert all(before != after for blocks in cycles.values() for before, after in pairwise(blocks))
    assert cycles[1] != cycles[2]
    orders = [tuple(cycles[1][start : start + 5]) for start in range(0, 500, 5)]
    assert len(set(orders)) > 50, "of 120"
    for place in range(5):
        assert {order[place] for order in orders} == set(range(5))


def _plateau_length(schedule: BlockSchedule, phase_losses: Sequence[float]) -> int | None:
    """Return the number of steps until the phase ends, given all its losses; None if there are too few."""
    settings = schedule.settings
    window, best, best_step = settings.bcd_plateau_window, math.inf, None
    for step in range(1, len(phase_losses) + 1):
        finite = [loss for loss in phase_losses[:step] if math.isfinite(loss)][-window:]
        if len(finite) == window and math.isfinite(phase_losses[step - 1]):
            mean = math.fsum(finite) / window
            if best_step is None or (mean < best and best - mean >= settings.bcd_plateau_min_improvement * abs(best)):
                best, best_step = mean, step
        if best_step is not None and step - best_step >= window:
            return step
    return None


@given(schedule=plateau_schedules, phase_losses=st.lists(losses, min_size=25, max_size=40))
def test_plateau(schedule: BlockSchedule, phase_losses: list[float]) -> None:
    """A phase ends by the definition of a plateau, and only where `may_end_with_next_step` is True."""
    state, length = PhaseState(), _plateau_length(schedule, phase_losses)
    for step, loss in enumerate(phase_losses[:length], start=1):
        may_end = schedule.may_end_with_next_step(state)
        assert may_end == (schedule.after_step(state, loss=NAN).phase == 1), "True only where it can happen"
        state = schedule.after_step(state, loss=loss)
        assert state.phase == (step == length)
        assert may_end or state.phase == 0
        assert len(state.recent_losses) <= schedule.settings.bcd_plateau_window


@given(schedule=plateau_schedules, run=st.lists(losses, max_size=40))
def test_going_on_from_json_takes_every_decision_alike(schedule: BlockSchedule, run: list[float]) -> None:
    """A state that passes through JSON takes every later decision alike (invariant 7)."""
    state = PhaseState()
    for loss in run:
        as_json = json.loads(json.dumps(state.to_dict(), allow_nan=False))
        assert as_json == state.to_dict(), "what a checkpoint holds is compared with what a run has"
        resumed = PhaseState.from_dict(as_json)
        assert resumed == state == PhaseState.from_dict(as_json | {"cycle_ends": []}), "as an earlier version wrote it"
        state = schedule.after_step(state, loss=loss)
        assert schedule.after_step(resumed, loss=loss) == state


@given(st.integers(1, 24), st.integers(1, 1500), st.sampled_from([(), ("--bcd-preset", "finetune")]))
def test_every_block_is_visited_equally_often(num_blocks: int, num_steps: int, preset: tuple[str, ...]) -> None:
    """Every block is visited equally often, in phases whose lengths differ by at most one step."""
    flags = ("--num-layers", "24", "--bcd-num-blocks", str(num_blocks), "--train-iters", str(num_steps), *preset)
    config = parse(*flags, without=("--num-layers", "--train-iters"))
    schedule = block_schedule_from_config(config, partition_from_config(config))
    states = _states(schedule, num_steps)
    lengths = Counter(state.phase for state in states[:-1])
    longest = 50 if preset else 100
    if num_blocks == 1:
        assert {*[*lengths.values()][:-1]} <= {longest}
        return
    assert max(lengths.values()) <= min(longest, min(lengths.values()) + 1)
    visits = Counter(schedule.block(PhaseState(phase=phase)) for phase in lengths)
    assert len(visits) == min(num_blocks, num_steps) and len(set(visits.values())) == 1
    assert min(visits.values()) >= 2 or num_steps < 2 * num_blocks
    assert len(lengths) >= schedule.phases_within(PhaseState(), num_steps) == min(len(lengths), num_blocks)
