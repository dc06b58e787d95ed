"""Which block owns a parameter, by its name."""

from __future__ import annotations

import pytest

from megatron.bcd.blocks.ownership import Ownership, ownership
from megatron.bcd.blocks.partition import LAYOUTS, Partition, partition

LAYER = ("self_attention.linear_qkv.weight", "input_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")


def names_of(cut: Partition, stage: int) -> list[str]:
    names = [f"decoder.layers.{index}.{name}" for index in range(len(cut.stage_layers(stage))) for name in LAYER]
    if stage == 0:
        names = ["embedding.word_embeddings.weight", "embedding.position_embeddings.weight", *names]
    if stage == cut.num_stages - 1:
        names += ["decoder.final_layernorm.weight", "output_layer.weight"]
    return names


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("always_active", [(), ("norms",), ("embedding",), ("head",), ("norms", "embedding", "head")])
def test_agrees_with_the_partition(layout: str, tied: bool, always_active: tuple[str, ...]) -> None:
    """A parameter left out of every phase, trained in two, or a tied head that is active without the embedding."""
    cut = partition(
        num_layers=8,
        num_stages=2,
        num_blocks=None if layout == "stage" else 2,
        layout=layout,
        tied=tied,
        always_active=frozenset(always_active),
    )
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


def test_modules_layers_and_norms() -> None:
    """Layers counted on their stage instead of the model; a norm of Transformer Engine that is taken for a matrix."""
    cut = partition(num_layers=6, num_stages=2, num_blocks=3, layout="spread", tied=False)
    owned = {
        (stage, name): ownership(name, partition=cut, stage=stage) for stage in (0, 1) for name in names_of(cut, stage)
    }
    assert owned[0, "embedding.word_embeddings.weight"] == Ownership(
        module="embedding", layer=None, is_norm=False, is_matrix=False, block=0, is_always_active=False
    )
    assert owned[1, "decoder.layers.1.mlp.linear_fc1.layer_norm_weight"] == Ownership(
        module="layer", layer=4, is_norm=True, is_matrix=False, block=1, is_always_active=False
    )
    assert owned[1, "decoder.final_layernorm.weight"].is_norm
    assert {name for (_, name), one in owned.items() if one.block == 2 and one.layer is None} == {
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    }
    assert not owned[1, "decoder.layers.1.self_attention.linear_qkv.weight"].is_norm


def test_unknown_name() -> None:
    """A module that Megatron Core adds, silently frozen for the whole run."""
    cut = partition(num_layers=6, num_stages=1, num_blocks=3, layout="spread", tied=False)
    with pytest.raises(KeyError, match="mtp"):
        ownership("mtp.layers.0.weight", partition=cut, stage=0)
