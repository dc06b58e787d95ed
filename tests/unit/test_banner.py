"""The banner's warning of a block that holds most of the model."""

from __future__ import annotations

import pytest

from megatron.bcd.training.reporting import warn_of_dominance


@pytest.mark.parametrize(
    "shares, of_tokens, named",
    [
        ((0.94, 0.03, 0.03), 0.9, "block 0"),
        ((0.1, 0.1, 0.8), 0.1, "block 2"),
    ],
)
def test_a_block_that_dominates(shares: tuple[float, ...], of_tokens: float, named: str) -> None:
    """A model that block coordinate descent does nothing for, without a warning."""
    (line,) = warn_of_dominance(shares, of_tokens)
    assert named in line


@pytest.mark.parametrize("shares", [(1.0,), (0.5, 0.5), (0.45, 0.4, 0.15)])
def test_blocks_that_do_not(shares: tuple[float, ...]) -> None:
    """A warning in every run."""
    assert warn_of_dominance(shares, 0.4) == ()
