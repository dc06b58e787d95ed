"""Validate a RunConfig before any process group exists and before anything is written.

Each problem is one line that names the flag, what is wrong and what to do. The rules here are those that neither
Megatron Core's TransformerConfig nor the partition into blocks checks. Data and tokenizer files are checked where they
are read.
"""

from __future__ import annotations

import functools
import math
import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.bcd.arguments import stock
from megatron.bcd.arguments.flags import flag_name, flags_by_field, holds
from megatron.bcd.blocks.partition import partition_from_config
from megatron.bcd.blocks.schedule import block_schedule_from_config
from megatron.bcd.config import DataConfig, RunConfig
from megatron.bcd.config.sections import dashed
from megatron.bcd.huggingface.folder import CONFIG, RUN
from megatron.bcd.runtime import device, packages

Run = Any
"""Namespace of all values by field name, and the arguments of `find_problems`. `run.partition()` builds the blocks."""

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
    "--num-experts": "--fp8-recipe=delayed --hierarchical-context-parallel-sizes",
    "--optimizer=muon": "--fp16 --loss-scale --calculate-per-token-loss",  # its gradients have no loss scale
    "--bcd-embedding-update=factored": "--decoupled-lr",  # only Megatron Core's optimizer supports it
    "--optimizer-cpu-offload": "--optimizer!=adam --no-decoupled-weight-decay --adam-moments-dtype "
    "--bcd-inactive-update",
    "--bcd-main-params=drop": "--optimizer=muon --bcd-inactive-update",  # these keep main parameters on the device
    "--bcd-inactive-update": "--fp16 --loss-scale",  # the optimizer of all matrices has no loss scale
    "--bcd-layers-on!=device": "--fp8-recipe=delayed",  # it writes frozen layers
    # these need all gradients of a step at once, or run separate passes
    "--bcd-schedule=breadth-first": "--fp8-recipe=delayed --optimizer-cpu-offload",
    "--bcd-switch=plateau": "--bcd-steps-per-block",
    "--bcd-prefix-cache": "--sequence-parallel --fp8-recipe=delayed",  # a rank that reads the cache would not scale
    "--fp8-recipe=delayed": "--transformer-impl=local",
    "--fp8-recipe=tensorwise": "--transformer-impl=transformer_engine --fp8-margin --fp8-amax-history-len "
    "--fp8-amax-compute-algo",
    # passes of some ranks alone, state that one data-parallel rank holds for all, and weights that all ranks draw alike
    "--expert-model-parallel-size": "--bcd-prefix-cache --lighthouse --optimizer-cpu-offload --use-cpu-initialization",
    # these are Megatron Core's, or need its layers
    "--transformer-impl=transformers": "--tensor-model-parallel-size --context-parallel-size --fp8-recipe=delayed "
    "--recompute --recompute-granularity=selective --bcd-prefix-cache",
    # each replica group would decide these by its own samples, or would not divide the samples
    "--lighthouse": "--skip-train --bcd-switch=plateau --bcd-prefix-cache --rampup-batch-size",
}
"""The conditions that a flag cannot be combined with."""

_GROUP_FLAGS = (
    "--replica-groups --min-replica-groups --replica-id --outer-interval --outer-lr "
    "--outer-momentum --outer-compression --outer-timeout-seconds"
)
NEEDS = {
    **dict.fromkeys(_GROUP_FLAGS.split(), "--lighthouse"),
    "--bcd-embedding-update=factored": "--bcd-inactive-update",
    **dict.fromkeys(_SPLIT_FLAGS.split(), "--pipeline-model-parallel-size"),
    "--fp8-format": "--bf16",
    "--fp16-accumulation": "--fp16",
    "--transformer-impl=transformers": "--load-hf",
    "--weight-decay-incr-style": "--start-weight-decay --end-weight-decay",
    "--use-pytorch-profiler": "--tensorboard-dir",
    "--moe-grouped-gemm": "--disable-bias-linear",  # the grouped product has no biases, nor have shared experts
    "--moe-shared-expert-intermediate-size": "--disable-bias-linear",
    # without a subset a phase uses no sample twice, and with dropout the cache would always repeat the same mask
    "--bcd-prefix-cache": "--bcd-sample-ratio --hidden-dropout=0 --attention-dropout=0 --bcd-schedule=bcd "
    "--bcd-layers-on=device",
}
"""The flags that have to be given with a flag."""

