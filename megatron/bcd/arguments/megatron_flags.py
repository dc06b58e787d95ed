"""The supported flags of Megatron-LM (release core_v0.16.1): data only, no code.

A flag's type, default and help come from the Megatron Core field that it sets (``flags.py``); a row holds only what
differs from that. Fields without a row are refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.bcd.arguments.core_flag import CoreFlag
from megatron.bcd.arguments.flag_groups import (
    LEARNING_RATE,
    NETWORK,
    OPTIMIZER,
    PARALLELISM,
    PRECISION,
    RECOMPUTATION,
    TRAINING,
)
from megatron.bcd.arguments.parallel_flags import PARALLEL_FLAGS

TRANSFORMER_FLAGS = (
    CoreFlag(field="num_layers", group=NETWORK, default=None, help="transformer layers of the whole model"),
    CoreFlag(field="hidden_size", group=NETWORK, default=None, help="width of the residual stream"),
    CoreFlag(field="num_attention_heads", group=NETWORK, default=None, help="attention heads of a layer"),
    CoreFlag(
        field="ffn_hidden_size",
        group=NETWORK,
        help="inner width of the feed-forward part; default 4 x --hidden-size, with --swiglu two thirds "
        "of that in multiples of 64",
    ),
    CoreFlag(
        field="kv_channels",
        group=NETWORK,
        help="width of one attention head; default --hidden-size / --num-attention-heads",
    ),
    CoreFlag(
        field="num_query_groups",
        group=NETWORK,
        default=1,
        help="key-value heads, with --group-query-attention",
    ),
    CoreFlag(field="hidden_dropout", group=NETWORK),
    CoreFlag(field="attention_dropout", group=NETWORK),
    CoreFlag(field="normalization", group=NETWORK, help="norm of the layers"),
    CoreFlag(field="layernorm_epsilon", group=NETWORK, name="--norm-epsilon"),
    CoreFlag(
        field="layernorm_zero_centered_gamma",
        group=NETWORK,
        name="--apply-layernorm-1p",
        help="norm weights are centred around 0 instead of 1",
    ),
    CoreFlag(
        field="add_bias_linear",
        group=NETWORK,
        name="--disable-bias-linear",
        help="biases in all linear layers",
    ),
    CoreFlag(
        field="add_qkv_bias",
        group=NETWORK,
        help="a bias in the query-key-value projection, with --disable-bias-linear",
    ),
    CoreFlag(field="qk_layernorm", group=NETWORK, help="normalise queries and keys"),
    CoreFlag(
        field="apply_residual_connection_post_layernorm",
        group=NETWORK,
        help="take the residual after the norm, as BERT does",
    ),
    CoreFlag(
        field="apply_query_key_layer_scaling",
        group=NETWORK,
        help="scale attention scores by 1 / layer number",
    ),
    CoreFlag(
        field="rotary_interleaved",
        group=NETWORK,
        help="rotate neighbouring pairs (RoFormer) instead of first and second half (LLaMA)",
    ),
    CoreFlag(
        field="attention_backend",
        group=NETWORK,
        choices=("auto", "flash", "fused", "unfused", "local"),
        help="attention kernel; without Transformer Engine, unfused is Megatron Core's own and every "
        "other value PyTorch's scaled_dot_product_attention",
    ),
    CoreFlag(field="init_method_std", group=NETWORK, help="standard deviation of the initial weights"),
    CoreFlag(
        field="embedding_init_method_std",
        group=NETWORK,
        help="standard deviation of the initial embedding; default --init-method-std",
    ),
    CoreFlag(
        field="use_cpu_initialization",
        group=NETWORK,
        help="draw initial weights on the CPU, the same ones for every tensor parallel size",
    ),
    CoreFlag(
        field="calculate_per_token_loss",
        group=TRAINING,
        help="weight every token of a step equally, instead of every microbatch",
    ),
    CoreFlag(field="deterministic_mode", group=TRAINING),
    CoreFlag(
        field="test_mode",
        group=TRAINING,
        help="with --qk-layernorm: compare the norms of queries and keys over the data and tensor parallel ranks, in "
        "every forward pass",
    ),
    CoreFlag(field="fp16", group=PRECISION, also=("optimizer",)),
    CoreFlag(field="bf16", group=PRECISION, also=("optimizer",)),
    CoreFlag(
        field="fp8",
        group=PRECISION,
        name="--fp8-format",
        help="matrix products of the layers in 8 bits, with Transformer Engine: e4m3, or hybrid, which has e5m2 for "
        "gradients",
    ),
    CoreFlag(field="fp8_recipe", group=PRECISION, default=None, choices=("delayed",), help="scaling of 8-bit tensors"),
    CoreFlag(field="fp8_margin", group=PRECISION, default=None, help="the scale is 2 to this power smaller"),
    CoreFlag(field="fp8_amax_history_len", group=PRECISION, default=None, help="steps that decide the scale"),
    CoreFlag(field="fp8_amax_compute_algo", group=PRECISION, default=None, help="which of these steps decides"),
    CoreFlag(field="attention_softmax_in_fp32", group=PRECISION, default=False),
    CoreFlag(
        field="disable_bf16_reduced_precision_matmul",
        group=PRECISION,
        help="keep bf16 matrix products from accumulating in reduced precision",
    ),
    CoreFlag(
        field="masked_softmax_fusion",
        group=PRECISION,
        name="--no-masked-softmax-fusion",
        default=True,
        help="fused mask and softmax kernel, where installed",
    ),
    CoreFlag(
        field="bias_dropout_fusion",
        group=PRECISION,
        name="--no-bias-dropout-fusion",
        default=True,
        help="fused bias, dropout and residual, on GPUs",
    ),
    CoreFlag(
        field="apply_rope_fusion",
        group=PRECISION,
        name="--no-rope-fusion",
        default=True,
        help="fused rotary embedding, with Transformer Engine",
    ),
    CoreFlag(
        field="persist_layer_norm",
        group=PRECISION,
        name="--no-persist-layer-norm",
        default=True,
        help="persistent fused layer norm kernel, with Transformer Engine",
    ),
    CoreFlag(
        field="gradient_accumulation_fusion",
        group=PRECISION,
        name="--no-gradient-accumulation-fusion",
        default=True,
        help="accumulate weight gradients inside the matrix product, where installed",
    ),
    CoreFlag(field="cross_entropy_loss_fusion", group=PRECISION, help="fused cross entropy"),
    *PARALLEL_FLAGS,
    CoreFlag(field="recompute_granularity", group=RECOMPUTATION, help="whole layers, or only --recompute-modules"),
    CoreFlag(
        field="recompute_method",
        group=RECOMPUTATION,
        help="with full: in chunks of --recompute-num-layers layers (uniform), or the first "
        "--recompute-num-layers of each stage (block)",
    ),
    CoreFlag(field="recompute_num_layers", group=RECOMPUTATION, help="number of layers for --recompute-method"),
    CoreFlag(
        field="recompute_modules",
        group=RECOMPUTATION,
        choices=("core_attn", "layernorm", "mlp"),
        help="modules that selective recomputes, default core_attn; one or more of",
    ),
    CoreFlag(
        field="distribute_saved_activations",
        group=RECOMPUTATION,
        help="split the saved layer inputs over the tensor parallel ranks",
    ),
)

OPTIMIZER_FLAGS = (
    CoreFlag(field="lr", group=LEARNING_RATE, help="learning rate after the warm-up"),
    CoreFlag(field="min_lr", group=LEARNING_RATE, default=0.0, help="learning rate at the end of the decay"),
    CoreFlag(
        field="decoupled_lr",
        group=LEARNING_RATE,
        help="learning rate of embedding and output head; default --lr",
    ),
    CoreFlag(
        field="decoupled_min_lr",
        group=LEARNING_RATE,
        help="the same at the end of the decay; default --min-lr",
    ),
    CoreFlag(field="weight_decay", group=OPTIMIZER, help="weight decay; biases and norms have none"),
    CoreFlag(
        field="apply_wd_to_qk_layernorm",
        group=OPTIMIZER,
        help="weight decay on the norms of queries and keys too",
    ),
    CoreFlag(
        field="optimizer",
        group=OPTIMIZER,
        help="the active block's optimizer: adam (AdamW, unless --no-decoupled-weight-decay); sgd with momentum, "
        "which has no distributed optimizer; or muon for matrices of layers and adam for everything else",
        choices=("adam", "sgd", "muon"),
    ),
    CoreFlag(field="adam_beta1", group=OPTIMIZER, help="decay of Adam's first moment"),
    CoreFlag(field="adam_beta2", group=OPTIMIZER, help="decay of Adam's second moment"),
    CoreFlag(field="adam_eps", group=OPTIMIZER),
    CoreFlag(
        field="decoupled_weight_decay",
        group=OPTIMIZER,
        help="weight decay apart from the gradient, AdamW; without it part of the gradient, plain Adam",
    ),
    CoreFlag(field="sgd_momentum", group=OPTIMIZER, help="momentum of SGD; 0 keeps no state"),
    CoreFlag(field="muon_momentum", group=OPTIMIZER, help="decay of Muon's momentum"),
    CoreFlag(field="muon_use_nesterov", group=OPTIMIZER, help="Nesterov's form of Muon's momentum"),
    CoreFlag(
        field="muon_split_qkv",
        group=OPTIMIZER,
        name="--muon-no-split-qkv",
        help="orthogonalise queries, keys and values apart",
    ),
    CoreFlag(
        field="muon_scale_mode",
        group=OPTIMIZER,
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
        help="factor of Muon's update from the matrix's shape; spectral gives it RMS 1",
    ),
    CoreFlag(field="muon_num_ns_steps", group=OPTIMIZER, help="Newton-Schulz iterations of an orthogonalisation"),
    CoreFlag(
        field="muon_tp_mode",
        group=OPTIMIZER,
        default="distributed",
        choices=("blockwise", "duplicated", "distributed"),
        help="orthogonalisation with tensor parallelism: blockwise = each rank its slice alone; duplicated = every "
        "rank the gathered matrix; distributed = the whole matrix, computed together",
    ),
    CoreFlag(
        field="muon_extra_scale_factor",
        group=OPTIMIZER,
        help="further factor of Muon's update; 0.2 with spectral suits Adam's learning rates",
    ),
    CoreFlag(
        field="clip_grad",
        group=OPTIMIZER,
        help="clip the active block's gradient to this norm; 0 never clips",
    ),
    CoreFlag(
        field="optimizer_cpu_offload",
        group=OPTIMIZER,
        help="baseline of full training: optimizer state and optimizer in host memory (needs --bcd-num-blocks 1 and a "
        "GPU)",
    ),
    CoreFlag(
        field="optimizer_offload_fraction",
        group=OPTIMIZER,
        default=1.0,
        help="share of the optimizer that is in host memory",
    ),
    CoreFlag(
        field="overlap_cpu_optimizer_d2h_h2d",
        group=OPTIMIZER,
        help="with offload: step one parameter while others are copied to and from the host",
    ),
    CoreFlag(
        field="pin_cpu_grads",
        group=OPTIMIZER,
        name="--no-pin-cpu-grads",
        help="with offload: gradients in page-locked memory",
    ),
    CoreFlag(field="loss_scale", group=PRECISION, help="fixed fp16 loss scale; default dynamic"),
    CoreFlag(field="initial_loss_scale", group=PRECISION, type=float, help="first dynamic fp16 loss scale"),
    CoreFlag(field="min_loss_scale", group=PRECISION, help="smallest dynamic fp16 loss scale"),
    CoreFlag(
        field="loss_scale_window",
        group=PRECISION,
        help="steps without overflow before the loss scale doubles",
    ),
    CoreFlag(field="hysteresis", group=PRECISION, help="overflows before the loss scale is halved"),
)

DDP_FLAGS = (
    CoreFlag(
        field="grad_reduce_in_fp32",
        group=PRECISION,
        name="--accumulate-allreduce-grads-in-fp32",
        help="accumulate and reduce gradients in fp32; with --bf16 always, unless --grad-reduce-in-bf16",
    ),
    CoreFlag(
        field="overlap_grad_reduce",
        group=PARALLELISM,
        help="reduce gradients during the backward pass",
    ),
    CoreFlag(
        field="overlap_param_gather",
        group=PARALLELISM,
        also=("optimizer",),
        help="gather updated weights during the forward pass",
    ),
    CoreFlag(
        field="bucket_size",
        group=PARALLELISM,
        name="--ddp-bucket-size",
        help="parameters of one bucket, with --overlap-grad-reduce; default max(40000000, 1000000 x data "
        "parallel size)",
    ),
    CoreFlag(
        field="pad_buckets_for_high_nccl_busbw",
        group=PARALLELISM,
        name="--ddp-pad-buckets-for-high-nccl-busbw",
        help="bucket sizes that suit NCCL on many ranks",
    ),
    CoreFlag(
        field="average_in_collective",
        group=PARALLELISM,
        name="--ddp-average-in-collective",
        help="average gradients inside the collective instead of dividing them first",
    ),
)


@dataclass(frozen=True, kw_only=True)
class DerivedFlag:
    """A stock flag that sets no field of its own name; ``derive.py`` derives other values from it."""

    field: str
    group: str
    help: str
    default: bool = False


DERIVED_FLAGS = (
    DerivedFlag(
        field="group_query_attention",
        group=NETWORK,
        help="heads share keys and values in --num-query-groups groups",
    ),
    DerivedFlag(
        field="use_rotary_position_embeddings",
        group=NETWORK,
        help="the same as --position-embedding-type rope",
    ),
    DerivedFlag(field="bias_gelu_fusion", group=PRECISION, default=True, help="fused bias and GELU, on GPUs"),
    DerivedFlag(field="bias_swiglu_fusion", group=PRECISION, default=True, help="fused bias and SwiGLU, on GPUs"),
    DerivedFlag(
        field="grad_reduce_in_bf16",
        group=PRECISION,
        help="accumulate and reduce gradients in bfloat16, with --bf16",
    ),
    DerivedFlag(
        field="use_precision_aware_optimizer",
        group=OPTIMIZER,
        help="let Transformer Engine's Adam hold the main parameters of bf16 weights, in 2 bytes each; without it main "
        "parameters are in fp32, with the same values",
    ),
    DerivedFlag(
        field="recompute_activations",
        group=RECOMPUTATION,
        help="the same as --recompute-granularity selective",
    ),
)

ALIASES = {
    "save_interval": ("--persistent-save-interval",),
    "use_checkpoint_opt_param_scheduler": ("--use-checkpoint-opt_param-scheduler",),
}
"""Further names of stock for fields of this project's sections."""

REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", "lr")
