"""--fp8-recipe tensorwise: linear products in FP8, without Transformer Engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import decoders, resumed_runs, worlds
from support.dist import World

from megatron.bcd.model import fp8

FP8 = {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "tensorwise"}
CUTS: dict[str, dict[str, Any]] = {
    "tensor": {"world_size": 2, "tensor_model_parallel_size": 2},
    "sequence": {"world_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"world_size": 2, "pipeline_model_parallel_size": 2, "bcd_layout": "submodel"},
}


def relative(value: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((value.float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("name", "most"), [("e4m3", 0.05), ("hybrid", 0.08)])
def test_a_product_and_its_gradients(name: str, most: float) -> None:
    """Output and both gradients are near those in fp32, and not equal to those in bf16. Zeros stay zero, and infinite
    inputs give NaN."""
    torch.manual_seed(1)
    x, weight, grad = (torch.randn(size, dtype=torch.bfloat16) for size in ((4, 8, 64), (48, 64), (4, 8, 48)))
    x.requires_grad_(), weight.requires_grad_()
    output = fp8._product(fp8.Weights(fp8._GRADIENTS[name]), "", x, weight)
    output.backward(grad)
    (x32, weight32, grad32), (x_grad, weight_grad) = (
        (each.detach().float() for each in (x, weight, grad)),
        (x.grad, weight.grad),
    )
    wanted = (x32 @ weight32.t(), grad32 @ weight32, grad32.flatten(0, 1).t() @ x32.flatten(0, 1))
    for value, exact in zip((output.detach(), x_grad, weight_grad), wanted, strict=True):
        assert value is not None and 0.005 < relative(value, exact) < most
    some = fp8._product(fp8.Weights(fp8._GRADIENTS[name]), "", x[:, :3], weight)  # 12 tokens of an expert
    assert some.shape == (4, 3, 48) and relative(some.detach(), wanted[0][:, :3]) < most
    fp8._product(fp8.Weights(), "", x[:0], weight).sum().backward()
    assert weight.grad is weight_grad and torch.equal(weight.grad, weight_grad)
    zeros = torch.zeros(16, 64, dtype=torch.bfloat16)
    assert not fp8._product(fp8.Weights(), "", zeros, weight).any()
    zeros[0, 0] = torch.inf
    assert fp8._product(fp8.Weights(), "", zeros, weight).isnan().all()


def losses(config: Any) -> tuple[list[float], int]:
    """Return the losses of a run, and the number of FP8 products."""
    with mock.patch.object(fp8, "scaled_mm", side_effect=fp8.scaled_mm) as product, worlds.started(config) as run:
        run.train()
        return [step["loss"] for step in run.results], product.call_count


@pytest.mark.parametrize("cut", CUTS)
def test_losses(world2: World, text_data: str, cut: str) -> None:
    """Losses are those of bf16 within 2 %, and not the same, on slices and stages."""
    flags = {"data_path": text_data, "train_iters": 3, "bcd_steps_per_block": 1, "hidden_size": 64, "eval_iters": 0}
    (wide, none), *_ = reversed(world2.run(losses, worlds.run_config(bf16=True, **flags | CUTS[cut])))
    (narrow, number), *_ = reversed(world2.run(losses, worlds.run_config(**flags | CUTS[cut] | FP8)))
    assert none == 0 < number and narrow != wide
    assert narrow == pytest.approx(wide, rel=0.02)


def rounded_always(config: Any) -> Any:
    """Return the outcome of a run that scales and rounds weights at each product."""
    with mock.patch.object(fp8.Weights, "_once", lambda self, kind, name, compute: compute()):
        return resumed_runs.one_part(config)


def counted(config: Any, root: str) -> tuple[Any, int, int, list[str]]:
    """Return the outcome of a run, how often it looks for a weight and computes it, and differences of a resumed
    run."""
    asked = mock.Mock()
    once = fp8.Weights._once

    def count(self: fp8.Weights, kind: str, name: str, compute: Any) -> torch.Tensor:
        asked(False)
        return once(self, kind, name, lambda: (asked(True), compute())[1])

    with mock.patch.object(fp8.Weights, "_once", count):
        outcome = resumed_runs.one_part(config)
    computed = asked.mock_calls.count(mock.call(True))
    differences = resumed_runs.stopped_and_resumed(config, [3], root)
    return outcome, len(asked.mock_calls) - computed, computed, differences


WEIGHTS: dict[str, dict[str, Any]] = {
    "blocks": {"bcd_preset": "pretrain", "bcd_num_blocks": 2},
    "chunks": {"bcd_preset": "pretrain", "bcd_num_blocks": 2, "bcd_schedule": "breadth-first", "bcd_layers_on": "host"},
    "experts": {"bcd_preset": "finetune", **worlds.EXPERTS, "moe_ffn_hidden_size": 32, "sequence_parallel": False},
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_are_rounded_once(world1: World, text_data: str, tmp_path: Path, case: str) -> None:
    """Training equals that with weights rounded at each product bit for bit: over updates, switches, loaded layers,
    evaluations, and a resume. With 4 microbatches, far fewer weights are computed than used."""
    flags = FP8 | {"data_path": text_data, "train_iters": 5, "bcd_steps_per_block": 2, "eval_interval": 2, "lr": 1e-2}
    flags |= {"eval_iters": 2, "micro_batch_size": 2, "global_batch_size": 8, "hidden_size": 64, "clip_grad": 0.0}
    if case == "experts":
        del flags["bcd_steps_per_block"]
    config = worlds.run_config(**flags | WEIGHTS[case])
    [(outcome, used, computed, resumed)] = world1.run(counted, config, str(tmp_path))
    [always] = world1.run(rounded_always, config)
    assert resumed_runs.differences(always, [outcome]) == [] and resumed == []
    assert computed < used * (0.45 if case == "chunks" else 0.75)


@pytest.mark.parametrize("preset", ["pretrain", "finetune"])
def test_layers_on_the_host(world1: World, text_data: str, tmp_path: Path, preset: str) -> None:
    """Training with layers in host memory equals that on the device bit for bit."""
    flags = FP8 | {"data_path": text_data, "train_iters": 4, "bcd_preset": preset, "clip_grad": 0.0, "eval_iters": 0}
    flags |= {"bcd_steps_per_block": 2} if preset == "pretrain" else {"bcd_inactive_update": "factored"}
    flags |= {"bcd_schedule": "breadth-first"}
    configs = [worlds.run_config(**flags, bcd_layers_on=place) for place in ("device", "host")]
    [device], [host] = (world1.run(resumed_runs.one_part, config) for config in configs)
    assert resumed_runs.differences(device, [host]) == []


def test_transformers_layers(world1: World, text_data: str, tmp_path: Path) -> None:
    """Layers of transformers train with losses near those in bf16."""
    model = decoders.write_model("llama", tmp_path / "model")
    flags = {"load_hf": model, "data_path": text_data, "tokenizer_type": "ByteLevelTokenizer", "seq_length": 24}
    flags |= {"transformer_impl": "transformers", "micro_batch_size": 2, "global_batch_size": 4, "train_iters": 3}
    flags |= {"lr": 1e-3, "eval_iters": 0, "log_interval": 1, "bcd_preset": "finetune", "num_workers": 0}
    [(wide, none)], [(narrow, number)] = (
        world1.run(losses, worlds.config_of(**flags | precision)) for precision in ({"bf16": True}, FP8)
    )
    assert none == 0 < number and narrow != wide and narrow == pytest.approx(wide, rel=0.02)