# only --pipeline-cut auto and --pipeline-model-parallel-layout can cut chunks
_NOT_WITH_CHUNKS = f"--bcd-schedule=stock --context-parallel-size {_SPLIT_FLAGS}"

_MOST = {"num_layers": 10**5, "bcd_num_blocks": 10**5}
"""The program loops over layers and blocks. More than this is taken for a typing error."""


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
    run = SimpleNamespace(**values, config=config, given=given, world_size=world_size, starts=starts)
    run.partition = functools.cache(functools.partial(partition_from_config, config))
    problems += _check_tables(values, given)
    for rule in _RULES:
        if rule is _check_core_accepts and problems:  # its messages are less clear
            continue
        try:
            problems.extend(rule(run))
        except ValueError as error:
            problems.append(str(error))
        except Exception:
            if not problems and not is_partial:  # otherwise it may come from a value that is reported already
                raise
    return list(dict.fromkeys(problems))


def _check_ranges(values: Mapping[str, Any]) -> Iterator[str]:
    for field, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        name = f"{flag_name(field)} {value}"
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{name}: must be a finite number"
        elif field in _MOST and value > _MOST[field]:
            yield f"{name}: must be at most {_MOST[field]}"
        elif (limits := flags_by_field()[field].range) is not None and not limits.contains(value):
            yield f"{name}: must be {limits.text}"


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
            if flags[0] == "--transformer-impl transformers":  # which config.json may have chosen
                yield f"{flags[1]}: the model runs on transformers' layers, which don't support it. Leave it out."
            else:
                yield f"{' and '.join(flags)} cannot be combined. Leave one of them out."
    for flag, needed in NEEDS.items():
        if holds(values, flag) and _describe(values, flag) not in conflicting:
            missing = [need.replace("=", " ") for need in needed.split() if not holds(values, need)]
            if missing:
                yield f"{_describe(values, flag)} needs {' and '.join(missing)}"


def _describe(values: Mapping[str, Any], condition: str) -> str:
    name = re.split("!?=", condition)[0]
    value = values.get(name[2:].replace("-", "_"))
    if value is None or isinstance(value, bool | tuple):
        return name
    return f"{name} {value}"


def _check_required(run: Run) -> Iterator[str]:
    missing = [flag_name(field) for field in stock.REQUIRED if getattr(run, field) is None]
    if run.skip_train:
        missing = [flag for flag in missing if flag != "--lr"]
    elif run.train_iters is None and run.train_samples is None and run.num_epochs is None:
        missing.append("--train-iters (or --train-samples" + (", or --num-epochs)" if run.sft else ")"))
    if run.tokenizer_type is None:
        missing.append("--tokenizer-type")
    if not any((run.mock_data, run.data_path, run.train_data_path, run.valid_data_path, run.test_data_path)):
        missing.append("--data-path")
    if missing:
        reason = f": --load-hf {run.load_hf} has no tokenizer's files" if run.load_hf and not run.tokenizer_type else ""
        yield f"{', '.join(missing)}: must be given{reason}. --help describes every flag."


