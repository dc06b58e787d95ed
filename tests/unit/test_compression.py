"""outer/compression.py: changes in 4 bits."""

from __future__ import annotations

import pytest
import torch

from megatron.bcd.outer.compression import COMPRESSIONS

CODE = COMPRESSIONS["4bit"]


@pytest.mark.parametrize("number", [1, 127, 128, 1000])
@pytest.mark.parametrize("groups", [2, 3])
def test_4_bits_are_within_half_a_step(number: int, groups: int) -> None:
    """Values in 4 bits arrive in their places within half a step, and encode to the same codes again."""
    torch.manual_seed(number)
    values = torch.randn(number) * 10.0 ** torch.randint(-20, 20, (number,))
    rows = CODE.rows(values, groups)
    sent = CODE.encode(rows)
    assert sent.dtype == torch.uint8 and sent.shape == (groups, -(-number // (128 * groups)), 66)
    arrived = CODE.decode(sent)
    steps = rows.abs().amax(-1, keepdim=True) / 7
    assert ((arrived - rows).abs() <= 0.503 * steps).all()  # the scale has 8 bits
    assert CODE.encode(arrived).equal(sent)
    assert not arrived.flatten()[number:].any()


def test_rows_of_zeros_arrive_as_zeros() -> None:
    """Rows of zeros arrive as positive zeros."""
    arrived = CODE.decode(CODE.encode(torch.zeros(2, 3, 128)))
    assert not arrived.any() and not arrived.signbit().any()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_does_not_become_finite(bad: float) -> None:
    """A row with a value that is not finite arrives as NaN, and other rows stay finite."""
    rows = torch.ones(2, 128)
    rows[1, 5] = bad
    arrived = CODE.decode(CODE.encode(rows))
    assert arrived[0].isfinite().all() and arrived[1].isnan().all()
