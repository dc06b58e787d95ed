"""Validate a RunConfig before any process group exists and before anything is written.

Each problem is one line that names the flag, what is wrong and what to do. The rules here are those that neither
Megatron Core's TransformerConfig nor the partition into blocks checks. Data and tokenizer files are checked where they
are read.
"""

from __future__ import annotations

import math
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.bcd.arguments import stock
from megatron.bcd.arguments.flags import dashed, flag_name, flag_ranges, holds
from megatron.bcd.blocks.partition import Partition, partition_from_config
from megatron.bcd.blocks.schedule import block_schedule_from_config
from megatron.bcd.config import DataConfig, RunConfig
from megatron.bcd.huggingface.folder import CONFIG, RUN
from megatron.bcd.runtime import device, packages

Run = Any
"""Namespace of all values by field name."""

_SPLIT_FLAGS = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
AT_MOST_ONE = (
    "--swiglu --squared-relu --openai-gelu",
    "--fp16 --bf16",
    "--train-iters --train-samples --num-epochs",
    "--lr-warmup-fraction --lr-warmup-iters --lr-warmup-samples",
)
"""Conditions (see ``flags.holds``) of which no two can be combined."""
CONFLICTS = {
    "--data-path": "--mock-data --train-data-path --valid-data-path --test-data-path",
    "--mock-data": "--train-data-path --valid-data-path --test-data-path --full-validation",
    "--train-iters": "--lr-decay-samples --lr-warmup-samples --lr-wsd-decay-samples",
    "--num-epochs": "--lr-decay-samples --lr-warmup-samples --lr-wsd-decay-samples --rampup-batch-size",
    "--train-samples": "--lr-decay-iters --lr-warmup-iters --lr-wsd-decay-iters",
    "--accumulate-allreduce-grads-in-fp32": "--grad-reduce-in-bf16",
    "--recompute": "--recompute-granularity",
    "--recompute-activations": "--recompute-granularity=full",
    "--pipeline-cut=auto": f"--pipeline-model-parallel-layout {_SPLIT_FLAGS}",
    "--pipeline-model-parallel-layout": _SPLIT_FLAGS,
    # Megatron Core's unfused attention needs the scores of whole sequences
    "--context-parallel-size": "--attention-backend=unfused",
    "--sft": "--mock-data --eod-mask-loss --context-parallel-size",
    "--save-hf": "--skip-train",
    "--num-experts": "--fp8-format --hierarchical-context-parallel-sizes",
    "--optimizer=muon": "--fp16 --loss-scale --calculate-per-token-loss",  # its gradients have no loss scale
    "--bcd-embedding-update=factored": "--decoupled-lr",  # only Megatron Core's optimizer supports it
    "--optimizer-cpu-offload": "--optimizer!=adam --no-decoupled-weight-decay --adam-moments-dtype "
    "--bcd-inactive-update",
    "--bcd-main-params=drop": "--optimizer=muon --bcd-inactive-update",  # these keep main parameters on the device
    "--bcd-inactive-update": "--fp16 --loss-scale",  # the optimizer of all matrices has no loss scale
    # these write frozen layers, or draw them differently on the ranks that share them
    "--bcd-layers-on!=device": "--data-parallel-random-init --fp8-recipe=delayed",
    # these need all gradients of a step at once, or run separate passes
    "--bcd-schedule=breadth-first": "--fp8-recipe=delayed --bcd-run-ahead --optimizer-cpu-offload",
    "--bcd-switch=plateau": "--bcd-steps-per-block",
    "--bcd-stop-cycle-improvement": "--eval-iters=0",
    "--bcd-run-ahead": "--bcd-schedule=stock",
    "--bcd-prefix-cache": "--sequence-parallel --fp8-format",  # a rank that reads the cache would not scale
    "--fp8-recipe=delayed": "--transformer-impl=local",
    "--fp8-recipe=tensorwise": "--transformer-impl=transformer_engine --fp8-margin --fp8-amax-history-len "
    "--fp8-amax-compute-algo",
    # these are Megatron Core's, or need its layers
    "--transformer-impl=transformers": "--tensor-model-parallel-size --context-parallel-size --fp8-recipe=delayed "
    "--recompute --recompute-granularity=selective --cross-entropy-loss-fusion --bcd-prefix-cache",
    # each replica group would decide these by its own samples, or would not divide the samples
    "--lighthouse": "--skip-train --bcd-switch=plateau --bcd-stop-cycle-improvement --bcd-prefix-cache "
    "--rampup-batch-size",
}
"""The conditions that a flag cannot be combined with."""

