"""Pre-inference (arXiv 2506.12037, section 3.2.2): phases whose prefix is read from a cache instead of computed."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import numpy
import torch
from megatron.core import parallel_state

from megatron.bcd import data
from megatron.bcd.blocks.partition import Partition
from megatron.bcd.config import RunConfig
from megatron.bcd.data.samples import TrainingSamples
from megatron.bcd.metrics.console import format_bytes
from megatron.bcd.metrics.reporter import Reporter
from megatron.bcd.model.implementation import Implementation
from megatron.bcd.model.transformer_config import DTYPES
from megatron.bcd.pipeline.schedule import PipelineSchedule
from megatron.bcd.prefix_cache import fill, folders, serve
from megatron.bcd.prefix_cache.folders import Cache
from megatron.bcd.prefix_cache.key import CacheKey, digest_of
from megatron.bcd.prefix_cache.store import Slots
from megatron.bcd.prefix_cache.weight_digests import layer_digests
from megatron.bcd.runtime import atomic_io, collectives, device, packages

BREAK_EVEN = 1.15
"""Least uses of a sample for which a cache pays: filling it costs at most as many forward passes of the prefix."""
_SHARDS_AT_ONCE = 16
"""Reserved while the other ranks wait: 4 GiB, two minutes on a disk that takes 32 MiB/s."""
_CHANGE_NO_OUTPUT = (
    "pipeline_model_parallel_size",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
)


class PrefixCache:
    """--bcd-prefix-cache: opens and fills the cache of each phase, and serves from it. The same on every rank."""

    def __init__(
        self,
        config: RunConfig,
        *,
        model: torch.nn.Module,
        partition: Partition,
        stage: int,
        dataset: Any,
        samples: TrainingSamples,
        pipeline: PipelineSchedule,
        implementation: Implementation,
        reporter: Reporter,
        should_stop: Callable[[], bool],
    ) -> None:
        """`stage`: pipeline stage of this rank; `dataset`: the training split, None on a stage that needs no data;
        `should_stop`: whether the run is asked to stop, which ends the filling of a cache; a collective."""
        self.root = config.bcd.bcd_prefix_cache
        self._config = config
        self._model = model
        self._partition = partition
        self._stage = stage
        self._dataset = dataset
        self._samples = samples
        self._pipeline = pipeline
        self._reporter = reporter
        self._should_stop = should_stop
        self._network = _network(config, implementation)
        self._phase = self._block = 0
        self._cache: Cache | None = None
        self._served: Iterator[data.Batch] | None = None
        self._hits = 0

    @property
    def cache(self) -> Cache | None:
        """The cache that the present phase reads; None where it computes its prefix."""
        return self._cache

    def begin_phase(self, phase: int, block: int, *, num_samples: int) -> bool:
        """Open the cache of `phase`, in which `block` is active, and fill what is missing; whether the phase reads its
        prefix from it. A collective, with whole weights on every rank.

        `num_samples`: least number of samples, repeated ones included, that the phase trains on from its start.
        """
        self.close()
        self._phase, self._block = phase, block
        self._cache = self._open(num_samples)
        return self._cache is not None

    def serve(self, batches: Iterator[data.Batch], *, position: int) -> Iterator[data.Batch]:
        """`batches`, from sample `position` of the phase on; if the phase reads its prefix, with the input of the first
        active layer added on the stage that holds that layer."""
        if self._cache is None or self._stage != self._partition.first_trainable_stage(self._block):
            return batches
        if self._served is None:
            self._served = self._with_prefix_outputs(batches, self._cache, position)
        return self._served

    def prefix(self) -> fill.Prefix:
        """The present phase's prefix, ready for forward passes. A collective."""
        return fill.Prefix.of(
            self._config,
            model=self._model,
            partition=self._partition,
            stage=self._stage,
            block=self._block,
            dataset=self._dataset,
            link=self._pipeline.prefix_link(self._model),
            pipeline=self._pipeline,
        )

    def take_hits(self) -> int:
        """Samples served to this rank since the last call; counted once over the ranks that share a microbatch."""
        hits, self._hits = self._hits, 0
        return hits if parallel_state.get_tensor_and_context_parallel_rank() == 0 else 0

    def bytes_on_disk(self) -> int:
        """Of all caches, as rank 0 sees them; 0 on the other ranks."""
        with contextlib.suppress(OSError):
            return folders.bytes_on_disk(self.root) if self.root and torch.distributed.get_rank() == 0 else 0
        return 0

    def close(self) -> None:
        """Stop reading ahead, at the end of a phase."""
        if self._served is not None:
            self._served.close()  # type: ignore[attr-defined]
        self._served = self._cache = None

    def _open(self, num_samples: int) -> Cache | None:
        """The present phase's cache, complete; None where the phase computes its prefix, with a note why."""
        num_layers = len(self._partition.prefix_layers(self._block))
        subset = self._samples.subset
        if not num_layers or subset is None:
            return None
        uses = subset.times_used(num_samples)
        size = f"{subset.size:,} outputs of {num_layers} layer{'s' * (num_layers > 1)}"
        pays = f"samples are used {uses:,.2f} times, and it pays from {BREAK_EVEN:.2f} on"
        if uses < BREAK_EVEN:
            self._note_computing(f"{size} are not kept: {pays}")
            return None
        samples = numpy.sort(subset.indices(self._phase))
        key = self._key(samples, num_layers)
        cache = Cache(str(self.root), key, samples)
        plan = self._prepare_on_rank_0(cache)
        if plan["error"] is not None:
            self._give_up(cache, plan["error"])
            return None
        if plan["reason"]:
            self._note_computing(f"{size} ({format_bytes(cache.store.num_bytes)}) are not kept: {plan['reason']}")
            return None
        error = _reserve(cache)
        if error is not None:
            self._give_up(cache, error)
            return None
        missing = _not_there(cache, numpy.arange(key.num_records))
        if len(missing):
            self._reporter.note(
                f"prefix cache: phase {self._phase} keeps {size}, {format_bytes(cache.store.num_bytes)}: {pays}"
            )
        return self._filled(cache, missing, plan["shorter"])

    def _filled(self, cache: Cache, missing: Slots, shorter: list[Cache]) -> Cache | None:
        start = time.monotonic()
        sources = [(one, _there(one, cache.samples[missing])) for one in shorter] if len(missing) else []
        error, counts = fill.fill(self.prefix(), cache, missing, sources, self._should_stop)
        if error == fill.STOPPED:  # what is there serves the resumed run
            self._note_computing("the run is asked to stop")
            return None
        if error is not None:
            self._give_up(cache, error)
            return None
        self._reporter.note(
            f"prefix cache: phase {self._phase} reads {cache.folder}; of {cache.key.num_records:,} records "
            f"{cache.key.num_records - len(missing):,} were there"
            + "".join(f", {count:,} {how}" for how, count in counts.items() if count)
            + (f" ({time.monotonic() - start:,.1f} s)" if len(missing) else "")
        )
        return cache

    def _note_computing(self, reason: str) -> None:
        self._reporter.note(f"prefix cache: phase {self._phase} computes its prefix: {reason}")

    def _give_up(self, cache: Cache, error: str) -> None:
        if torch.distributed.get_rank() == 0:
            with contextlib.suppress(OSError):
                folders.delete(cache.folder)  # it would only be in the way on a disk that is full
        self._reporter.warning(
            f"--bcd-prefix-cache {self.root}: can't be filled ({error}); phase {self._phase} computes its prefix"
        )

    def _key(self, samples: Slots, num_layers: int) -> CacheKey:
        return CacheKey(
            prefix=layer_digests(self._model, self._partition, stage=self._stage, num_layers=num_layers),
            samples=folders.samples_digest(samples),
            num_records=len(samples),
            record_shape=(self._config.model.seq_length, self._config.hidden_size),
            dtype=self._config.bcd.bcd_prefix_cache_dtype,
            data=collectives.on_rank_0(lambda: _describe_data(self._config, self._dataset)),
            network=self._network,
        )

    def _prepare_on_rank_0(self, cache: Cache) -> dict[str, Any]:
        """On rank 0: check disk space and find caches to start from. Returned on every rank."""
        plan: dict[str, Any] = {"error": None, "reason": "", "shorter": []}

        def prepare() -> dict[str, Any]:
            try:
                self._prepare(cache, plan)
            except OSError as error:
                plan["error"] = atomic_io.describe(error)
            return plan

        return collectives.on_rank_0(prepare)

    def _prepare(self, cache: Cache, plan: dict[str, Any]) -> None:
        root, limit = str(self.root), self._config.bcd.bcd_prefix_cache_max_gib
        os.makedirs(root, exist_ok=True)
        space = folders.check_space(
            root, cache.key, cache.store.num_bytes, limit=None if limit is None else int(limit * 2**30)
        )
        if not space.is_enough:
            plan["reason"] = space.reason
            return
        for folder in space.to_delete:
            folders.delete(folder)
        folders.prepare(root, cache.key, cache.samples)
        plan["shorter"] = folders.shorter(root, cache.key)

    def _with_prefix_outputs(self, batches: Iterator[data.Batch], cache: Cache, position: int) -> Iterator[data.Batch]:
        subset = self._samples.subset
        assert subset is not None
        sampler = data.SubsetBatches(
            subset=subset,
            phase=self._phase,
            position=position,
            micro_batch_size=self._config.training.micro_batch_size,
            rank=parallel_state.get_data_parallel_rank(),
            num_ranks=parallel_state.get_data_parallel_world_size(),
        )
        slots = (cache.slots_of(numpy.array(samples, dtype=numpy.int64)) for samples in sampler)
        outputs = serve.read_ahead(cache, slots, DTYPES[self._config.precision])
        with contextlib.closing(outputs):  # type: ignore[type-var]
            for batch, output in zip(batches, device.copied_ahead(outputs), strict=False):
                self._hits += output.size(1)
                yield batch | {"prefix_output": data.part_of_sequences(output)}


