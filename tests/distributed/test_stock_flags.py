"""Single flags of stock Megatron-LM against its curves: with one block the run equals stock's.

`tests/data/stock_flags.json` has what stock's pretrain_gpt.py (core_v0.16.1) printed on a CPU with each set of flags,
on the dataset of `data_path`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from support import worlds
from support.dist import World

from megatron.bcd.config import RunConfig

STOCK: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "stock_flags.json").read_text("utf-8"))
PLATFORM = {"num_workers": 0, "bcd_num_blocks": 1, "log_interval": 1}


SHA256 = "7f16925065d6d2fed70699d73d5ed1bff5d899cf07ccacb6e3a856b811ddf7cb"


@pytest.fixture(scope="module")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of 200 random walks of 20 to 199 of 250 tokens, each ended by token 256, the same everywhere."""
    prefix = tmp_path_factory.mktemp("walks") / "walks"
    draw = numpy.random.default_rng(5)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for _ in range(200):
        length = int(draw.integers(20, 200))
        tokens = (draw.integers(0, 250) + numpy.cumsum(draw.integers(0, 4, length))) % 250
        tokens[-1] = 256
        builder.add_document(torch.from_numpy(tokens), [length])
    builder.finalize(f"{prefix}.idx")
    assert hashlib.sha256(Path(f"{prefix}.bin").read_bytes()).hexdigest() == SHA256, "NumPy draws other numbers"
    return str(prefix)


def flags_of(run: str, data_path: str) -> dict[str, Any]:
    return STOCK["flags"] | STOCK["runs"][run]["flags"] | PLATFORM | {"data_path": data_path}


IN_OTHERS = ("tensor2", "data2", "layout", "rope_scaled", "per_token_loss_data2")
"""Runs whose faults other tests notice."""


@pytest.mark.parametrize("run", [run for run in STOCK["runs"] if run not in IN_OTHERS])
def test_curve(world1: World, world2: World, data_path: str, run: str) -> None:
    """With each set of flags the run has stock's losses, norms, learning rates and evaluations, within rounding."""
    stock = STOCK["runs"][run]
    # 16-bit roundings of sums in another order grow from step to step
    looser = 20 if run == "bf16" else 1
    world = (world1, world2)[stock["world_size"] - 1]
    config = worlds.config_of(world_size=world.size, **flags_of(run, data_path))
    for outcome in world.run(worlds.train_run, config):
        for ours, theirs in zip(outcome["metrics"], stock["iterations"], strict=True):
            place = f"{run}, iteration {ours['iteration']}"
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4 * looser), place
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-3 * looser, abs=6e-4), place
            assert ours["params_norm"] == pytest.approx(theirs["params_norm"], abs=2e-3 * looser), place
            # sums in another order are exactly 0 elsewhere: a few by chance, tens in bf16, thousands with squared ReLU
            assert ours["num_zeros"] == pytest.approx(theirs["num_zeros"], rel=0.05, abs=20), place
            assert ours["learning_rate"] == pytest.approx(theirs["learning_rate"], rel=1e-6), place
            assert ours["router_losses"] == pytest.approx(theirs.get("router_losses", ours["router_losses"])), place
        evaluations = {str(iteration): loss for iteration, _, loss in outcome["evaluations"]}
        assert evaluations == pytest.approx(stock["validation_loss"], rel=1e-4 * looser)


def scaling_of_gradients(config: RunConfig) -> set[float]:
    """Return the factor that multiplies gradients before they are reduced."""
    with worlds.started(config) as run:
        assert run.active.wrapped is not None
        return {buffer.gradient_scaling_factor for buffer in run.active.wrapped.buffers}


def test_average_in_collective(world2: World, data_path: str) -> None:
    """--ddp-average-in-collective leaves gradients unscaled before they are reduced. Its curve is that of the base."""
    for run, factor in (("data2", 0.5), ("data2_average", 1.0)):
        config = worlds.config_of(world_size=2, **flags_of(run, data_path))
        assert world2.run(scaling_of_gradients, config) == [{factor}] * 2
