"""studies/local_steps.py: the outer step of the simulation."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from local_steps import BITS, Outer


def an_outer(num_workers: int = 2, **changes: object) -> tuple[Outer, list[torch.nn.Linear]]:
    torch.manual_seed(0)
    models = [torch.nn.Linear(20, 7) for _ in range(num_workers)]
    for model in models:
        model.load_state_dict(models[0].state_dict())
    common = {name: weight.detach().clone() for name, weight in models[0].named_parameters()}
    args = SimpleNamespace(**{"outer_lr": 0.7, "outer_momentum": 0.9, "compression": "fp32"} | changes)
    return Outer(common, [SimpleNamespace(model=model) for model in models], args), models


def test_the_outer_step_is_sgd_with_nesterov() -> None:
    """The outer step is SGD with Nesterov momentum on the workers' mean; what no worker has changed stays and is not
    sent."""
    outer, models = an_outer()
    weight = torch.nn.Parameter(models[0].weight.detach().clone())
    bias = models[0].bias.detach().clone()
    reference = torch.optim.SGD([weight], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(3):
        for model in models:
            model.weight.data += torch.randn_like(model.weight)
        weight.grad = weight.detach() - (models[0].weight.data + models[1].weight.data) / 2
        reference.step()
        outer.apply(outer.exchange(["weight", "bias"]))
        for model in models:
            torch.testing.assert_close(model.weight.data, weight.data)
            assert model.bias.data.equal(bias)
    assert outer.bytes_sent == 3 * weight.numel() * BITS["fp32"] / 8
