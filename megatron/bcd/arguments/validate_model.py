"""Rules of the network, of its parallel layout, of precision and optimizer, and of Megatron Core itself."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.bcd.arguments.rules import Run, flag_name, refuse_unless
from megatron.bcd.blocks.partition import Partition
from megatron.bcd.config import RunConfig
from megatron.bcd.runtime import packages


def check_network(run: Run) -> None:
    hidden, heads = run.hidden_size, run.num_attention_heads
    if run.kv_channels is None:
        refuse_unless(
            hidden % heads == 0,
            f"--hidden-size {hidden} is not divisible by --num-attention-heads "
            f"{heads}: give a multiple of {heads}, or --kv-channels",
        )
    groups = run.num_query_groups
    refuse_unless(
        groups is None or heads % groups == 0,
        f"--num-attention-heads {heads} is not divisible by --num-query-groups {groups}: give a divisor of {heads}",
    )
    refuse_unless(
        not (run.test_mode and run.qk_layernorm and run.normalization == "RMSNorm"),
        "--test-mode with --qk-layernorm needs --normalization LayerNorm: Megatron Core compares biases too",
    )
    activations = [name for name in ("openai_gelu", "squared_relu", "quick_geglu", "swiglu") if getattr(run, name)]
    refuse_unless(
        len(activations) < 2,
        f"{' does not go with '.join(map(flag_name, activations[:2]))}: there is one activation; leave one of them out "
        "(--no-swiglu where --swiglu is the script's default)",
    )


def check_positions(run: Run, given: Mapping[str, Any]) -> None:
    asked = given.get("position_embedding_type", "rope")
    refuse_unless(
        not given.get("use_rotary_position_embeddings") or asked == "rope",
        f"--use-rotary-position-embeddings and --position-embedding-type {asked} are both given: give one of them",
    )
    source = f" of --load-hf {run.load_hf}" if run.load_hf else f" of --load {run.load}" if run.finetune else ""
    remedy = f"give at most that, or --max-position-embeddings {run.seq_length} to train beyond it"
    if run.position_embedding_type == "learned_absolute":
        remedy = "the position table must reach the end of a sequence"
    refuse_unless(
        run.seq_length <= run.max_position_embeddings,
        f"--seq-length {run.seq_length} is larger than --max-position-embeddings {run.max_position_embeddings}"
        f"{source}: {remedy}",
    )
    if run.position_embedding_type == "rope":
        rotated = int((run.kv_channels or run.hidden_size // run.num_attention_heads) * run.rotary_percent)
        refuse_unless(
            rotated >= 2 and rotated % 2 == 0,
            f"--rotary-percent {run.rotary_percent} rotates {rotated} "
            "channels of a head: must be an even number of them",
        )


def check_compatible(run: Run, given: Mapping[str, Any]) -> None:
    """Flags accepted for compatibility, combined with flags that contradict them."""
    if "--no-position-embedding" in given:
        refuse_unless(
            run.position_embedding_type != "learned_absolute",
            "--no-position-embedding: give --position-embedding-type rope or none instead",
        )
    if "--no-create-attention-mask-in-dataloader" in given:
        refuse_unless(
            not run.reset_attention_mask,
            "--no-create-attention-mask-in-dataloader: --reset-attention-mask needs that mask; give only one of them",
        )


def check_parallel(run: Run, world_size: int) -> None:
    tensor, pipeline, context = (
        run.tensor_model_parallel_size,
        run.pipeline_model_parallel_size,
        run.context_parallel_size,
    )
    model_ranks = tensor * pipeline * context
    of_context = f" x --context-parallel-size {context}" if context > 1 else ""
    refuse_unless(
        world_size % model_ranks == 0,
        f"--tensor-model-parallel-size {tensor} x --pipeline-model-parallel-size {pipeline}{of_context} does not "
        f"divide the world size {world_size}: start a multiple of {model_ranks} processes (torchrun --nproc-per-node)",
    )
    for field in ("num_attention_heads", "ffn_hidden_size", "hidden_size"):
        size = getattr(run, field)
        refuse_unless(
            size is None or size % tensor == 0,
            f"{flag_name(field)} {size} is not divisible by "
            f"--tensor-model-parallel-size {tensor}: give a multiple of {tensor}",
        )
    groups = run.num_query_groups
    refuse_unless(
        groups is None or groups % tensor == 0 or tensor % groups == 0,
        f"--num-query-groups {groups}: must be a multiple or a divisor of --tensor-model-parallel-size {tensor}",
    )
    if run.sequence_parallel:
        refuse_unless(
            run.seq_length % tensor == 0,
            f"--seq-length {run.seq_length} is not divisible by "
            f"--tensor-model-parallel-size {tensor}, which --sequence-parallel needs",
        )
    refuse_unless(
        run.adam_moments_dtype != "int8"
        or run.untie_embeddings_and_output_weights
        or not run.use_distributed_optimizer
        or pipeline == 1
        or world_size == tensor * pipeline,
        "--adam-moments-dtype int8 over data parallel ranks of a pipeline with a tied head: the embedding and its copy "
        "would be sharded, and rounded, differently; give bf16, --no-use-distributed-optimizer, or "
        "--untie-embeddings-and-output-weights",
    )


def check_precision(run: Run, given: Mapping[str, Any]) -> None:
    refuse_unless(not (run.fp16 and run.bf16), "--fp16 and --bf16 are both given: give one of them")
    refuse_unless(
        not (given.get("grad_reduce_in_bf16") and given.get("grad_reduce_in_fp32")),
        "--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 are both given: give one of them",
    )


def check_fp8(run: Run, partition: Partition, *, starts: bool) -> None:
    """`starts`: the run is to start on this machine."""
    if run.fp8 is None:
        return
    flag = f"--fp8-format {run.fp8}"
    refuse_unless(run.bf16, f"{flag} needs --bf16")
    refuse_unless(run.transformer_impl != "local", f"{flag} does not go with --transformer-impl local: leave it out")
    # Transformer Engine updates the scales at the end of a pass with gradients only
    refuse_unless(
        not any(map(partition.first_trainable_virtual_stage, range(partition.num_blocks))),
        f"{flag} needs gradients on every pipeline stage in every phase: give --bcd-layout spread, or --bcd-num-blocks "
        "1",
    )
    refuse_unless(
        not starts or packages.has_transformer_engine(), f"{flag} needs Transformer Engine and a GPU; give --bf16 alone"
    )


def check_optimizer(run: Run, given: Mapping[str, Any]) -> None:
    if run.optimizer == "sgd":
        refuse_unless(
            not given.get("use_distributed_optimizer"),
            "--use-distributed-optimizer does not go with --optimizer sgd: Megatron Core's is for Adam only",
        )
    if run.optimizer == "muon":
        _check_muon(run)
    groups, tensor = run.num_query_groups, run.tensor_model_parallel_size
    is_orthogonal = run.optimizer == "muon" or run.bcd_resting_update == "orthogonal"
    # Megatron Core then slices inside of a group: a rank's rows are not whole queries, keys and values
    refuse_unless(
        groups is None or groups >= tensor or not (is_orthogonal and run.muon_split_qkv),
        f"--num-query-groups {groups} is less than --tensor-model-parallel-size {tensor}: queries, keys and values "
        "cannot be orthogonalised apart; give --muon-no-split-qkv",
    )


def _check_muon(run: Run) -> None:
    for flag, is_given, remedy in (
        ("--fp16", run.fp16, "Muon's gradients have no loss scale; give --bf16"),
        ("--loss-scale", run.loss_scale is not None, "Muon's gradients have no loss scale; leave one of them out"),
        ("--calculate-per-token-loss", run.calculate_per_token_loss, "leave one of them out"),
        ("--bcd-order greedy", run.bcd_order == "greedy", "scores count only what Adam steps"),
    ):
        refuse_unless(not is_given, f"--optimizer muon does not go with {flag}: {remedy}")


def check_offload(run: Run, num_blocks: int, given: Mapping[str, Any]) -> None:
    """--optimizer-cpu-offload, stock Megatron-LM's: a baseline, without blocks."""
    if not run.optimizer_cpu_offload:
        return
    for flag, is_right in (
        (f"--optimizer {run.optimizer}", run.optimizer == "adam"),
        ("--no-decoupled-weight-decay", run.decoupled_weight_decay is not False),
        ("--no-use-distributed-optimizer", run.use_distributed_optimizer),
        (f"--adam-moments-dtype {run.adam_moments_dtype}", run.adam_moments_dtype == "fp32"),
    ):
        refuse_unless(is_right, f"--optimizer-cpu-offload does not go with {flag}: leave one of them out")
    refuse_unless(
        not run.fp16 or run.grad_reduce_in_fp32,
        "--optimizer-cpu-offload with --fp16 needs --accumulate-allreduce-grads-in-fp32: the host steps in fp32",
    )
    refuse_unless(
        not run.overlap_cpu_optimizer_d2h_h2d
        or run.optimizer_offload_fraction == 1
        or not given.get("grad_reduce_in_bf16"),
        "--overlap-cpu-optimizer-d2h-h2d with --optimizer-offload-fraction below 1 does not go with "
        "--grad-reduce-in-bf16: Megatron Core would step on gradients that are still being converted; leave one of "
        "them out",
    )
    refuse_unless(
        num_blocks == 1,
        f"--optimizer-cpu-offload is a baseline of full training, and there are {num_blocks} blocks: give "
        "--bcd-num-blocks 1 with it, or leave it out (--bcd-optimizer-state host keeps the state of frozen blocks "
        "in host memory)",
    )


