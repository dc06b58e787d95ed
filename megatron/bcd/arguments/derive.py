"""Derive values from other flags, like ``validate_args`` of stock Megatron-LM, and find flags without effect."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron.bcd.arguments.flags import Flag, holds
from megatron.bcd.arguments.stock import BELONG_TO, EXPERTS, TRANSFORMER_FIELDS
from megatron.bcd.config import DEFAULT_NUM_BLOCKS, DataConfig, TrainingConfig
from megatron.bcd.config.presets import derive_blocks, derive_chunks, derive_schedule

Values = dict[str, Any]
"""Values by field name."""


def derive_values(
    values: Values, flags: tuple[Flag, ...], *, asked: Mapping[str, Any], given: Mapping[str, Any], world_size: int
) -> list[str]:
    """Derive `values` in place.

    Args:
        asked: values of the command line.
        given: values of the command line and of --load-hf.

    Returns:
        Lines for the run summary about flags that have no effect, or an unusual one.
    """
    lines = []
    if _leaves_no_evaluation(values["split"]):
        values["eval_iters"] = 0
        if not values["mock_data"]:
            lines.append(f"--split {values['split']} leaves no data to evaluate on: there is no evaluation")
    ignored = [name for name in asked if name.startswith("--")]
    derive_schedule(values)
    taken_back = _take_back(values, flags, asked=asked)
    given = {field: value for field, value in given.items() if field not in taken_back}
    _derive_network(values)
    if values["eval_iters"] == -1:  # the whole validation split
        values["eval_iters"] = TrainingConfig.eval_iters
        values["full_validation"] = True
    if values["sft"]:
        _derive_fine_tuning(values, given=given)
    _derive_training(values, world_size=world_size)
    _derive_precision(values, given=given)
    if values["tokenizer_type"] is None and values["vocab_file"] and values["merge_file"]:
        values["tokenizer_type"] = "GPT2BPETokenizer"
    elif values["tokenizer_type"] is None and values["mock_data"] and values["vocab_size"]:
        values["tokenizer_type"] = "NullTokenizer"
    derive_blocks(values, given=given)
    chunks = derive_chunks(values, given=given)
    if chunks is not None and chunks != values["num_virtual_stages_per_pipeline_rank"]:
        rounded = values["num_virtual_stages_per_pipeline_rank"]
        number, per_chunk = values["bcd_num_blocks"], given.get("num_layers_per_virtual_pipeline_stage")
        flag = "" if per_chunk is None else f"--num-layers-per-virtual-pipeline-stage {per_chunk} is not kept: "
        lines.append(
            f"{flag}{rounded} chunks on every pipeline stage in place of {chunks}, a multiple of --bcd-num-blocks "
            f"{DEFAULT_NUM_BLOCKS if number is None else number}"
        )
    ignored += taken_back.values()
    if given.get("overlap_param_gather") and not values["overlap_param_gather"]:
        ignored.append("--overlap-param-gather (chunks are gathered after the step)")
    if values["mock_data"] and values["split"]:
        ignored.append(f"--split {values['split']} (mock data are not split)")
    return [f"without effect here: {', '.join(ignored)}", *lines] if ignored else lines


def _take_back(values: Values, flags: tuple[Flag, ...], *, asked: Mapping[str, Any]) -> dict[str, str]:
    """Reset flags that have no effect without another flag, which is not given. Return the summary's text by field."""
    by_field = {flag.field: flag for flag in flags}
    reset: dict[str, str] = {}
    for owners, fields in BELONG_TO.items():
        if any(holds(values, owner) for owner in owners.split()):
            continue
        for field in fields.split():
            flag = by_field[field]
            if field in asked and (asked[field] != flag.default or asked[field] is True):
                name = flag.off_names[0] if asked[field] is False else flag.names[0]
                reset[field] = f"{name} (without {' or '.join(owners.split()).replace('=', ' ')})"
                values[field] = flag.default
    return reset


