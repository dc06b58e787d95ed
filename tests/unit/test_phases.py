"""phases.py: visit order, switch decision, phase state (DESIGN, sections 1 and 3)."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.bcd.phases import PhaseSchedule, PhaseState

schedules = st.builds(PhaseSchedule, num_blocks=st.integers(1, 7), steps_per_block=st.integers(1, 12))


def _states(schedule: PhaseSchedule, steps: int) -> list[PhaseState]:
    states = [PhaseState()]
    for _ in range(steps):
        states.append(schedule.after_step(states[-1]))
    return states


@given(schedule=schedules, iteration=st.integers(0, 120))
def test_closed_form_equals_stepping(schedule: PhaseSchedule, iteration: int) -> None:
    """Exposes a resume that lands in another phase than the uninterrupted run (invariant 7)."""
    assert schedule.at_iteration(iteration) == _states(schedule, iteration)[-1]


@given(schedule=schedules)
def test_each_phase_lasts_its_steps_and_blocks_go_round(schedule: PhaseSchedule) -> None:
    """Exposes an off-by-one at the switch, a skipped block, or a cycle counted wrong."""
    length, blocks = schedule.steps_per_block, schedule.num_blocks
    for iteration, state in enumerate(_states(schedule, 3 * blocks * length)):
        assert schedule.block(state) == iteration // length % blocks
        assert schedule.cycle(state) == iteration // (length * blocks)
        assert state.step_in_phase == iteration % length


@given(schedule=schedules)
def test_a_cycle_visits_every_block_once(schedule: PhaseSchedule) -> None:
    """Exposes a block that starves."""
    states = _states(schedule, 4 * schedule.num_blocks * schedule.steps_per_block)
    for cycle in range(4):
        begun = [state for state in states if schedule.cycle(state) == cycle and state.step_in_phase == 0]
        assert sorted(schedule.block(state) for state in begun) == list(range(schedule.num_blocks))


@given(schedule=schedules)
def test_switches_only_between_phases_of_different_blocks(schedule: PhaseSchedule) -> None:
    """Exposes a rebuild amid a phase, or one that throws the moments away when the block stays the same."""
    states = _states(schedule, 3 * schedule.num_blocks * schedule.steps_per_block)
    for before, after in pairwise(states):
        is_new_phase = after.phase != before.phase
        assert schedule.is_switch(before, after) == (is_new_phase and schedule.num_blocks > 1)


def test_example() -> None:
    """Exposes a change of the documented counting from 0."""
    schedule = PhaseSchedule(num_blocks=3, steps_per_block=10)
    state = schedule.at_iteration(45)
    assert state == PhaseState(phase=4, step_in_phase=5)
    assert (schedule.block(state), schedule.cycle(state)) == (1, 1)


def test_stepping_ignores_the_loss_and_keeps_the_old_state() -> None:
    """Exposes a fixed-length phase that depends on the loss, and a state changed in place."""
    schedule = PhaseSchedule(num_blocks=2, steps_per_block=2)
    before = PhaseState(phase=1, step_in_phase=1)
    for loss in (None, 1.0, float("nan")):
        assert schedule.after_step(before, loss=loss) == PhaseState(phase=2)
    assert before == PhaseState(phase=1, step_in_phase=1)


def test_shorter_phases_after_a_resume_end_the_long_one() -> None:
    """Exposes a phase without end where a run resumes past the new --bcd-steps-per-block."""
    schedule = PhaseSchedule(num_blocks=3, steps_per_block=5)
    assert schedule.after_step(PhaseState(phase=2, step_in_phase=8)) == PhaseState(phase=3)


@given(phase=st.integers(0, 10**6), step=st.integers(0, 10**6))
def test_state_survives_json(phase: int, step: int) -> None:
    """Exposes a checkpointed state that comes back different."""
    state = PhaseState(phase=phase, step_in_phase=step)
    assert PhaseState.from_dict(json.loads(json.dumps(state.to_dict()))) == state


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"phase": 1}, "step_in_phase"),
        ({"phase": 1, "step_in_phase": 0, "extra": 2}, "extra"),
        ({"phase": -1, "step_in_phase": 0}, "phase is -1"),
        ({"phase": 0, "step_in_phase": 1.5}, "step_in_phase is 1.5"),
        ({"phase": True, "step_in_phase": 0}, "phase is True"),
    ],
)
def test_damaged_state_is_refused(values: dict[str, int], named: str) -> None:
    """Exposes a damaged checkpoint that resumes at some other place without a word."""
    with pytest.raises(ValueError, match=named):
        PhaseState.from_dict(values)


@pytest.mark.parametrize(("blocks", "steps", "flag"), [(0, 5, "--bcd-num-blocks 0"), (3, 0, "--bcd-steps-per-block 0")])
def test_bad_schedule_names_the_flag(blocks: int, steps: int, flag: str) -> None:
    """Exposes a division by zero shown to the user instead of the flag."""
    with pytest.raises(ValueError, match=flag):
        PhaseSchedule(num_blocks=blocks, steps_per_block=steps)
