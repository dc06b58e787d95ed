"""A run's memory and arithmetic from its configuration: model state, --recompute auto, FLOPs. Pure."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.bcd.blocks.partition import Partition
from megatron.bcd.config import RunConfig
from megatron.bcd.pipeline.plan import steady_shape
from megatron.bcd.planner import cost
from megatron.bcd.planner.activations import Recomputed, StageActivations, layer_bytes
from megatron.bcd.planner.state import ModelState


def offload_fraction(config: RunConfig) -> float:
    """Share of the optimizer state in host memory."""
    if not config.optimizer.optimizer_cpu_offload:
        return 0.0
    return config.optimizer.optimizer_offload_fraction


def moments_of(config: RunConfig, *, of_adam: Sequence[str]) -> Sequence[str]:
    """Dtypes of the optimizer's moments."""
    optimizer = config.optimizer
    return ("fp32",) * (optimizer.sgd_momentum != 0.0) if optimizer.optimizer == "sgd" else of_adam


def model_state_of(config: RunConfig, partition: Partition, *, padded_vocab_size: int, num_replicas: int) -> ModelState:
    """Model state of the ranks of a run, ``num_replicas`` of which hold the same weights."""
    optimizer = config.optimizer
    return ModelState(
        shape=shape_of(config, vocab_size=padded_vocab_size),
        partition=partition,
        padded_vocabulary=padded_vocab_size,
        num_replicas=num_replicas,
        tensor_size=config.tensor_size,
        precision=config.precision,
        budget=cost.state_budget(
            precision=config.precision,
            moments=moments_of(config, of_adam=config.moment_dtypes),
            gradients_in_fp32=config.ddp.grad_reduce_in_fp32,
            precision_aware=config.is_precision_aware,
        ),
        bcd=config.bcd,
        optimizer=optimizer.optimizer,
        is_low_bit=set(config.moment_dtypes) != {"fp32"},
        is_distributed=config.training.use_distributed_optimizer,
        offload_fraction=offload_fraction(config),
    )


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


def phase_flops(config: RunConfig, partition: Partition, block: int, *, padded_vocab_size: int) -> float:
    """Floating-point operations of matrix products for one sequence in the block's phase, over all ranks.

    Stock Megatron-LM's count of full training, without what the phase leaves out: gradients behind its prefix and of
    frozen weights. What is recomputed is not counted, and what a prefix cache serves is.
    """
    shape, length = shape_of(config, vocab_size=padded_vocab_size), config.model.seq_length
    matrices, core = cost.pass_products(shape, sequence=length)
    work = cost.layer_work(partition, block)
    of_layers = sum(work) * (matrices + core / 2)
    head = shape.hidden_size * padded_vocab_size
    return 2.0 * length * (of_layers + head * (2 + partition.head_active(block)))


@dataclass(frozen=True, kw_only=True)
class RunMemory:
    """A run's memory, by the planner's formulas: a LLaMA's kernels are assumed fused."""

    config: RunConfig
    state: ModelState
    num_microbatches: int
    """Of a full global batch."""

    def frozen_weights(self, *, memory_bytes: float) -> tuple[str, int]:
        """--bcd-frozen-weights and --bcd-resident-layers: as many layers on the device as every rank has room for in
        every phase, beside the activations that the flags keep. All in host memory where nothing fits."""
        partition = self.state.partition
        places = list(itertools.product(range(partition.num_stages), range(partition.num_blocks)))
        activations = [self._activation_bytes(*place) for place in places]

        def fits(choice: tuple[str, int]) -> bool:
            bcd = replace(self.state.bcd, bcd_frozen_weights=choice[0], bcd_resident_layers=choice[1])
            state = replace(self.state, bcd=bcd)
            ranks = [state.largest_rank(*place) for place in places]
            return all(
                replace(rank, activations=held).total <= memory_bytes
                for rank, held in zip(ranks, activations, strict=True)
            )

        if fits(("device", 0)):
            return "device", 0
        on_host = [("host", number) for number in range(max(partition.layers_per_stage), -1, -1)]
        return on_host[min(bisect_left(on_host, True, key=fits), len(on_host) - 1)]

    def _activation_bytes(self, stage: int, block: int) -> int:
        """Messages included."""
        activations, granularity = self.activations(stage, block), self.config.transformer.get("recompute_granularity")
        layers = activations.partition.num_behind_prefix(stage, block) if granularity == "full" else ()
        choice = Recomputed(granularity=granularity or "full", layers=tuple(layers))
        return activations.peak_bytes(choice) + activations.message_bytes

    def activations(self, stage: int, block: int) -> StageActivations:
        config, state = self.config, self.state
        return StageActivations(
            state=state,
            sequence=config.model.seq_length,
            sizes=layer_bytes(
                state,
                tokens=config.training.micro_batch_size * config.model.seq_length // config.context_size,
                sequence=config.model.seq_length,
                num_heads=int(config.transformer["num_attention_heads"]),
                context_size=config.context_size,
                linear_loss=config.has_linear_loss,
            ),
            shape=steady_shape(
                state.partition,
                block,
                num_microbatches=self.num_microbatches,
                head=head_passes(config, padded_vocab_size=state.padded_vocabulary),
                run_ahead=config.bcd.bcd_run_ahead,
            ),
            stage=stage,
            block=block,
        )
