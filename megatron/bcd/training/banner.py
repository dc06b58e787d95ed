"""The start banner: the run, and its memory compared with full-parameter training."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.bcd.blocks.ownership import ownership
from megatron.bcd.blocks.partition import Partition
from megatron.bcd.blocks.schedule import BlockSchedule
from megatron.bcd.blocks.subsets import PhaseSubset
from megatron.bcd.config import RunConfig
from megatron.bcd.config.presets import PRESETS
from megatron.bcd.metrics.schema import BlockSummary, RunSummary
from megatron.bcd.model.builder import count_parameters, unwrap_model
from megatron.bcd.model.implementation import SCALED_DOT_PRODUCT, Implementation
from megatron.bcd.model.transformer_config import describe_activation
from megatron.bcd.pipeline.build import default_run_ahead
from megatron.bcd.planner import cost
from megatron.bcd.planner.run_state import offload_fraction, phase_counts, state_bytes
from megatron.bcd.runtime import collectives, device, distributed, replicas
from megatron.bcd.training.recompute import Recomputation


def summarize(
    *,
    config: RunConfig,
    partition: Partition,
    model: torch.nn.Module,
    vocab_size: int,
    padded_vocab_size: int,
    global_batch_size: int,
    train_iters: int,
    implementation: Implementation,
    block_schedule: BlockSchedule,
    samples: PhaseSubset | None,
    recomputation: Recomputation,
) -> RunSummary:
    """Collect the banner's figures from all ranks; a collective, the same on every rank."""
    num_replicas = replicas.size()
    ranks = collectives.gather_objects(_this_rank(partition, model, is_muon=config.optimizer.optimizer == "muon"))
    # one replica's stages and tensor slices make up the model
    one_replica = [rank for rank in ranks if rank["replica"] == 0]
    per_stage = tuple(
        next(rank["stage_parameters"] for rank in one_replica if rank["stage"] == stage)
        for stage in range(partition.num_stages)
    )
    tied_copy = next(rank["tied_copy"] for rank in one_replica if rank["stage"] == partition.num_stages - 1)
    num_parameters = sum(rank["num_parameters"] for rank in one_replica)
    shares = _shares(one_replica, partition.num_blocks)
    return RunSummary(
        model=_describe_model(config, unwrap_model(model).config, vocab_size, padded_vocab_size),
        parallel=f"{config.describe_ranks(parallel_state.get_data_parallel_world_size())}, {config.precision}",
        parameters_per_stage=per_stage,
        total_parameters=sum(per_stage) - tied_copy,
        blocks=tuple(
            BlockSummary(
                index=block.index,
                layers=partition.describe_layers(block.index),
                extras=", ".join(partition.describe_extras(block.index)),
                share=shares[block.index],
                model_state_bytes=tuple(_state_bytes(config, rank, block.index) for rank in ranks),
            )
            for block in partition.blocks
        ),
        layout=partition.layout,
        phases=block_schedule.describe(),
        full_model_state_bytes=tuple(_full_state_bytes(config, rank) for rank in ranks),
        training=_describe_training(config, global_batch_size, train_iters),
        notes=(
            implementation.describe(),
            *_describe_context(config, implementation),
            *_describe_preset(config),
            *_describe_other_blocks(config, partition, one_replica),
            *_describe_kept_state(config, partition, ranks),
            *_describe_offload(config, max(rank["num_parameters"] for rank in ranks), num_replicas),
            *_describe_stages(config, partition, recomputation),
            *_describe_samples(samples),
            *_describe_prefix_cache(config, partition),
        ),
        warnings=()
        if config.training.skip_train
        else warn_of_dominance(shares, sum(rank["num_of_tokens"] for rank in one_replica) / num_parameters),
    )


def _shares(one_replica: Sequence[Mapping[str, Any]], num_blocks: int) -> list[float]:
    """Of the parameters, by block."""
    num_parameters = sum(rank["num_parameters"] for rank in one_replica)
    return [
        sum(_num_active(rank["counts"][block]) for rank in one_replica) / num_parameters for block in range(num_blocks)
    ]


_DOMINANT = 0.6
"""Share of the parameters from which a block is too large to save much."""


