"""--adam-moments-dtype and --muon-momentum-dtype: runs whose moments have fewer bits."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import resumed_runs, worlds
from support.dist import World

from megatron.bcd.config import RunConfig
from megatron.bcd.optim import low_bit_adam, low_bit_momentum
from megatron.bcd.optim.state import MOMENTUM


def small_run(text_data: str, dtype: str, **flags: Any) -> RunConfig:
    """Return 30 steps of a model that is wide enough to make padding negligible."""
    small = {"num_layers": 4, "hidden_size": 64, "train_iters": 30, "lr": 3e-3, "bcd_num_blocks": 2}
    small |= {"data_path": text_data, "adam_moments_dtype": dtype, "bcd_steps_per_block": 5}
    return worlds.run_config(**small | flags)


def trained(config: RunConfig) -> dict[str, Any]:
    """Return the losses, and the bytes of model state and offloaded state: counted, and as in the run summary."""
    with worlds.started(config) as run:
        run.train()
        last, summary = run.recorder.steps[-1], run.recorder.summary
        kinds = {
            str(tensor.dtype)
            for shard in worlds.block_shards(run.active.core).values()
            for tensor in shard.stored_moments().values()
        }
        return {
            "losses": [step["loss"] for step in run.results],
            "counted": list(last.model_state_bytes),
            "told": list(summary.model_state_bytes[run.active.block]),
            "optimizer": max(run.active.state_bytes()["optimizer_state_bytes"], 0),
            "active": sum(shard.end - shard.start for shard in worlds.block_shards(run.active.core).values()),
            "host": max(last.host_state_bytes),
            "kinds": kinds,
            "training": summary.training,
        }  # fmt: skip


KINDS = {"torch.int8", "torch.uint8", "torch.float32"}


def test_training_and_bytes(world1: World, text_data: str) -> None:
    """Low-bit moments train as fp32 moments within 0.5 %, and take the bytes of their dtype on the device, in host
    memory and in the run summary."""
    flags = {"bcd_optimizer_state": "host"}
    (exact,) = world1.run(trained, small_run(text_data, "fp32", **flags))
    (result,) = world1.run(trained, small_run(text_data, "int8", **flags))
    moments = 2 + 8 / 256
    assert result["losses"][0] == exact["losses"][0] and result["losses"] != exact["losses"]
    assert statistics.mean(result["losses"][-5:]) == pytest.approx(statistics.mean(exact["losses"][-5:]), rel=0.005)
    assert result["kinds"] == KINDS
    assert result["optimizer"] == pytest.approx(moments * result["active"], rel=0.01)
    assert result["counted"] == pytest.approx(result["told"], rel=0.01)
    assert result["host"] == pytest.approx(exact["host"] * moments / 8, rel=0.01)
    assert "adam with int8 moments" in result["training"]


def resumed_state(config: RunConfig, folder: str) -> dict[str, torch.Tensor]:
    """Return Muon's momenta, or Adam's second moments, in fp32 of a resumed run before its first step."""
    with worlds.started(resumed_runs.with_checkpoints(config, load=folder)) as run:
        if config.is_muon:
            states = [state for state in run.active.state() if MOMENTUM in state.tensors]
            return {state.name: state.tensors[MOMENTUM]() for state in states}
        shards = worlds.block_shards(run.active.core).items()
        return {name: shard.snapshot().read("exp_avg_sq", shard.weight) for name, shard in shards}


def rounded_moment(moment: torch.Tensor) -> torch.Tensor:
    return low_bit_adam.read(low_bit_adam.encode({"exp_avg_sq": moment}), "exp_avg_sq")


def rounded_momentum(momentum: torch.Tensor) -> torch.Tensor:
    return low_bit_momentum.decode(*low_bit_momentum.encode(momentum))


MUON = {"bcd_num_blocks": 1, "bcd_steps_per_block": None, "optimizer": "muon"}


@pytest.mark.parametrize(
    ("flags", "flag", "dtype", "rounding"),
    [
        ({"bcd_steps_per_block": 9}, "adam_moments_dtype", torch.float32, rounded_moment),
        (MUON, "muon_momentum_dtype", torch.bfloat16, rounded_momentum),
    ],
    ids=["adam", "muon"],
)
def test_a_resumed_run_may_store_moments_otherwise(
    world1: World,
    text_data: str,
    tmp_path: Path,
    flags: dict[str, Any],
    flag: str,
    dtype: torch.dtype,
    rounding: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """An 8-bit run resumes from fp32 moments or bf16 momenta in codes, and a run with those from codes as the numbers
    that they encode."""
    names = {torch.float32: "fp32", torch.bfloat16: "bf16"}
    exact, coarse = (worlds.run_config(data_path=text_data, **flags, **{flag: name}) for name in (names[dtype], "int8"))
    folders = {"exact": str(tmp_path / "exact"), "coarse": str(tmp_path / "coarse")}
    for config, folder in zip((exact, coarse), folders.values(), strict=True):
        world1.run(resumed_runs.one_part, resumed_runs.with_checkpoints(config, save=folder, exit_interval=3))
    of_exact, rounded, of_coarse, as_exact = (
        world1.run(resumed_state, config, folders[name])[0]
        for config, name in ((exact, "exact"), (coarse, "exact"), (coarse, "coarse"), (exact, "coarse"))
    )
    assert of_exact
    for name, moment in of_exact.items():
        assert torch.equal(rounded[name], rounding(moment)) and bool(moment.any())
        assert torch.equal(as_exact[name], of_coarse[name].to(dtype).float())


def test_codes_of_a_momentum() -> None:
    """A group of zeros stays zero, decoding and encoding again changes no bit, and an element is off by at most half a
    code of its group's largest; also with a last group that is not full."""
    torch.manual_seed(1)
    for shape in ((3, 16, 32), (2, 33, 17), (1, 5)):
        for scale in (1.0, 1e-20, 1e30):
            values = torch.randn(shape) * torch.exp(4 * torch.randn(*shape[:-1], 1)) * scale
            values[..., 0, : min(shape[-1], 3)] = 0.0
            codes, scales = low_bit_momentum.encode(values)
            decoded = low_bit_momentum.decode(codes, scales)
            assert scales.shape == (*shape[:-2], -(-shape[-2] * shape[-1] // low_bit_adam.BLOCK))
            again = low_bit_momentum.encode(decoded)
            assert torch.equal(again[0], codes) and torch.equal(again[1], scales)
            largest = scales.repeat_interleave(low_bit_adam.BLOCK, -1)[..., : shape[-2] * shape[-1]]
            assert bool(((decoded - values).abs().flatten(-2) <= 0.501 * largest).all())
    codes, scales = low_bit_momentum.encode(torch.full((1, 256), 1e-38))
    assert not codes.any() and not scales.any()