def _check_network(run: Run) -> Iterator[str]:
    hidden, heads, groups, kind = run.hidden_size, run.num_attention_heads, run.num_query_groups, "rope"
    if run.kv_channels is None and hidden % heads:
        yield f"--hidden-size {hidden}: must be a multiple of --num-attention-heads {heads}. Or give --kv-channels."
    if groups is not None and heads % groups:
        yield f"--num-query-groups {groups}: must divide --num-attention-heads {heads}"
    if run.given.get("use_rotary_position_embeddings"):
        kind = run.given.get("position_embedding_type", "rope")
    if kind != "rope":
        yield f"--use-rotary-position-embeddings and --position-embedding-type {kind} cannot be combined"
    if run.position_embedding_type == "learned_absolute" and "--no-position-embedding" in run.given:
        yield "--no-position-embedding: has no meaning here. Give --position-embedding-type rope or none instead."
    if run.transformer_impl == "transformers" and run.reset_position_ids != run.reset_attention_mask:
        yield "--reset-position-ids and --reset-attention-mask: transformers needs both. Give both."
    is_fused = run.cross_entropy_loss_fusion and run.cross_entropy_fusion_impl != "linear"
    if run.transformer_impl == "transformers" and is_fused:
        yield "--cross-entropy-loss-fusion: transformers' layers fuse by --cross-entropy-fusion-impl linear. Give both."
    length, most = run.seq_length, run.max_position_embeddings
    if length > most:
        source = f" of --load-hf {run.load_hf}" if run.load_hf else ""
        yield f"--seq-length {length} is larger than --max-position-embeddings {most}{source}"
    if run.position_embedding_type == "rope":
        rotated = int((run.kv_channels or hidden // heads) * run.rotary_percent)
        if rotated < 2 or rotated % 2:
            yield f"--rotary-percent {run.rotary_percent} rotates {rotated} channels of a head: must be an even number"


def _check_experts(run: Run) -> Iterator[str]:
    experts, tensor = run.num_moe_experts, run.tensor_model_parallel_size
    if experts is None:
        return
    size, pattern, width = run.expert_model_parallel_size, run.moe_layer_freq, run.moe_ffn_hidden_size
    sliced = run.expert_tensor_parallel_size or tensor
    if run.moe_router_topk > experts:
        yield f"--moe-router-topk {run.moe_router_topk} is more than --num-experts {experts}"
    if experts % size:
        yield f"--num-experts {experts} is not divisible by --expert-model-parallel-size {size}"
    if sliced != tensor and (sliced != 1 or size == 1):  # Megatron Core adds no gradients of whole experts over slices
        yield (
            f"--expert-tensor-parallel-size {sliced}: must be --tensor-model-parallel-size {tensor}, or 1 with "
            "--expert-model-parallel-size above 1"
        )
    ranks = size * sliced * run.pipeline_model_parallel_size
    if run.world_size % ranks:
        yield f"--expert-model-parallel-size {size} needs a multiple of {ranks} ranks, but there are {run.world_size}"
    if tensor > 1 and not run.sequence_parallel:
        yield f"--num-experts {experts} with --tensor-model-parallel-size {tensor} needs --sequence-parallel"
    if width % sliced:
        yield f"--moe-ffn-hidden-size {width} is not divisible by the {sliced} ranks that slice an expert"
    if run.add_bias_linear and sliced > 1:
        yield f"--num-experts {experts}: {sliced} ranks cannot slice experts with biases. Give --disable-bias-linear."
    if isinstance(pattern, int):
        return
    if len(pattern) != run.num_layers or not any(pattern):
        yield f"--moe-layer-freq: must have a number for each of the {run.num_layers} layers, and a 1"
    if run.bcd_layers_on != "device":
        yield f"--bcd-layers-on {run.bcd_layers_on}: layers in host memory need one size. Give --moe-layer-freq 1."


def _check_parallel(run: Run) -> Iterator[str]:
    tensor, pipeline = run.tensor_model_parallel_size, run.pipeline_model_parallel_size
    factors = f"--tensor-model-parallel-size {tensor} x --pipeline-model-parallel-size {pipeline}"
    if run.context_parallel_size > 1:
        factors += f" x --context-parallel-size {run.context_parallel_size}"
    ranks = tensor * pipeline * run.context_parallel_size
    if run.world_size % ranks:
        yield f"{factors} does not divide the world size {run.world_size}. Start a multiple of {ranks} processes."
    for field in ("num_attention_heads", "ffn_hidden_size", "hidden_size"):
        if (size := getattr(run, field)) is not None and size % tensor:
            yield f"{flag_name(field)} {size} is not divisible by --tensor-model-parallel-size {tensor}"
    splits = run.muon_split_qkv and (run.optimizer == "muon" or run.bcd_inactive_update in ("orthogonal", "factored"))
    # Megatron Core then slices inside a group: a rank's rows are not whole queries, keys and values
    if splits and run.num_query_groups is not None and run.num_query_groups < tensor:
        yield f"--num-query-groups {run.num_query_groups}: less than {tensor} tensor ranks. Give --muon-no-split-qkv."
    is_tied_pipeline = pipeline > 1 and not run.untie_embeddings_and_output_weights
    if run.adam_moments_dtype == "int8" and is_tied_pipeline and run.world_size != tensor * pipeline:
        # the embedding and its copy would be rounded differently
        yield "--adam-moments-dtype int8: a tied head needs one stage or one data-parallel rank. Give fp32."


def _check_context(run: Run) -> Iterator[str]:
    size, tensor = run.context_parallel_size, run.tensor_model_parallel_size
    halves = 2 * size if size > 1 else 1  # a rank gets two chunks, so that causal attention is evenly divided
    multiple = math.lcm(halves, size * tensor if run.sequence_parallel else 1)
    if run.seq_length % multiple:
        flags = f"--context-parallel-size {size}{' and --sequence-parallel' * run.sequence_parallel}"
        yield f"--seq-length {run.seq_length}: must be a multiple of {multiple}, for {flags}"
    sizes, kind = run.hierarchical_context_parallel_sizes, run.cp_comm_type
    if sizes is None and kind == "a2a+p2p":
        yield "--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes"
    elif sizes is not None and not (len(sizes) == 2 and min(sizes) >= 1 and math.prod(sizes) == size):
        shown = f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes))}"
        yield f"{shown}: must be two numbers whose product is --context-parallel-size {size}"
    elif kind in ("a2a", "a2a+p2p") and size > 1:
        shared = size if kind == "a2a" else sizes[0]
        groups = max(1, (run.num_query_groups or run.num_attention_heads) // tensor)
        if groups % shared:
            yield f"--cp-comm-type {kind}: {shared} ranks cannot share {groups} key-value heads. Give p2p."


def _check_chunks(run: Run) -> Iterator[str]:
    """Check layout interleaved, and stock's flags for virtual pipeline stages."""
    chunks, per_chunk = run.num_virtual_stages_per_pipeline_rank, run.num_layers_per_virtual_pipeline_stage
    layers_flag, chunks_flag = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
    if per_chunk is not None and "num_virtual_stages_per_pipeline_rank" in run.given:
        yield f"{layers_flag} and {chunks_flag} cannot be combined. Leave one of them out."
    if per_chunk is not None and chunks is None:
        yield f"{layers_flag} {per_chunk}: must divide the layers of a pipeline stage"
    stages, layout = run.pipeline_model_parallel_size, run.bcd_layout
    name = "--bcd-layout interleaved" if "bcd_layout" in run.given else f"{chunks_flag} {chunks}"
    if run.bcd_schedule == "breadth-first" and stages > 1:
        name = f"--bcd-schedule breadth-first with --pipeline-model-parallel-size {stages}"
    if chunks not in (None, 1) and layout != "interleaved":
        yield f"{chunks_flag} {chunks} needs --bcd-layout interleaved, not {layout}"
    for flag in _NOT_WITH_CHUNKS.split() if run.config.num_chunks > 1 else ():
        if holds(vars(run), flag):
            yield f"{name} and {_describe(vars(run), flag)} cannot be combined. Leave one of them out."


def _check_blocks(run: Run) -> Iterator[str]:
    partition = run.partition()
    num_blocks = partition.num_blocks
    layers = max(partition.layers_per_stage)
    if run.bcd_resident_layers > layers:
        yield f"--bcd-resident-layers {run.bcd_resident_layers}: a pipeline stage has {layers} layers. Give no more."
    if run.recompute and run.bcd_schedule != "bcd" and partition.num_stages > 1 and run.bcd_num_blocks not in (0, 1):
        yield "--recompute auto needs --bcd-schedule bcd: it counts no activations of stages before the active block"
    # Transformer Engine updates the scales only at the end of a pass with gradients
    if run.fp8_recipe == "delayed" and any(map(partition.first_trainable_virtual_stage, range(num_blocks))):
        yield (
            f"--fp8-format {run.fp8}: delayed scaling needs gradients on every pipeline stage in every phase. Give "
            "--fp8-recipe tensorwise, --bcd-layout spread, or --bcd-num-blocks 1."
        )
    if not run.optimizer_cpu_offload:
        return
    if num_blocks > 1:
        yield "--optimizer-cpu-offload is a baseline of full training. Give --bcd-num-blocks 1 with it."
    if run.fp16 and not run.grad_reduce_in_fp32:
        yield "--optimizer-cpu-offload with --fp16 needs --accumulate-allreduce-grads-in-fp32: the host steps in fp32"
    # Megatron Core would use gradients while they are still being converted
    if run.overlap_cpu_optimizer_d2h_h2d and run.optimizer_offload_fraction < 1 and run.grad_reduce_in_bf16:
        yield "--overlap-cpu-optimizer-d2h-h2d of a part and --grad-reduce-in-bf16 cannot be combined"


def _check_inactive_update(run: Run) -> Iterator[str]:
    partition, rule, embedding = run.partition(), run.bcd_inactive_update, run.bcd_embedding_update
    if rule != "none" and partition.num_blocks == 1 and partition.has_active_block:
        yield f"--bcd-inactive-update {rule}: all layers are one block. Give --bcd-num-blocks 2 or more, or 0."
    if embedding != "adam" and not partition.always_active & {"embedding", "head"}:
        yield f"--bcd-embedding-update {embedding}: name embedding or head in --bcd-always-active"


def _check_breadth_first(run: Run) -> Iterator[str]:
    place, schedule = f"--bcd-layers-on {run.bcd_layers_on}", "--bcd-schedule breadth-first"
    if run.bcd_schedule != "breadth-first":
        if run.bcd_layers_on != "device":
            yield f"--bcd-schedule {run.bcd_schedule}: {place} needs {schedule}. Leave it out."
        return
    if run.bcd_layers_on != "device" and run.bcd_layout == "stage":
        yield f"{place}: is not supported by --bcd-layout stage. Give --bcd-layout spread or strided."
    if run.bcd_layers_on != "device" and run.bcd_num_blocks == 1 and not run.bcd_head_phase:
        for other in ("--fp16", "--lighthouse"):
            if holds(vars(run), other):
                yield f"{other}: is not supported by {place} --bcd-num-blocks 1. Leave one of them out."
    if run.recompute or run.recompute_granularity == "full":
        flag = "--recompute auto" if run.recompute else "--recompute-granularity full"
        yield f"{flag}: {schedule} recomputes every layer anyway. Leave it out, or give --recompute-activations."
    size, stages = run.bcd_layers_per_pass, run.partition().num_stages
    if run.num_layers % size if stages == 1 else run.num_virtual_stages_per_pipeline_rank is None:
        yield f"--bcd-layers-per-pass {size}: must divide the layers of a pipeline stage. Give a divisor."
    if stages == 1:
        return
    chunks = {"num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"} & run.given.keys()
    if chunks and "bcd_layers_per_pass" in run.given:
        yield f"--bcd-layers-per-pass and {flag_name(min(chunks))} cannot be combined. Leave one of them out."


def _check_groups(run: Run) -> Iterator[str]:
    if run.lighthouse is None:
        return
    interval = run.outer_interval
    shortest = block_schedule_from_config(run.config, run.partition()).least_steps(0)
    if interval is not None and interval > shortest:
        yield f"--outer-interval {interval}: a phase has {shortest} steps. Give no more, or leave it out."
    if run.min_replica_groups > run.replica_groups:
        yield f"--min-replica-groups {run.min_replica_groups} is more than --replica-groups {run.replica_groups}"


def _check_batch(run: Run) -> Iterator[str]:
    ranks, micro = run.world_size // run.config.model_size, run.micro_batch_size
    step, total, product = (
        micro * ranks,
        run.global_batch_size,
        f"--micro-batch-size {micro} x data parallel size {ranks}",
    )
    if run.fp8_recipe == "tensorwise" and run.bcd_prefix_cache and micro > 1:  # a scale is that of a micro-batch
        yield f"--micro-batch-size {micro}: FP8 rounds samples together, --bcd-prefix-cache stores them alone. Give 1."
    if total % step:
        yield f"--global-batch-size {total} is not divisible by {product}. Give a multiple of {step}."
    if run.rampup_batch_size is None:
        return
    start, increment, samples = run.rampup_batch_size
    name = f"--rampup-batch-size {start} {increment} {samples}"
    if start <= 0 or increment <= 0 or samples < 0 or start % step or increment % step:
        yield f"{name}: start and increment must be multiples of {step} ({product}), samples at least 0"
    elif start > total or (total - start) % increment:
        yield f"{name}: whole increments must lead from {start} to --global-batch-size {total}"


def _check_learning_rate(run: Run) -> Iterator[str]:
    for low, high in (
        ("min_lr", "lr"),
        ("lr_warmup_init", "lr"),
        ("decoupled_min_lr", "decoupled_lr"),
        ("start_weight_decay", "end_weight_decay"),
    ):
        low_value, high_value = getattr(run, low), getattr(run, high)
        if low_value is not None and high_value is not None and low_value > high_value:
            yield f"{dashed(low)} {low_value}: must be at most {dashed(high)} {high_value}"
    unit = "iters" if run.train_samples is None else "samples"
    warmup, decay = getattr(run, f"lr_warmup_{unit}"), getattr(run, f"lr_decay_{unit}")
    if decay is None:
        return
    whole = f"{decay}, the length of the decay (--lr-decay-{unit}, or --train-{unit})"
    if warmup >= decay:
        yield f"--lr-warmup-{unit} {warmup}: must be less than {whole}"
    if run.lr_decay_style == "WSD":
        last = getattr(run, f"lr_wsd_decay_{unit}")
        if last is None:
            yield f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}"
        elif last > decay - warmup:
            yield f"--lr-wsd-decay-{unit} {last}: must be at most {whole}, less the warm-up"


