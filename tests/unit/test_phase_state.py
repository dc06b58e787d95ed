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

NAN = float("nan")


@given(phase=st.integers(0, 10**6), step=st.integers(0, 10**6))
def test_state_survives_json(phase: int, step: int) -> None:
    """Exposes a checkpointed state that comes back different."""
    state = PhaseState(phase=phase, step_in_phase=step)
    assert PhaseState.from_dict(json.loads(json.dumps(state.to_dict()))) == state


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"step_in_phase": None}, "step_in_phase"),
        ({"extra": 2}, "extra"),
        ({"phase": -1}, "phase"),
        ({"step_in_phase": 1.5}, "step_in_phase"),
        ({"block": -1}, "block"),
        ({"visited": [0, 0]}, "twice"),
        ({"visited": [1], "block": 1}, "twice"),
        ({"recent_losses": [NAN]}, "nan"),
        ({"recent_losses": [1.0] * 9}, "8"),
        ({"best_loss": 1.0, "best_loss_step": 9}, "8"),
        ({"best_loss": 1.0}, "best_loss"),
        ({"cycle_ends": [{"cycle": 1}]}, "cycle_ends"),
        ({"cycle_ends": [{"cycle": 1, "validation_loss": NAN}]}, "validation_loss"),
        ({"cycle_ends": [{"cycle": c, "validation_loss": 2.0} for c in (2, 1)]}, "cycles"),
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
    with pytest.raises(ValueError, match=missing):
        PhaseState.from_dict(values)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"order": "down"}, "--bcd-order"),
        ({"switch": "never"}, "--bcd-switch"),
        ({"steps_per_block": 0}, "--bcd-steps-per-block"),
        ({"plateau_window": 0}, "--bcd-plateau-window"),
        ({"plateau_min_improvement": -0.1}, "--bcd-plateau-min-improvement"),
        ({"min_steps_per_block": 5, "max_steps_per_block": 4}, "--bcd-max-steps-per-block"),
        ({"stop_cycle_improvement": 1.0}, "--bcd-stop-cycle-improvement"),
        ({"phase_warmup_steps": -1}, "--bcd-phase-warmup-steps"),
        ({"phase_warmup_steps": 7, "steps_per_block": 7}, "--bcd-phase-warmup-steps"),
        ({"phase_warmup_steps": 7, "switch": "plateau", "max_steps_per_block": 6}, "--bcd-phase-warmup-steps"),
        ({"block_lr_multipliers": (1.0, 0.0, 1.0)}, "--bcd-block-lr-multipliers"),
        ({"block_lr_multipliers": (1.0, 2.0)}, "--bcd-block-lr-multipliers"),
    ],
)
def test_bad_settings_name_the_flag(settings: dict[str, Any], message: str) -> None:
    """Exposes a division by zero, or a run without end, in place of one line that names the flag."""
    with pytest.raises(ValueError, match=message):
        block_schedule(num_blocks=3, **settings)
