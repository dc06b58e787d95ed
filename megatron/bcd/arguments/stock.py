"""Tables of how the command line of stock Megatron-LM (core_v0.16.1, and the flags that 0.19.2 adds) works.

Types, defaults and help of flags come from the dataclass fields that they set, see ``flags.py``.
"""

from __future__ import annotations

import argparse
import functools
import importlib.resources
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.bcd.config.sections import (
    ABOVE_0,
    AT_LEAST_0,
    AT_LEAST_1,
    BELOW_1,
    NETWORK,
    OPTIMIZER,
    PARALLELISM,
    RECOMPUTATION,
    SHARE,
    Range,
    option,
)

TRAINING = "training"
LEARNING_RATE = "learning rate"
PRECISION = "precision"
EXPERTS = "mixture of experts"

REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", "lr")

TRANSFORMER_FIELDS = {
    NETWORK: "num_layers hidden_size num_attention_heads ffn_hidden_size kv_channels num_query_groups hidden_dropout "
    "attention_dropout normalization layernorm_epsilon layernorm_zero_centered_gamma add_bias_linear add_qkv_bias "
    "qk_layernorm apply_residual_connection_post_layernorm apply_query_key_layer_scaling rotary_interleaved "
    "attention_backend init_method_std embedding_init_method_std use_cpu_initialization",
    EXPERTS: "num_moe_experts moe_router_topk moe_ffn_hidden_size moe_layer_freq moe_router_load_balancing_type "
    "moe_aux_loss_coeff moe_z_loss_coeff moe_router_score_function moe_router_pre_softmax "
    "moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk moe_router_dtype moe_router_fusion "
    "moe_shared_expert_intermediate_size moe_shared_expert_gate moe_grouped_gemm moe_token_dispatcher_type "
    "moe_permute_fusion expert_model_parallel_size expert_tensor_parallel_size",
    TRAINING: "calculate_per_token_loss deterministic_mode test_mode",
    PRECISION: "fp16 bf16 fp8 fp8_recipe fp8_margin fp8_amax_history_len fp8_amax_compute_algo "
    "attention_softmax_in_fp32 disable_bf16_reduced_precision_matmul masked_softmax_fusion bias_dropout_fusion "
    "apply_rope_fusion persist_layer_norm gradient_accumulation_fusion cross_entropy_loss_fusion "
    "cross_entropy_fusion_impl",
    PARALLELISM: "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size cp_comm_type "
    "hierarchical_context_parallel_sizes sequence_parallel",
    RECOMPUTATION: "recompute_granularity recompute_method recompute_num_layers recompute_modules",
}
"""Fields of Megatron Core's ``TransformerConfig`` that have a flag."""
OPTIMIZER_FIELDS = {
    LEARNING_RATE: "lr min_lr decoupled_lr decoupled_min_lr",
    OPTIMIZER: "weight_decay apply_wd_to_qk_layernorm optimizer adam_beta1 adam_beta2 adam_eps decoupled_weight_decay "
    "muon_momentum muon_split_qkv muon_num_ns_steps muon_tp_mode muon_extra_scale_factor clip_grad "
    "optimizer_cpu_offload optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d pin_cpu_grads",
    PRECISION: "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis",
}
"""Fields of ``OptimizerConfig`` that have a flag."""
DDP_FIELDS = {
    PRECISION: "grad_reduce_in_fp32",
    PARALLELISM: "overlap_grad_reduce overlap_param_gather bucket_size pad_buckets_for_high_nccl_busbw "
    "average_in_collective",
}
"""Fields of ``DistributedDataParallelConfig`` that have a flag."""


def layer_pattern(text: str) -> int | list[int]:
    """Return stock's pattern of layers: an interval, or a list with a number for each layer, such as ``[0]*3+[1]``.

    Raises:
        ArgumentTypeError: `text` is neither.
    """
    problem = argparse.ArgumentTypeError(f"{text!r} is neither a number above 0 nor a list of 0 and 1. Give one.")
    is_arithmetic = re.fullmatch(r"(?:[][()+,\d\s]|(?<!\*)\*)+", text)
    try:
        pattern: int | list[int] = eval(text.strip() if is_arithmetic else "")  # stock evaluates any text
        is_valid = set(pattern) <= {0, 1} if isinstance(pattern, list) else pattern > 0
    except (IndexError, SyntaxError, TypeError):
        raise problem from None
    if not is_valid:
        raise problem
    return pattern