def _reserve(cache: Cache) -> str | None:
    """On rank 0, share by share: the others must not wait for all of it in one collective, which has a timeout. The
    error, on every rank."""

    def reserve(first_shard: int) -> str | None:
        try:
            cache.store.reserve(first_shard, _SHARDS_AT_ONCE)
        except OSError as error:
            return atomic_io.describe(error)
        return None

    shares = range(0, cache.store.num_shards, _SHARDS_AT_ONCE)
    errors = (collectives.on_rank_0(functools.partial(reserve, first_shard)) for first_shard in shares)
    return next((error for error in errors if error is not None), None)


def _network(config: RunConfig, implementation: Implementation) -> dict[str, Any]:
    """What determines, beside weights and tokens, every bit that a prefix computes."""
    return {
        "transformer": {name: str(v) for name, v in config.transformer.items() if name not in _CHANGE_NO_OUTPUT},
        "model": {name: str(value) for name, value in asdict(config.model).items()},
        "precision": config.precision,
        "positions": [config.data.reset_position_ids, config.data.reset_attention_mask],
        "micro_batch_size": config.training.micro_batch_size,
        "implementation": implementation.describe(),
        "device": device.name(),
        "versions": {name: version(name) for name in ("torch", "megatron-core")}
        | {"transformer-engine": packages.transformer_engine_version()},
    }