def warn_of_dominance(shares: Sequence[float], of_tokens: float) -> tuple[str, ...]:
    """A line about the largest of several blocks where it holds most of the model, and what helps.

    `shares`: of the parameters, by block; `of_tokens`: that of the word embedding and an output head of its own.
    """
    largest = max(range(len(shares)), key=shares.__getitem__, default=0)
    if len(shares) < 2 or shares[largest] < _DOMINANT:
        return ()
    if of_tokens < _DOMINANT / 2:
        helps = "more blocks or another --bcd-layout divide the layers more evenly"
    else:
        helps = (
            f"{of_tokens:.0%} are the word embedding and the head; a smaller vocabulary (tools/train_tokenizer.py) or "
            "a wider or deeper model makes them a smaller part, and --adam-moments-dtype int8 their optimizer state"
        )
    return (
        f"block {largest} holds {shares[largest]:.0%} of the parameters, so its phases need nearly the model state of "
        f"full training: {helps}",
    )


def _state_bytes(config: RunConfig, rank: dict[str, Any], block: int) -> int:
    """Estimated model state of a rank in a phase."""
    return state_bytes(
        config,
        num_parameters=rank["num_parameters"],
        counts=rank["counts"][block],
        num_replicas=replicas.size(),
    )


def _full_state_bytes(config: RunConfig, rank: dict[str, Any]) -> int:
    """Of full-parameter training by stock Megatron-LM: Adam with fp32 moments, or SGD."""
    return cost.model_state_bytes(
        num_parameters=rank["num_parameters"],
        num_active=rank["num_parameters"],
        precision=config.precision,
        optimizer="sgd" if config.optimizer.optimizer == "sgd" else "adam",
        sgd_momentum=config.optimizer.sgd_momentum != 0.0,
        gradients_in_fp32=config.ddp.grad_reduce_in_fp32,
        data_parallel_size=replicas.size(),
        distributed_optimizer=config.training.use_distributed_optimizer,
        offload_fraction=offload_fraction(config),
    )


def _num_active(counts: Mapping[str, int]) -> int:
    return counts["adam"] + counts["muon"]


def _this_rank(partition: Partition, model: torch.nn.Module, *, is_muon: bool) -> dict[str, Any]:
    gpt = unwrap_model(model)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    parameters = dict(gpt.named_parameters())
    sizes = {name: parameter.numel() for name, parameter in parameters.items()}
    owned = {name: ownership(name, partition=partition, stage=stage) for name in parameters}
    between = [name for name, one in owned.items() if not one.is_always_active and one.block is not None]
    matrices = {name for name, one in owned.items() if one.is_matrix and (is_muon or one.resting_in)}
    heads = (parameter for name, parameter in parameters.items() if name.endswith("output_layer.weight"))
    tied_copy = next(heads, None) if partition.tied else None
    return {
        "stage": stage,
        "replica": replicas.rank(),
        "stage_parameters": count_parameters(model),
        "num_parameters": sum(sizes.values()),
        "num_of_tokens": sum(
            size for name, size in sizes.items() if name.endswith(("word_embeddings.weight", "output_layer.weight"))
        ),
        "num_frozen": sum(sizes[name] for name, one in owned.items() if one.is_frozen),
        "num_kept": sum(sizes[name] for name in between if name not in matrices),
        "num_kept_matrix": sum(sizes[name] for name in between if name in matrices),
        "tied_copy": 0
        if tied_copy is None
        else tied_copy.numel() * parallel_state.get_tensor_model_parallel_world_size(),
        "counts": [phase_counts(sizes, owned, block.index, is_muon=is_muon) for block in partition.blocks],
    }


def _describe_model(config: RunConfig, built: TransformerConfig, vocab_size: int, padded_vocab_size: int) -> str:
    is_llama = (
        config.model.position_embedding_type == "rope"
        and config.model.swiglu
        and built.normalization == "RMSNorm"
        and not built.add_bias_linear
    )
    heads, groups = built.num_attention_heads, built.num_query_groups
    parts = (
        "LLaMA" if is_llama else "GPT",
        f"{config.num_layers} layers",
        f"hidden {config.hidden_size}",
        f"{heads} heads" + (f" in {groups} query groups" if groups != heads else ""),
        f"ffn {built.ffn_hidden_size}",
        describe_activation(built),
        f"vocabulary {vocab_size:,} (padded {padded_vocab_size:,})",
        f"sequence {config.model.seq_length:,}",
        f"{'tied' if config.tied else 'untied'} head",
    )
    return ", ".join(parts)


def _describe_context(config: RunConfig, implementation: Implementation) -> tuple[str, ...]:
    kind = config.transformer.get("cp_comm_type")
    if config.context_size == 1:
        return ()
    if implementation.attention != SCALED_DOT_PRODUCT:
        return (f"context parallel ranks exchange keys and values by {kind or 'p2p'}",)
    ignored = "" if kind in (None, "all_gather") else f"; accepted without effect: --cp-comm-type {kind}"
    return (f"context parallel ranks gather keys and values{ignored}",)


