"""Saved activations: what shares memory counts once, and a GPU's allocator is asked.

Counts of whole runs, beside the planner's formulas: distributed/test_planned_bytes.py.
"""

from __future__ import annotations

import torch

from megatron.bcd.runtime.activation_meter import ActivationMeter


def test_views_share_a_storage() -> None:
    """Views counted by their own size: a slice keeps its whole storage alive, two slices keep it once."""
    meter, whole, factor = ActivationMeter(), torch.ones(5, 4), torch.ones(4, requires_grad=True)
    with meter.measuring([factor]):
        outputs = whole[0] * factor, whole[1] * factor
    assert meter.peak_bytes == whole.nbytes
    del outputs


def test_an_allocator_is_asked_after_each_forward_pass() -> None:
    """A GPU's count that includes what was there before, or what a stage without a graph allocates."""
    allocated = 100
    meter = ActivationMeter(lambda: allocated)
    meter.after_forward()  # outside: not counted
    with meter.measuring([]):
        allocated = 130
        meter.after_forward()
        allocated = 190
        with torch.no_grad():
            meter.after_forward()
        allocated = 110
        meter.after_forward()
    assert meter.peak_bytes == 30
