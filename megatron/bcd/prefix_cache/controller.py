"""Pre-inference in the loop (arXiv 2506.12037, section 3.2.2): phases whose prefix is read and not computed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy
import torch
from megatron.core import parallel_state

from megatron.bcd import data
from megatron.bcd.metrics.lines import format_bytes
from megatron.bcd.model.implementation import Implementation
from megatron.bcd.model.transformer_config import DTYPES
from megatron.bcd.prefix_cache import fill, folders, serve
from megatron.bcd.prefix_cache.folders import Cache
from megatron.bcd.prefix_cache.key import CacheKey, digest_of
from megatron.bcd.prefix_cache.store import Slots
from megatron.bcd.prefix_cache.weight_digests import layer_digests
from megatron.bcd.runtime import atomic_io, collectives, device, packages

if TYPE_CHECKING:
    from megatron.bcd.training.loop import Trainer

BREAK_EVEN = 1.15
"""Uses of a sample from which on a cache pays: a fill costs at most so many forward passes of the prefix."""
_CHANGE_NO_OUTPUT = (
    "pipeline_model_parallel_size",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
)


class Prefix:
    """--bcd-prefix-cache: opens, fills and serves the cache of each phase. The same on every rank."""

    def __init__(self, trainer: Trainer, implementation: Implementation) -> None:
        self.root = trainer.config.bcd.bcd_prefix_cache
        self._trainer = trainer
        self._network = _network(trainer, implementation)
        self._phase: int | None = None
        self._cache: Cache | None = None
        self._served: Iterator[data.Batch] | None = None
        self._hits = 0

    @property
    def cache(self) -> Cache | None:
        """What the present phase reads its prefix's outputs from; None where it computes them."""
        return self._cache

    def batches(self) -> Iterator[data.Batch]:
        """This rank's micro-batches from here on, to be asked for before each iteration; where a cache serves, with the
        input of the first active layer on the stage that holds it. A collective at the beginning of a phase."""
        trainer = self._trainer
        if self.root is not None and trainer.state.phase != self._phase:
            self._begin_phase()
        batches = trainer.samples.batches(phase=trainer.state.phase, consumed_samples=trainer.consumed_samples)
        if self._cache is None or trainer.stage != self._first_trainable_stage:
            return batches
        if self._served is None:
            self._served = self._with_prefix_outputs(batches, self._cache)
        return self._served

    def take_hits(self) -> int:
        """Samples that this rank was served since the last call; counted once over tensor-parallel ranks."""
        hits, self._hits = self._hits, 0
        return hits if parallel_state.get_tensor_model_parallel_rank() == 0 else 0

    def bytes_on_disk(self) -> int:
        """Of all caches, as rank 0 sees them; 0 on the other ranks."""
        with contextlib.suppress(OSError):
            return folders.bytes_on_disk(self.root) if self.root and torch.distributed.get_rank() == 0 else 0
        return 0

    def close(self) -> None:
        """Stop reading ahead; the next batches are another phase's."""
        if self._served is not None:
            self._served.close()  # type: ignore[attr-defined]
        self._served = self._cache = self._phase = None

    @property
    def _first_trainable_stage(self) -> int:
        return self._trainer.partition.first_trainable_stage(self._block)

    @property
    def _block(self) -> int:
        return self._trainer.phases.block(self._trainer.state)

    def _begin_phase(self) -> None:
        self.close()
        trainer = self._trainer
        self._phase = trainer.state.phase
        trainer.active.pause_parameter_gather()
        self._cache = self._open()
        trainer.active.resume_parameter_gather()
        trainer.schedule.begin_phase(self._block, is_prefix_served=self._cache is not None)

    def _open(self) -> Cache | None:
        """The present phase's cache, whole; None where the phase computes its prefix, which is told with the reason."""
        trainer = self._trainer
        num_layers = len(trainer.partition.prefix_layers(self._block))
        subset = trainer.samples.subset
        if not num_layers or subset is None:
            return None
        steps = min(trainer.phases.least_steps, trainer.train_iters - (trainer.iteration - trainer.state.step_in_phase))
        uses = subset.times_used(steps * trainer.global_batch_size)
        size = f"{subset.size:,} outputs of {num_layers} layer{'s' * (num_layers > 1)}"
        pays = f"samples are used {uses:,.2f} times, and it pays from {BREAK_EVEN:.2f} on"
        if uses < BREAK_EVEN:
            self._tell_computing(f"{size} are not kept: {pays}")
            return None
        samples = numpy.sort(subset.indices(trainer.state.phase))
        key = self._key(samples, num_layers)
        cache = Cache(str(self.root), key, samples)
        plan = self._prepare_on_first(cache)
        if plan["error"] is not None:
            self._give_up(cache, plan["error"])
            return None
        if plan["reason"]:
            self._tell_computing(f"{size} ({format_bytes(cache.store.num_bytes)}) are not kept: {plan['reason']}")
            return None
        missing = _not_there(cache, numpy.arange(key.num_records))
        if len(missing):
            trainer.reporter.note(
                f"prefix cache: phase {trainer.state.phase} keeps {size}, {format_bytes(cache.store.num_bytes)}: {pays}"
            )
        return self._filled(cache, missing, plan["shorter"])

    def _filled(self, cache: Cache, missing: Slots, shorter: list[Cache]) -> Cache | None:
        trainer = self._trainer
        start = time.monotonic()
        sources = [(one, _there(one, cache.samples[missing])) for one in shorter] if len(missing) else []
        error, counts = fill.fill(trainer, cache, missing, sources)
        if error is not None:
            self._give_up(cache, error)
            return None
        trainer.reporter.note(
            f"prefix cache: phase {trainer.state.phase} reads {cache.folder}; of {cache.key.num_records:,} records "
            f"{cache.key.num_records - len(missing):,} were there"
            + "".join(f", {count:,} {how}" for how, count in counts.items() if count)
            + (f" ({time.monotonic() - start:,.1f} s)" if len(missing) else "")
        )
        return cache

    def _tell_computing(self, reason: str) -> None:
        self._trainer.reporter.note(f"prefix cache: phase {self._trainer.state.phase} computes its prefix: {reason}")

    def _give_up(self, cache: Cache, error: str) -> None:
        if torch.distributed.get_rank() == 0:
            with contextlib.suppress(OSError):
                folders.delete(cache.folder)  # it would only be in the way on a disk that is full
        self._trainer.reporter.warning(
            f"--bcd-prefix-cache {self.root}: can't be filled ({error}); phase {self._trainer.state.phase} computes "
            "its prefix"
        )

    def _key(self, samples: Slots, num_layers: int) -> CacheKey:
        trainer = self._trainer
        return CacheKey(
            prefix=layer_digests(trainer.model, trainer.partition, stage=trainer.stage, num_layers=num_layers),
            samples=folders.samples_digest(samples),
            num_records=len(samples),
            record_shape=(trainer.config.model.seq_length, trainer.config.hidden_size),
            dtype=trainer.config.bcd.bcd_prefix_cache_dtype,
            data=collectives.on_rank_0(lambda: _describe_data(trainer)),
            network=self._network,
        )

    def _prepare_on_first(self, cache: Cache) -> dict[str, Any]:
        """On rank 0: look for room, take it, and find caches to start from. Its answer on every rank."""
        plan: dict[str, Any] = {"error": None, "reason": "", "shorter": []}

        def prepare() -> dict[str, Any]:
            try:
                self._prepare(cache, plan)
            except OSError as error:
                plan["error"] = atomic_io.describe(error)
            return plan

        return collectives.on_rank_0(prepare)

    def _prepare(self, cache: Cache, plan: dict[str, Any]) -> None:
        root, limit = str(self.root), self._trainer.config.bcd.bcd_prefix_cache_max_gib
        os.makedirs(root, exist_ok=True)
        room = folders.find_room(
            root, cache.key, cache.store.num_bytes, limit=None if limit is None else int(limit * 2**30)
        )
        if not room.is_enough:
            plan["reason"] = room.reason
            return
        for folder in room.to_delete:
            folders.delete(folder)
        folders.prepare(root, cache.key, cache.samples)
        plan["shorter"] = folders.shorter(root, cache.key)

    def _with_prefix_outputs(self, batches: Iterator[data.Batch], cache: Cache) -> Iterator[data.Batch]:
        trainer = self._trainer
        subset = trainer.samples.subset
        assert subset is not None
        sampler = data.SubsetBatches(
            subset=subset,
            phase=trainer.state.phase,
            position=trainer.samples.in_phase,
            micro_batch_size=trainer.config.training.micro_batch_size,
            rank=parallel_state.get_data_parallel_rank(),
            num_ranks=parallel_state.get_data_parallel_world_size(),
        )
        slots = (cache.slots_of(numpy.array(samples, dtype=numpy.int64)) for samples in sampler)
        outputs = serve.read_ahead(cache, slots, DTYPES[trainer.config.precision])
        with contextlib.closing(outputs):  # type: ignore[type-var]
            for batch, output in zip(batches, outputs, strict=False):
                self._hits += output.size(1)
                yield batch | {"prefix_output": output.to(device.current(), non_blocking=True)}


