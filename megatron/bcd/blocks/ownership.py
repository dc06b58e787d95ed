"""Which block owns a parameter, from the name that Megatron Core's GPTModel gives it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.bcd.blocks.partition import Partition

Module = Literal["embedding", "layer", "final_norm", "head"]


@dataclass(frozen=True, kw_only=True)
class Ownership:
    """Where a parameter lies in the model, and in which phases it is active."""

    module: Module
    layer: int | None
    """Layer number over the whole model; None outside the layers."""
    is_norm: bool
    block: int
    """The block that owns it; a tied head belongs to the block of the embedding."""
    is_always_active: bool
    """Active in every phase (--bcd-always-active)."""

    def is_active(self, block: int) -> bool:
        """Whether the parameter is updated in a phase of ``block``."""
        return self.is_always_active or self.block == block


def ownership(name: str, *, partition: Partition, stage: int) -> Ownership:
    """Ownership of the parameter that GPTModel calls ``name`` on pipeline stage ``stage``.

    Raises:
        KeyError: no module of the model has a parameter of that name.
    """
    layer = None
    # layernorm: modules of the local layers; layer_norm_weight: inside Transformer Engine's fused linear layers
    is_norm = name.startswith("decoder.") and ("layernorm" in name or "layer_norm" in name)
    is_always_active = is_norm and partition.norms_always_active
    first = next(block.index for block in partition.blocks if block.owns_embedding)
    last = next(block.index for block in partition.blocks if block.owns_final_norm)
    module: Module
    if name.startswith("embedding."):
        module, block, is_always_active = "embedding", first, partition.embedding_always_active
    elif name.startswith("output_layer."):
        module, block, is_always_active = "head", first if partition.tied else last, partition.head_always_active
    elif name.startswith("decoder.final_layernorm."):
        module, block = "final_norm", last
    elif name.startswith("decoder.layers."):
        module, layer = "layer", partition.stage_layers(stage).start + int(name.split(".")[2])
        block = next(block.index for block in partition.blocks if layer in block.layers)
    else:
        raise KeyError(name)
    return Ownership(module=module, layer=layer, is_norm=is_norm, block=block, is_always_active=is_always_active)