def check_recomputation(run: Run, num_blocks: int, given: Mapping[str, Any]) -> None:
    granularity = run.recompute_granularity
    refuse_unless(
        run.recompute is None or granularity is None,
        f"--recompute auto decides what is recomputed, and so does --recompute-granularity {granularity}: give one of "
        "them",
    )
    if granularity == "full":
        refuse_unless(
            not given.get("recompute_activations"),
            "--recompute-activations and --recompute-granularity full are both given: give one of them",
        )
        refuse_unless(
            run.recompute_method and run.recompute_num_layers,
            "--recompute-granularity full needs --recompute-method and --recompute-num-layers",
        )
    refuse_unless(
        not run.distribute_saved_activations or num_blocks == 1,
        f"--distribute-saved-activations does not work behind frozen layers, and there are {num_blocks} blocks: "
        "leave it out, or give --bcd-num-blocks 1",
    )


def check_core_accepts(config: RunConfig) -> None:
    """The rules of Megatron Core's TransformerConfig: build it once, as on a machine without any fused kernel.

    `check_offload` covers what its OptimizerConfig checks of the fields that flags set; its DDP class checks none.
    """
    transformer = dict(config.transformer)
    transformer |= dict.fromkeys((field for field in transformer if field.endswith("_fusion")), False)
    transformer |= {
        "params_dtype": torch.float32,
        "pipeline_model_parallel_size": 1,
        "attention_backend": AttnBackend[transformer["attention_backend"]],
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            TransformerConfig(**transformer)
    except (AssertionError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split()) or "no reason given"
        raise ValueError(f"Megatron Core refuses these flags: {reason}") from error
