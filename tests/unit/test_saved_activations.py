"""Saved activations, against small models whose saved tensors are counted by hand."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.bcd.runtime.activation_meter import ActivationMeter

ROWS, INPUTS, HIDDEN, OUTPUTS = 5, 4, 8, 3
INPUT_BYTES, HIDDEN_BYTES = ROWS * INPUTS * 4, ROWS * HIDDEN * 4  # fp32
ONE = INPUT_BYTES + HIDDEN_BYTES
"""The first layer saves its input; the ReLU saves its output and the second layer its input, which are one tensor."""


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUTPUTS))


@pytest.fixture
def meter() -> ActivationMeter:
    return ActivationMeter()


def test_gradients_are_the_same(model: nn.Sequential, meter: ActivationMeter) -> None:
    """A hook that hands another tensor back than it was given."""
    inputs = torch.arange(ROWS * INPUTS, dtype=torch.float32).view(ROWS, INPUTS)
    expected = torch.autograd.grad(model(inputs).square().sum(), list(model.parameters()))
    with meter.measuring(model.parameters()):
        found = torch.autograd.grad(model(inputs).square().sum(), list(model.parameters()))
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


def test_a_frozen_prefix_saves_nothing(model: nn.Sequential, meter: ActivationMeter) -> None:
    """A count of the forward pass's tensors, where autograd keeps none."""
    model[0].requires_grad_(False)
    with meter.measuring(model.parameters()):
        output = model(torch.ones(ROWS, INPUTS))
    assert meter.peak_bytes == HIDDEN_BYTES  # the last layer's input, for its weight's gradient
    del output
    with meter.measuring(model.parameters()), torch.no_grad():
        model(torch.ones(ROWS, INPUTS))
    assert meter.peak_bytes == 0


def test_views_share_a_storage(meter: ActivationMeter) -> None:
    """Views counted by their own size: a slice keeps its whole storage alive, two slices keep it once."""
    whole = torch.ones(ROWS, INPUTS)
    factor = torch.ones(INPUTS, requires_grad=True)
    with meter.measuring([factor]):
        outputs = whole[0] * factor, whole[1] * factor
    assert meter.peak_bytes == INPUT_BYTES
    del outputs


def test_the_peak_is_that_of_graphs_that_are_alive_together(model: nn.Sequential, meter: ActivationMeter) -> None:
    """Weights that are counted, a peak that adds up over microbatches, or that the next measurement inherits."""
    weights = list(model.parameters())
    with meter.measuring(weights):
        for _ in range(3):
            model(torch.ones(ROWS, INPUTS)).sum().backward()
    assert meter.peak_bytes == ONE
    with meter.measuring(weights):
        outputs = [model(torch.ones(ROWS, INPUTS)) for _ in range(2)]
        outputs[0].sum().backward()
    assert meter.peak_bytes == 2 * ONE
    with meter.measuring(weights):  # what is alive still counts from the start
        model(torch.ones(ROWS, INPUTS)).sum().backward()
    assert meter.peak_bytes == 2 * ONE
    del outputs
    with meter.measuring(weights):
        pass
    assert meter.peak_bytes == 0


def test_recomputed_activations_count_while_they_live(model: nn.Sequential, meter: ActivationMeter) -> None:
    """A peak without what the backward pass builds again."""
    inputs = torch.ones(ROWS, INPUTS, requires_grad=True)
    with meter.measuring(model.parameters()):
        output = checkpoint(model, inputs, use_reentrant=True)
        assert meter.peak_bytes == INPUT_BYTES
        output.sum().backward()
        assert meter.peak_bytes == ONE  # the recomputed graph: its input is the one that was kept
    del output
    gc.collect()
    with meter.measuring(()):
        pass
    assert meter.peak_bytes == 0


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
