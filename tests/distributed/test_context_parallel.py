"""Context parallelism: ranks that share every sequence take the steps of one rank that has it alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank
from support import resumed_runs, worlds
from support.dist import World

from megatron.bcd.model.attention import whole_sequence

Flags = Callable[..., dict[str, Any]]
CONTEXT = {"context_parallel_size": 2}
PIPELINE = {"pipeline_model_parallel_size": 2}
TENSOR = {"tensor_model_parallel_size": 2}
LLAMA = {"form": "llama", "group_query_attention": True, "num_query_groups": 2, "num_layers": 6}
FP32 = {"bcd_resting_grad_dtype": "fp32", "muon_grad_dtype": "fp32", "muon_momentum_dtype": "fp32"}
PRETRAIN = {"bcd_preset": "pretrain"} | FP32  # else gradients are rounded to 8 bits, in another order
MASKS = {"reset_attention_mask": True, "reset_position_ids": True}
TOKENS = {"eod_mask_loss": True, "calculate_per_token_loss": True}
STEPS = {"bcd_num_blocks": 3, "bcd_steps_per_block": 2, "train_iters": 6, "eval_iters": 1, "eval_interval": 3}
TOLERANCE = 2e-5


def run(world: World, flags: dict[str, Any], **kwargs: Any) -> list[dict[str, Any]]:
    """Two steps per block, one cycle, with evaluation."""
    return world.run(worlds.train_run, worlds.run_config(world_size=world.size, **STEPS | flags), **kwargs)


def assert_same_run(ranks: list[dict[str, Any]], reference: dict[str, Any], tolerance: float = TOLERANCE) -> None:
    assert set(reference["blocks"]) == {0, 1, 2}
    for rank in ranks:
        assert rank["blocks"] == reference["blocks"]
        assert rank["losses"] == pytest.approx(reference["losses"], rel=tolerance)
        assert rank["grad_norms"] == pytest.approx(reference["grad_norms"], rel=50 * tolerance)
        evaluations = [loss for *_, loss in reference["evaluations"]]
        assert [loss for *_, loss in rank["evaluations"]] == pytest.approx(evaluations, rel=tolerance)


def part_and_whole(config: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A sequence, what became of it, and its gradient on this rank."""
    with worlds.parallel(config):
        sequence = torch.arange(16.0).view(8, 2)
        part = get_batch_on_this_cp_rank({"sequence": sequence.t().contiguous()})["sequence"].t()
        part = part.clone().requires_grad_()
        group = parallel_state.get_context_parallel_group()
        whole = whole_sequence(part, group)
        (whole * sequence * (1 + group.rank())).sum().backward()
        assert part.grad is not None
        return sequence, whole.detach(), part.grad / part.detach().clamp(min=1e-9)


@pytest.mark.parametrize("size", [2, 4])
def test_sequences_are_put_together_in_order(world2: World, world4: World, size: int) -> None:
    """Chunks in another order than Megatron Core cuts them, or gradients of one rank only."""
    config = worlds.run_config(world_size=size, context_parallel_size=size, mock_data=True, split=None)
    for sequence, whole, factor in {2: world2, 4: world4}[size].run(part_and_whole, config):
        assert torch.equal(whole, sequence)
        assert factor[factor > 0].unique().tolist() == [size * (size + 1) / 2], "1 + 2 + ... of all ranks"


CASES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama-pretrain": LLAMA | PRETRAIN,
    "masks": LLAMA | MASKS,
    "tokens": TOKENS,
}
LONG_CASES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gpt-pretrain": PRETRAIN,
    "gpt-masks": MASKS,
    "rests": {"bcd_resting_update": "normalized"},
    "kept": {"bcd_optimizer_state": "host", "bcd_always_active": "norms,embedding,head", "train_iters": 12},
    "whole": {"no_use_distributed_optimizer": True},
    "sgd": {"optimizer": "sgd", "sgd_momentum": 0.9, "lr": 0.1},
    "recompute": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "selective": {"recompute_granularity": "selective"},
    "overlap": {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 5000},
}


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.long) for case in LONG_CASES)])
def test_two_ranks(world1: World, world2: World, initial_weights: Flags, case: str) -> None:
    """A query that misses keys, a position of another rank, a gradient or a loss of half of the tokens."""
    flags = initial_weights(**(CASES | LONG_CASES)[case])
    assert_same_run(run(world2, flags | CONTEXT), run(world1, flags)[0])


@pytest.fixture(scope="module")
def llama_pretrain(world1: World, initial_weights: Flags) -> dict[str, Any]:
    return run(world1, initial_weights(**LLAMA | PRETRAIN), blocks_of_stages=2)[0]


CUTS = {"pipeline": PIPELINE, "data": {}, "tensor": TENSOR, "four": {"context_parallel_size": 4}}


@pytest.mark.parametrize(
    "cut", [*list(CUTS)[:2], *(pytest.param(cut, marks=pytest.mark.long) for cut in list(CUTS)[2:])]
)
def test_four_ranks(world4: World, initial_weights: Flags, llama_pretrain: dict[str, Any], cut: str) -> None:
    """A message of a whole sequence between stages; an owner of a matrix that counts data-parallel ranks only."""
    flags = initial_weights(**LLAMA | PRETRAIN) | CONTEXT | CUTS[cut]
    assert_same_run(run(world4, flags), llama_pretrain)


def test_resumed_equals_uninterrupted(world2: World, text_data: str, tmp_path: Path) -> None:
    """State of a shard that is saved by several ranks or by none; random generators of another rank."""
    flags = {"data_path": text_data, "bf16": True, "bcd_steps_per_block": 3, "train_iters": 8} | CONTEXT | PRETRAIN
    flags |= {"hidden_dropout": 0.1, "attention_dropout": 0.1, "bcd_optimizer_state": "host"}
    config = worlds.run_config(world_size=2, **flags)
    assert world2.run(resumed_runs.stopped_and_resumed, config, (4,), str(tmp_path)) == [[], []]
