"""The values of --bcd-preset, which the command line overrides, and the defaults of the training scripts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.bcd.config.sections import DEFAULT_NUM_BLOCKS

_MUON: dict[str, Any] = {
    "optimizer": "muon",
    "muon_momentum": 0.95,
    "muon_use_nesterov": True,
    "muon_extra_scale_factor": 0.2,
    "muon_momentum_dtype": "bf16",
    "muon_grad_dtype": "bf16",
}
_FINE_TUNING: dict[str, Any] = {
    "bcd_layout": "spread",
    "bcd_order": "random",
    "bcd_optimizer_state": "reset",
    "optimizer": "adam",
}
PRESETS: dict[str, dict[str, Any]] = {
    # Algorithm 1 of arXiv 2506.12037
    "paper": {
        "bcd_layout": "spread",
        "bcd_order": "ascending",
        "bcd_optimizer_state": "reset",
        "bcd_always_active": "none",
        "bcd_inactive_update": "none",
        "optimizer": "adam",
    },
    # docs/fine_tuning.md: every layer in every step
    "finetune": {
        **_FINE_TUNING,
        "bcd_num_blocks": 0,
        "bcd_inactive_update": "factored",
        "bcd_embedding_update": "factored",
        "bcd_always_active": "norms,biases,embedding,head",
        "bcd_frozen": "none",
    },
    # docs/learning.md
    "pretrain": {
        "bcd_layout": "strided",
        "bcd_order": "ascending",
        "bcd_optimizer_state": "host",
        "bcd_inactive_update": "orthogonal",
        **_MUON,
    },
}
"""Values by field name, of each preset."""
FINE_TUNING_BLOCKS: dict[str, Any] = {
    **_FINE_TUNING,
    "bcd_inactive_update": "none",
    "bcd_always_active": "head",
    "bcd_frozen": "embedding",
}
"""Preset finetune with --bcd-inactive-update none. `derive_blocks` adds one layer a block, and no active head where
it is frozen."""
_ASKS_FOR_BLOCKS = (
    "bcd_num_blocks", "bcd_layout", "bcd_order", "bcd_steps_per_block", "bcd_switch", "bcd_frozen", "bcd_head_phase",
    "bcd_prefix_cache", "bcd_sample_ratio", "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage", "bcd_main_params", "optimizer", "fp16", "loss_scale",
    "optimizer_cpu_offload",
)  # fmt: skip
"""Without --bcd-inactive-update these flags make preset finetune train blocks: only runs with blocks use them, or
inactive updates exclude them."""
_DEFAULTS = {"bcd_num_blocks": 0, "bcd_main_params": "host", "optimizer": "adam"}
"""Values of these flags that do not ask for blocks."""


def asks_for_blocks(given: Mapping[str, Any]) -> bool:
    """Return whether the `given` flags make preset finetune train blocks."""
    return any(given.get(field) not in (None, False, _DEFAULTS.get(field)) for field in _ASKS_FOR_BLOCKS)


def preset_fields(name: str, rule: str | None) -> dict[str, Any]:
    """Return the values of a preset with this --bcd-inactive-update, by field name."""
    return FINE_TUNING_BLOCKS if name == "finetune" and rule == "none" else PRESETS[name]


def preset_values(name: str, given: Mapping[str, Any], network: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the values of a preset by field name, without those `given` on the command line.

    With one block no layer is inactive, and with another optimizer Muon's values are left out.

    Args:
        network: sizes by field name, from the model of --load-hf where the command line has none.
    """
    rule = given.get("bcd_inactive_update")
    if name == "finetune" and rule is None:
        size = given.get("tensor_model_parallel_size", 1)
        # queries, keys and values can't be updated apart if a rank has less than a query group
        is_narrow = given.get("muon_split_qkv", True) and ((network or {}).get("num_query_groups") or size) < size
        rule = "none" if asks_for_blocks(given) or is_narrow else None
    values = preset_fields(name, rule)
    if name != "finetune" and (given.get("bcd_num_blocks") == 1 or rule == "none"):
        values = {field: value for field, value in values.items() if field != "bcd_inactive_update"}
    if given.get("optimizer", "muon") != "muon":
        values = {field: value for field, value in values.items() if field not in _MUON}
    return {field: value for field, value in values.items() if field not in given}


def derive_schedule(values: dict[str, Any]) -> None:
    """Derive --bcd-schedule, in place: only breadth-first copies layers from host memory."""
    is_whole = values["bcd_num_blocks"] == 1 and not values["bcd_head_phase"]
    if values["bcd_layers_on"] == "auto" and is_whole and values["bcd_schedule"] != "breadth-first":
        values["bcd_layers_on"] = "device"
    if values["bcd_schedule"] is None:
        values["bcd_schedule"] = "bcd" if values["bcd_layers_on"] == "device" else "breadth-first"