def _describe_preset(config: RunConfig) -> tuple[str, ...]:
    name = config.bcd.bcd_preset
    if name is None:
        return ()
    values = vars(config.bcd) | vars(config.optimizer)
    same = {field: value for field, value in PRESETS[name].items() if values[field] == value}
    own = sorted(PRESETS[name].keys() - same)
    flags = [f"--{field.replace('_', '-')}" + ("" if value is True else f" {value}") for field, value in same.items()]
    differs = f"; not {', '.join('--' + field.replace('_', '-') for field in own)}, as given" if own else ""
    return (f"preset {name}: {' '.join(flags)}{differs}",)


def _describe_other_blocks(
    config: RunConfig, partition: Partition, one_replica: Sequence[Mapping[str, Any]]
) -> tuple[str, ...]:
    """What is not trained with the active block, and how."""
    resting = _describe_resting(config)
    if not partition.frozen:
        return resting
    num_frozen = sum(rank["num_frozen"] for rank in one_replica)
    return (
        f"no phase trains {', '.join(sorted(partition.frozen))} (--bcd-frozen), {num_frozen:,} parameters",
        *resting,
    )


def _describe_resting(config: RunConfig) -> tuple[str, ...]:
    bcd = config.bcd
    if bcd.bcd_resting_update == "none":
        return ()
    which = "all other layers" if bcd.bcd_resting_layers == "all" else "layers after the block's first"
    return (
        f"resting update {bcd.bcd_resting_update}: matrices of {which}, {bcd.bcd_resting_lr_ratio:g} of the learning "
        f"rate, gradients in {bcd.bcd_resting_grad_dtype}",
    )


def _describe_kept_state(
    config: RunConfig, partition: Partition, ranks: Sequence[Mapping[str, Any]]
) -> tuple[str, ...]:
    """What is kept in host memory between a block's phases; empty with one block."""
    optimizer = config.optimizer.optimizer
    is_host = config.bcd.bcd_optimizer_state == "host"
    moments = is_host * cost.moment_bytes(
        optimizer,
        sgd_momentum=config.optimizer.sgd_momentum != 0.0,
        adam_moments_dtype=config.kept_moment_dtypes,
    )
    of_matrices = is_host * cost.DTYPE_BYTES[config.bcd.muon_momentum_dtype] if optimizer == "muon" else moments
    sharding: dict[str, Any] = {
        "data_parallel_size": replicas.size(),
        "distributed_optimizer": config.training.use_distributed_optimizer or optimizer == "muon",
    }
    main_params: dict[str, Any] = {"main_params": config.bcd.bcd_main_params == "host", "precision": config.precision}
    # what resting matrices lack of their main parameters stays on the device
    of_matrix: dict[str, Any] = main_params if config.bcd.bcd_resting_update == "none" else {"precision": "fp32"}
    bytes_by_rank = [
        cost.host_state_bytes(num_kept=rank["num_kept"], moments=moments, **main_params, **sharding)
        + cost.host_state_bytes(num_kept=rank["num_kept_matrix"], moments=of_matrices, **of_matrix, **sharding)
        for rank in ranks
    ]
    if partition.num_blocks == 1 or config.training.skip_train or not max(bytes_by_rank):
        return ()
    kept = ["the optimizer's moments"] if is_host and (moments or of_matrices) else []
    names = ("num_kept", "num_kept_matrix") if of_matrix is main_params else ("num_kept",)
    if any(rank[name] for rank in ranks for name in names) and config.bcd.bcd_main_params == "host":
        low = {"fp32": [], "bf16": ["the low 16 bits of main parameters"], "fp16": ["main parameters"]}
        kept += low[config.precision]
    return (f"kept in host memory between phases: {' and '.join(kept)}, {max(bytes_by_rank):,} bytes per rank",)


def _describe_offload(config: RunConfig, num_parameters: int, num_replicas: int) -> tuple[str, ...]:
    fraction = offload_fraction(config)
    if not fraction or config.training.skip_train:
        return ()
    held = math.ceil(cost.OFFLOADED_BYTES * fraction * num_parameters / num_replicas)
    return (
        f"optimizer offloaded to the host, {fraction:.0%} of it: weights, gradients and moments in fp32, {held:,} "
        "bytes of host memory per rank before page-locked memory is rounded up",
    )


