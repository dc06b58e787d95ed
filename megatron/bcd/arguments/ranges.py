"""The range of each number."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from megatron.bcd.arguments.rules import Run, flag_name

_Range = tuple[str, Callable[[Any], bool]]
_AT_LEAST_0: _Range = ("at least 0", lambda value: value >= 0)
_AT_LEAST_1: _Range = ("at least 1", lambda value: value >= 1)
_ABOVE_0: _Range = ("greater than 0", lambda value: value > 0)
_SHARE: _Range = ("from 0 to less than 1", lambda value: 0 <= value < 1)

_RANGES: dict[str, _Range] = {
    **dict.fromkeys(
        (
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "ffn_hidden_size",
            "kv_channels",
            "num_query_groups",
            "seq_length",
            "max_position_embeddings",
            "rotary_base",
            "make_vocab_size_divisible_by",
            "vocab_size",
            "micro_batch_size",
            "global_batch_size",
            "train_iters",
            "train_samples",
            "eval_interval",
            "log_interval",
            "save_interval",
            "save_hf_interval",
            "keep_last_checkpoints",
            "save_retain_interval",
            "check_weight_hash_across_dp_replicas_interval",
            "ckpt_step",
            "exit_interval",
            "exit_duration_in_mins",
            "max_skipped_steps",
            "seed",
            "lr_decay_iters",
            "lr_decay_samples",
            "lr_wsd_decay_iters",
            "lr_wsd_decay_samples",
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "num_virtual_stages_per_pipeline_rank",
            "num_layers_per_virtual_pipeline_stage",
            "recompute_num_layers",
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "bucket_size",
            "distributed_timeout_minutes",
            "hysteresis",
            "loss_scale_window",
            "muon_num_ns_steps",
            "bcd_steps_per_block",
            "bcd_greedy_microbatches",
        ),
        _AT_LEAST_1,
    ),
    "straggler_minmax_count": _AT_LEAST_1,
    **dict.fromkeys(
        (
            "eval_iters",
            "num_workers",
            "profile_step_start",
            "manual_gc_interval",
            "lr_warmup_iters",
            "lr_warmup_samples",
            "lr_warmup_init",
            "min_lr",
            "decoupled_min_lr",
            "weight_decay",
            "start_weight_decay",
            "end_weight_decay",
            "clip_grad",
            "bcd_run_ahead",
        ),
        _AT_LEAST_0,
    ),
    **dict.fromkeys(
        (
            "lr",
            "decoupled_lr",
            "adam_eps",
            "layernorm_epsilon",
            "init_method_std",
            "embedding_init_method_std",
            "rope_scaling_factor",
            "loss_scale",
            "initial_loss_scale",
            "min_loss_scale",
            "bcd_prefix_cache_max_gib",
            "recompute_memory_gib",
            "bcd_resting_lr_ratio",
            "muon_extra_scale_factor",
            "num_epochs",
        ),
        _ABOVE_0,
    ),
    **dict.fromkeys(
        (
            "hidden_dropout",
            "attention_dropout",
            "adam_beta1",
            "adam_beta2",
            "sgd_momentum",
            "lr_warmup_fraction",
            "muon_momentum",
        ),
        _SHARE,
    ),
    **dict.fromkeys(
        ("rotary_percent", "bcd_sample_ratio", "optimizer_offload_fraction"),
        ("greater than 0 and at most 1", lambda value: 0 < value <= 1),
    ),
}


_MOST = {"num_layers": 10**5, "bcd_num_blocks": 10**5}
"""Every layer and block is counted; more are taken for typing errors."""
_MOST_OF_ANY = 10**15


def range_problems(run: Run) -> Iterator[str]:
    """One line for each number that is out of its range."""
    for field, value in vars(run).items():
        name = f"{flag_name(field)} {value}"
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{name}: must be a finite number"
        elif isinstance(value, int) and value > (most := _MOST.get(field, _MOST_OF_ANY)):
            yield f"{name}: must be at most {most}"
        elif field in _RANGES and value is not None and not _RANGES[field][1](value):
            yield f"{name}: must be {_RANGES[field][0]}"
