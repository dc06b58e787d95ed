"""Invariant 3: the active block's gradient is the true gradient of the loss, against a GPT-2 of plain PyTorch.

Shapes: B sequences, S tokens, N heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from support import worlds
from support.dist import World
from support.pairwise import thinned
from torch import Tensor
from torch.nn import functional

from megatron.bcd.blocks.partition import partition
from megatron.bcd.config import RunConfig
from megatron.bcd.model.builder import unwrap_model

Weights = dict[str, Tensor]
NUM_HEADS = 4
CUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "one_recomputed": (
        1,
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
    "one_per_token": (1, {"calculate_per_token_loss": True}),
    "data2": (2, {"no_use_distributed_optimizer": True}),  # it would keep a shard of the gradient only
    "tensor2": (2, {"tensor_model_parallel_size": 2}),
    "one_biases": (1, {"bcd_always_active": "biases"}),
    "tensor2_biases": (2, {"tensor_model_parallel_size": 2, "bcd_always_active": "biases"}),
    "pipeline2_spread": (2, {"pipeline_model_parallel_size": 2}),
    "pipeline2_stage": (2, {"pipeline_model_parallel_size": 2, "bcd_layout": "stage", "bcd_num_blocks": None}),
    "pipeline2_submodel": (2, {"pipeline_model_parallel_size": 2, "bcd_layout": "submodel"}),
    "pipeline2_recomputed": (
        2,
        {
            "pipeline_model_parallel_size": 2,
            "bcd_layout": "submodel",
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    ),
}


def layer_forward(x: Tensor, w: Callable[[str], Tensor]) -> Tensor:
    """One pre-norm GPT-2 layer on [B, S, H], with Megatron's rows of the QKV weight: per head its q, k and v."""
    batch, length, hidden = x.shape
    normed = functional.layer_norm(x, (hidden,), w("input_layernorm.weight"), w("input_layernorm.bias"))
    qkv = functional.linear(normed, w("self_attention.linear_qkv.weight"), w("self_attention.linear_qkv.bias"))
    query, key, value = qkv.view(batch, length, NUM_HEADS, 3, -1).permute(3, 0, 2, 1, 4)  # each [B, N, S, D]
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.size(-1))
    is_future = torch.ones(length, length, dtype=torch.bool).triu(1)
    probabilities = scores.masked_fill(is_future, -math.inf).softmax(-1)
    context = (probabilities @ value).permute(0, 2, 1, 3).reshape(batch, length, hidden)
    x = x + functional.linear(context, w("self_attention.linear_proj.weight"), w("self_attention.linear_proj.bias"))
    normed = functional.layer_norm(x, (hidden,), w("pre_mlp_layernorm.weight"), w("pre_mlp_layernorm.bias"))
    inner = functional.gelu(functional.linear(normed, w("mlp.linear_fc1.weight"), w("mlp.linear_fc1.bias")))
    return x + functional.linear(inner, w("mlp.linear_fc2.weight"), w("mlp.linear_fc2.bias"))


def mean_loss(weights: Weights, batch: dict[str, Tensor], num_layers: int) -> Tensor:
    """Mean cross-entropy over the tokens that count."""
    embedding = weights["embedding.word_embeddings.weight"]
    x = embedding[batch["tokens"]] + weights["embedding.position_embeddings.weight"][batch["position_ids"]]
    for layer in range(num_layers):
        x = layer_forward(x, lambda name, layer=layer: weights[f"decoder.layers.{layer}.{name}"])
    x = functional.layer_norm(
        x, x.shape[-1:], weights["decoder.final_layernorm.weight"], weights["decoder.final_layernorm.bias"]
    )
    logits = functional.linear(x, weights.get("output_layer.weight", embedding))
    losses = functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return (losses * batch["loss_mask"].flatten()).sum() / batch["loss_mask"].sum()


def reference_gradients(weights: Weights, batch: dict[str, Tensor], active: set[str], num_layers: int) -> Weights:
    """By name, in double precision, with only the active parameters requiring a gradient."""
    leaves = {name: weight.double().requires_grad_(name in active) for name, weight in weights.items()}
    names = sorted(active)
    loss = mean_loss(leaves, batch | {"loss_mask": batch["loss_mask"].double()}, num_layers)
    return dict(zip(names, torch.autograd.grad(loss, [leaves[name] for name in names]), strict=True))


def active_names(names: list[str], *, layers: tuple[int, ...], embedding: bool, norm: bool, head: bool) -> set[str]:
    """Names of a block that holds `layers`, and the embedding, the final norm and an untied head or not."""
    extras = [("embedding.", embedding), ("decoder.final_layernorm.", norm), ("output_layer.", head)]
    prefixes = [f"decoder.layers.{layer}." for layer in layers] + [prefix for prefix, is_held in extras if is_held]
    return {name for name in names if name.startswith(tuple(prefixes))}


def is_bias(name: str) -> bool:
    return name.endswith(".bias") and "layernorm" not in name