def check_learning_rate(config: RunConfig) -> None:
    """Check the schedules of learning rate and weight decay, as far as their lengths are known."""
    run = SimpleNamespace(**vars(config.optimizer) | vars(config.training) | vars(config.schedule))
    for problem in _check_learning_rate(run):
        raise ValueError(problem)


def _check_data(run: Run) -> Iterator[str]:
    if run.split is not None:
        if not run.data_path and not run.mock_data:
            yield f"--split {run.split} needs --data-path"
        assert DataConfig(split=run.split).split_shares
    for field in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        words = getattr(run, field) or ()
        flag = f"{flag_name(field)} {' '.join(words)}"
        # Megatron Core accepts prefixes alone, or weight prefix weight prefix ...
        weights = [_as_number(word) for word in words[::2]] if len(words) % 2 == 0 else []
        numbers = [weight for weight in weights if weight is not None]
        if len(numbers) not in (0, len(weights)) or not all(0 < number < math.inf for number in numbers):
            yield (
                f"{flag}: weights must be greater than 0. Give one before every prefix, or before none (a file whose "
                "name is a number as ./NAME)."
            )
        if numbers and run.full_validation and field in ("data_path", "valid_data_path"):
            yield (
                f"--full-validation: {flag} has weights, which choose samples without end. Give datasets without "
                "weights, those of the validation with --valid-data-path."
            )
        if run.sft and any(_as_number(word) is not None for word in words):
            yield f"{flag}: --sft reads every record once an epoch. Leave the weights out."


