"""Report a run: the run summary with its memory beside that of full training, warnings at the start, and metrics."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_current_global_batch_size, get_num_microbatches
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.bcd.blocks.partition import Partition, describe_layers
from megatron.bcd.blocks.schedule import PhaseState
from megatron.bcd.blocks.subsets import PhaseSubset
from megatron.bcd.checkpoint.loader import Source
from megatron.bcd.config import CheckpointConfig, RunConfig
from megatron.bcd.config.presets import preset_fields
from megatron.bcd.metrics.reporter import Reporter, SilentReporter
from megatron.bcd.metrics.schema import RunSummary, StepMetrics
from megatron.bcd.model import grouped_experts
from megatron.bcd.model.builder import count_parameters, unwrap_model
from megatron.bcd.model.implementation import SCALED_DOT_PRODUCT, Implementation
from megatron.bcd.model.loss import router_losses
from megatron.bcd.model.skeleton import has_weights
from megatron.bcd.model.transformer_config import describe_activation
from megatron.bcd.pipeline.build import host_passes, kept_passes
from megatron.bcd.pipeline.plan import phase_shape
from megatron.bcd.planner import cost
from megatron.bcd.planner.activations import Recomputed
from megatron.bcd.planner.run_state import logit_bytes, phase_flops
from megatron.bcd.planner.state import ModelState
from megatron.bcd.planner.tensors import Tensor
from megatron.bcd.runtime import collectives, device, memory, replicas
from megatron.bcd.training.resolve import ResolvedRun


def build_reporter(run: ResolvedRun, *, start_iteration: int) -> Reporter:
    """Return the reporter that the flags describe on rank 0, and a silent one on other ranks."""
    if torch.distributed.get_rank() != 0:
        return SilentReporter()
    return Reporter(
        run.config.report,
        train_iters=run.train_iters,
        start_iteration=start_iteration,
        run=run.name,
        run_config=asdict(run.config),
    )


def report_source(checkpoint: CheckpointConfig, source: Source | None, reporter: Reporter) -> None:
    """Report the origin of the weights, and warnings about that checkpoint."""
    if source is None:
        if checkpoint.load is not None:
            reporter.note(f"--load {checkpoint.load} holds no checkpoint: starting from iteration 0")
        if checkpoint.load_hf is not None and has_weights(checkpoint.load_hf):
            reporter.note(f"weights of {checkpoint.load_hf} loaded")
        return
    for message in source.messages:
        reporter.warning(message)
    if source.state is None:
        reporter.note(f"weights of {source.path} loaded")


def collect_step_metrics(trainer: Any, phase_state: PhaseState) -> StepMetrics:
    """Return the metrics of a `Trainer`'s steps since the last log line, over all ranks. Collective.

    The loss is the mean of the steps that were not skipped, or of all steps if every one was skipped.

    Args:
        phase_state: of the last of these steps, which may have ended its phase.
    """
    config: RunConfig = trainer.config
    active, state, schedule, interval = trainer.active, trainer.state, trainer.block_schedule, trainer.state.interval
    stepped = [result for result in interval if not result.skipped]
    milliseconds = statistics.fmean(result.milliseconds for result in interval)
    batch_size = get_current_global_batch_size()
    counted = active.state_bytes() | {
        "peak_memory_bytes": memory.peak_memory_bytes(),
        "reserved_memory_bytes": memory.reserved_memory_bytes(),
    }
    cache = trainer.prefix_cache
    ranks = collectives.gather_integers(*counted.values(), cache.take_hits(), cache.bytes_on_disk())
    *by_rank, hits, cached = zip(*ranks, strict=True)
    optional: dict[str, Any] = {}
    if config.num_experts:
        optional["router_losses"] = router_losses(get_num_microbatches())
    if config.report.log_params_norm:
        with active.whole_parameters():
            optional["params_norm"] = active.core.params_norm()
    if config.report.log_num_zeros_in_grad:
        optional["num_zeros"] = active.core.num_zeros
    if config.report.log_throughput:
        per_sequence = phase_flops(
            config, trainer.partition, schedule.block(phase_state), padded_vocab_size=trainer.padded_vocab_size
        )
        per_second = per_sequence * batch_size / milliseconds * 1e3
        optional["tflops_per_gpu"] = per_second / torch.distributed.get_world_size() / 1e12
    return StepMetrics(
        iteration=state.iteration,
        consumed_samples=state.consumed_samples,
        cycle=schedule.cycle(phase_state),
        phase=phase_state.phase,
        block=schedule.block(phase_state),
        loss=statistics.fmean(result.loss for result in stepped or interval),
        learning_rate=float(trainer.lr_scheduler.get_lr({})),
        step_learning_rate=interval[-1].learning_rate,
        grad_norm=interval[-1].grad_norm,
        step_time_ms=milliseconds,
        tokens_per_second=batch_size * config.model.seq_length / milliseconds * 1e3,
        loss_scale=active.core.loss_scale() if config.precision == "fp16" else None,
        skipped_iterations=len(interval) - len(stepped),
        skipped_layers=sum(result.skipped_layers for result in interval),
        global_batch_size=batch_size,
        data_seen=trainer.samples.share_seen(in_phase=state.samples_in_phase, seen_before=state.samples_seen_before),
        prefix_cache_hits=sum(hits),
        prefix_cache_bytes=max(cached),
        **dict(zip(counted, by_rank, strict=True)),
        **optional,
    )


def summarize(
    run: ResolvedRun,
    *,
    model: torch.nn.Module,
    implementation: Implementation,
    samples: PhaseSubset | None,
) -> RunSummary:
    """Collect the figures of the run summary from all ranks. Collective; every rank gets the same summary."""
    config, partition, state = run.config, run.partition, run.memory.state
    place = parallel_state.get_pipeline_model_parallel_rank(), replicas.rank()
    ranks = collectives.gather_objects((*place, count_parameters(model)))
    by_stage = {stage: number for stage, _, number in ranks}
    per_stage = tuple(by_stage[stage] for stage in range(partition.num_stages))
    tensors = [tensor for stage in range(partition.num_stages) for tensor in state.whole_tensors(stage)]
    num_parameters = _count(tensors)
    heads = [tensor for tensor in tensors if tensor.name.endswith("output_layer.weight")]
    frozen = [tensor for tensor in tensors if tensor.owned.is_frozen]
    trained = [_count(each for each in tensors if each.owned.is_active(block.index)) for block in partition.blocks]
    if not partition.has_active_block:  # inactive updates train every layer
        trained = [num_parameters - _count(frozen)]
    return RunSummary(
        model=_describe_model(config, unwrap_model(model).config, run.vocab_size, run.padded_vocab_size),
        parallel=f"{config.describe_ranks(parallel_state.get_data_parallel_world_size())}, {config.precision}"
        + (f" with {config.fp8_products} FP8 products" if config.fp8_products else ""),
        parameters_per_stage=per_stage,
        total_parameters=sum(per_stage) - _count(heads) * partition.tied,
        blocks=tuple(_describe_block(partition, block.index) for block in partition.blocks),
        shares=tuple(number / num_parameters for number in trained),
        model_state_bytes=tuple(
            tuple(state.rank(stage, block.index, replica).model_state for stage, replica, _ in ranks)
            for block in partition.blocks
        ),
        layout=partition.layout,
        phases=run.block_schedule.describe(),
        full_model_state_bytes=tuple(_full_state_bytes(config, state, stage) for stage, *_ in ranks),
        training=_describe_training(run),
        notes=(
            *_notes(config, state, implementation, num_frozen=_count(frozen)),
            *_pipeline_notes(run),
            *_data_notes(config, partition, samples),
        ),
    )


def _describe_block(partition: Partition, block: int) -> str:
    layers, extras = partition.describe_layers(block), ", ".join(partition.describe_extras(block))
    if not partition.has_active_block:
        layers = describe_layers(range(partition.num_layers))
    named = f"layer{'' if layers.isdigit() else 's'} {layers}" if layers else ""
    return " and ".join(filter(None, (named, extras)))


def _count(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.size for tensor in tensors)


def _full_state_bytes(config: RunConfig, state: ModelState, stage: int) -> int:
    """Return the model state of full training by stock Megatron-LM: Adam with fp32 moments, without padding."""
    budget = cost.state_budget(config, adam_moments="fp32")
    stored = sum(tensor.size * (state.num_expert_parts if tensor.is_expert else 1) for tensor in state.tensors[stage])
    optimizer = (1 - cost.offload_fraction(config)) * budget.optimizer * stored / state.num_replicas
    return (budget.weight + budget.gradient) * state.num_parameters[stage] + math.ceil(optimizer)


def _describe_model(config: RunConfig, built: TransformerConfig, vocab_size: int, padded_vocab_size: int) -> str:
    is_llama = (
        config.model.position_embedding_type == "rope"
        and config.model.swiglu
        and built.normalization == "RMSNorm"
        and not built.add_bias_linear
    )
    heads, groups = built.num_attention_heads, built.num_query_groups
    # the fast kernels of cuBLAS need rows that are a multiple of 16 bytes: docs/gpu.md, On an H100
    is_slow = config.precision != "fp32" and built.ffn_hidden_size // config.tensor_size % 8 > 0
    parts = (
        "LLaMA" if is_llama else "GPT",
        f"{config.num_layers} layers",
        f"hidden {config.hidden_size}",
        f"{heads} heads" + (f" in {groups} query groups" if groups != heads else ""),
        f"ffn {built.ffn_hidden_size}{' (slow on GPUs: no multiple of 8 on a rank)' * is_slow}",
        describe_activation(built),
        f"vocabulary {vocab_size:,} (padded {padded_vocab_size:,})",
        f"sequence {config.model.seq_length:,}",
        f"{'tied' if config.tied else 'untied'} head",
    )
    return ", ".join(parts)


def _describe_training(run: ResolvedRun) -> str:
    config, training, optimizer = run.config, run.config.training, run.config.optimizer
    if training.skip_train:
        return "evaluation only"
    parts = (
        f"{run.train_iters:,} iterations",
        f"global batch {run.global_batch_size} of micro-batches of {training.micro_batch_size}",
        f"lr {optimizer.lr} {config.schedule.lr_decay_style}",
        optimizer.optimizer + ("" if (dtype := training.adam_moments_dtype) == "fp32" else f" with {dtype} moments"),
        f"clip {optimizer.clip_grad}" + " (not matrices)" * (optimizer.clip_grad > 0 and not config.clips_matrices),
        f"seed {training.seed}",
    )
    return ", ".join(parts)


def _notes(config: RunConfig, state: ModelState, implementation: Implementation, *, num_frozen: int) -> Iterator[str]:
    """Yield lines about kernels, and about parameters that are not trained with the active block."""
    bcd, partition = config.bcd, state.partition
    yield implementation.describe()
    if config.num_experts and implementation.layers == "local":
        is_grouped, dtype = config.transformer["moe_grouped_gemm"], device.DTYPES[config.precision]
        remedy = "needs bf16, widths in eights, and PyTorch 2.10" if is_grouped else "is faster"
        can_run = is_grouped and grouped_experts.is_available(dtype, *config.expert_sizes)
        yield f"experts of a layer run {'in one product' if can_run else f'one by one: --moe-grouped-gemm {remedy}'}"
    kind = config.transformer.get("cp_comm_type")
    if config.context_size > 1 and implementation.attention == SCALED_DOT_PRODUCT and kind not in (None, "all_gather"):
        yield f"accepted without effect: --cp-comm-type {kind}: context parallel ranks gather keys and values"
    if bcd.bcd_preset is not None:
        yield _describe_preset(config, bcd.bcd_preset)
    if partition.frozen:
        yield f"no phase trains {', '.join(sorted(partition.frozen))} (--bcd-frozen), {num_frozen:,} parameters"
    if bcd.bcd_inactive_update != "none":
        rate = f"{bcd.bcd_inactive_lr_ratio:g} of the learning rate"
        yield f"inactive update {bcd.bcd_inactive_update}: {rate}, gradients in {bcd.bcd_inactive_grad_dtype}"


def _describe_preset(config: RunConfig, name: str) -> str:
    values = vars(config.bcd) | vars(config.optimizer)
    preset = {field: values[field] for field in preset_fields(name, config.bcd.bcd_inactive_update)}
    flags = [f"--{field.replace('_', '-')}" + ("" if value is True else f" {value}") for field, value in preset.items()]
    return f"preset {name}: {' '.join(flags)}"


def _pipeline_notes(run: ResolvedRun) -> Iterator[str]:
    config, partition = run.config, run.partition
    if partition.num_stages > 1:
        if config.training.pipeline_cut == "auto":
            layout = config.training.pipeline_model_parallel_layout
            yield f"--pipeline-cut auto: --pipeline-model-parallel-layout {layout}"
        yield f"pipeline schedule {_describe_pipeline(config, partition)}"
    if run.recomputed:
        by_block = (
            f"block {block.index}: {', '.join(_describe_recomputed(stage[block.index]) for stage in run.recomputed)}"
            for block in partition.blocks
        )
        yield f"recomputation by stage, of the layers after the prefix: {'; '.join(by_block)}"
    if config.has_linear_loss:
        size = logit_bytes(config, padded_vocab_size=run.padded_vocab_size) / 2**30
        yield f"loss without the {size:.2f} GiB of a micro-batch's logits (--no-cross-entropy-loss-fusion: with them)"
    if config.is_breadth_first:
        chunks = partition.in_passes(config.bcd.bcd_layers_per_pass).num_virtual_stages
        yield f"breadth-first in {chunks} chunks, whose inputs wait in memory of the {config.bcd.bcd_saved_inputs}"
        shape = run.memory.schedule_shape(0)
        kept, on_host = len(kept_passes(shape, 0)), len(host_passes(shape, 0))
        if kept or on_host:
            yield f"activations of {kept} passes wait on the device, of {on_host} in host memory; others are recomputed"
    if config.bcd.bcd_layers_on == "host":
        layers = "layers" + " outside the block" * (not config.steps_block_by_chunk)
        layers += " and embedding" * config.has_embedding_on_host
        number = 3 * config.bcd.bcd_layers_per_pass + config.bcd.bcd_resident_layers
        yield f"{layers} in host memory, copied as they are read; buffers for {number} layers on the device"
        if config.checkpoint.async_save and config.updates_streamed_layers:
            yield "--async-save writes at once, because each step changes layers in host memory"


def _describe_recomputed(choice: Recomputed) -> str:
    if choice.granularity == "selective":
        return "attention"
    return f"first {sum(choice.layers)}" if sum(choice.layers) else "none"


def _describe_pipeline(config: RunConfig, partition: Partition) -> str:
    blocks, schedule = [block.index for block in partition.blocks], config.bcd.bcd_schedule
    if schedule == "stock":
        return "stock: Megatron Core's 1F1B"
    if partition.num_chunks > 1:
        forward_only = [partition.first_trainable_virtual_stage(block) // partition.num_stages for block in blocks]
        chunks = f"{partition.num_chunks} chunks of the model on every stage"
        return f"{schedule}: {chunks}, forward-only ones by block {_listed(forward_only)}"
    forward_only = [partition.first_trainable_stage(block) for block in blocks]
    if not any(forward_only):
        reason = "every block begins on the first" if partition.has_prefix else "the first is always trained"
        return f"{schedule}: no stage runs forward only ({reason})"
    ahead = [phase_shape(partition, block, num_microbatches=1).microbatches_ahead for block in blocks]
    return f"bcd: forward-only stages by block {_listed(forward_only)}; they run ahead {_listed(ahead)} microbatches"


def _data_notes(config: RunConfig, partition: Partition, samples: PhaseSubset | None) -> Iterator[str]:
    if samples is not None:
        yield (
            f"each phase trains on {samples.size:,} of the {samples.num_samples:,} sequences of an epoch; after "
            f"{math.ceil(samples.num_samples / samples.size):,} phases all have been drawn"
        )
    root = config.bcd.bcd_prefix_cache
    if root is not None:
        lengths = [len(partition.prefix_layers(block.index)) for block in partition.blocks]
        is_off = "" if any(lengths) else "; off, because no block has a prefix"
        yield f"prefix cache {root}: layers before the first active one, by block {_listed(lengths)}{is_off}"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
