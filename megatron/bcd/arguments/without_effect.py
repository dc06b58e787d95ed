"""Flags that are given without the flag they belong to: as if they were not given, and the run summary names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron.bcd.arguments.derive import has_no_evaluation
from megatron.bcd.arguments.flags import Flag

_Values = Mapping[str, Any]


def _has_rope(values: _Values) -> bool:
    return bool(values["position_embedding_type"] == "rope" or values["use_rotary_position_embeddings"])


def _is_recomputed(values: _Values) -> str | None:
    granularity: str | None = values["recompute_granularity"]
    return granularity or ("selective" if values["recompute_activations"] else None)


def _is_gathered_by_shards(values: _Values) -> bool:
    has_shards = values["use_distributed_optimizer"] and values["optimizer"] != "sgd"
    return bool(values["overlap_grad_reduce"] and has_shards)


def _splits_layer_inputs(values: _Values) -> bool:
    has_split = values["tensor_model_parallel_size"] > 1 and not values["sequence_parallel"]
    return _is_recomputed(values) == "full" and has_split


def _orthogonalizes(values: _Values) -> bool:
    return bool(values["optimizer"] == "muon" or values["bcd_resting_update"] == "orthogonal")


_OWNERS: tuple[tuple[str, Callable[[_Values], object], str], ...] = (
    (
        "no --save",
        lambda values: values["save"],
        "save_interval save_retain_interval overwrite_checkpoints log_progress async_save keep_last_checkpoints",
    ),
    ("no --load", lambda values: values["load"], "exit_on_missing_checkpoint ckpt_step finetune"),
    ("no --save-hf", lambda values: values["save_hf"], "save_hf_interval"),
    ("no --group-query-attention", lambda values: values["group_query_attention"], "num_query_groups"),
    ("no rotary positions", _has_rope, "rotary_base rotary_percent rotary_interleaved use_rope_scaling"),
    (
        "no --recompute-granularity full",
        lambda values: _is_recomputed(values) == "full",
        "recompute_method recompute_num_layers",
    ),
    (
        "no --recompute-granularity full with tensor parallel ranks, or --sequence-parallel",
        _splits_layer_inputs,
        "distribute_saved_activations",
    ),
    (
        "no --recompute-granularity selective",
        lambda values: _is_recomputed(values) == "selective",
        "recompute_modules",
    ),
    ("no --recompute auto", lambda values: values["recompute"], "recompute_memory_gib"),
    (
        "no --optimizer-cpu-offload",
        lambda values: values["optimizer_cpu_offload"],
        "optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d pin_cpu_grads",
    ),
    ("no --optimizer sgd", lambda values: values["optimizer"] == "sgd", "sgd_momentum"),
    (
        "--optimizer sgd",
        lambda values: values["optimizer"] != "sgd",
        "adam_beta1 adam_beta2 adam_eps decoupled_weight_decay adam_moments_dtype",
    ),
    (
        "no --optimizer muon",
        lambda values: values["optimizer"] == "muon",
        "muon_momentum muon_use_nesterov muon_scale_mode muon_extra_scale_factor muon_momentum_dtype muon_grad_dtype",
    ),
    (
        "no --optimizer muon, no --bcd-resting-update orthogonal",
        _orthogonalizes,
        "muon_split_qkv muon_num_ns_steps muon_tp_mode",
    ),
    ("no --overlap-grad-reduce, or no distributed optimizer", _is_gathered_by_shards, "overlap_param_gather"),
    ("no --bf16", lambda values: values["bf16"], "grad_reduce_in_bf16"),
    (
        "no --fp8-format",
        lambda values: values["fp8"],
        "fp8_recipe fp8_margin fp8_amax_history_len fp8_amax_compute_algo",
    ),
    ("no --decoupled-lr", lambda values: values["decoupled_lr"], "decoupled_min_lr"),
    ("no --dataloader-type cyclic", lambda values: values["dataloader_type"] == "cyclic", "data_sharding"),
    (
        "no evaluation",
        lambda values: values["eval_iters"] and not has_no_evaluation(values),
        "eval_fixed full_validation",
    ),
    ("--mock-data has no end", lambda values: not values["mock_data"], "full_validation"),
    ("no --sft", lambda values: values["sft"], "sft_prompt_format sft_packing sft_drop_long"),
    (
        "no --bcd-switch plateau",
        lambda values: values["bcd_switch"] == "plateau",
        "bcd_plateau_window bcd_plateau_min_improvement bcd_min_steps_per_block bcd_max_steps_per_block",
    ),
    ("no --bcd-order greedy", lambda values: values["bcd_order"] == "greedy", "bcd_greedy_microbatches"),
    (
        "no --bcd-resting-update",
        lambda values: values["bcd_resting_update"] != "none",
        "bcd_resting_lr_ratio bcd_resting_layers bcd_resting_grad_dtype",
    ),
    (
        "no --bcd-prefix-cache",
        lambda values: values["bcd_prefix_cache"],
        "bcd_prefix_cache_dtype bcd_prefix_cache_max_gib",
    ),
)
"""(why the flags have no effect, what the values are like where they have one, the flags' fields)."""


def take_back(values: dict[str, Any], flags: Mapping[str, Flag], *, given: Mapping[str, Any]) -> dict[str, str]:
    """Set in `values` the defaults of `given` flags that belong to flags which are not given.

    Returns:
        By field: the flag, and why it has no effect.
    """
    found: dict[str, str] = {}
    for why, has_effect, fields in _OWNERS:
        if has_effect(values):
            continue
        for field in fields.split():
            flag = flags[field]
            if field in given and given[field] != flag.default:
                name = flag.off_names[0] if given[field] is False else flag.names[0]
                found[field] = f"{name} ({why})"
                values[field] = flag.default
    return found
