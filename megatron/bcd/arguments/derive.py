"""Values that follow from other flags, as in stock Megatron-LM's ``validate_args``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.bcd.arguments import precision_aware
from megatron.bcd.config import DEFAULT_NUM_BLOCKS, TrainingConfig


def derive_values(values: dict[str, Any], *, given: Mapping[str, Any], world_size: int) -> int | None:
    """Fill in `values`, by field name; `given` holds those of the command line alone.

    Returns:
        The chunks of a pipeline stage that flags ask for; in `values` they are a multiple of the blocks.
    """
    _derive_network(values)
    _derive_evaluation(values)
    _derive_fine_tuning(values, given=given)
    _derive_training(values, given=given, world_size=world_size)
    _derive_tokenizer(values)
    _derive_blocks(values)
    chunks = _derive_chunks(values, given=given)
    _derive_frozen(values, given=given)
    if has_no_evaluation(values):
        values["eval_iters"] = 0
    return chunks


def _derive_evaluation(values: dict[str, Any]) -> None:
    """--eval-iters -1 is the whole validation split."""
    if values["eval_iters"] == -1:
        values["eval_iters"] = TrainingConfig.eval_iters
        values["full_validation"] = values["full_validation"] or not has_no_evaluation(values)


def has_no_evaluation(values: Mapping[str, Any]) -> bool:
    """Whether --split leaves nothing for validation and test, so that stock does not evaluate."""
    try:
        shares = [float(share) for share in str(values["split"]).strip("'\"").replace("/", ",").split(",")]
    except ValueError:
        return False  # validation says so
    return len(shares) == 3 and shares[0] > 0 and shares[1:] == [0.0, 0.0]


def _derive_chunks(values: dict[str, Any], *, given: Mapping[str, Any]) -> int | None:
    """Chunks of a pipeline stage imply the layout that has them, whose chunks each belong to one block."""
    layers, per_chunk = values["num_layers"] or 0, values["num_layers_per_virtual_pipeline_stage"] or 0
    if per_chunk > 0 and values["num_virtual_stages_per_pipeline_rank"] is None:
        on_stage, left = divmod(layers, max(1, values["pipeline_model_parallel_size"]))
        if not left and on_stage % per_chunk == 0:
            values["num_virtual_stages_per_pipeline_rank"] = on_stage // per_chunk
    num_chunks = values["num_virtual_stages_per_pipeline_rank"] or 1
    if num_chunks > 1 and "bcd_layout" not in given and values["bcd_layout"] == "spread":
        values["bcd_layout"] = "interleaved"
    if num_chunks > 1 and values["pipeline_model_parallel_size"] > 1 and values["bcd_layout"] == "interleaved":
        values["overlap_param_gather"] = False  # it would change speed alone
    if num_chunks > 1 and values["bcd_layout"] == "interleaved" and values["pipeline_model_parallel_layout"] is None:
        num_blocks = max(1, DEFAULT_NUM_BLOCKS if values["bcd_num_blocks"] is None else values["bcd_num_blocks"])
        values["num_virtual_stages_per_pipeline_rank"] = max(num_chunks // num_blocks, 1) * num_blocks
    return num_chunks if num_chunks > 1 else None


def _derive_blocks(values: dict[str, Any]) -> None:
    """Preset finetune: as many blocks as a pipeline stage has layers."""
    has_number = values["bcd_num_blocks"] is not None or values["bcd_layout"] == "stage"
    if values["bcd_preset"] == "finetune" and not has_number and values["num_layers"]:
        values["bcd_num_blocks"] = max(1, values["num_layers"] // max(1, values["pipeline_model_parallel_size"]))


def _derive_frozen(values: dict[str, Any], *, given: Mapping[str, Any]) -> None:
    """A tied head is the embedding: --bcd-frozen names both or neither. A preset's always-active parts leave out frozen
    ones."""
    parts = str(values["bcd_frozen"]).split(",")
    tied = {"embedding", "head"} if not values["untie_embeddings_and_output_weights"] else set()
    if tied & set(parts):
        parts += sorted(tied - set(parts))
        values["bcd_frozen"] = ",".join(parts)
    if values["bcd_preset"] is not None and "bcd_always_active" not in given and values["bcd_always_active"]:
        left = [part for part in values["bcd_always_active"].split(",") if part not in parts]
        values["bcd_always_active"] = ",".join(left) or "none"


def _derive_network(values: dict[str, Any]) -> None:
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
    if values["max_position_embeddings"] is None:
        values["max_position_embeddings"] = values["seq_length"]
    if values["recompute_activations"]:
        values["recompute_granularity"] = values["recompute_granularity"] or "selective"


def _derive_training(values: dict[str, Any], *, given: Mapping[str, Any], world_size: int) -> None:
    model_ranks = math.prod(values[f"{kind}_parallel_size"] for kind in ("tensor_model", "pipeline_model", "context"))
    if values["global_batch_size"] is None and values["micro_batch_size"] and model_ranks > 0:
        values["global_batch_size"] = values["micro_batch_size"] * max(1, world_size // model_ranks)
    if values["tensor_model_parallel_size"] == 1:
        values["sequence_parallel"] = False  # stock's own rule
    if values["bf16"]:
        # stock's own rule: what the optimizer is given in bf16 is reduced in it
        is_reduced_in_bf16 = values["use_precision_aware_optimizer"] and values["main_grads_dtype"] == "bf16"
        if given.get("grad_reduce_in_fp32"):
            is_reduced_in_bf16 = False  # refused
        values["grad_reduce_in_fp32"] = not (values["grad_reduce_in_bf16"] or is_reduced_in_bf16)
    if values["fp16"] and values["loss_scale"] is None:
        # under dynamic scaling a gradient that is not finite is the scaler's signal, not an error
        values["check_for_nan_in_loss_and_grad"] = False
    if values["optimizer"] == "sgd" and not given.get("use_distributed_optimizer"):
        values["use_distributed_optimizer"] = False  # Megatron Core's supports Adam only
    for unit in ("iters", "samples"):
        if values[f"lr_decay_{unit}"] is None:
            values[f"lr_decay_{unit}"] = values[f"train_{unit}"]
    if values["weight_decay_incr_style"] == "constant":
        for end in ("start_weight_decay", "end_weight_decay"):
            values[end] = values["weight_decay"] if values[end] is None else values[end]


def _derive_fine_tuning(values: dict[str, Any], *, given: Mapping[str, Any]) -> None:
    if not values["sft"]:
        return
    if values["sft_packing"]:
        values["reset_position_ids"] = values["reset_attention_mask"] = True
    if values["optimizer"] != "muon":  # which has no such mean
        values["calculate_per_token_loss"] = True
    if values["data_path"] and values["split"] is None:
        values["split"] = "95,5,0"
    if "eval_iters" not in given and not has_no_evaluation(values):  # a validation split of records is small
        values["full_validation"] = True


def _derive_tokenizer(values: dict[str, Any]) -> None:
    if values["tokenizer_type"] is None and values["vocab_file"] and values["merge_file"]:
        values["tokenizer_type"] = "GPT2BPETokenizer"
    if values["tokenizer_type"] is None and values["mock_data"] and values["vocab_size"]:
        values["tokenizer_type"] = "NullTokenizer"


def derived_core_fields(values: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(section, field, value) of Megatron Core fields that follow from flags that set other fields."""
    is_fused = (
        values["bias_swiglu_fusion"] if values["swiglu"] else values["bias_gelu_fusion"] and values["add_bias_linear"]
    )
    yield "transformer", "bias_activation_fusion", is_fused
    if values["fp8"]:  # passes outside of a step, such as those of --bcd-order greedy, would read outdated weights
        yield "transformer", "disable_parameter_transpose_cache", True
    for section in ("optimizer", "ddp"):
        yield section, "use_distributed_optimizer", values["use_distributed_optimizer"]
    # as in stock: offload is a branch of that code
    is_precision_aware = values["optimizer_cpu_offload"] or precision_aware.is_taken(values)
    yield "optimizer", "use_precision_aware_optimizer", is_precision_aware
    yield "ddp", "check_for_nan_in_grad", False  # it would end the run; a step that is not finite is skipped
