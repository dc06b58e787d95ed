"""Formulas of a training configuration, for planner and trainer: memory, --recompute auto, FLOPs. Pure."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from megatron.bcd.blocks.partition import Partition, layout_text, partition_from_config
from megatron.bcd.config import RunConfig
from megatron.bcd.pipeline.cut import balanced_cut
from megatron.bcd.pipeline.plan import PlanShape, phase_shape
from megatron.bcd.planner import cost
from megatron.bcd.planner.activations import LayerBytes, Recomputed, StageActivations, layer_bytes
from megatron.bcd.planner.state import ModelState, RankMemory, largest_rank, matrix_shares

_MOST_LOGITS = 2**30
"""Bytes of the logits of a microbatch from which on they are not stored."""


def balance_stages(config: RunConfig, *, padded_vocab_size: int) -> RunConfig:
    """Return the configuration with the --pipeline-model-parallel-layout of --pipeline-cut auto."""
    shape, sequence = cost.shape_of(config, vocab_size=padded_vocab_size), config.model.seq_length
    # in passes of a layer
    head = shape.hidden_size * padded_vocab_size / sum(cost.pass_products(shape, sequence=sequence))
    layers = config.measured.relative_costs if config.measured else None
    sizes = balanced_cut(partition_from_config(config), head=head, layers=layers)
    return config.replace_section("training", pipeline_model_parallel_layout=layout_text(sizes))


def logit_bytes(config: RunConfig, *, padded_vocab_size: int) -> int:
    """Return the bytes of a microbatch's logits on a rank: in fp32 for the loss, and in the run's 16 bits."""
    tokens = config.training.micro_batch_size * config.model.seq_length // config.context_size
    return tokens * padded_vocab_size // config.tensor_size * (4 if config.precision == "fp32" else 6)


def with_loss(config: RunConfig, *, padded_vocab_size: int, has_plain_head: Callable[[], bool]) -> RunConfig:
    """Return the configuration with the linear loss if logits take too much, no flag decides, and the head is plain."""
    is_open = config.transformer.get("cross_entropy_loss_fusion") is None
    is_large = logit_bytes(config, padded_vocab_size=padded_vocab_size) > _MOST_LOGITS
    if not (is_open and is_large and has_plain_head()):
        return config
    linear = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}
    return replace(config, transformer={**config.transformer, **linear})


def phase_flops(config: RunConfig, partition: Partition, block: int, *, padded_vocab_size: int) -> float:
    """Return the floating-point operations of the matrix products of one sequence in the block's phase, on all ranks.

    This is stock Megatron-LM's count of full training without the work that the phase skips: input gradients of its
    prefix, and weight gradients of frozen layers. Recomputation does not count. The forward pass of a cached prefix
    does.
    """
    shape, length = cost.shape_of(config, vocab_size=padded_vocab_size), config.model.seq_length
    matrices, core = cost.pass_products(shape, sequence=length)
    layers = sum(cost.layer_work(partition, block)) * (matrices + core / 2)  # a causal mask halves the core
    head = shape.hidden_size * padded_vocab_size
    return 2.0 * length * (layers + head * (2 + partition.head_active(block)))


@dataclass(frozen=True, kw_only=True)
class RunMemory:
    """The memory of a run. The formulas assume that the kernels of a LLaMA are fused."""

    config: RunConfig
    state: ModelState
    num_microbatches: int
    """Microbatches of a full global batch."""
    num_kept: int = 0
    num_on_host: int = 0
    """See `PlanShape`."""

    @property
    def kept(self) -> dict[str, int]:
        """The passes of each stage that are not repeated, by their names in `PlanShape`."""
        return {"num_kept": self.num_kept, "num_on_host": self.num_on_host}

    def with_kept(self, *, memory_bytes: float) -> RunMemory:
        """Return the run with the passes that --bcd-saved-activations keeps; with auto those that fit on the device in
        all phases and on all stages, and of the others --bcd-passes-on-host."""
        choice = self.config.bcd.bcd_saved_activations
        if not self.config.is_breadth_first or choice == "recompute":
            return self
        most = len(self.state.chunks) // self.config.pipeline_size * self.num_microbatches
        if choice != "auto":
            return replace(self, num_kept=most * (choice == "device"), num_on_host=most * (choice == "host"))
        run = replace(self, num_on_host=self.config.bcd.bcd_passes_on_host)
        does_not_fit = bisect_left(
            range(most + 1), True, key=lambda n: not replace(run, num_kept=n).fits_in(memory_bytes)
        )
        return replace(run, num_kept=max(0, does_not_fit - 1))

    def with_places(self, *, memory_bytes: float) -> RunMemory:
        """Return the run with what --bcd-layers-on auto and --bcd-saved-inputs auto choose in this memory.

        Saved inputs leave the device before layers do. As many layers stay on it as fit on every rank in every phase,
        given the activations that the flags save. If nothing fits, all inactive layers are on the host.
        """
        bcd, most = self.config.bcd, max(self.state.partition.layers_per_stage)
        by_layers: list[list[tuple[str, int]]] = [[(bcd.bcd_layers_on, bcd.bcd_resident_layers)]]
        if bcd.bcd_layers_on == "auto":
            by_layers = [[("device", 0)], [("host", number) for number in range(most, -1, -1)]]
        is_open = self.config.is_breadth_first and bcd.bcd_saved_inputs == "auto"
        for layers, inputs in itertools.product(by_layers, ("device", "host") if is_open else (bcd.bcd_saved_inputs,)):
            choices = [self._at(*choice, inputs) for choice in layers]
            index = bisect_left(choices, True, key=lambda run: run.fits_in(memory_bytes))
            if index < len(choices):
                return choices[index]
        return choices[-1]

    def _at(self, layers_on: str, num_resident: int, saved_inputs: str) -> RunMemory:
        places = {"bcd_layers_on": layers_on, "bcd_resident_layers": num_resident, "bcd_saved_inputs": saved_inputs}
        config = self.config.replace_section("bcd", **places)
        return replace(self, config=config, state=replace(self.state, config=config))

    def fits_in(self, memory_bytes: float) -> bool:
        """Return whether every rank fits in every phase, with what Megatron-LM's flags recompute."""
        partition = self.state.partition
        return all(
            self.rank(stage, block, choice=self.recomputed(stage, block)).total <= memory_bytes
            for stage, block in itertools.product(range(partition.num_stages), range(partition.num_blocks))
        )

    def recomputed(self, stage: int, block: int) -> Recomputed:
        """Return what Megatron-LM's flags recompute."""
        granularity, partition = self.config.transformer.get("recompute_granularity"), self.state.partition
        layers = partition.num_behind_prefix(stage, block) if granularity == "full" else ()
        return Recomputed(granularity=granularity or "none", layers=tuple(layers))

    def recomputation(self, *, limit: float) -> list[list[Recomputed]]:
        """Return by stage and block what flags recompute, or with --recompute auto the least that fits `limit` bytes of
        a rank."""

        def choice(stage: int, block: int) -> Recomputed:
            if self.config.training.recompute == "auto":
                return self.activations(stage, block).least_recomputation(limit=limit)
            return self.recomputed(stage, block)

        stages, blocks = range(self.state.partition.num_stages), range(self.state.partition.num_blocks)
        return [[choice(stage, block) for block in blocks] for stage in stages]

    def rank(self, stage: int, block: int, *, choice: Recomputed, replica: int | None = None) -> RankMemory:
        """Return the memory of a rank of the stage with this recomputation; by default that with the most state."""
        state, activations = self.state, self.activations(stage, block)
        rank = largest_rank(state, stage, block) if replica is None else state.rank(stage, block, replica)
        rank = replace(rank, communication=activations.message_bytes)
        if not state.config.is_breadth_first:
            return replace(rank, activations=activations.peak_bytes(choice))
        share, none = matrix_shares(state, stage, block)[replica or 0], (0,) * len(state.chunks)
        chunks = slice(stage, None, state.partition.num_stages)
        updates = (share.working_by_chunk or none)[chunks]
        if self.config.clips_by_chunk:  # updates are a separate pass, which has no activations
            rank, updates = replace(rank, optimizer_work=max(rank.optimizer_work, *updates)), none[chunks]
        working = map(max, activations.chunk_peaks(choice), updates)
        gradients, peak = max(zip((share.by_chunk or none)[chunks], working, strict=True), key=sum)
        waiting = activations.input_bytes("device") + activations.kept_bytes(choice)
        return replace(rank, chunks=waiting + gradients, activations=peak)

    @cached_property
    def layer_bytes(self) -> LayerBytes:
        """The activations of one microbatch."""
        return layer_bytes(self.config, self.state)

    def schedule_shape(self, block: int) -> PlanShape:
        """Return the pipeline schedule in the middle of the block's phase."""
        shape = _schedule_shape(self.state, block, self.num_microbatches)
        return replace(shape, num_kept=self.num_kept, num_on_host=self.num_on_host)

    def activations(self, stage: int, block: int) -> StageActivations:
        """Return the activations of a stage in the block's phase."""
        shape = self.schedule_shape(block)
        return StageActivations(
            config=self.config, state=self.state, sizes=self.layer_bytes, shape=shape, stage=stage, block=block
        )


@lru_cache(maxsize=4096)
def _schedule_shape(state: ModelState, block: int, num_microbatches: int) -> PlanShape:
    is_breadth_first = state.config.is_breadth_first
    shape = phase_shape(state.passes, block, num_microbatches=num_microbatches, is_breadth_first=is_breadth_first)
    return shape.mid_phase(num_microbatches)
