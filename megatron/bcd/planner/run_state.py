"""A run's memory and arithmetic from its configuration: model state, --recompute auto, FLOPs. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from megatron.bcd.blocks.ownership import Ownership
from megatron.bcd.blocks.partition import Partition
from megatron.bcd.config import RunConfig
from megatron.bcd.pipeline.plan import steady_shape
from megatron.bcd.planner import cost
from megatron.bcd.planner.activations import (
    MOST_ROUNDS,
    LayerCounts,
    Recomputed,
    StageActivations,
    layer_bytes,
    layer_counts_of,
)
from megatron.bcd.planner.tensors import stage_tensors

_SHARED_BY_TENSOR_RANKS = (
    "word_embeddings.weight",
    "output_layer.weight",
    "linear_qkv.weight",
    "linear_qkv.bias",
    "linear_fc1.weight",
    "linear_fc1.bias",
    "linear_proj.weight",
    "linear_fc2.weight",
)
"""Ends of the names of parameters of which each tensor-parallel rank holds a slice; it holds all of the others."""


def phase_counts(
    config: RunConfig, sizes: Mapping[str, int], owned: Mapping[str, Ownership], block: int
) -> dict[str, int]:
    """Parameters of a rank in a phase, by what steps them: Megatron Core's optimizer, Muon, or a rule without state;
    matrices that rest now or in another phase; and those on the device: with --bcd-frozen-weights host not all."""
    is_muon = config.optimizer.optimizer == "muon"
    counts = dict.fromkeys(("adam", "muon", "stateless", "matrices"), 0)
    for name, one in owned.items():
        if one.is_active(block):
            counts["muon" if is_muon and one.is_matrix else "adam"] += sizes[name]
            continue
        counts["stateless"] += sizes[name] * one.is_stateless(block)
        counts["matrices"] += sizes[name] * bool(one.stateless_in)
    return counts | {"on_device": _on_device(config, sizes, owned, block)}


def offload_fraction(config: RunConfig) -> float:
    """Share of the optimizer state in host memory."""
    if not config.optimizer.optimizer_cpu_offload:
        return 0.0
    return config.optimizer.optimizer_offload_fraction


def state_bytes(config: RunConfig, *, counts: Mapping[str, int], num_replicas: int) -> int:
    """Model state in bytes of a rank in a phase with these `phase_counts`.

    ``num_replicas`` ranks hold the same weights: data-parallel times context-parallel ones.
    """
    bcd, precision = config.bcd, config.precision
    stateless = cost.matrix_state_bytes(
        num_matrix=counts["matrices"],
        num_stepped=counts["stateless"],
        grad_dtype=bcd.bcd_resting_grad_dtype,
        precision=precision,
        data_parallel_size=num_replicas,
    )
    muon = cost.matrix_state_bytes(
        num_matrix=counts["muon"],
        num_stepped=counts["muon"],
        grad_dtype=bcd.muon_grad_dtype,
        momentum_dtype=bcd.muon_momentum_dtype,
        precision=precision,
        data_parallel_size=num_replicas,
    )
    of_optimizer = cost.model_state_bytes(
        num_parameters=counts["on_device"],
        num_active=counts["adam"],
        precision=precision,
        optimizer=config.optimizer.optimizer,
        sgd_momentum=config.optimizer.sgd_momentum != 0.0,
        adam_moments_dtype=config.moment_dtypes,
        gradients_in_fp32=config.ddp.grad_reduce_in_fp32,
        precision_aware=config.is_precision_aware,
        data_parallel_size=num_replicas,
        distributed_optimizer=config.training.use_distributed_optimizer,
        offload_fraction=offload_fraction(config),
    )
    return stateless + muon + of_optimizer


def shape_of(config: RunConfig, *, vocab_size: int) -> cost.ModelShape:
    """Sizes of the model."""
    fields = config.transformer
    hidden, heads = config.hidden_size, int(fields["num_attention_heads"])
    channels = fields.get("kv_channels") or hidden // heads
    return cost.ModelShape(
        num_layers=config.num_layers,
        hidden_size=hidden,
        ffn_hidden_size=fields.get("ffn_hidden_size") or 4 * hidden,
        vocab_size=vocab_size,
        num_positions=config.model.max_position_embeddings
        if config.model.position_embedding_type == "learned_absolute"
        else 0,
        tied=config.tied,
        biases=bool(fields["add_bias_linear"]),
        gated=config.is_gated,
        query_size=heads * channels,
        key_value_size=(fields.get("num_query_groups") or heads) * channels,
        shifted_norms=fields.get("normalization", "LayerNorm") == "LayerNorm",
        qkv_bias=bool(fields.get("add_qkv_bias")),
        qk_norm_size=channels if fields.get("qk_layernorm") else 0,
    )


def head_passes(config: RunConfig, *, padded_vocab_size: int) -> float:
    """Cost of one pass of the output head, in passes of a layer."""
    shape = shape_of(config, vocab_size=padded_vocab_size)
    return cost.head_passes(shape, sequence=config.model.seq_length, padded_vocabulary=padded_vocab_size)


def _stage_counts(
    config: RunConfig, partition: Partition, stage: int, *, padded_vocab_size: int
) -> tuple[int, list[dict[str, int]]]:
    """Parameters of a rank of a pipeline stage, and its `phase_counts` by block."""
    shape, sizes, owned = shape_of(config, vocab_size=padded_vocab_size), {}, {}
    for tensor in stage_tensors(shape, partition, stage, padded_vocabulary=padded_vocab_size):
        is_split = tensor.name.endswith(_SHARED_BY_TENSOR_RANKS)
        sizes[tensor.name] = -(-tensor.size // config.tensor_size) if is_split else tensor.size
        owned[tensor.name] = tensor.owned
    counts = [phase_counts(config, sizes, owned, block.index) for block in partition.blocks]
    return sum(sizes.values()), counts


def _on_device(config: RunConfig, sizes: Mapping[str, int], owned: Mapping[str, Ownership], block: int) -> int:
    if config.bcd.bcd_frozen_weights == "device":
        return sum(sizes.values())
    frozen = dict[int, int]()
    for name, one in owned.items():
        if one.layer is not None and not one.is_always_active:
            frozen[one.layer] = frozen.get(one.layer, 0) + sizes[name]
    for one in owned.values():
        if one.layer is not None and one.is_active(block) and not one.is_always_active:
            frozen.pop(one.layer, None)
    held = config.bcd.bcd_resident_layers + 2  # buffers
    return sum(sizes.values()) - sum([*frozen.values()][: max(0, len(frozen) - held)])


def stage_state(
    config: RunConfig, partition: Partition, *, vocab_size: int, num_replicas: int
) -> Iterator[tuple[int, int]]:
    """(parameters, largest model state in bytes of any phase) of a rank of each pipeline stage.

    From formulas, without buffer padding; ``vocab_size`` is the tokenizer's, ``num_replicas`` as in `state_bytes`.
    """
    multiple = config.model.make_vocab_size_divisible_by * config.tensor_size
    padded = -(-vocab_size // multiple) * multiple
    for stage in range(partition.num_stages):
        total, counts = _stage_counts(config, partition, stage, padded_vocab_size=padded)
        yield total, max(state_bytes(config, counts=each, num_replicas=num_replicas) for each in counts)


def phase_flops(config: RunConfig, partition: Partition, block: int, *, padded_vocab_size: int) -> float:
    """Floating-point operations of matrix products for one sequence in the block's phase, over all ranks.

    Stock Megatron-LM's count of full training, without what the phase leaves out: gradients behind its prefix and of
    frozen weights. What is recomputed is not counted, and what a prefix cache serves is.
    """
    shape, length = shape_of(config, vocab_size=padded_vocab_size), config.model.seq_length
    projections = shape.hidden_size * 2 * (shape.query_size + shape.key_value_size)
    causal_attention = shape.query_size * length
    matrices = (3 if shape.gated else 2) * shape.hidden_size * shape.ffn_hidden_size
    layers = config.num_layers * (projections + causal_attention + matrices)
    head = shape.hidden_size * padded_vocab_size
    of_layers = 3 * layers * cost.total_compute_ratio(partition, block)
    return 2.0 * length * (of_layers + head * (2 + partition.head_active(block)))


def with_frozen_weights(config: RunConfig, where: str, resident_layers: int) -> RunConfig:
    return config.replace_section("bcd", bcd_frozen_weights=where, bcd_resident_layers=resident_layers)


@dataclass(frozen=True, kw_only=True)
class RunMemory:
    """A run's memory, by the planner's formulas: no padding of buffers, and a LLaMA's kernels are assumed fused."""

    config: RunConfig
    partition: Partition
    padded_vocab_size: int
    num_replicas: int
    """Ranks with the same weights."""
    num_microbatches: int
    """Of a full global batch."""

    def recomputed(self, stage: int, block: int, *, memory_bytes: float) -> Recomputed:
        """The least recomputation with which model state, activations and messages of a rank of the stage take at most
        ``memory_bytes`` in the block's phase; all layers where that does not fit either."""
        return self.activations(stage, block).least_recomputation(
            self._model_shape,
            sequence=self.config.model.seq_length,
            state=self._state_bytes(stage, block),
            optimizer_work=self._optimizer_work(stage, block),
            limit=memory_bytes,
        )

    def frozen_weights(self, *, memory_bytes: float) -> tuple[str, int]:
        """--bcd-frozen-weights and --bcd-resident-layers: as many layers on the device as every rank has room for in
        every phase, beside the activations that the flags keep. All in host memory where nothing fits."""
        stages, blocks = range(self.partition.num_stages), range(self.partition.num_blocks)
        most = max(len(self.partition.stage_layers(stage)) for stage in stages)
        moving = {place: self._moving_bytes(*place) for place in itertools.product(stages, blocks)}
        for choice in (("device", 0), *(("host", number) for number in range(most, -1, -1))):
            placed = replace(self, config=with_frozen_weights(self.config, *choice))
            if all(placed._state_bytes(*place) + moving[place] <= memory_bytes for place in moving):
                return choice
        return "host", 0

    def _state_bytes(self, stage: int, block: int) -> int:
        return state_bytes(self.config, counts=self._counts(stage)[block], num_replicas=self.num_replicas)

    def _moving_bytes(self, stage: int, block: int) -> int:
        """Activations and messages, or the optimizer's temporary memory if that is more."""
        activations, granularity = self.activations(stage, block), self.config.transformer.get("recompute_granularity")
        layers = activations.counts.after_prefix(stage, block) if granularity == "full" else ()
        choice = Recomputed(granularity=granularity or "full", layers=tuple(layers))
        return max(activations.peak_bytes(choice) + activations.message_bytes, self._optimizer_work(stage, block))

    def _optimizer_work(self, stage: int, block: int) -> int:
        """Temporary memory of PyTorch's Adam."""
        shards = self.num_replicas if self.config.training.use_distributed_optimizer else 1
        return 4 * self._counts(stage)[block]["adam"] // shards

    def _counts(self, stage: int) -> list[dict[str, int]]:
        return _stage_counts(self.config, self.partition, stage, padded_vocab_size=self.padded_vocab_size)[1]

    def activations(self, stage: int, block: int) -> StageActivations:
        config, partition, number = self.config, self.partition, self.num_microbatches
        if partition.num_chunks > 1:
            number = min(number, MOST_ROUNDS * partition.num_stages)
        return StageActivations(
            counts=self._layer_counts,
            sizes=layer_bytes(
                self._model_shape,
                tokens=config.training.micro_batch_size * config.model.seq_length // config.context_size,
                sequence=config.model.seq_length,
                element=4 if config.precision == "fp32" else 2,
                num_heads=int(config.transformer["num_attention_heads"]),
                padded_vocabulary=self.padded_vocab_size,
                context_size=config.context_size,
                tensor_size=config.tensor_size,
            ),
            shape=steady_shape(
                partition,
                block,
                num_microbatches=number,
                head=head_passes(config, padded_vocab_size=self.padded_vocab_size),
                run_ahead=config.bcd.bcd_run_ahead,
            ),
            stage=stage,
            block=block,
        )

    @cached_property
    def _layer_counts(self) -> LayerCounts:
        return layer_counts_of(self.partition)

    @cached_property
    def _model_shape(self) -> cost.ModelShape:
        return shape_of(self.config, vocab_size=self.padded_vocab_size)