def _describe_stages(config: RunConfig, partition: Partition, recomputation: Recomputation) -> tuple[str, ...]:
    return (
        *_describe_cut(config, partition),
        *_describe_pipeline(config, partition),
        *recomputation.describe(partition),
        *_describe_connections(config),
    )


def _describe_cut(config: RunConfig, partition: Partition) -> tuple[str, ...]:
    if config.training.pipeline_cut != "auto" or partition.num_stages == 1:
        return ()
    return (f"--pipeline-cut auto: --pipeline-model-parallel-layout {config.training.pipeline_model_parallel_layout}",)


def _describe_pipeline(config: RunConfig, partition: Partition) -> tuple[str, ...]:
    if partition.num_stages == 1:
        return ()
    if config.bcd.bcd_schedule == "stock":
        return ("pipeline schedule stock: Megatron Core's 1F1B",)
    if partition.num_chunks > 1:
        return (
            f"pipeline schedule bcd: interleaved, {partition.num_chunks} chunks of the model on every stage; "
            f"forward-only chunks by block {', '.join(_forward_only_chunks(partition))}",
        )
    forward_only = [partition.first_trainable_stage(block.index) for block in partition.blocks]
    if not partition.has_prefix:
        return (f"pipeline schedule bcd: no stage runs forward only ({_why_no_prefix(config)})",)
    if not any(forward_only):
        return ("pipeline schedule bcd: every block begins on the first stage, so no stage runs forward only",)
    asked = config.bcd.bcd_run_ahead
    ahead = [
        default_run_ahead(num_stages=partition.num_stages, first_trainable=first_trainable)
        if asked is None
        else asked * (first_trainable > 0)
        for first_trainable in forward_only
    ]
    return (
        f"pipeline schedule bcd: forward-only stages by block {', '.join(map(str, forward_only))}; they run ahead "
        f"{', '.join(map(str, ahead))} microbatches",
    )


def _describe_connections(config: RunConfig) -> tuple[str, ...]:
    if config.tensor_size == 1 or not device.has_cuda():
        return ()
    value = os.environ[distributed.CONNECTIONS]
    warning = "" if value == "1" else ", as given; before Blackwell, tensor-parallel communication overlaps with 1 only"
    return (f"{distributed.CONNECTIONS}={value}{warning}",)


def _forward_only_chunks(partition: Partition) -> list[str]:
    firsts = (partition.first_trainable_virtual_stage(block.index) for block in partition.blocks)
    return [str(first // partition.num_stages) for first in firsts]


def _why_no_prefix(config: RunConfig) -> str:
    bcd = config.bcd
    if bcd.bcd_resting_update != "none" and bcd.bcd_resting_layers == "all":
        return f"--bcd-resting-update {bcd.bcd_resting_update} updates all layers in every phase"
    return f"--bcd-always-active {bcd.bcd_always_active} trains the bottom of the model in every phase"


def _describe_samples(samples: PhaseSubset | None) -> tuple[str, ...]:
    if samples is None:
        return ()
    return (
        f"each phase trains on {samples.size:,} of the {samples.num_samples:,} sequences of an epoch; after "
        f"{math.ceil(samples.num_samples / samples.size):,} phases all have been drawn",
    )


def _describe_prefix_cache(config: RunConfig, partition: Partition) -> tuple[str, ...]:
    root = config.bcd.bcd_prefix_cache
    if root is None:
        return ()
    if not partition.has_prefix:
        return (f"prefix cache: off, no block has a prefix ({_why_no_prefix(config)})",)
    lengths = [len(partition.prefix_layers(block.index)) for block in partition.blocks]
    if not any(lengths):
        return ("prefix cache: off, no block has a prefix (there is one block)",)
    return (
        f"prefix cache {root}: layers before the first active one, by block {', '.join(map(str, lengths))}; kept in "
        f"{config.bcd.bcd_prefix_cache_dtype}",
    )


def _describe_training(config: RunConfig, global_batch_size: int, train_iters: int) -> str:
    training, optimizer = config.training, config.optimizer
    if training.skip_train:
        return "evaluation only"
    dtypes = list(dict.fromkeys(config.moment_dtypes))
    parts = (
        f"{train_iters:,} iterations",
        f"global batch {global_batch_size} of micro-batches of {training.micro_batch_size}",
        f"lr {optimizer.lr} {config.schedule.lr_decay_style}",
        optimizer.optimizer + ("" if dtypes == ["fp32"] else f" with {' and '.join(dtypes)} moments"),
        f"clip {optimizer.clip_grad}",
        f"seed {training.seed}",
    )
    return ", ".join(parts)