DIFFERENCES: dict[str, dict[str, Any]] = {
    # names and defaults of stock that Megatron Core's dataclasses do not have
    "masked_softmax_fusion": {"name": "--no-masked-softmax-fusion", "default": True},
    "bias_dropout_fusion": {"name": "--no-bias-dropout-fusion", "default": True},
    "apply_rope_fusion": {"name": "--no-rope-fusion", "default": True},
    "persist_layer_norm": {"name": "--no-persist-layer-norm", "default": True},
    "gradient_accumulation_fusion": {"name": "--no-gradient-accumulation-fusion", "default": True},
    "attention_softmax_in_fp32": {"default": False},
    "use_cpu_initialization": {"default": False},
    "min_lr": {"default": 0.0},
    "optimizer_offload_fraction": {"default": 1.0},
    "pin_cpu_grads": {"name": "--no-pin-cpu-grads"},
    "muon_split_qkv": {"name": "--muon-no-split-qkv"},
    "num_moe_experts": {"name": "--num-experts", "help": "experts in each layer's feed-forward part"},
    "moe_layer_freq": {
        "type": layer_pattern,
        "help": "layers with experts: every N-th from the first on, or a list like '([0]+[1]*3)*8' with 1 for each",
    },
    "moe_router_load_balancing_type": {"type": str, "choices": ("aux_loss", "seq_aux_loss", "sinkhorn", "none")},
    "moe_aux_loss_coeff": {"type": float},
    "moe_token_dispatcher_type": {"choices": ("allgather", "alltoall")},
    "initial_loss_scale": {"type": float},
    "grad_reduce_in_fp32": {"name": "--accumulate-allreduce-grads-in-fp32"},
    "bucket_size": {"name": "--ddp-bucket-size"},
    "pad_buckets_for_high_nccl_busbw": {"name": "--ddp-pad-buckets-for-high-nccl-busbw"},
    "average_in_collective": {"name": "--ddp-average-in-collective"},
    # with None Megatron Core uses its default
    "fp8_margin": {"default": None},
    "fp8_amax_history_len": {"default": None},
    "fp8_amax_compute_algo": {"default": None},
    # values
    "fp8_recipe": {"default": None, "choices": ("delayed", "tensorwise")},
    "attention_backend": {"choices": ("auto", "flash", "fused", "unfused", "local")},
    "cp_comm_type": {"choices": ("p2p", "all_gather", "a2a", "a2a+p2p")},
    "recompute_modules": {"choices": ("core_attn", "mlp"), "metavar": "MODULE"},
    "muon_tp_mode": {"default": "distributed", "choices": ("blockwise", "distributed")},
    "optimizer": {
        "choices": ("adam", "muon"),
        "help": "the active block's optimizer: adam (AdamW, unless --no-decoupled-weight-decay), or muon for matrices "
        "of layers and adam for everything else",
    },
    "cross_entropy_loss_fusion": {
        "default": None,
        "help": "fuse the loss; default: --cross-entropy-fusion-impl linear above 1 GiB of a micro-batch's logits",
    },
    "cross_entropy_fusion_impl": {
        "choices": ("native", "linear"),
        "help": "linear: head and loss together, with the logits of a few tokens at a time; not bit-equal",
    },
    # help where that of Megatron Core describes something else
    "ffn_hidden_size": {
        "help": "inner width of the feed-forward part; default 4 x --hidden-size, with --swiglu two thirds of that in "
        "multiples of 64"
    },
    "num_query_groups": {"help": "key-value heads, with --group-query-attention"},
    "clip_grad": {"help": "clip the active block's gradient, except matrices of an int8 momentum; 0 never clips"},
    "optimizer_cpu_offload": {
        "help": "baseline of full training: optimizer and its state in host memory (needs --bcd-num-blocks 1, a GPU)"
    },
}
"""What differs from the dataclass field, by field."""

_RANGES: dict[Range, str] = {
    AT_LEAST_1: "num_layers hidden_size num_attention_heads ffn_hidden_size kv_channels num_query_groups "
    "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size recompute_num_layers bucket_size "
    "hysteresis loss_scale_window muon_num_ns_steps num_moe_experts moe_router_topk moe_ffn_hidden_size "
    "moe_router_num_groups moe_router_group_topk moe_shared_expert_intermediate_size expert_model_parallel_size "
    "expert_tensor_parallel_size",
    AT_LEAST_0: "min_lr decoupled_min_lr weight_decay clip_grad moe_aux_loss_coeff moe_z_loss_coeff",
    ABOVE_0: "lr decoupled_lr adam_eps layernorm_epsilon init_method_std embedding_init_method_std loss_scale "
    "initial_loss_scale min_loss_scale muon_extra_scale_factor moe_router_topk_scaling_factor",
    BELOW_1: "hidden_dropout attention_dropout adam_beta1 adam_beta2 muon_momentum",
    SHARE: "optimizer_offload_fraction",
}
CORE_RANGES = {field: range for range, fields in _RANGES.items() for field in fields.split()}
"""The ranges of Megatron Core's fields, by field. Our own fields have theirs in `config.sections`."""