def _network(trainer: Trainer, implementation: Implementation) -> dict[str, Any]:
    """What decides, beside weights and tokens, every bit that a prefix computes."""
    config = trainer.config
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


def _describe_data(trainer: Trainer) -> str:
    """The dataset that indices are of; its files by size and time, not by their content."""
    dataset, paths = trainer.splits.train, trainer.config.data
    parts = [type(dataset).__name__, str(getattr(dataset, "unique_description_hash", ""))]
    for word in (*(paths.data_path or ()), *(paths.train_data_path or ())):
        for path in (f"{word}.bin", f"{word}.idx"):
            with contextlib.suppress(OSError):
                found = os.stat(path)
                parts.append(f"{os.path.basename(path)} {found.st_size} {found.st_mtime_ns}")
    return digest_of(parts)


def _not_there(cache: Cache, slots: Slots) -> Slots:
    """Of `slots`, those whose record is absent or damaged. Every rank looks at a part. A collective."""
    number, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    bounds = [len(slots) * rank // ranks for rank in range(ranks + 1)]
    mine = slice(bounds[number], bounds[number + 1])
    found = numpy.zeros(len(slots), dtype=numpy.int32)
    found[mine] = cache.store.are_there(slots[mine].tolist())
    everyones = torch.from_numpy(found).to(device.current())
    torch.distributed.all_reduce(everyones)
    return slots[everyones.cpu().numpy() == 0]


def _there(cache: Cache, samples: Slots) -> Slots:
    """Where an older cache holds `samples`, undamaged; -1 elsewhere. A collective."""
    slots = cache.slots_of(samples)
    slots[numpy.isin(slots, _not_there(cache, slots[slots >= 0]))] = -1
    return slots