def _as_number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _check_files(run: Run) -> Iterator[str]:
    retained, interval = run.save_retain_interval, run.save_interval
    if retained is not None and (interval is None or retained % interval):
        yield f"--save-retain-interval {retained}: must be a multiple of --save-interval {interval or '(not given)'}"
    for field in ("save_hf", "bcd_prefix_cache"):
        path = getattr(run, field)
        if path is not None and run.save is not None and os.path.realpath(path) == os.path.realpath(run.save):
            yield f"{flag_name(field)} {path} is the folder of --save. Give each its folder."
    if run.save is not None and any((Path(run.save) / name).exists() for name in (CONFIG, RUN)):
        yield f"--save {run.save} holds a model in Hugging Face's format. Give another folder."
    if run.load is not None and Path(run.load).exists() and not Path(run.load).is_dir():
        yield f"--load {run.load} is a file. Give a folder."
    start, end = run.profile_step_start, run.profile_step_end
    if run.profile and end <= start:
        yield f"--profile-step-end {end}: must be more than --profile-step-start {start}"


def _check_core_accepts(run: Run) -> Iterator[str]:
    """Build Megatron Core's TransformerConfig, which checks its own rules, as on a machine without fused kernels."""
    transformer = dict(run.config.transformer)
    if run.config.fp8_products:  # Megatron Core knows only Transformer Engine's
        del transformer["fp8"], transformer["fp8_recipe"]
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
        yield f"Megatron Core: {' '.join(reason.split())}"