@dataclass(frozen=True, kw_only=True)
class StockSwitches:
    """Switches of stock that set no field of Megatron Core's classes, or one that its versions name differently.

    ``derive.py`` derives other values from them.
    """

    group_query_attention: bool = option(
        False, "heads share keys and values in --num-query-groups groups", group=NETWORK
    )
    use_rotary_position_embeddings: bool = option(False, "--position-embedding-type rope", group=NETWORK)
    bias_gelu_fusion: bool = option(True, "fused bias and GELU, on GPUs", group=PRECISION)
    bias_swiglu_fusion: bool = option(True, "fused bias and SwiGLU, on GPUs", group=PRECISION)
    grad_reduce_in_bf16: bool = option(False, "with --bf16: accumulate and reduce gradients in it", group=PRECISION)
    muon_use_nesterov: bool = option(False, "Nesterov momentum in Muon", group=OPTIMIZER)
    recompute_activations: bool = option(False, "--recompute-granularity selective", group=RECOMPUTATION)


ALIASES = {
    "save_interval": ("--persistent-save-interval",),
    "use_checkpoint_opt_param_scheduler": ("--use-checkpoint-opt_param-scheduler",),
    "muon_use_nesterov": ("--muon-nesterov",),
}
"""Further names of flags, by field."""

BELONG_TO = {
    "--save": "save_interval save_retain_interval async_save keep_last_checkpoints",
    "--load": "exit_on_missing_checkpoint ckpt_step finetune",
    "--save-hf": "save_hf_interval",
    "--group-query-attention": "num_query_groups",
    "--num-experts": TRANSFORMER_FIELDS[EXPERTS].replace("num_moe_experts ", ""),
    "--position-embedding-type=rope --use-rotary-position-embeddings": "rotary_base rotary_percent "
    "rotary_interleaved use_rope_scaling",
    "--recompute-granularity=full": "recompute_method recompute_num_layers",
    "--recompute-granularity=selective --recompute-activations": "recompute_modules",
    "--tensor-model-parallel-size": "sequence_parallel",
    "--recompute --bcd-layers-on=auto --bcd-schedule=breadth-first": "recompute_memory_gib",
    "--optimizer-cpu-offload": "optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d pin_cpu_grads",
    "--cross-entropy-loss-fusion": "cross_entropy_fusion_impl",
    "--optimizer=muon": "muon_momentum muon_use_nesterov muon_extra_scale_factor muon_momentum_dtype muon_grad_dtype",
    "--optimizer=muon --bcd-inactive-update=orthogonal": "muon_num_ns_steps muon_tp_mode muon_gram_iteration",
    "--optimizer=muon --bcd-inactive-update=orthogonal --bcd-inactive-update=factored": "muon_split_qkv",
    "--overlap-grad-reduce": "overlap_param_gather",
    "--bf16": "grad_reduce_in_bf16",
    "--bf16 --fp16": "bcd_main_params",
    "--fp8-format": "fp8_recipe fp8_margin fp8_amax_history_len fp8_amax_compute_algo",
    "--decoupled-lr": "decoupled_min_lr",
    "--weight-decay-incr-style": "start_weight_decay end_weight_decay",
    "--eval-iters!=0": "eval_fixed full_validation",
    "--no-mock-data": "full_validation",
    "--sft": "sft_prompt_format sft_ignore_keys sft_skip_bad_records sft_packing sft_drop_long num_epochs",
    "--profile": "use_pytorch_profiler profile_step_start profile_step_end profile_ranks",
    "--context-parallel-size": "cp_comm_type",
    "--bcd-switch=plateau": "bcd_plateau_window bcd_plateau_min_improvement",
    "--bcd-layers-on=host": "bcd_resident_layers",
    "--bcd-schedule=breadth-first": "bcd_layers_per_pass bcd_saved_inputs bcd_saved_activations",
    "--bcd-saved-activations=auto": "bcd_passes_on_host",
    "--bcd-inactive-update": "bcd_inactive_lr_ratio bcd_inactive_grad_dtype",
}
"""Conditions (see ``flags.holds``), and the fields whose flags have no effect unless one of them is met."""

