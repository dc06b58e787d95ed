"""Computes missing records of a prefix cache with the training's own forward passes, up to the first active layer.

Tensor shapes: S sequence length, B micro-batch size, H hidden size.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy
import torch
from megatron.core import parallel_state

from megatron.bcd import data
from megatron.bcd.blocks.partition import Partition
from megatron.bcd.config import RunConfig
from megatron.bcd.model.attention import whole_sequence
from megatron.bcd.model.builder import unwrap_model
from megatron.bcd.model.transformer_config import DTYPES
from megatron.bcd.pipeline.p2p import OneWayLink
from megatron.bcd.pipeline.schedule import PipelineSchedule
from megatron.bcd.prefix_cache import serve
from megatron.bcd.prefix_cache.folders import Cache
from megatron.bcd.prefix_cache.store import Bytes, Slots
from megatron.bcd.runtime import atomic_io, collectives, device

_MICROBATCHES_PER_ROUND = 16
"""After each round all ranks exchange errors: ranks without work must not wait longer than a collective's timeout."""
_MAX_PENDING_WRITES = 4
STOPPED = "stopped"
"""In place of an error of `fill`."""
Counts = dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """The frozen layers before the first active one, and what their forward passes need."""

    model: torch.nn.Module
    partition: Partition
    stage: int
    """Pipeline stage of this rank."""
    block: int
    """The active block."""
    dataset: Any
    """Training split; None on a stage that needs no data."""
    dtype: torch.dtype
    """Of the model."""
    micro_batch_size: int
    has_attention_mask: bool
    """Whether every stage needs the batch, for its mask (--reset-attention-mask)."""
    link: OneWayLink | None
    """To the neighbouring stages; None on one pipeline stage."""
    pipeline: PipelineSchedule | None = None
    """Runs the prefix where stages have several chunks."""

    @classmethod
    def of(
        cls,
        config: RunConfig,
        *,
        model: torch.nn.Module,
        partition: Partition,
        stage: int,
        block: int,
        dataset: Any,
        link: OneWayLink | None,
        pipeline: PipelineSchedule | None = None,
    ) -> Prefix:
        return cls(
            model=model,
            partition=partition,
            stage=stage,
            block=block,
            dataset=dataset,
            dtype=DTYPES[config.precision],
            micro_batch_size=config.training.micro_batch_size,
            has_attention_mask=config.data.reset_attention_mask,
            link=link,
            pipeline=pipeline,
        )

    @property
    def num_chunks(self) -> int:
        """Chunks of every stage that hold the prefix; 0 where a stage is one chunk."""
        cut = self.partition
        return cut.first_trainable_virtual_stage(self.block) // cut.num_stages if cut.num_chunks > 1 else 0

    @property
    def last_stage(self) -> int:
        """The first trainable stage: the last one that holds a part of the prefix, or its output. With several chunks
        the last stage, behind which the prefix ends."""
        if self.num_chunks:
            return self.partition.num_stages - 1
        return self.partition.first_trainable_stage(self.block)

    @property
    def ends_here(self) -> bool:
        """Whether this rank's stage writes the prefix's output."""
        return self.stage == self.last_stage

    def local_layer(self, layer: int) -> int:
        """A layer of the model, counted on this stage."""
        return layer - self.partition.chunk_layers(self.stage, 0).start


@dataclass(frozen=True, kw_only=True)
class _Work:
    """One micro-batch of one data-parallel replica."""

    slots: Slots
    """Records to make, at most B."""
    source: Cache | None = None
    """An older cache that holds the input of a layer of the prefix."""
    source_slots: Slots | None = None


class _Reached(Exception):
    """Ends a forward pass at the input of the first active layer."""

    def __init__(self, hidden_states: torch.Tensor) -> None:
        self.hidden_states = hidden_states


def fill(
    prefix: Prefix,
    cache: Cache,
    missing: Slots,
    sources: list[tuple[Cache, Slots]],
    should_stop: Callable[[], bool],
) -> tuple[str | None, Counts]:
    """Write the records of the slots `missing`, each by one data-parallel replica. A collective.

    `sources` are older caches and their slots of the missing samples (-1: not there), the best one first. Returns an
    error of any rank, `STOPPED` as soon as `should_stop` says so, or None; and how many records were obtained in which
    way.
    """
    plan, counts = _divide(prefix, missing, sources)
    if not plan:
        return None, counts
    filler = Filler(prefix, cache)
    try:
        for start in range(0, len(plan), _MICROBATCHES_PER_ROUND):
            filler.do_all(plan[start : start + _MICROBATCHES_PER_ROUND])
            error = collectives.first_error(filler.finish())
            if error is not None:
                return error, counts
            if should_stop():
                return STOPPED, counts
    finally:
        filler.close()
    return None, counts