_GROUP_FLAGS = (
    "--replica-groups --min-replica-groups --replica-id --outer-interval --outer-delay --outer-lr "
    "--outer-momentum --outer-compression --outer-timeout-seconds"
)
_NOT_DIVIDED = "--bcd-prefix-cache --lighthouse --optimizer-cpu-offload --use-cpu-initialization"
"""Conditions that --expert-model-parallel-size above 1 cannot be combined with: passes of some ranks alone, state that
one data-parallel rank holds for all, and weights that all ranks draw alike."""
NEEDS = {
    **dict.fromkeys(_GROUP_FLAGS.split(), "--lighthouse"),
    "--bcd-embedding-update=factored": "--bcd-inactive-update",
    **dict.fromkeys(_SPLIT_FLAGS.split(), "--pipeline-model-parallel-size"),
    "--fp8-format": "--bf16",
    "--transformer-impl=transformers": "--load-hf",
    "--weight-decay-incr-style": "--start-weight-decay --end-weight-decay",
    "--use-pytorch-profiler": "--tensorboard-dir",
    # without a subset a phase uses no sample twice, and with dropout the cache would always repeat the same mask
    "--bcd-prefix-cache": "--bcd-sample-ratio --hidden-dropout=0 --attention-dropout=0 --bcd-schedule=bcd "
    "--bcd-layers-on=device",
}
"""The flags that have to be given with a flag."""

# only --pipeline-cut auto and --pipeline-model-parallel-layout can cut chunks
_NOT_WITH_CHUNKS = f"--bcd-schedule=stock --bcd-run-ahead --context-parallel-size {_SPLIT_FLAGS}"

_MOST = {"num_layers": 10**5, "bcd_num_blocks": 10**5}
"""The program loops over layers and blocks. More than this is taken for a typing error."""
_MOST_OF_ANY = 10**15


def find_problems(
    config: RunConfig,
    values: Mapping[str, Any],
    *,
    given: Mapping[str, Any],
    world_size: int,
    starts: bool = True,
    is_partial: bool = False,
) -> list[str]:
    """Return one line for each rule that the run breaks.

    Args:
        config: the run.
        values: all values by field name, also those of flags that set no field.
        given: the values of the command line.
        world_size: number of ranks.
        starts: the run is going to start on this machine, so its files must be writable.
        is_partial: there are problems already, so values that the rules need may be absent.
    """
    problems = [*_check_ranges(values)]
    if problems:
        return problems
    run = SimpleNamespace(**values)
    partitions: list[Partition] = []
    rules: list[Callable[[], object]] = [
        lambda: _check_required(run),
        lambda: _check_network(run),
        lambda: _check_positions(run, given),
        lambda: _check_experts(run, world_size),
        lambda: _check_parallel(run, world_size),
        lambda: _check_context(run),
        lambda: _check_chunks(config, run, given),
        lambda: partitions.append(partition_from_config(config)),
        lambda: _check_blocks(config, run, partitions[0]),
        lambda: _check_inactive_update(run, partitions[0]),
        lambda: _check_places(run),
        lambda: _check_breadth_first(run, partitions[0], given),
        lambda: _check_groups(config, run, partitions[0]),
        lambda: _check_batch(run, world_size),
        lambda: check_learning_rate(config),
        lambda: _check_data(run),
        lambda: _check_files(run),
        lambda: None if problems else _check_core_accepts(config),  # its messages are less clear
        lambda: _check_machine(run) if starts else None,
    ]
    problems += _check_tables(values, given)
    for rule in rules:
        try:
            rule()
        except ValueError as error:
            problems.append(str(error))
        except Exception:
            if not problems and not is_partial:  # otherwise it may come from a value that is reported already
                raise
    return list(dict.fromkeys(problems))


def require(condition: object, message: str) -> None:
    """Raise ValueError with the message unless the condition is met."""
    if not condition:
        raise ValueError(message)


def _check_ranges(values: Mapping[str, Any]) -> Iterator[str]:
    ranges = flag_ranges()
    for field, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        name = f"{flag_name(field)} {value}"
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{name}: must be a finite number"
        elif isinstance(value, int) and value > (most := _MOST.get(field, _MOST_OF_ANY)):
            yield f"{name}: must be at most {most}"
        elif field in ranges and not ranges[field].contains(value):
            yield f"{name}: must be {ranges[field].text}"