def _check_machine(run: Run) -> Iterator[str]:
    if not run.starts:
        return
    if run.fp8_recipe == "delayed" and not packages.has_transformer_engine():
        yield (
            f"--fp8-format {run.fp8}: delayed scaling needs Transformer Engine and a GPU. Give --fp8-recipe tensorwise."
        )
    if run.fp8_recipe == "tensorwise" and not device.can_multiply_fp8():
        yield f"--fp8-format {run.fp8}: this GPU has no FP8. Use one of compute capability 8.9 or above."
    for field in ("save", "save_hf", "tensorboard_dir", "wandb_save_dir"):
        if (folder := getattr(run, field)) is not None:
            yield from _check_can_write(f"{flag_name(field)} {folder}", Path(folder).absolute())
    if run.metrics_file is not None:
        file, name = Path(run.metrics_file).absolute(), f"--metrics-file {run.metrics_file}"
        if file.is_dir():
            yield f"{name} is a folder. Give a file."
        elif file.exists() and not os.access(file, os.W_OK):
            yield f"{name} can't be written. Give a file that can."
        yield from _check_can_write(name, file.parent)
    # data workers send samples through sockets TMPDIR/pymp-XXXXXXXX/listener-XXXXXXXX; a path may have 107 characters
    folder, longest = tempfile.gettempdir(), 107 - len("/pymp-XXXXXXXX/listener-XXXXXXXX")
    if run.num_workers and len(os.fsencode(folder)) > longest:
        yield (
            f"TMPDIR {folder} is too long for the sockets of --num-workers {run.num_workers}. Give a folder with at "
            f"most {longest} characters, or --num-workers 0."
        )


def _check_can_write(name: str, folder: Path) -> Iterator[str]:
    """Create and remove a file in the folder, or in its nearest existing parent.

    Root passes every permission check, and a read-only mount shows only when something is written.
    """
    try:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        yield f"{name} can't be written ({error.strerror}: {folder}). Give a folder that can."


_RULES = (
    _check_required, _check_network, _check_experts, _check_parallel, _check_context, _check_chunks, _check_blocks,
    _check_inactive_update, _check_breadth_first, _check_groups, _check_batch, _check_learning_rate, _check_data,
    _check_files, _check_machine, _check_core_accepts,
)  # fmt: skip