_INSTEAD = {
    "Train every layer with --bcd-preset finetune (6 bytes a parameter), or train LoRA with peft.": (
        "--bcd-low-rank --bcd-low-rank-alpha --bcd-low-rank-layers --bcd-low-rank-lr-ratio --save-adapters"
    ),
    "Leave it out, and give --bcd-order ascending, descending or random.": "--bcd-greedy-microbatches",
    "Leave it out: --lr-warmup-iters and the run's schedule apply to all blocks and phases.": (
        "--bcd-phase-warmup-steps --bcd-block-lr-multipliers"
    ),
    "Leave it out, and stop the run when its validation loss is low enough: it saves and resumes.": (
        "--bcd-stop-cycle-improvement"
    ),
    "Leave it out, or give --bcd-plateau-window or --bcd-plateau-min-improvement.": (
        "--bcd-min-steps-per-block --bcd-max-steps-per-block"
    ),
    "Leave it out: every inactive layer is updated.": "--bcd-inactive-layers --bcd-resting-layers",
    "Leave it out: a CPU runs Megatron Core's own functions.": "--cpu-kernels",
    "Leave it out: forward-only stages run ahead as far as that gains anything.": "--bcd-run-ahead",
    "Leave it out, and give tools/generate.py a folder of --save-hf.": "--eval-generate --eval-generate-tokens",
    "Leave it out: it stores the outputs in the run's precision, and takes at most half of the free disk space.": (
        "--bcd-prefix-cache-dtype --bcd-prefix-cache-max-gib"
    ),
    "Leave it out, to cut long answers, or give --sft-drop-long.": "--sft-refuse-long",
    "Delete the checkpoints of the other run, or give another --save.": "--overwrite-checkpoints",
    "Write the flags into a script; --dry-run prints what would run.": "--config --print-config",
    "Leave it out, or give a longer --outer-interval.": "--outer-delay",
    "Leave it out: data-parallel ranks always shard the optimizer state.": "--no-use-distributed-optimizer",
    "Give --bcd-layers-on.": "--bcd-frozen-weights",
    "Give --bcd-inactive-update.": "--bcd-resting-update",
    "Give --bcd-inactive-lr-ratio.": "--bcd-resting-lr-ratio",
    "Give --bcd-inactive-grad-dtype.": "--bcd-resting-grad-dtype",
}
REMOVED = {name: f"{name}: removed. {instead}" for instead, names in _INSTEAD.items() for name in names.split()}
"""The error message of each flag that this program had and no longer accepts."""
UNSUPPORTED = {
    "experts are balanced by losses, and every token reaches its experts": (
        "--moe-router-enable-expert-bias --moe-router-bias-update-rate --moe-expert-capacity-factor "
        "--moe-pad-expert- --moe-token-drop-policy --moe-router-padding-for- --moe-router-force-load-balancing "
        "--moe-input-jitter-eps --moe-enable-routing-replay"
    ),
    "experts are Megatron Core's, one by one or with Transformer Engine's grouped products": (
        "--moe-enable-deepep --moe-deepep- --moe-flex- --moe-hybridep- --moe-latent-size --moe-extended-tp "
        "--moe-use-upcycling --moe-upcycling- --moe-use-legacy-grouped-gemm --moe-apply-probs-on-input "
        "--moe-shared-expert-overlap --moe-layer-recompute --overlap-moe-"
    ),
    "all layers are the same transformer layer": "--heterogeneous- --spec --mtp-",
    "give --load-hf, with the folder of a config.json, and --transformer-impl transformers": (
        "--experimental-attention-variant --attention-output-gate --qk-clip --qk-l2-norm --multi-latent-attention "
        "--hybrid- --is-hybrid-model --rope-type --enable-gpt-oss --softmax-type --window-size "
        "--window-attn-skip-freq --quick-geglu --activation-func-clamp-value --glu-linear-offset --no-rope-freq "
        "--rotary-scaling-factor --yarn- --no-yarn- --mscale"
    ),
    "weights are drawn as --init-method-std says": "--init-method-xavier-uniform --use-mup --mup-",
    "weights are drawn alike on all data-parallel ranks": "--data-parallel-random-init",
    "Muon is quintic, its scale spectral, and Adam steps the rest": (
        "--muon-coefficient-type --muon-scale-mode --muon-scalar-optimizer --lion-"
    ),
    "FP8 is supported only as --fp8-format with delayed scaling or a scale a tensor": (
        "--fp4- --fp8-quantizer-factory --no-fp8-wgrad --disable-fp8-wgrad --first-last-layers-bf16 "
        "--num-layers-at- --kitchen- --use-kitchen --te-precision-config-file --fp8-output-proj"
    ),
    "weights are not sharded over data-parallel ranks; the optimizer state is": (
        "--use-megatron-fsdp --use-custom-fsdp --use-torch-fsdp2 --tensor-parallel-num-weight-shards"
    ),
    "activations stay on the device; give --recompute-activations": (
        "--cpu-offloading --offload-modules --fine-grained-activation-offloading --distribute-saved-activations"
    ),
    "activations, loss and main parameters have the precision of --bf16, --fp16 or fp32": (
        "--fp32-residual-connection --fp16-lm-cross-entropy --main-params-dtype --batch-invariant-mode"
    ),
    "give --adam-moments-dtype int8": "--exp-avg-dtype --exp-avg-sq-dtype",
    "give --grad-reduce-in-bf16": "--main-grads-dtype",
    "give --profile, which shows each rank's time": "--log-straggler --straggler-",
    "only matrices have weight decay; --apply-wd-to-qk-layernorm adds norms": "--no-weight-decay-cond-type",
    "only --use-rope-scaling scales positions": "--rotary-seq-len-interpolation-factor",
    "give parallel sizes; a checkpoint fits all of them": "--use-mp-args-from-checkpoint-args",
    "a run starts from --load or --load-hf; tools/convert_checkpoint.py converts": (
        "--ckpt-convert- --load-main-params-from-ckpt --pretrained-checkpoint --override-ckpt-iteration"
    ),
    "give --num-layers and --seq-length": "--encoder-num-layers --encoder-seq-length",
    "the vocabulary is that of the tokenizer's files and --make-vocab-size-divisible-by": (
        "--vocab-extra-ids --padded-vocab-size --tokenizer- --tiktoken-special-tokens --allow-ambiguous-pad-tokens "
        "--no-pad-vocab-size --disable-pad-vocab-size --no-tokenizer- --disable-tokenizer- --null-tokenizer-"
    ),
    "give --pipeline-model-parallel-layout": "--decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers",
    "give --data-path, or --train-data-path and its relatives": "--data-args-path --per-split-data-args-path",
    "samples are read in the dataset's order; --bcd-sample-ratio draws others in each phase": "--dataloader-type",
    "data are prepared before the run; --sft reads records": (
        "--fim-data --finetune- --sft-tokenizer-prompt-format --multiple-validation-sets --validation-set-names "
        "--chat-template --dataloader-inter-document-masking"
    ),
    "every step is trained, with the batch size that is given": (
        "--iterations-to-skip --phase-transition-iterations --decrease-batch-size-if-needed --fake-process-group "
        "--freeze-all-layers --step-batch-size-schedule --eval-global-batch-size --eval-micro-batch-size "
        "--start-eval-at-iter --fault-injector-"
    ),
    "this trains language models on text": "--perform-rl-step --export- --modelopt- --logits-",
    "write the flags into a script": "--yaml-cfg",
}
"""Flags of stock that would train something else or are not supported: the reason, and how they start."""
_HARMLESS = {
    **dict.fromkeys(("--main-params-dtype", "--main-grads-dtype", "--exp-avg-dtype", "--exp-avg-sq-dtype"), ["fp32"]),
    "--dataloader-type": ["single"],
    "--muon-scale-mode": ["spectral"],
    "--softmax-type": ["vanilla"],
    "--rotary-seq-len-interpolation-factor": ["1"],
}
"""The value of an unsupported flag that asks for what this program does anyway."""


@functools.cache
def stock_flags() -> frozenset[str]:
    """Return every flag of stock Megatron-LM, supported or not."""
    file = importlib.resources.files("megatron.bcd.arguments") / "megatron_flag_names.txt"
    lines = file.read_text(encoding="utf-8").splitlines()
    return frozenset(name for line in lines for name in line.split("#")[0].split())


def why_unsupported(name: str) -> str | None:
    """Return why a flag of stock is an error, or None if it is not an error or not a flag of stock."""
    for why, text in UNSUPPORTED.items():
        starts = text.split()
        if name in starts or name in stock_flags() and name.startswith(tuple(starts)):
            return why
    return None


def has_no_effect(name: str, values: Sequence[str]) -> bool:
    """Return whether a flag that sets no field may be ignored, because it is a flag of stock."""
    return name in stock_flags() and (why_unsupported(name) is None or _HARMLESS.get(name) == list(values))