def gradients_of_all_blocks(config: RunConfig) -> list[dict[str, Any]]:
    """This rank's main gradients after one schedule run, by block: name over the whole model -> (gradient, split).

    `split` is the dimension that tensor-parallel ranks share, None where each holds all of it.
    """
    with worlds.started(config) as one:
        first_layer = one.partition.stage_layers(one.active.stage).start
        blocks = []
        one.active.dispose()
        for block in range(one.partition.num_blocks):
            one.active.build(block)
            one.active.zero_grad()
            batches = one.samples.look_ahead(phase=0, consumed_samples=0, position=0)
            one.forward_backward(batches, get_num_microbatches(), forward_only=False)
            gradients = {}
            for name, parameter in unwrap_model(one.model).named_parameters():
                assert parameter.grad is None, f"{name} keeps a second gradient"
                assert parameter.requires_grad == hasattr(parameter, "main_grad"), name
                if name.startswith("decoder.layers."):
                    _, _, index, rest = name.split(".", 3)
                    name = f"decoder.layers.{int(index) + first_layer}.{rest}"
                if parameter.requires_grad:
                    is_split = getattr(parameter, "tensor_model_parallel", False)
                    gradients[name] = (parameter.main_grad.clone(), parameter.partition_dim if is_split else None)
            blocks.append(gradients)
            one.active.dispose()
        return blocks


def global_batch(config: RunConfig) -> dict[str, Tensor]:
    """All microbatches of the first step, put together along B."""
    with worlds.started(config) as one:
        batches = one.samples.look_ahead(phase=0, consumed_samples=0, position=0)
        microbatches = [next(batches) for _ in range(get_num_microbatches())]
        return {name: torch.cat([microbatch[name] for microbatch in microbatches]) for name in microbatches[0]}


def merge(ranks: list[dict[str, Any]], num_tensor_ranks: int) -> list[Weights]:
    """Every copy of the gradients by name: one dict per group of ranks that together hold a stage."""
    copies = []
    for start in range(0, len(ranks), num_tensor_ranks):
        group = ranks[start : start + num_tensor_ranks]
        merged = {}
        for name, (gradient, split) in group[0].items():
            parts = [rank[name][0] for rank in group]
            assert split is not None or all(torch.equal(gradient, part) for part in parts), name
            merged[name] = gradient if split is None else torch.cat(parts, dim=split)
        copies.append(merged)
    return copies


@pytest.fixture(scope="module", params=[False, True], ids=["tied", "untied"])
def model_and_batch(
    request: pytest.FixtureRequest, world1: World, initial_weights: Callable[..., dict[str, Any]]
) -> tuple[dict[str, Any], Weights, dict[str, Tensor]]:
    """Flags that load a model, the same model's weights, and the first global batch."""
    flags = initial_weights(untie_embeddings_and_output_weights=request.param, init_method_std=0.2)
    config = worlds.run_config(**flags)
    return flags, world1.run(worlds.initial_weights, config)[0], world1.run(global_batch, config)[0]


@pytest.mark.parametrize("cut", thinned(CUTS, keep_every=2))
def test_gradient_of_every_block(
    world1: World,
    world2: World,
    model_and_batch: tuple[dict[str, Any], Weights, dict[str, Tensor]],
    cut: str,
) -> None:
    """A suffix that does not carry the gradient back, a prefix that is trained, a tied copy that is not summed,
    a recomputed layer or a bias of a frozen one without a gradient: anything that makes a block's gradient not the
    loss's."""
    size, extra = CUTS[cut]
    flags, weights, batch = model_and_batch
    untied = "output_layer.weight" in weights
    config = worlds.run_config(world_size=size, **flags | extra)
    ranks = (world1, world2)[size - 1].run(gradients_of_all_blocks, config)
    blocks = partition(
        num_layers=config.num_layers,
        num_stages=config.pipeline_size,
        num_blocks=config.bcd.bcd_num_blocks,
        layout=config.bcd.bcd_layout,
        tied=config.tied,
    ).blocks
    assert len(blocks) == len(ranks[0])
    for block in blocks:
        active = active_names(
            list(weights),
            layers=block.layers,
            embedding=block.index == 0,
            norm=block.index == len(blocks) - 1,
            head=untied and block.index == len(blocks) - 1,
        )
        if "biases" in config.bcd.always_active:
            active |= {name for name in weights if name.startswith("decoder.layers.") and is_bias(name)}
        expected = reference_gradients(weights, batch, active, config.num_layers)
        found = merge([rank[block.index] for rank in ranks], config.tensor_size)
        seen = set()
        for copy in found:
            for name, gradient in copy.items():
                is_tied_copy = name == "output_layer.weight" and not untied
                name = "embedding.word_embeddings.weight" if is_tied_copy else name
                scale = expected[name].abs().max().item()
                torch.testing.assert_close(gradient.double(), expected[name], rtol=1e-4, atol=2e-6 * scale, msg=name)
                seen.add(name)
        assert seen == active
        if block.index == 0 and not untied and config.pipeline_size == 2:
            assert all(any("word_emb" in name or "output_layer" in name for name in copy) for copy in found)