def _check_tables(values: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    derived, conflicting = dict[str, str](), set[str]()
    if values["bcd_layers_on"] != "device" and "bcd_schedule" not in given:  # name the flag that the user gave
        derived["--bcd-schedule=breadth-first"] = "--bcd-layers-on"
    if "fp8_recipe" not in given:
        derived["--fp8-recipe=delayed"] = "--fp8-format"
    pairs = (f"{flag} {other}" for flag, others in CONFLICTS.items() for other in others.split())
    for row in (*AT_MOST_ONE, *pairs):
        flags = [_describe(values, derived.get(flag, flag)) for flag in row.split() if holds(values, flag)]
        if len(flags) > 1:
            conflicting.update(flags)
            yield f"{' and '.join(flags)} cannot be combined. Leave one of them out."
    for flag, needed in NEEDS.items():
        if holds(values, flag) and _describe(values, flag) not in conflicting:
            missing = [need.replace("=", " ") for need in needed.split() if not holds(values, need)]
            if missing:
                yield f"{_describe(values, flag)} needs {' and '.join(missing)}"


def _describe(values: Mapping[str, Any], condition: str) -> str:
    """Return the flag of a condition with its value."""
    name = re.split("!?=", condition)[0]
    value = values.get(name[2:].replace("-", "_"))
    if value is None or isinstance(value, bool | tuple):
        return name
    return f"{name} {value}"


def _check_required(run: Run) -> None:
    missing = [flag_name(field) for field in stock.REQUIRED if getattr(run, field) is None]
    if run.skip_train:
        missing = [flag for flag in missing if flag != "--lr"]
    elif run.train_iters is None and run.train_samples is None and run.num_epochs is None:
        missing.append("--train-iters (or --train-samples" + (", or --num-epochs)" if run.sft else ")"))
    if run.tokenizer_type is None:
        missing.append("--tokenizer-type")
    if not any((run.mock_data, run.data_path, run.train_data_path, run.valid_data_path, run.test_data_path)):
        missing.append("--data-path")
    verb, pronoun = ("is", "it") if len(missing) == 1 else ("are", "them")
    require(not missing, f"{', '.join(missing)} {verb} missing. Give {pronoun}; --help describes every flag.")


def _check_network(run: Run) -> None:
    hidden, heads, groups = run.hidden_size, run.num_attention_heads, run.num_query_groups
    require(
        run.kv_channels is not None or hidden % heads == 0,
        f"--hidden-size {hidden} is not divisible by --num-attention-heads {heads}. Give a multiple, or --kv-channels.",
    )
    require(
        groups is None or heads % groups == 0,
        f"--num-attention-heads {heads} is not divisible by --num-query-groups {groups}. Give a divisor of {heads}.",
    )
    require(
        not (run.test_mode and run.qk_layernorm and run.normalization == "RMSNorm"),
        "--test-mode with --qk-layernorm needs --normalization LayerNorm: Megatron Core compares biases too",
    )


def _check_positions(run: Run, given: Mapping[str, Any]) -> None:
    kind = given.get("position_embedding_type", "rope")
    require(
        kind == "rope" or not given.get("use_rotary_position_embeddings"),
        f"--use-rotary-position-embeddings and --position-embedding-type {kind} cannot be combined",
    )
    require(
        run.position_embedding_type != "learned_absolute" or "--no-position-embedding" not in given,
        "--no-position-embedding: has no meaning here. Give --position-embedding-type rope or none instead.",
    )
    require(
        run.transformer_impl != "transformers" or run.reset_position_ids == run.reset_attention_mask,
        "--reset-position-ids and --reset-attention-mask: transformers separates texts by their positions. Give both.",
    )
    source = f" of --load-hf {run.load_hf}" if run.load_hf else f" of --load {run.load}" if run.finetune else ""
    require(
        run.seq_length <= run.max_position_embeddings,
        f"--seq-length {run.seq_length} is larger than --max-position-embeddings {run.max_position_embeddings}{source}",
    )
    if run.position_embedding_type == "rope":
        rotated = int((run.kv_channels or run.hidden_size // run.num_attention_heads) * run.rotary_percent)
        require(
            rotated >= 2 and rotated % 2 == 0,
            f"--rotary-percent {run.rotary_percent} rotates {rotated} channels of a head: must be an even number",
        )


def _check_experts(run: Run, world_size: int) -> None:
    experts, tensor = run.num_moe_experts, run.tensor_model_parallel_size
    if experts is None:
        return
    size, pattern = run.expert_model_parallel_size, run.moe_layer_freq
    sliced = run.expert_tensor_parallel_size or tensor
    require(
        run.moe_router_topk <= experts,
        f"--moe-router-topk {run.moe_router_topk} is more than --num-experts {experts}",
    )
    require(
        experts % size == 0,
        f"--num-experts {experts} is not divisible by --expert-model-parallel-size {size}",
    )
    require(
        sliced == tensor or (sliced == 1 and size > 1),  # Megatron Core adds no gradients of whole experts over slices
        f"--expert-tensor-parallel-size {sliced}: must be --tensor-model-parallel-size {tensor}, or 1 with "
        "--expert-model-parallel-size above 1",
    )
    ranks = size * sliced * run.pipeline_model_parallel_size
    require(
        world_size % ranks == 0,
        f"--expert-model-parallel-size {size} needs a multiple of {ranks} ranks (with tensor-parallel experts and "
        f"pipeline stages), but the world size is {world_size}. Give a smaller one, or start more processes.",
    )
    given = [condition for condition in _NOT_DIVIDED.split() if size > 1 and holds(vars(run), condition)]
    require(
        not given,
        f"--expert-model-parallel-size {size} does not work with {', '.join(given)}. Omit one of them.",
    )
    require(
        tensor == 1 or run.sequence_parallel,
        f"--num-experts {experts} with --tensor-model-parallel-size {tensor} needs --sequence-parallel",
    )
    require(
        run.moe_ffn_hidden_size % sliced == 0,
        f"--moe-ffn-hidden-size {run.moe_ffn_hidden_size} is not divisible by the {sliced} ranks that slice an expert",
    )
    if run.add_bias_linear:
        _check_expert_biases(run, sliced)
    if isinstance(pattern, int):
        return
    require(
        len(pattern) == run.num_layers and any(pattern),
        f"--moe-layer-freq has {len(pattern)} numbers for {run.num_layers} layers. Give one for each layer, and a 1.",
    )
    require(
        run.bcd_layers_on == "device",
        f"--bcd-layers-on {run.bcd_layers_on}: layers in host memory must have one size, but --moe-layer-freq mixes "
        "two kinds. Give device, or --moe-layer-freq 1.",
    )


def _check_expert_biases(run: Run, sliced: int) -> None:
    shared = run.moe_shared_expert_intermediate_size
    require(
        sliced == 1,
        f"--num-experts {run.num_moe_experts}: Megatron Core does not slice experts with biases over {sliced} "
        "tensor-parallel ranks. Give --disable-bias-linear, or --expert-tensor-parallel-size 1 with "
        "--expert-model-parallel-size above 1.",
    )
    require(
        not run.moe_grouped_gemm,
        "--moe-grouped-gemm: the grouped product has no biases. Give --disable-bias-linear, or omit it.",
    )
    require(
        not shared,
        f"--moe-shared-expert-intermediate-size {shared}: Megatron Core's shared experts have no biases. Give "
        "--disable-bias-linear.",
    )


def _check_parallel(run: Run, world_size: int) -> None:
    tensor, pipeline, context = (
        run.tensor_model_parallel_size,
        run.pipeline_model_parallel_size,
        run.context_parallel_size,
    )
    context_factor = f" x --context-parallel-size {context}" if context > 1 else ""
    ranks = tensor * pipeline * context
    require(
        world_size % ranks == 0,
        f"--tensor-model-parallel-size {tensor} x --pipeline-model-parallel-size {pipeline}{context_factor} does not "
        f"divide the world size {world_size}. Start a multiple of {ranks} processes (torchrun --nproc-per-node).",
    )
    for field in ("num_attention_heads", "ffn_hidden_size", "hidden_size"):
        size = getattr(run, field)
        require(
            size is None or size % tensor == 0,
            f"{flag_name(field)} {size} is not divisible by --tensor-model-parallel-size {tensor}",
        )
    splits = run.optimizer == "muon" or run.bcd_inactive_update in ("orthogonal", "factored")
    # Megatron Core then slices inside a group: a rank's rows are not whole queries, keys and values
    require(
        run.num_query_groups is None or run.num_query_groups >= tensor or not (splits and run.muon_split_qkv),
        f"--num-query-groups {run.num_query_groups} is less than --tensor-model-parallel-size {tensor}: queries, keys "
        "and values cannot be updated apart. Give --muon-no-split-qkv.",
    )
    is_tied_pipeline = pipeline > 1 and not run.untie_embeddings_and_output_weights
    require(
        run.adam_moments_dtype != "int8" or not is_tied_pipeline or world_size == tensor * pipeline,
        "--adam-moments-dtype int8 over data parallel ranks of a pipeline with a tied head: the embedding and its copy "
        "would be rounded differently. Give fp32, or --untie-embeddings-and-output-weights.",
    )


def _check_context(run: Run) -> None:
    size, tensor = run.context_parallel_size, run.tensor_model_parallel_size
    halves = (
        2 * size if size > 1 else 1
    )  # each rank gets two chunks of a sequence, so that causal attention is evenly divided
    multiple = math.lcm(halves, size * tensor if run.sequence_parallel else 1)
    shards = f" and --sequence-parallel, --tensor-model-parallel-size {tensor}" if run.sequence_parallel else ""
    require(
        run.seq_length % multiple == 0,
        f"--seq-length {run.seq_length}: must be a multiple of {multiple} with --context-parallel-size {size}{shards}",
    )
    sizes, kind = run.hierarchical_context_parallel_sizes, run.cp_comm_type
    if sizes is None:
        require(kind != "a2a+p2p", "--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes")
    else:
        require(
            len(sizes) == 2 and min(sizes) >= 1 and math.prod(sizes) == size,
            f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes))}: must be two numbers whose product is "
            f"--context-parallel-size {size}",
        )
    if kind in ("a2a", "a2a+p2p") and size > 1:
        shared = size if kind == "a2a" else sizes[0]
        groups = max(1, (run.num_query_groups or run.num_attention_heads) // tensor)
        require(
            groups % shared == 0,
            f"--cp-comm-type {kind} divides the {groups} key-value heads of a tensor parallel rank over {shared} "
            "ranks, evenly. Give p2p or all_gather.",
        )


def _check_chunks(config: RunConfig, run: Run, given: Mapping[str, Any]) -> None:
    """Check layout interleaved, and stock's flags for virtual pipeline stages."""
    chunks, per_chunk = run.num_virtual_stages_per_pipeline_rank, run.num_layers_per_virtual_pipeline_stage
    layers_flag, chunks_flag = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
    require(
        per_chunk is None or "num_virtual_stages_per_pipeline_rank" not in given,
        f"{layers_flag} and {chunks_flag} cannot be combined. Leave one of them out.",
    )
    require(
        per_chunk is None or chunks is not None,
        f"{layers_flag} {per_chunk}: must divide the layers of a pipeline stage "
        f"(--num-layers {run.num_layers}, --pipeline-model-parallel-size {run.pipeline_model_parallel_size})",
    )
    stages, layout = run.pipeline_model_parallel_size, run.bcd_layout
    name = "--bcd-layout interleaved" if "bcd_layout" in given else f"{chunks_flag} {chunks}"
    if run.bcd_schedule == "breadth-first" and stages > 1:
        name = f"--bcd-schedule breadth-first with --pipeline-model-parallel-size {stages}"
        require(
            chunks in (None, 1) or layout == "interleaved",
            f"--bcd-layout {layout}: {name} divides the model into chunks. Leave it out, or give --bcd-layers-per-pass "
            f"{max(1, run.num_layers // stages)}.",
        )
    require(
        chunks in (None, 1) or layout == "interleaved",
        f"{chunks_flag} {chunks} needs --bcd-layout interleaved, not {layout}",
    )
    for flag in _NOT_WITH_CHUNKS.split() if config.num_chunks > 1 else ():
        conflict = f"{name} and {_describe(vars(run), flag)} cannot be combined. Leave one of them out."
        require(not holds(vars(run), flag), conflict)


def _check_blocks(config: RunConfig, run: Run, partition: Partition) -> None:
    least, most, window = run.bcd_min_steps_per_block, run.bcd_max_steps_per_block, run.bcd_plateau_window
    require(
        most is None or most >= least,
        f"--bcd-max-steps-per-block {most}: must be at least --bcd-min-steps-per-block {least}",
    )
    require(
        run.bcd_switch != "plateau" or most is None or most > 2 * window,
        f"--bcd-max-steps-per-block {most}: no phase would last long enough to end at a plateau; must be more than "
        f"2 x --bcd-plateau-window {window}",
    )
    num_blocks = partition.num_blocks
    most_layers = max(len(partition.stage_layers(stage)) for stage in range(partition.num_stages))
    require(
        run.bcd_resident_layers <= most_layers,
        f"--bcd-resident-layers {run.bcd_resident_layers}: a pipeline stage has at most {most_layers} layers. Give no "
        "more than that, or --bcd-layers-on auto, which finds how many fit.",
    )
    require(
        run.recompute is None or run.bcd_schedule == "bcd" or config.pipeline_size == 1 or run.bcd_num_blocks in (0, 1),
        "--recompute auto needs --bcd-schedule bcd: it counts no activations of stages before the active block",
    )
    require(
        not run.distribute_saved_activations or num_blocks == 1,
        f"--distribute-saved-activations does not work behind frozen layers, and there are {num_blocks} blocks. "
        "Leave it out, or give --bcd-num-blocks 1.",
    )
    # Transformer Engine updates the scales only at the end of a pass with gradients
    require(
        run.fp8_recipe != "delayed" or not any(map(partition.first_trainable_virtual_stage, range(num_blocks))),
        f"--fp8-format {run.fp8}: delayed scaling needs gradients on every pipeline stage in every phase. Give "
        "--fp8-recipe tensorwise, --bcd-layout spread, or --bcd-num-blocks 1.",
    )
    if not run.optimizer_cpu_offload:
        return
    require(
        num_blocks == 1,
        f"--optimizer-cpu-offload is a baseline of full training, and there are {num_blocks} blocks. Give "
        "--bcd-num-blocks 1 with it, or leave it out (--bcd-optimizer-state host offloads the state of inactive "
        "blocks).",
    )
    require(
        not run.fp16 or run.grad_reduce_in_fp32,
        "--optimizer-cpu-offload with --fp16 needs --accumulate-allreduce-grads-in-fp32: the host steps in fp32",
    )
    # Megatron Core would use gradients while they are still being converted
    require(
        not (run.overlap_cpu_optimizer_d2h_h2d and run.optimizer_offload_fraction < 1 and run.grad_reduce_in_bf16),
        "--overlap-cpu-optimizer-d2h-h2d with --optimizer-offload-fraction below 1 cannot be combined with "
        "--grad-reduce-in-bf16",
    )


def _check_inactive_update(run: Run, partition: Partition) -> None:
    rule, has_embedding = run.bcd_inactive_update, run.bcd_embedding_update != "adam"
    require(
        rule == "none" or partition.num_blocks > 1 or not partition.has_active_block,
        f"--bcd-inactive-update {rule}: no layer is inactive while all of them are one block. Give --bcd-num-blocks 2 "
        "or more, or 0.",
    )
    require(
        not has_embedding or partition.always_active & {"embedding", "head"},
        f"--bcd-embedding-update {run.bcd_embedding_update}: neither embedding nor head is trained in every phase. "
        "Name one of them in --bcd-always-active.",
    )
    require(
        not has_embedding or rule != "none" or run.optimizer == "muon",
        f"--bcd-embedding-update {run.bcd_embedding_update}: no other matrix follows an inactive update. Give "
        "--bcd-inactive-update factored, or leave it out.",
    )


def _check_places(run: Run) -> None:
    if run.bcd_layers_on == "device":
        return
    flag = f"--bcd-layers-on {run.bcd_layers_on}"
    require(
        run.bcd_schedule == "breadth-first",
        f"--bcd-schedule {run.bcd_schedule}: {flag} needs --bcd-schedule breadth-first. Leave it out.",
    )
    if run.bcd_num_blocks != 1 or run.bcd_head_phase:
        return
    for other, remedy in (("--fp16", "Give --bf16"), ("--lighthouse", "Leave it out")):
        require(not holds(vars(run), other), f"{other} is not supported by {flag} --bcd-num-blocks 1. {remedy}.")


def _check_breadth_first(run: Run, partition: Partition, given: Mapping[str, Any]) -> None:
    if run.bcd_schedule != "breadth-first":
        return
    schedule = "--bcd-schedule breadth-first"
    granularity = "--recompute auto" if run.recompute else f"--recompute-granularity {run.recompute_granularity}"
    require(
        run.recompute is None and run.recompute_granularity != "full",
        f"{granularity}: {schedule} recomputes every layer anyway. Leave it out, or give --recompute-activations.",
    )
    size, stages = run.bcd_layers_per_pass, partition.num_stages
    fits = run.num_layers % size == 0 if stages == 1 else run.num_virtual_stages_per_pipeline_rank is not None
    require(
        fits,
        f"--bcd-layers-per-pass {size}: must divide the layers of a pipeline stage (--num-layers {run.num_layers}, "
        f"--pipeline-model-parallel-size {stages}). Give a divisor.",
    )
    require(
        stages == 1 or run.bcd_saved_activations == "recompute",
        f"--bcd-saved-activations {run.bcd_saved_activations}: needs one pipeline stage. Leave it out.",
    )
    chunks = {"num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"} & given.keys()
    require(
        stages == 1 or not chunks or "bcd_layers_per_pass" not in given,
        f"--bcd-layers-per-pass and {''.join(map(flag_name, sorted(chunks)[:1]))} both set the size of a chunk. Leave "
        "one of them out.",
    )


def _check_groups(config: RunConfig, run: Run, partition: Partition) -> None:
    if run.lighthouse is None:
        return
    shortest = block_schedule_from_config(config, partition).least_steps(0)
    require(
        run.outer_interval is None or run.outer_interval <= shortest,
        f"--outer-interval {run.outer_interval} is longer than a phase of {shortest} steps, at whose end replica "
        "groups exchange anyway. Give at most that, or leave it out.",
    )
    require(
        run.outer_delay == 0 or run.outer_delay < (run.outer_interval or 0),
        f"--outer-delay {run.outer_delay}: the exchange that ends a phase is never delayed. Give an --outer-interval "
        "that is longer.",
    )
    require(
        run.min_replica_groups <= run.replica_groups,
        f"--min-replica-groups {run.min_replica_groups} is more than --replica-groups {run.replica_groups}",
    )


def _check_batch(run: Run, world_size: int) -> None:
    model_ranks = run.tensor_model_parallel_size * run.pipeline_model_parallel_size * run.context_parallel_size
    ranks = world_size // model_ranks
    step, total = run.micro_batch_size * ranks, run.global_batch_size
    tokens = run.micro_batch_size * run.seq_length // run.context_parallel_size
    require(
        run.fp8_recipe != "tensorwise" or tokens % 16 == 0,
        f"--micro-batch-size {run.micro_batch_size}: --fp8-recipe tensorwise needs micro-batches of a multiple of 16 "
        f"tokens on a rank, but they have {tokens}. Give another size or --seq-length.",
    )
    product = f"--micro-batch-size {run.micro_batch_size} x data parallel size {ranks}"
    require(
        total % step == 0,
        f"--global-batch-size {total} is not divisible by {product}. Give a multiple of {step}.",
    )
    if run.rampup_batch_size is None:
        return
    start, increment, samples = run.rampup_batch_size
    require(
        start > 0 and increment > 0 and samples >= 0 and start % step == 0 and increment % step == 0,
        f"--rampup-batch-size {start} {increment} {samples}: start and increment must be greater than 0 and divisible "
        f"by {product}, samples at least 0",
    )
    require(
        start <= total and (total - start) % increment == 0,
        f"--rampup-batch-size {start} {increment} {samples}: whole increments must lead from {start} to "
        f"--global-batch-size {total}",
    )


def check_learning_rate(config: RunConfig) -> None:
    """Check the schedules of learning rate and weight decay, as far as their lengths are known."""
    run = SimpleNamespace(**vars(config.optimizer) | vars(config.training) | vars(config.schedule))
    for low, high in (
        ("min_lr", "lr"),
        ("lr_warmup_init", "lr"),
        ("decoupled_min_lr", "decoupled_lr"),
        ("start_weight_decay", "end_weight_decay"),
    ):
        low_value, high_value = getattr(run, low), getattr(run, high)
        require(
            low_value is None or high_value is None or low_value <= high_value,
            f"{dashed(low)} {low_value}: must be at most {dashed(high)} {high_value}",
        )
    unit = "iters" if run.train_samples is None else "samples"
    warmup, decay = getattr(run, f"lr_warmup_{unit}"), getattr(run, f"lr_decay_{unit}")
    if decay is None:
        return
    whole = f"{decay}, the length of the decay (--lr-decay-{unit}, or --train-{unit})"
    require(warmup < decay, f"--lr-warmup-{unit} {warmup}: must be less than {whole}")
    if run.lr_decay_style == "WSD":
        last = getattr(run, f"lr_wsd_decay_{unit}")
        require(last is not None, f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}")
        require(last <= decay - warmup, f"--lr-wsd-decay-{unit} {last}: must be at most {whole}, less the warm-up")


def _check_data(run: Run) -> None:
    if run.split is not None:
        require(run.data_path or run.mock_data, f"--split {run.split} needs --data-path")
        assert DataConfig(split=run.split).split_shares
    for field in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        words = getattr(run, field) or ()
        flag = f"{flag_name(field)} {' '.join(words)}"
        # Megatron Core accepts prefixes alone, or weight prefix weight prefix ...
        weights = [_as_number(word) for word in words[::2]] if len(words) % 2 == 0 else []
        numbers = [weight for weight in weights if weight is not None]
        require(
            len(numbers) in (0, len(weights)) and all(0 < number < math.inf for number in numbers),
            f"{flag}: weights must be greater than 0. Give one before every prefix, or before none (a file whose name "
            "is a number as ./NAME).",
        )
        is_evaluated = field in ("data_path", "valid_data_path")
        require(
            not (numbers and run.full_validation and is_evaluated),
            f"--full-validation: {flag} has weights, which choose samples without end. Give datasets without weights, "
            "those of the validation with --valid-data-path.",
        )
        has_number = any(_as_number(word) is not None for word in words)
        require(not (run.sft and has_number), f"{flag}: --sft reads every record once an epoch. Leave the weights out.")


def _as_number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _check_files(run: Run) -> None:
    retained, interval = run.save_retain_interval, run.save_interval
    require(
        retained is None or (interval is not None and retained % interval == 0),
        f"--save-retain-interval {retained}: must be a multiple of --save-interval {interval or '(not given)'}",
    )
    for field in ("save_hf", "bcd_prefix_cache"):
        path = getattr(run, field)
        require(
            path is None or run.save is None or os.path.realpath(path) != os.path.realpath(run.save),
            f"{flag_name(field)} {path} is the folder of --save. Give each its folder.",
        )
    require(
        run.save is None or not any((Path(run.save) / name).exists() for name in (CONFIG, RUN)),
        f"--save {run.save} holds a model in Hugging Face's format. Give another folder.",
    )
    require(
        run.load is None or not Path(run.load).exists() or Path(run.load).is_dir(),
        f"--load {run.load} is a file. Give a folder.",
    )
    require(
        not run.profile or run.profile_step_end > run.profile_step_start,
        f"--profile-step-end {run.profile_step_end}: must be more than --profile-step-start {run.profile_step_start}",
    )


def _check_core_accepts(config: RunConfig) -> None:
    """Build Megatron Core's TransformerConfig, which checks its own rules, as on a machine without fused kernels."""
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
        reason = re.sub(
            r"\b[a-z]\w*\b", lambda word: flag_name(word[0]) if word[0] in transformer else word[0], str(error)
        )
        raise ValueError(f"Megatron Core: {' '.join(reason.split())}") from error


def _check_machine(run: Run) -> None:
    require(
        run.fp8_recipe != "delayed" or packages.has_transformer_engine(),
        f"--fp8-format {run.fp8}: delayed scaling needs Transformer Engine and a GPU. Give --fp8-recipe tensorwise.",
    )
    require(
        run.fp8_recipe != "tensorwise" or device.can_multiply_fp8(),
        f"--fp8-format {run.fp8}: this GPU has no FP8. Leave it out, or use one of compute capability 8.9 or above.",
    )
    for field in ("save", "save_hf", "tensorboard_dir", "wandb_save_dir"):
        folder = getattr(run, field)
        if folder is not None:
            _check_can_write(f"{flag_name(field)} {folder}", Path(folder).absolute())
    if run.metrics_file is not None:
        file, name = Path(run.metrics_file).absolute(), f"--metrics-file {run.metrics_file}"
        require(not file.is_dir(), f"{name} is a folder. Give a file.")
        require(not file.exists() or os.access(file, os.W_OK), f"{name} can't be written. Give a file that can.")
        _check_can_write(name, file.parent)
    # data workers send samples through sockets TMPDIR/pymp-XXXXXXXX/listener-XXXXXXXX; a path may have 107 characters
    folder, longest = tempfile.gettempdir(), 107 - len("/pymp-XXXXXXXX/listener-XXXXXXXX")
    require(
        not run.num_workers or len(os.fsencode(folder)) <= longest,
        f"TMPDIR {folder} is too long for the sockets of --num-workers {run.num_workers}. Give a folder with at most "
        f"{longest} characters, or --num-workers 0.",
    )


def _check_can_write(name: str, folder: Path) -> None:
    """Create and remove a file in the folder, or in its nearest existing parent.

    Root passes every permission check, and a read-only mount shows only when something is written.
    """
    try:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        require(folder.is_dir(), f"{name} can't be written: {folder} is a file, not a folder")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{name} can't be written ({error.strerror}: {folder}). Give a folder that can.") from error
