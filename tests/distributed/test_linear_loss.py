"""--cross-entropy-fusion-impl linear computes Megatron Core's loss and gradients, without the logits."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from megatron.core.num_microbatches_calculator import get_num_microbatches
from support import fine_tuning, worlds
from support.dist import World
from support.planned import LINEAR

from megatron.bcd.config import RunConfig
from megatron.bcd.model import linear_loss
from megatron.bcd.model.builder import unwrap_model
from megatron.bcd.optim.step import Step
from megatron.bcd.planner import run_state

LLAMA = {"form": "llama", "max_position_embeddings": None, "make_vocab_size_divisible_by": 132}
PIPELINE = {"world_size": 2, "pipeline_model_parallel_size": 2}
TENSOR = {"world_size": 2, "tensor_model_parallel_size": 2}
CASES: dict[str, dict[str, Any]] = {
    "gpt_untied_frozen": {"untie_embeddings_and_output_weights": True, "bcd_frozen": "head"},
    "gpt_pipeline2_interleaved": PIPELINE | {"bcd_layout": "interleaved", "bcd_num_blocks": 3},
    "llama_sequence_parallel": LLAMA | TENSOR | {"sequence_parallel": True, "normalization": "LayerNorm"},
    "llama_context2": LLAMA | {"world_size": 2, "context_parallel_size": 2},
    "llama_per_token_data2": LLAMA | {"world_size": 2, "calculate_per_token_loss": True},
}


def run_of(config: RunConfig, *, chunk: int | None) -> dict[str, Any]:
    """Return the losses of a step and of an evaluation, and every block's gradients, computing `chunk` tokens at a
    time."""
    with mock.patch.object(linear_loss, "LOSS_CHUNK", chunk or 1), worlds.started(config) as run:
        run.active.dispose()
        losses, gradients = [], []
        for block, is_training in itertools.product(range(run.partition.num_blocks), (True, False)):
            run.active.build(block)
            run.active.zero_grad()
            batches = worlds.first_batches(run)
            reported = run.forward_backward(batches, get_num_microbatches(), Step(run.active) if is_training else None)
            losses += [each["lm loss"].tolist() for each in reported]
            for name, parameter in unwrap_model(run.model).named_parameters():
                if is_training and parameter.requires_grad:
                    gradients.append((f"{block} {name}", parameter.main_grad.float().clone()))
            run.active.dispose()
        return {"losses": losses, "gradients": gradients}


def assert_alike(
    ranks: list[dict[str, Any]], stock: list[dict[str, Any]], *, of_loss: float, of_gradient: float
) -> None:
    """Compare by relative differences; for a gradient, relative to its norm."""
    for mine, theirs in zip(ranks, stock, strict=True):
        assert mine["losses"] == [pytest.approx(loss, rel=of_loss) for loss in theirs["losses"]]
        for (name, gradient), (_, expected) in zip(mine["gradients"], theirs["gradients"], strict=True):
            assert (gradient - expected).norm() <= of_gradient * expected.norm() + 1e-9, name
    assert any(rank["losses"] for rank in stock) and any(rank["gradients"] for rank in stock)


@pytest.mark.parametrize("name", CASES)
def test_is_megatrons_loss(world1: World, world2: World, text_data: str, name: str) -> None:
    """Losses and gradients equal Megatron Core's, in training and in evaluation, under every layout."""
    flags = {"data_path": text_data} | CASES[name]
    world = world2 if "world_size" in flags else world1
    stock = world.run(run_of, worlds.run_config(**flags), chunk=None)
    linear = world.run(run_of, worlds.run_config(**flags, **LINEAR), chunk=24)
    assert_alike(linear, stock, of_loss=1e-6, of_gradient=2e-5)


def test_in_16_bits(world1: World, text_data: str) -> None:
    """In bf16, losses equal Megatron Core's within 1e-5 and gradients within 2 %."""
    flags = {"data_path": text_data, "bf16": True}
    [stock] = world1.run(run_of, worlds.run_config(**flags), chunk=None)
    [linear] = world1.run(run_of, worlds.run_config(**flags, **LINEAR), chunk=24)
    assert_alike([linear], [stock], of_loss=1e-5, of_gradient=2e-2)


def resolved_run(config: RunConfig, *, most: int) -> dict[str, Any]:
    """Return the losses of a run that stores at most `most` bytes of logits, and its notes about them."""
    with mock.patch.object(run_state, "_MOST_LOGITS", most), worlds.started(config) as run:
        run.train()
        return {
            "losses": worlds.outcome(run)["losses"],
            "notes": [note for note in run.recorder.summary.notes if "logits" in note],
        }


def test_large_logits_are_not_stored(world1: World, text_data: str) -> None:
    """Without a flag the linear loss is used where logits take more than a limit, and the run says so."""
    flags = {"data_path": text_data, "train_iters": 2}
    plain, linear, off = (
        worlds.run_config(**flags),
        worlds.run_config(**flags, **LINEAR),
        {"no_cross_entropy_loss_fusion": True},
    )
    num_bytes = 2 * 32 * worlds.PADDED_VOCABULARY * 4
    expected = world1.run(resolved_run, linear, most=num_bytes)
    assert world1.run(resolved_run, plain, most=num_bytes - 1) == expected
    small = world1.run(resolved_run, plain, most=num_bytes)
    assert world1.run(resolved_run, worlds.run_config(**flags, **off), most=0) == small != expected
    assert small[0]["notes"] == [] and "--no-cross-entropy-loss-fusion" in expected[0]["notes"][0]


def test_masked_tokens(world1: World, tmp_path: Path) -> None:
    """Losses and gradients equal Megatron Core's where tokens of a prompt are masked."""
    data = fine_tuning.write_records(tmp_path / "data.jsonl", fine_tuning.questions(60))
    stock = world1.run(run_of, fine_tuning.config_of(data), chunk=None)
    assert_alike(
        world1.run(run_of, fine_tuning.config_of(data, **LINEAR), chunk=24), stock, of_loss=1e-6, of_gradient=2e-5
    )