def _describe_data(config: RunConfig, dataset: Any) -> str:
    """The dataset that indices refer to; its files by size and time, not by their content."""
    paths = config.data
    parts = [type(dataset).__name__, str(getattr(dataset, "unique_description_hash", ""))]
    for word in (*(paths.data_path or ()), *(paths.train_data_path or ())):
        for path in (f"{word}.bin", f"{word}.idx"):
            with contextlib.suppress(OSError):
                found = os.stat(path)
                parts.append(f"{os.path.basename(path)} {found.st_size} {found.st_mtime_ns}")
    return digest_of(parts)


def _not_there(cache: Cache, slots: Slots) -> Slots:
    """Of `slots`, those whose record is absent or damaged. Each rank checks a share. A collective."""
    number, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    bounds = [len(slots) * rank // ranks for rank in range(ranks + 1)]
    mine = slice(bounds[number], bounds[number + 1])
    found = numpy.zeros(len(slots), dtype=numpy.int32)
    found[mine] = cache.store.are_there(slots[mine].tolist())
    everyones = torch.from_numpy(found).to(device.current())
    torch.distributed.all_reduce(everyones)
    return slots[everyones.cpu().numpy() == 0]


def _there(cache: Cache, samples: Slots) -> Slots:
    """Slots of an older cache that hold `samples` undamaged; -1 for the others. A collective."""
    slots = cache.slots_of(samples)
    slots[numpy.isin(slots, _not_there(cache, slots[slots >= 0]))] = -1
    return slots
