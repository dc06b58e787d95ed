"""The block that owns a parameter, by the parameter's name."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.bcd.blocks.ownership import ownership
from megatron.bcd.blocks.partition import Partition, partition
from megatron.bcd.config import LAYOUTS

LAYER = ("self_attention.linear_qkv.weight", "input_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
LAYER += ("self_attention.q_layernorm.weight",)


def names_of(cut: Partition, stage: int) -> list[str]:
    names: list[str] = []
    for chunk in range(cut.num_chunks):
        virtual = chunk * cut.num_stages + stage
        numbers = range(len(cut.chunk_layers(stage, chunk)))
        chunk_names = [f"decoder.layers.{index}.{name}" for index in numbers for name in LAYER]
        if virtual == 0:
            chunk_names = ["embedding.word_embeddings.weight", "embedding.position_embeddings.weight", *chunk_names]
        if virtual == cut.num_virtual_stages - 1:
            chunk_names += ["decoder.final_layernorm.weight", "output_layer.weight"]
        names += [f"chunks.{chunk}.{name}" for name in chunk_names] if cut.num_chunks > 1 else chunk_names
    return names


def two_stages(layout: str, **parts: Any) -> Partition:
    num_blocks = None if layout == "stage" else 2
    return partition(num_layers=8, num_stages=2, num_blocks=num_blocks, layout=layout, **parts)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("always_active", [(), ("norms",), ("embedding",), ("head",), ("norms", "embedding", "head")])
def test_agrees_with_the_partition(layout: str, tied: bool, always_active: tuple[str, ...]) -> None:
    """The owner of each parameter agrees with the partition in every phase."""
    cut = two_stages(layout, tied=tied, always_active=frozenset(always_active))
    for stage in range(2):
        for name in names_of(cut, stage):
            owned = ownership(name, partition=cut, stage=stage)
            for block in range(cut.num_blocks):
                expected = {
                    "embedding": cut.embedding_active(block),
                    "head": cut.head_active(block),
                    "final_norm": cut.final_norm_active(block),
                    "layer": owned.layer in cut.active_layers(block, stage)
                    or (cut.norms_always_active and "norm" in name),
                }
                assert owned.is_active(block) == expected[owned.module], (name, block)
                assert owned.is_always_active or owned.is_active(block) == (block == owned.block)


def test_experts_belong_to_their_layer() -> None:
    """Experts, routers and shared experts are trained in the phase of their layer, and updated without state in others.

    Their matrices are those of separate modules, or of Transformer Engine's grouped layers."""
    cut = partition(num_layers=4, num_stages=2, num_blocks=2, layout="spread", tied=True, has_inactive_updates=True)
    experts = ("experts.local_experts.3.linear_fc1.weight", "experts.linear_fc2.weight2")
    for name in (*experts, "router.weight", "shared_experts.linear_fc1.weight", "shared_experts.gate_weight"):
        owned = ownership(f"decoder.layers.1.mlp.{name}", partition=cut, stage=1)
        assert (owned.layer, owned.block, owned.inactive_updates_in) == (3, 1, {0}), name
        assert owned.is_matrix and not owned.is_always_active, name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("frozen", ["embedding", "head", "norms", "embedding,head"])
def test_no_phase_trains_what_is_frozen(layout: str, tied: bool, frozen: str) -> None:
    """A frozen part, also a tied one, is active in no phase, and every other parameter in exactly one."""
    cut = two_stages(layout, tied=tied, frozen=frozenset(frozen.split(",")))
    parts = set(frozen.split(",")) | ({"embedding", "head"} if tied and frozen != "norms" else set())
    for stage in range(2):
        for name in names_of(cut, stage):
            owned = ownership(name, partition=cut, stage=stage)
            is_frozen = ("norms" if owned.is_norm else owned.module) in parts
            assert owned.is_frozen == is_frozen
            assert sum(owned.is_active(block) for block in range(cut.num_blocks)) == (not is_frozen), name
    for block in range(cut.num_blocks):
        assert not ("embedding" in parts and cut.embedding_active(block))
        assert not ("head" in parts and cut.head_active(block))
        assert not ("norms" in parts and cut.final_norm_active(block))


def test_unknown_name() -> None:
    """A parameter of an unknown module is refused by name."""
    cut = partition(num_layers=6, num_stages=1, num_blocks=3, layout="spread", tied=False)
    with pytest.raises(KeyError, match="mtp"):
        ownership("mtp.layers.0.weight", partition=cut, stage=0)


@pytest.mark.parametrize(
    ("name", "num_axes", "is_matrix"),
    [
        ("mlp.experts.gate_up_proj", 3, True),
        ("mlp.experts.gate_up_proj_bias", 2, False),
        ("mlp.router.weight", 2, True),
        ("linear_attn.conv1d.weight", 3, False),
        ("linear_attn.A_log", 1, False),
    ],
)
def test_matrices_of_transformers(name: str, num_axes: int, *, is_matrix: bool) -> None:
    """Parameters of experts with three axes are matrices; their biases and convolutions count as biases."""
    cut = partition(num_layers=2, num_stages=1, num_blocks=2, layout="spread", tied=True, has_inactive_updates=True)
    owned = ownership(f"decoder.layers.1.{name}", partition=cut, stage=0, num_axes=num_axes)
    assert owned.is_matrix == is_matrix