def _divide(prefix: Prefix, missing: Slots, sources: list[tuple[Cache, Slots]]) -> tuple[list[_Work | None], Counts]:
    """This replica's micro-batches, as many as on the others, padded with None."""
    if prefix.num_chunks:  # a shorter prefix would have to start in the middle of the plan
        first_layer = len(prefix.partition.prefix_layers(prefix.block))
    else:
        first_layer = prefix.partition.chunk_layers(prefix.last_stage, 0).start
    size, counts = prefix.micro_batch_size, Counts()
    number, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    is_open = numpy.ones(len(missing), dtype=bool)
    works: list[_Work | None] = []
    for source, slots in (*sources, (None, numpy.zeros_like(missing))):
        if source is not None and source.key.num_layers < first_layer:
            continue  # stages before the first trainable stage would have to start at an inner layer
        chosen = numpy.flatnonzero(is_open & (slots >= 0))
        is_open[chosen] = False
        how = "were computed" if source is None else f"were taken from a prefix of {source.key.num_layers} layers"
        counts[how] = counts.get(how, 0) + len(chosen)
        share = -(-len(chosen) // ranks)
        mine = chosen[number * share : (number + 1) * share]
        for start in range(0, share, size):
            at = mine[start : start + size]
            works.append(_Work(slots=missing[at], source=source, source_slots=slots[at]) if len(at) else None)
    return works, counts


class Filler:
    """One rank's work for its replica; a thread writes while the next micro-batch is computed."""

    def __init__(self, prefix: Prefix, cache: Cache) -> None:
        self._prefix, self._cache = prefix, cache
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="prefix-fill")
        self._writes: deque[Future[None]] = deque()
        self._error: str | None = None

    def do_all(self, works: Sequence[_Work | None]) -> None:
        """Some micro-batches. A collective within the replica."""
        if not self._prefix.num_chunks:
            for work in works:
                self.do(work)
            return
        mine = [work for work in works if work is not None]
        for work in mine:
            if work.source is not None:
                self.do(work)
        computed = [work for work in mine if work.source is None]
        if computed:
            self._compute_in_chunks(computed)

    def _compute_in_chunks(self, works: Sequence[_Work]) -> None:
        """From the tokens through all chunks that hold the prefix, as in an evaluation."""
        prefix, done = self._prefix, iter(works)
        assert prefix.pipeline is not None
        needs_batch = prefix.stage == 0 or prefix.has_attention_mask

        def step(batches: Iterator[data.Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., None]]:
            batch = next(batches)
            output = model(batch.get("tokens"), batch.get("position_ids"), batch.get("attention_mask"))
            return output, lambda output, non_loss_data: self._write(next(done), output)

        length, _ = self._cache.key.record_shape
        prefix.pipeline.run_chunks_forward(
            model=prefix.model,
            num_chunks=prefix.num_chunks,
            num_microbatches=len(works),
            data_iterator=(self._batch(work) if needs_batch else {} for work in works),
            forward_step_func=step,
            seq_length=length,
            micro_batch_size=prefix.micro_batch_size,
            decoder_seq_length=length,
        )

    def do(self, work: _Work | None) -> None:
        """One micro-batch. A collective within the replica."""
        if work is None or self._prefix.stage > self._prefix.last_stage:
            return
        if work.source is not None:
            output = self._from_source(work, work.source) if self._prefix.ends_here else None
            if output is not None:
                self._write(work, output)
            return
        output = self._computed(work)
        if self._prefix.ends_here:
            self._write(work, output)
        else:
            assert self._prefix.link is not None
            self._prefix.link.send(output)

    def finish(self) -> str | None:
        """Wait for pending sends and writes; the first error on this rank."""
        if self._prefix.link is not None:
            self._prefix.link.finish_sends()
        while self._writes:
            self._attempt(self._writes.popleft().result)
        self._attempt(self._cache.store.close)
        return self._error

    def close(self) -> None:
        self._writer.shutdown()

    @torch.no_grad()
    def _computed(self, work: _Work) -> torch.Tensor:
        """From the tokens: this stage's output, or the input of the first active layer, [S, B, H]."""
        prefix = self._prefix
        batch = self._batch(work) if prefix.stage == 0 or prefix.has_attention_mask else {}
        received = None
        if prefix.stage > 0:
            assert self._prefix.link is not None
            received = self._prefix.link.receive(self._shape(), more_follow=False)
        unwrap_model(prefix.model).set_input_tensor(received)
        try:
            return self.forward(batch)
        finally:
            unwrap_model(prefix.model).set_input_tensor(None)

    @torch.no_grad()
    def _from_source(self, work: _Work, source: Cache) -> torch.Tensor | None:
        """From an older cache, through the layers it does not cover; None if it can no longer be read."""
        assert work.source_slots is not None
        slots = self._padded(work.source_slots)
        hidden_states = torch.empty(0)
        try:
            hidden_states = data.part_of_sequences(serve.read(source, slots, self._prefix.dtype))
        except (serve.DamagedRecord, OSError) as error:
            self._error = self._error or atomic_io.describe(error)
        if self._is_stopped_on_another_rank():
            return None
        if source.key.num_layers == self._cache.key.num_layers:
            return hidden_states.to(device.current())
        return self.forward(
            self._batch(work) if self._prefix.has_attention_mask else {},
            decoder_input=hidden_states.to(device.current()),
            extra_block_kwargs={"first_layer": self._prefix.local_layer(source.key.num_layers)},
        )

    def _batch(self, work: _Work) -> data.Batch:
        return data.batch_of(self._prefix.dataset, self._cache.samples[self._padded(work.slots)].tolist())

    def forward(self, batch: data.Batch, **others: Any) -> torch.Tensor:
        """The model's output; on the stage of the first active layer, that layer's input."""
        with contextlib.ExitStack() as hooks:
            if self._prefix.ends_here:
                first_active = self._prefix.local_layer(self._cache.key.num_layers)
                layer = unwrap_model(self._prefix.model).decoder.layers[first_active]
                hook = layer.register_forward_pre_hook(_reached, with_kwargs=True)
                hooks.callback(hook.remove)
            try:
                output: torch.Tensor = self._prefix.model(
                    batch.get("tokens"), batch.get("position_ids"), batch.get("attention_mask"), **others
                )
            except _Reached as reached:
                return reached.hidden_states
        return output

    def _is_stopped_on_another_rank(self) -> bool:
        """Whether a rank that shares the microbatch lacks its input: the others must not compute without it."""
        group = parallel_state.get_tensor_and_context_parallel_group()
        if group.size() == 1:
            return self._error is not None
        stopped = torch.tensor([self._error is not None], dtype=torch.int32, device=device.current())
        torch.distributed.all_reduce(stopped, op=torch.distributed.ReduceOp.MAX, group=group)
        return bool(stopped.item())

    def _padded(self, slots: Slots) -> Slots:
        """Padded with the last slot to the micro-batch size of training, so that the same kernels run."""
        return numpy.pad(slots, (0, self._prefix.micro_batch_size - len(slots)), mode="edge")

    def _shape(self) -> tuple[int, ...]:
        length, hidden_size = self._cache.key.record_shape
        context_size = parallel_state.get_context_parallel_world_size()
        return length // context_size, self._prefix.micro_batch_size, hidden_size

    def _write(self, work: _Work, hidden_states: torch.Tensor) -> None:
        if parallel_state.get_tensor_model_parallel_rank() != 0:
            return
        hidden_states = whole_sequence(hidden_states, parallel_state.get_context_parallel_group())
        if parallel_state.get_context_parallel_rank() != 0 or self._error is not None:
            return
        records = serve.to_records(hidden_states, self._cache.key.dtype)
        self._writes.append(self._writer.submit(_write_records, self._cache, work.slots, records))
        while len(self._writes) > _MAX_PENDING_WRITES:
            self._attempt(self._writes.popleft().result)

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            self._error = self._error or atomic_io.describe(error)


def _reached(layer: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> NoReturn:
    raise _Reached(kwargs["hidden_states"])


def _write_records(cache: Cache, slots: Slots, records: list[Bytes]) -> None:
    for slot, record in zip(slots.tolist(), records, strict=False):  # padding is not written
        cache.store.write(slot, record)