def derive_blocks(values: dict[str, Any], *, given: Mapping[str, Any]) -> None:
    """Derive the flags that depend on the blocks, in place.

    Preset finetune with blocks has one block per layer of a pipeline stage. --bcd-frozen contains both the embedding
    and a tied head or neither, because they are one weight. The always-active parts of a preset exclude frozen parts,
    and a head with its own phase. If embedding and head can't be factored, Adam updates them.
    """
    has_number = values["bcd_num_blocks"] is not None or values["bcd_layout"] == "stage"
    if values["bcd_preset"] == "finetune" and not has_number and values["num_layers"]:
        values["bcd_num_blocks"] = max(1, values["num_layers"] // max(1, values["pipeline_model_parallel_size"]))
    frozen = str(values["bcd_frozen"]).split(",")
    if values["bcd_inactive_lr_ratio"] is None:  # orthogonal directions have a larger root mean square than Adam's
        values["bcd_inactive_lr_ratio"] = 1.0 if values["bcd_inactive_update"] == "factored" else 0.2
    tied = {"embedding", "head"} if not values["untie_embeddings_and_output_weights"] else set()
    if tied & set(frozen):
        frozen += sorted(tied - set(frozen))
        values["bcd_frozen"] = ",".join(frozen)
    if values["bcd_preset"] is not None and "bcd_always_active" not in given and values["bcd_always_active"]:
        excluded = [*frozen, "head"] if values["bcd_head_phase"] else frozen
        left = [part for part in values["bcd_always_active"].split(",") if part not in excluded]
        values["bcd_always_active"] = ",".join(left) or "none"
    if values["bcd_preset"] is not None and "bcd_embedding_update" not in given:
        is_trained = {"embedding", "head"} & set(str(values["bcd_always_active"]).split(","))
        if not is_trained or values["decoupled_lr"] is not None:
            values["bcd_embedding_update"] = "adam"


def derive_chunks(values: dict[str, Any], *, given: Mapping[str, Any]) -> int | None:
    """Derive the chunks of a pipeline stage, and the layout interleaved that they imply.

    Each chunk belongs to one block, so `values` gets a multiple of the number of blocks. The chunks of --bcd-schedule
    breadth-first on several stages are chunks, by default as many as possible.

    Returns:
        The number of chunks that the flags ask for.
    """
    layers, per_chunk = values["num_layers"] or 0, values["num_layers_per_virtual_pipeline_stage"] or 0
    stages = max(1, values["pipeline_model_parallel_size"])
    is_in_chunks = stages > 1 and values["bcd_schedule"] == "breadth-first"
    if is_in_chunks:
        per_chunk = per_chunk or given.get("bcd_layers_per_pass") or 0
    if values["num_virtual_stages_per_pipeline_rank"] is None and (per_chunk > 0 or is_in_chunks):
        on_stage, left = divmod(layers, stages)
        if not per_chunk:
            values["num_virtual_stages_per_pipeline_rank"] = max(on_stage, 1)
        elif not left and on_stage % per_chunk == 0:
            values["num_virtual_stages_per_pipeline_rank"] = on_stage // per_chunk
    num_chunks = values["num_virtual_stages_per_pipeline_rank"] or 1
    if (
        num_chunks > 1 and "bcd_layout" not in given and values["bcd_layout"] in ("spread", "strided")
    ):  # also if a preset set it
        values["bcd_layout"] = "interleaved"
    if values["bcd_layout"] == "interleaved" and stages > 1:
        values["overlap_param_gather"] = False  # not supported with chunks; it only affects speed
    if num_chunks > 1 and values["bcd_layout"] == "interleaved" and values["pipeline_model_parallel_layout"] is None:
        num_blocks = max(1, DEFAULT_NUM_BLOCKS if values["bcd_num_blocks"] is None else values["bcd_num_blocks"])
        values["num_virtual_stages_per_pipeline_rank"] = max(num_chunks // num_blocks, 1) * num_blocks
    if is_in_chunks and values["num_virtual_stages_per_pipeline_rank"] is not None:
        values["bcd_layers_per_pass"] = -(-layers // (stages * values["num_virtual_stages_per_pipeline_rank"]))
    return int(num_chunks) if num_chunks > 1 else None


FAMILY_DEFAULTS: dict[str, Mapping[str, object]] = {
    "gpt": {},
    "llama": {
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "swiglu": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
}
"""Defaults of pretrain_gpt_bcd.py, which are Megatron-LM's, and of pretrain_llama_bcd.py (arXiv 2302.13971, section
2.2)."""
