"""What a run recomputes, by stage and phase (`--recompute auto`). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron.bcd.blocks.ownership import ownership
from megatron.bcd.blocks.partition import Partition
from megatron.bcd.config import RunConfig
from megatron.bcd.pipeline.build import bcd_shape, default_run_ahead
from megatron.bcd.pipeline.chunk_shape import phase_chunk_shape
from megatron.bcd.planner.activations import (
    LayerBytes,
    Recomputed,
    Shape,
    bytes_of_layers,
    stage_activations,
    stage_messages,
)
from megatron.bcd.planner.cost import ModelShape, pass_products
from megatron.bcd.planner.recipe import LayerCounts, layer_counts_of
from megatron.bcd.planner.recomputation import MOST_ROUNDS, least_recomputation
from megatron.bcd.planner.run_state import head_passes, phase_counts, shape_of, stage_sizes, state_bytes

_OPTIMIZER_WORK = 4
"""Bytes per stepped parameter of a rank's shard: temporary memory of PyTorch's Adam."""


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
        num_stages = self.partition.num_stages
        numbers = [
            self._cut.after_prefix[chunk * num_stages + stage][block] for chunk in range(self.partition.num_chunks)
        ]
        matrices, core = pass_products(self._model_shape, sequence=self.config.model.seq_length)
        shape = self._phase_shape(block)
        state, work = self._state(stage, block)
        messages = stage_messages(self._layer_bytes, shape, stage)

        def fits(choice: Recomputed) -> bool:
            activations = stage_activations(self._cut, self._layer_bytes, shape, stage, block, choice)
            return state + max(activations + messages, work) <= memory_bytes

        return least_recomputation(numbers, fits, core_share=core / (matrices + core))

    @cached_property
    def _cut(self) -> LayerCounts:
        return layer_counts_of(self.partition)

    @cached_property
    def _model_shape(self) -> ModelShape:
        return shape_of(self.config, vocab_size=self.padded_vocab_size)

    @cached_property
    def _layer_bytes(self) -> LayerBytes:
        config = self.config
        return bytes_of_layers(
            self._model_shape,
            tokens=config.training.micro_batch_size * config.model.seq_length // config.context_size,
            sequence=config.model.seq_length,
            element=4 if config.precision == "fp32" else 2,
            num_heads=int(config.transformer["num_attention_heads"]),
            padded_vocabulary=self.padded_vocab_size,
            context_size=config.context_size,
            tensor_size=config.tensor_size,
        )

    def _phase_shape(self, block: int) -> Shape:
        partition, number = self.partition, self.num_microbatches
        if partition.num_chunks > 1:
            head = head_passes(self.config, padded_vocab_size=self.padded_vocab_size)
            number = min(number, MOST_ROUNDS * partition.num_stages)
            return phase_chunk_shape(partition, block, num_microbatches=number, head=head)
        first = partition.first_trainable_stage(block)
        asked = self.config.bcd.bcd_run_ahead
        default = default_run_ahead(num_stages=partition.num_stages, first_trainable=first)
        ahead = min(default if asked is None else asked, number) if first else 0
        return bcd_shape(
            num_stages=partition.num_stages,
            num_microbatches=number,
            first_trainable=first,
            active=[partition.stage_active(block, stage) for stage in range(partition.num_stages)],
            done_ahead=ahead,
            run_ahead=ahead,
        )

    def _state(self, stage: int, block: int) -> tuple[int, int]:
        """Bytes of model state, and of temporary memory of the optimizer."""
        config = self.config
        sizes = stage_sizes(config, self.partition, stage, padded_vocab_size=self.padded_vocab_size)
        owned = {name: ownership(name, partition=self.partition, stage=stage) for name in sizes}
        counts = phase_counts(sizes, owned, block, is_muon=config.optimizer.optimizer == "muon")
        total = sum(sizes.values())
        state = state_bytes(config, num_parameters=total, counts=counts, num_replicas=self.num_replicas)
        shards = self.num_replicas if config.training.use_distributed_optimizer else 1
        return state, _OPTIMIZER_WORK * counts["adam"] // shards
