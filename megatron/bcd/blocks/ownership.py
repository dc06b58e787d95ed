"""Which block owns a parameter, by the name that Megatron Core's GPTModel gives it. Pure."""

from __future__ import annotations

from megatron.bcd.blocks.partition import Partition


def is_active(name: str, *, partition: Partition, block: int, stage: int) -> bool:
    """Whether the parameter that GPTModel calls `name` on pipeline stage `stage` is updated while `block` is active.

    Raises:
        KeyError: no room of the model has a parameter of that name.
    """
    if is_always_active(name, partition=partition):
        return True
    room, _, rest = name.partition(".")
    if room == "embedding":
        return partition.embedding_active(block)
    if room == "output_layer":
        return partition.head_active(block)
    if name.startswith("decoder.final_layernorm."):
        return partition.final_norm_active(block)
    if name.startswith("decoder.layers."):
        layer = partition.stage_layers(stage).start + int(rest.split(".")[1])
        return layer in partition.active_layers(block, stage)
    raise KeyError(name)


def is_always_active(name: str, *, partition: Partition) -> bool:
    """Whether the parameter that GPTModel calls `name` is updated in every phase (--bcd-always-active)."""
    room = name.partition(".")[0]
    if room == "embedding":
        return partition.embedding_always_active
    if room == "output_layer":
        return partition.head_always_active
    # layernorm: the local layers' modules; layer_norm_weight: inside Transformer Engine's fused linear layers
    return partition.norms_always_active and ("layernorm" in name or "layer_norm" in name)