def _leaves_no_evaluation(split: str | None) -> bool:
    """Return whether --split leaves nothing for validation and test, so that stock does not evaluate."""
    try:
        shares = DataConfig(split=split).split_shares
    except ValueError:
        return False  # validate.py reports it
    return shares is not None and shares[1:] == [0.0, 0.0]


def _derive_network(values: Values) -> None:
    if values["use_rotary_position_embeddings"]:
        values["position_embedding_type"] = "rope"
    if values["position_embedding_type"] != "rope":
        values["apply_rope_fusion"] = False
    if not values["group_query_attention"]:
        values["num_query_groups"] = None
    if values["add_bias_linear"]:
        values["add_qkv_bias"] = True
    if values["swiglu"] and values["ffn_hidden_size"] is None and values["hidden_size"]:
        # two thirds of the plain width keep the parameter count; multiples of 64 suit a GPU
        values["ffn_hidden_size"] = 4 * values["hidden_size"] * 2 // (3 * 64) * 64
    _derive_experts(values)
    if values["max_position_embeddings"] is None:
        values["max_position_embeddings"] = values["seq_length"]
    if values["recompute_activations"]:
        values["recompute_granularity"] = values["recompute_granularity"] or "selective"
    is_fused = values["bias_gelu_fusion"] and values["add_bias_linear"]
    values["bias_activation_fusion"] = values["bias_swiglu_fusion"] if values["swiglu"] else is_fused
    # passes outside a step, such as those of an evaluation, would read outdated weights
    values["disable_parameter_transpose_cache"] = True if values["fp8"] else None
    values["fp8_recipe"] = values["fp8_recipe"] or ("delayed" if values["fp8"] else None)


def _derive_experts(values: Values) -> None:
    """Derive the layers with experts and their width. A dense model has no values of experts."""
    every, num_layers = values["moe_layer_freq"], values["num_layers"] or 0
    if isinstance(every, int) and every > 1:
        every = [int(number % every == 0) for number in range(num_layers)]
    values["moe_layer_freq"] = 1 if isinstance(every, list) and all(every) else every
    if values["moe_ffn_hidden_size"] is None:
        values["moe_ffn_hidden_size"] = values["ffn_hidden_size"] or 4 * (values["hidden_size"] or 0)
    if values["num_moe_experts"] is None:
        values |= dict.fromkeys(TRANSFORMER_FIELDS[EXPERTS].split())


def _derive_fine_tuning(values: Values, *, given: Mapping[str, Any]) -> None:
    if values["sft_packing"]:
        values["reset_position_ids"] = values["reset_attention_mask"] = True
    if values["optimizer"] != "muon":  # Muon does not support the mean over tokens
        values["calculate_per_token_loss"] = True
    if values["data_path"] and values["split"] is None:
        values["split"] = "95,5,0"
    has_validation = not _leaves_no_evaluation(values["split"])
    if "eval_iters" not in given and has_validation:  # a validation split of records is small
        values["full_validation"] = True


def _derive_training(values: Values, *, world_size: int) -> None:
    model_ranks = math.prod(values[f"{kind}_parallel_size"] for kind in ("tensor_model", "pipeline_model", "context"))
    if values["global_batch_size"] is None and values["micro_batch_size"] and model_ranks > 0:
        values["global_batch_size"] = values["micro_batch_size"] * max(1, world_size // model_ranks)
    for unit in ("iters", "samples"):
        if values[f"lr_decay_{unit}"] is None:
            values[f"lr_decay_{unit}"] = values[f"train_{unit}"]
    if values["weight_decay_incr_style"] == "constant":
        values["start_weight_decay"] = values["end_weight_decay"] = values["weight_decay"]


def _derive_precision(values: Values, *, given: Mapping[str, Any]) -> None:
    if values["bf16"]:
        values["grad_reduce_in_fp32"] = bool(given.get("grad_reduce_in_fp32")) or not values["grad_reduce_in_bf16"]
    if values["fp16"] and values["loss_scale"] is None:
        # with a dynamic loss scale a gradient that is not finite only lowers the scale
        values["check_for_nan_in_loss_and_grad"] = False
    values["check_for_nan_in_grad"] = False  # Megatron Core would end the run, instead of skipping the step
