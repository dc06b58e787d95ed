"""PhaseState: what a checkpoint keeps of it, and the settings that a user gives."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.block_schedules import block_schedule

from megatron.bcd.blocks.phase_state import PhaseState

NAN, INF = float("nan"), float("inf")


@given(phase=st.integers(0, 10**6), step=st.integers(0, 10**6))
def test_state_survives_json(phase: int, step: int) -> None:
    """Exposes a checkpointed state that comes back different."""
    state = PhaseState(phase=phase, step_in_phase=step)
    assert PhaseState.from_dict(json.loads(json.dumps(state.to_dict()))) == state


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"step_in_phase": None}, "step_in_phase is None"),
        ({"extra": 2}, "extra"),
        ({"phase": -1}, "phase is -1"),
        ({"step_in_phase": 1.5}, "step_in_phase is 1.5"),
        ({"phase": True}, "phase is True"),
        ({"block": -1}, "block is -1"),
        ({"block": "1"}, "block is '1'"),
        ({"visited": [0, 0]}, "no block comes twice"),
        ({"visited": [1], "block": 1}, "no block comes twice"),
        ({"visited": 3}, "visited is 3"),
        ({"recent_losses": [NAN]}, "training loss is nan"),
        ({"recent_losses": [1]}, "training loss is 1"),
        ({"recent_losses": [1.0] * 9}, "more steps than 8"),
        ({"best_loss": 1.0, "best_loss_step": 9}, "more steps than 8"),
        ({"best_loss": 1.0}, "best_loss is 1.0 at best_loss_step 0"),
        ({"best_loss": "1", "best_loss_step": 2}, "training loss is '1'"),
        ({"best_loss_step": 3}, "best_loss is None at best_loss_step 3"),
        ({"cycle_ends": [{"cycle": 1}]}, "cycle_ends has the entries"),
        ({"cycle_ends": [7]}, "cycle_ends has the entries 7"),
        ({"cycle_ends": [{"cycle": 1, "validation_loss": NAN}]}, "validation_loss is nan"),
        ({"cycle_ends": [{"cycle": 1.0, "validation_loss": 2.0}]}, "cycle is 1.0"),
        ({"cycle_ends": [{"cycle": c, "validation_loss": 2.0} for c in (2, 1)]}, r"cycles \[2, 1\]"),
    ],
)
def test_damaged_state_is_refused(changed: dict[str, Any], named: str) -> None:
    """Exposes a damaged checkpoint that resumes at some other place without a word."""
    with pytest.raises(ValueError, match=named):
        PhaseState.from_dict(PhaseState(phase=3, step_in_phase=8).to_dict() | changed)


@pytest.mark.parametrize("missing", [field.name for field in dataclasses.fields(PhaseState)])
def test_incomplete_state_is_refused(missing: str) -> None:
    """Exposes a cut-off state that resumes with a default in place of what is lost."""
    values = PhaseState().to_dict()
    del values[missing]
    with pytest.raises(ValueError, match="must have .*" + missing):
        PhaseState.from_dict(values)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"order": "down"}, "--bcd-order down: must be one of ascending, descending, random, greedy"),
        ({"switch": "never"}, "--bcd-switch never: must be one of steps, plateau"),
        ({"steps_per_block": 0}, "--bcd-steps-per-block 0: must be at least 1"),
        ({"plateau_window": 0}, "--bcd-plateau-window 0: must be at least 1"),
        ({"plateau_min_improvement": -0.1}, "--bcd-plateau-min-improvement -0.1: must be at least 0 and less than 1"),
        ({"plateau_min_improvement": NAN}, "--bcd-plateau-min-improvement nan: must be"),
        ({"min_steps_per_block": 0}, "--bcd-min-steps-per-block 0: must be at least 1"),
        (
            {"min_steps_per_block": 5, "max_steps_per_block": 4},
            "--bcd-max-steps-per-block 4: must be at least --bcd-min-steps-per-block 5",
        ),
        ({"stop_cycle_improvement": 1.0}, "--bcd-stop-cycle-improvement 1.0: must be"),
        ({"phase_warmup_steps": -1}, "--bcd-phase-warmup-steps -1: must be at least 0"),
        (
            {"phase_warmup_steps": 7, "steps_per_block": 7},
            "--bcd-phase-warmup-steps 7: .* less than --bcd-steps-per-block 7",
        ),
        (
            {"phase_warmup_steps": 7, "switch": "plateau", "max_steps_per_block": 6},
            "--bcd-phase-warmup-steps 7: .* less than --bcd-max-steps-per-block 6",
        ),
        ({"block_lr_multipliers": (1.0, 0.0, 1.0)}, "--bcd-block-lr-multipliers 0.0: each"),
        ({"block_lr_multipliers": (1.0, INF, 1.0)}, "--bcd-block-lr-multipliers inf: each"),
        ({"block_lr_multipliers": (1.0, 2.0)}, "--bcd-block-lr-multipliers: 2 given, must be one for each of the 3"),
    ],
)
def test_bad_settings_name_the_flag(settings: dict[str, Any], message: str) -> None:
    """Exposes a division by zero, or a run without end, in place of one line that names the flag."""
    with pytest.raises(ValueError, match=message):
        block_schedule(num_blocks=3, **settings)
