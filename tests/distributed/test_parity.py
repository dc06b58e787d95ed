"""Invariant 2: from the same initial weights every parallel layout takes the same steps, for each kind of training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core import parallel_state
from support import worlds
from support.dist import World

from megatron.bcd.model.attention import whole_sequence
from megatron.bcd.runtime.compat.megatron_core import context_part

Flags = Callable[..., dict[str, Any]]
PIPELINE, TENSOR, CONTEXT = ({f"{name}_parallel_size": 2} for name in ("pipeline_model", "tensor_model", "context"))
CUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor2": (2, TENSOR),
    "pipeline2": (2, PIPELINE),
    "context2": (2, CONTEXT),
    "context2_pipeline2": (4, CONTEXT | PIPELINE),
    "pipeline2_data2": (4, PIPELINE),
    "expert2_data2": (2, worlds.EXPERT2),
    "expert2_tensor2_etp1": (2, worlds.EXPERT2 | TENSOR | {"expert_tensor_parallel_size": 1}),
    "expert2_pipeline2_data2": (4, worlds.EXPERT2 | PIPELINE),
    "expert2_context2": (2, worlds.EXPERT2 | CONTEXT),
}
UNTIED = {"untie_embeddings_and_output_weights": True}
LLAMA = {"form": "llama", "group_query_attention": True, "num_query_groups": 2}
MASKS = {"reset_attention_mask": True, "reset_position_ids": True}
# else gradients are rounded to 8 bits, in another order
PRETRAIN = {"bcd_preset": "pretrain", "bcd_inactive_grad_dtype": "fp32", "muon_grad_dtype": "fp32"}
PRETRAIN |= {"muon_momentum_dtype": "fp32"}
INACTIVE = {
    "bcd_layout": "strided",
    "bcd_inactive_update": "orthogonal",
    "bcd_inactive_grad_dtype": "fp32",
    "lr": 3e-3,
}
MUON = {"optimizer": "muon", "muon_extra_scale_factor": 0.2, "muon_use_nesterov": True, "lr": 3e-3}
FACTORED = INACTIVE | {"bcd_inactive_update": "factored"}
FACTORED_EMBEDDING = FACTORED | {"bcd_embedding_update": "factored"}
SAME_MICROBATCHES = {"global_batch_size": 8, "micro_batch_size": 2}
"""Auxiliary losses depend on the samples of a microbatch."""
ONE_SAMPLE = {"micro_batch_size": 1}
"""One rank sums the gradients of more microbatches than each of two data-parallel ranks."""
EQUAL_WEIGHTS = {"check_weight_hash_across_dp_replicas_interval": 1}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 5000}


class Case(NamedTuple):
    """The kind of training (flags of the network, and others), and the layouts."""

    network: dict[str, Any]
    flags: dict[str, Any]
    cuts: tuple[str, ...]
    tolerance: float = 2e-5
    """Tolerance of losses, because fp32 sums have another order; a wrong gradient shows in the first digits."""


CASES = {
    "spread": Case({}, {}, ("tensor2", "context2", "pipeline2_data2")),
    "submodel": Case({}, ONE_SAMPLE | {"bcd_layout": "submodel"}, ("pipeline2_data2",)),
    "pretrain": Case(LLAMA, PRETRAIN, ("context2_pipeline2",)),
    "masks": Case(LLAMA, MASKS, ("context2",)),
    "per_token": Case({}, {"eod_mask_loss": True, "calculate_per_token_loss": True}, ("context2",)),
    "moments_int8": Case({}, {"adam_moments_dtype": "int8"}, ("pipeline2",), 1e-4),
    "muon_int8": Case({}, MUON | {"muon_momentum_dtype": "int8"}, ("tensor2", "pipeline2_data2"), 1e-4),
    "factored_untied": Case(UNTIED, FACTORED_EMBEDDING | MUON, ("tensor2",)),
    "factored_tied": Case({}, FACTORED_EMBEDDING | OVERLAP | ONE_SAMPLE | {"bcd_num_blocks": 3}, ("pipeline2_data2",)),
    "experts": Case(worlds.EXPERTS, SAME_MICROBATCHES, ("expert2_pipeline2_data2",)),
    "experts_muon_divided": Case(
        worlds.EXPERTS | worlds.SHARED_EXPERT,
        MUON
        | INACTIVE
        | EQUAL_WEIGHTS
        | SAME_MICROBATCHES
        | {"moe_token_dispatcher_type": "alltoall", "log_params_norm": True, "muon_momentum_dtype": "int8"},
        ("expert2_data2",),
        2e-4,
    ),
    "experts_factored": Case(
        worlds.EXPERTS | worlds.SHARED_EXPERT,
        FACTORED
        | {"bcd_num_blocks": 0, "overlap_grad_reduce": True, "moe_token_dispatcher_type": "alltoall"}
        | {"moe_grouped_gemm": True},
        ("expert2_context2",),
    ),
    "expert_biases": Case(worlds.EXPERT_BIASES, FACTORED | {"sequence_parallel": True}, ("expert2_tensor2_etp1",)),
}


def config_of(initial_weights: Flags, case: Case, **more: Any) -> Any:
    """Return two steps per block for one cycle and the first block's next visit, with evaluations inside and at the
    end."""
    flags = initial_weights(bcd_num_blocks=2, **case.network) | case.flags
    num_blocks = max(flags["bcd_num_blocks"], 1) * (2 if flags.get("bcd_layout") == "submodel" else 1)
    steps = 2 * num_blocks + 2
    lengths = {"bcd_steps_per_block": 2, "train_iters": steps, "eval_iters": 1, "eval_interval": steps - 1}
    # With 1e-8, Adam makes whole steps of gradients that are mostly rounding, and norms may differ by 1 %.
    return worlds.run_config(**{"adam_eps": 1e-6} | flags | lengths | more)


@functools.cache
def one_rank(world1: World, initial_weights: Flags, name: str, stages: int | None) -> dict[str, Any]:
    """Return the run of one rank that trains the blocks of this many stages."""
    config = config_of(initial_weights, CASES[name])
    return world1.run(worlds.train_run, config, blocks_of_stages=stages)[0]


PAIRS = [(name, cut) for name, case in CASES.items() for cut in case.cuts]
PAIRS.sort(key=lambda pair: [*CUTS].index(pair[1]))  # groups of ranks are kept from case to case


@pytest.mark.parametrize(("name", "cut"), PAIRS)
def test_every_layout_takes_the_same_steps(
    world1: World, world2: World, world4: World, initial_weights: Flags, name: str, cut: str
) -> None:
    """Every layout has the losses, gradient norms and evaluations of one rank, within the tolerance of fp32 sums."""
    case, (num_ranks, layout) = CASES[name], CUTS[cut]
    has_own_blocks = "pipeline" in cut and case.flags.get("bcd_layout") != "strided"
    reference = one_rank(world1, initial_weights, name, 2 if has_own_blocks else None)
    assert len(set(reference["blocks"])) > 1 or case.flags.get("bcd_num_blocks") in (0, 1)
    config = config_of(initial_weights, case, world_size=num_ranks, **layout)
    for rank in {2: world2, 4: world4}[num_ranks].run(worlds.train_run, config):
        assert rank["blocks"] == reference["blocks"]
        assert rank["losses"] == pytest.approx(reference["losses"], rel=case.tolerance)
        assert rank["grad_norms"] == pytest.approx(reference["grad_norms"], rel=50 * case.tolerance)
        if "log_params_norm" in case.flags:
            norms = [step["params_norm"] for step in reference["metrics"]]
            assert [step["params_norm"] for step in rank["metrics"]] == pytest.approx(norms, rel=case.tolerance)
        evaluations = [loss for *_, loss in reference["evaluations"]]
        assert len(evaluations) == 2
        assert [loss for *_, loss in rank["evaluations"]] == pytest.approx(evaluations, rel=case.tolerance)


def part_and_whole(config: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a sequence, the assembled result, and its gradient on this rank."""
    with worlds.parallel(config):
        sequence = torch.arange(16.0).view(8, 2)
        part = context_part({"sequence": sequence.t().contiguous()})["sequence"].t()
        part = part.clone().requires_grad_()
        group = parallel_state.get_context_parallel_group()
        whole = whole_sequence(part, group)
        (whole * sequence * (1 + group.rank())).sum().backward()
        assert part.grad is not None
        return sequence, whole.detach(), part.grad / part.detach().clamp(min=1e-9)


@pytest.mark.parametrize("size", [2, 4])
def test_sequences_are_put_together_in_order(world2: World, world4: World, size: int) -> None:
    """The parts of a sequence are assembled in order, and the gradient of each is the sum over all ranks."""
    config = worlds.run_config(world_size=size, context_parallel_size=size, mock_data=True, split=None)
    for sequence, whole, factor in {2: world2, 4: world4}[size].run(part_and_whole, config):
        assert torch.equal(whole, sequence)
        assert factor[factor > 0].unique().tolist() == [size * (size + 1) / 2], "1 + 2 + ... of all ranks"
