"""studies/fine_tuning.py: its figures, from made-up curves. e2e/test_fine_tuning_study.py runs it."""

from __future__ import annotations

import pytest
from fine_tuning import Row, Trained, build_row


def run(*losses: float, seed: int = 1, step_ms: float = 10.0, state: int = 2**20) -> Trained:
    """Return a run that is evaluated every 10 steps."""
    curve = tuple((10 * (i + 1), loss) for i, loss in enumerate(losses))
    return Trained(seed=seed, curve=curve, step_ms=step_ms, state_bytes=state, peak_bytes=5, test=losses[-1])


def row(*runs: Trained, full: Trained | None = None) -> Row:
    known = {} if full is None else {full.seed: full}
    return build_row(runs, known, tokens=100, method="m", label="M", lr=1e-3, rates=((1e-3, 2.0), (1e-2, None)))


def test_cost_is_time_to_the_best_of_full_training() -> None:
    """The cost is the time to the best loss of full training with the same seed, or none if it is not reached."""
    full = run(3.0, 2.0, 2.5)
    assert full.best == (20, 2.0)
    assert row(full, full=full).cost == 1
    result = row(run(2.5, 1.5, 1.5, step_ms=6.0), full=full)
    assert result.cost == pytest.approx(15 * 6 / (20 * 10)) and result.to_full == pytest.approx(-0.25)
    assert row(run(3.0, 2.1, 2.01), full=full).cost is None
    two = row(run(2.5, 1.5), run(2.5, 2.2, seed=2), full=full)
    assert two.num_reached == 1 and two.seeds == (1, 2), "the second seed has no full training beside it"


def test_equal_time() -> None:
    """The loss at equal time is interpolated at the end of full training, or is the last of a run that ended."""
    full = run(3.0, 2.0, step_ms=10.0)
    assert row(run(3.0, 2.0, 1.0, step_ms=10.0), full=full).at_full_time == 2.0
    assert row(run(3.0, 2.0, step_ms=13.0), full=full).at_full_time == pytest.approx(3 - (200 / 13 - 10) / 10)
    assert row(run(3.0, 2.0, step_ms=5.0), full=full).at_full_time == 2.0, "it had ended"
