"""The run summary's warning of a block that holds most of the model."""

from __future__ import annotations

import pytest

from megatron.bcd.training.reporting import warn_of_dominance


@pytest.mark.parametrize(
    ("shares", "of_tokens", "largest"),
    [
        ((0.94, 0.03, 0.03), 0.9, "block 0"),
        ((0.1, 0.1, 0.8), 0.1, "block 2"),
        ((1.0,), 0.4, None),
        ((0.45, 0.4, 0.15), 0.4, None),
    ],
)
def test_a_block_that_dominates(shares: tuple[float, ...], of_tokens: float, largest: str | None) -> None:
    """A model that block coordinate descent does nothing for, without a warning; or a warning in every run."""
    warnings = warn_of_dominance(shares, of_tokens)
    assert len(warnings) == (largest is not None) and all(str(largest) in line for line in warnings)
