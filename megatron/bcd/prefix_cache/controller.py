"""Read the output of a phase's prefix from a file instead of computing it.

Tensor shapes: S sequence length, B micro-batch size, H hidden size.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any, NoReturn

import numpy
import torch
from megatron.core import parallel_state

from megatron.bcd import data
from megatron.bcd.blocks.ownership import ownership
from megatron.bcd.config import RunConfig
from megatron.bcd.data.batches import TrainingSamples
from megatron.bcd.metrics.console import format_bytes
from megatron.bcd.metrics.reporter import Reporter
from megatron.bcd.model.attention import whole_sequence
from megatron.bcd.model.builder import get_chunks, unwrap_model
from megatron.bcd.model.implementation import Implementation
from megatron.bcd.optim.active_block import ActiveBlock
from megatron.bcd.pipeline.schedule import PipelineSchedule
from megatron.bcd.prefix_cache.store import Indices, PrefixFile, cache_files
from megatron.bcd.runtime import atomic_io, collectives, device, packages, replicas

BREAK_EVEN = 1.15
"""Minimum uses of a sample for a cache to pay. Filling it costs about this many forward passes of the prefix."""
_MICROBATCHES_PER_ROUND = 16
"""Number of microbatches between exchanges of errors. Idle ranks must not wait longer than a collective's timeout."""
_MICROBATCHES_AHEAD = 4


@dataclass(kw_only=True)
class PrefixCache:
    """The cache of --bcd-prefix-cache: fills it in each phase and reads from it. All ranks decide alike.

    Every phase has different samples and different weights in its prefix. The folder therefore holds the file of one
    phase, and the next phase replaces it.
    """

    active: ActiveBlock
    samples: TrainingSamples
    pipeline: PipelineSchedule
    implementation: Implementation
    reporter: Reporter
    should_stop: Callable[[], bool]
    """Collective. Returns whether the run was asked to stop, which also ends the filling of a cache."""
    block: int = field(init=False, default=0)
    _phase: int = field(init=False, default=0)
    _file: PrefixFile | None = field(init=False, default=None)
    _cached_batches: Iterator[data.Batch] | None = field(init=False, default=None)
    _hits: int = field(init=False, default=0)

    @property
    def root(self) -> str | None:
        return self.active.config.bcd.bcd_prefix_cache

    def begin_phase(self, phase: int, block: int, *, num_samples: int) -> bool:
        """Collective. Fill the cache of `phase`, in which `block` is active. All weights must be gathered.

        Args:
            num_samples: minimum number of samples, including repetitions, that the phase will train on.

        Returns:
            Whether the phase reads its prefix from the cache.
        """
        self.close()
        self._phase, self.block = phase, block
        self._file = self._prepare_file(num_samples)
        return self._file is not None

    def add_prefix_outputs(self, batches: Iterator[data.Batch], *, position: int) -> Iterator[data.Batch]:
        """Return `batches`, from sample `position` of the phase on, with the prefix output of cached phases added.

        Only the stage with the first active layer gets it.
        """
        if self._file is None or self.active.stage != self.active.partition.first_trainable_stage(self.block):
            return batches
        if self._cached_batches is None:
            self._cached_batches = self._read_outputs(batches, self._file, position)
        return self._cached_batches

    def take_hits(self) -> int:
        """Return the cache hits since the last call. Ranks that share a microbatch count it once."""
        hits, self._hits = self._hits, 0
        return hits if parallel_state.get_tensor_and_context_parallel_rank() == 0 else 0

    def bytes_on_disk(self) -> int:
        """Return the size of the cache on rank 0; 0 on the other ranks."""
        with contextlib.suppress(OSError):
            if self.root and torch.distributed.get_rank() == 0:
                return sum(map(os.path.getsize, cache_files(self.root)))
        return 0

    def close(self) -> None:
        """Stop reading ahead at the end of a phase."""
        if self._cached_batches is not None:
            self._cached_batches.close()  # type: ignore[attr-defined]
        self._cached_batches = self._file = None

    def _prepare_file(self, num_samples: int) -> PrefixFile | None:
        """Fill the file of this phase unless it is complete, and return it.

        Return None, with a note why, if the phase computes its prefix.
        """
        num_layers = len(self.active.partition.prefix_layers(self.block))
        subset = self.samples.subset
        if not num_layers or subset is None:
            return None
        contents = f"{subset.size:,} outputs of {num_layers} layer{'s' * (num_layers > 1)}"
        uses = num_samples / subset.size
        if uses < BREAK_EVEN:
            self.reporter.note(
                f"prefix cache: phase {self._phase} computes its prefix: {contents} are used {uses:,.2f} times, and a "
                f"cache pays from {BREAK_EVEN:.2f} on"
            )
            return None
        samples = numpy.sort(subset.indices(self._phase))
        assert self.root is not None
        file = PrefixFile(
            self.root,
            key=self._key(samples, num_layers),
            samples=samples,
            shape=(self.active.config.model.seq_length, self.active.config.hidden_size),
            dtype=self.active.config.precision,
        )
        error = collectives.on_rank_0(lambda: atomic_io.capture_error(file.prepare))
        start = time.monotonic()
        if not error and not collectives.on_rank_0(file.is_complete):
            self.reporter.note(
                f"prefix cache: phase {self._phase} stores {contents} ({format_bytes(file.num_bytes)}), used "
                f"{uses:,.2f} times"
            )
            error = _Fill(self, file).run()
            if error and torch.distributed.get_rank() == 0:
                atomic_io.capture_error(file.remove)  # an incomplete file only occupies space on a full disk
        if error:
            self.reporter.warning(
                f"--bcd-prefix-cache {self.root}: can't be filled ({error}). Phase {self._phase} computes its prefix."
            )
            return None
        self.reporter.note(
            f"prefix cache: phase {self._phase} reads {file.path} ({time.monotonic() - start:,.1f} s to fill it)"
        )
        return file

    def _key(self, samples: Indices, num_layers: int) -> str:
        """Collective. Return a hash of everything that determines the file's content. Equal on all ranks."""
        config, weights = self.active.config, self._weights(num_layers)

        def key() -> str:
            parts = {
                "format": 4,
                "weights": weights,
                "data": _describe_data(config, self.samples.dataset),
                "transformer": {name: str(value) for name, value in config.transformer.items()},
                "model": {name: str(value) for name, value in asdict(config.model).items()},
                "precision": config.precision,
                "positions": [config.data.reset_position_ids, config.data.reset_attention_mask],
                "micro_batch_size": config.training.micro_batch_size,  # kernels may differ by shape
                "implementation": self.implementation.describe(),
                "device": device.name(),
                "versions": [version("torch"), version("megatron-core"), packages.transformer_engine_version()],
            }
            return hashlib.sha256(json.dumps(parts, sort_keys=True).encode() + samples.tobytes()).hexdigest()

        return collectives.on_rank_0(key)

    def _weights(self, num_layers: int) -> list[tuple[int, int, str, str]]:
        """Collective. Return a hash of each parameter before layer `num_layers`, by stage, tensor rank and name."""
        mine = []
        if replicas.rank() == 0:
            tensor_rank = parallel_state.get_tensor_model_parallel_rank()
            for name, parameter in unwrap_model(self.active.model).named_parameters():
                place = ownership(name, partition=self.active.partition, stage=self.active.stage)
                if place.module == "embedding" or (place.layer is not None and place.layer < num_layers):
                    content = parameter.detach().cpu().contiguous().view(torch.uint8).numpy()
                    mine.append((self.active.stage, tensor_rank, name, hashlib.sha256(content).hexdigest()))
        return sorted(itertools.chain.from_iterable(collectives.gather_objects(mine)))

    def _read_outputs(self, batches: Iterator[data.Batch], file: PrefixFile, position: int) -> Iterator[data.Batch]:
        subset = self.samples.subset
        assert subset is not None
        sharding = data.BatchSharding.from_run(self.active.config)
        indices = data.subset_indices(sharding, subset=subset, phase=self._phase, position=position)
        outputs = _read_ahead(file, indices)
        with contextlib.closing(outputs):  # type: ignore[type-var]
            for batch, on_host in zip(batches, outputs, strict=True):
                output = on_host.to(device.current(), non_blocking=True)
                self._hits += output.size(1)
                yield batch | {"prefix_output": data.context_shard(output)}


class _PrefixDone(Exception):
    """Ends a forward pass at the first active layer. Carries that layer's input."""


class _Fill:
    """Fills the cache with training's own forward passes, in micro-batches of the same size.

    Each data-parallel replica computes its share.
    """

    def __init__(self, cache: PrefixCache, file: PrefixFile) -> None:
        self._cache, self._file = cache, file
        config, partition, block = cache.active.config, cache.active.partition, cache.block
        self._micro_batch_size, self._length = config.training.micro_batch_size, config.model.seq_length
        self._needs_batch = cache.active.stage == 0 or config.data.reset_attention_mask
        first = partition.first_trainable_virtual_stage(block)
        self._num_stages, self._num_chunks = partition.first_trainable_stage(block) + 1, 1
        self._first_active: torch.nn.Module | None = None
        """The module before which the prefix ends inside a chunk: the first active layer, or the norm of the head."""
        if partition.num_chunks > 1:  # the prefix consists of whole chunks
            self._num_stages, self._num_chunks = partition.num_stages, -(-first // partition.num_stages)
        if cache.active.stage == self._num_stages - 1 and (partition.num_chunks == 1 or first % partition.num_stages):
            chunk, decoder = self._num_chunks - 1, get_chunks(cache.active.model)[self._num_chunks - 1].decoder
            layers = partition.chunk_layers(cache.active.stage, chunk)
            number = len(partition.prefix_layers(block)) - layers.start
            self._first_active = decoder.layers[number] if number < len(layers) else decoder.final_layernorm
        self._error: str | None = None

    def run(self) -> str | None:
        """Collective. Compute all entries. Return None, or an error of any rank, or that the run is asked to stop."""
        rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        slots = numpy.arange(len(self._file.samples))
        share = -(-len(slots) // ranks)
        mine = slots[rank * share : (rank + 1) * share]
        size = self._micro_batch_size
        for start in range(0, share, size * _MICROBATCHES_PER_ROUND):
            end = min(start + size * _MICROBATCHES_PER_ROUND, len(mine))
            self._compute([mine[first : min(first + size, end)] for first in range(start, end, size)])
            error = collectives.first_error(self._error)
            if error or self._cache.should_stop():
                return error or "the run is asked to stop"
        error = collectives.first_error(atomic_io.capture_error(self._file.sync))
        return error or collectives.on_rank_0(lambda: atomic_io.capture_error(self._file.publish))

    def _compute(self, microbatches: Sequence[Indices]) -> None:
        """Collective. Compute the entries of these slots by the pipeline of an evaluation that ends with the prefix."""
        done = iter(microbatches)

        def step(batches: Iterator[data.Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., None]]:
            return self._forward(model, next(batches)), lambda output, non_loss_data: self._write(next(done), output)

        self._cache.pipeline.run_prefix_forward(
            model=self._cache.active.model,
            num_stages=self._num_stages,
            num_chunks=self._num_chunks,
            num_microbatches=len(microbatches),
            data_iterator=map(self._batch, microbatches),
            forward_step_func=step,
            seq_length=self._length,
            micro_batch_size=self._micro_batch_size,
        )

    def _batch(self, slots: Indices) -> data.Batch:
        """Return a batch padded with its last sample to training's micro-batch size, so that the same kernels run."""
        if not self._needs_batch:
            return {}
        slots = numpy.pad(slots, (0, self._micro_batch_size - len(slots)), mode="edge")
        samples = self._file.samples[slots].tolist()
        return data.load_batch(self._cache.samples.dataset, samples, self._cache.active.config)

    def _forward(self, model: torch.nn.Module, batch: data.Batch) -> torch.Tensor:
        """Return the chunk's output, or the input of the first active layer if it is in this chunk."""
        if self._first_active is None:
            return _output(model, batch)

        # an exception is the only way out of Megatron Core's forward pass in the middle of its layers
        def stop(layer: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> NoReturn:
            raise _PrefixDone(args[0] if args else kwargs["hidden_states"])

        hook = self._first_active.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            return _output(model, batch)  # an earlier chunk's output
        except _PrefixDone as done:
            hidden_states: torch.Tensor = done.args[0]
            return hidden_states
        finally:
            hook.remove()

    def _write(self, slots: Indices, hidden_states: torch.Tensor) -> None:
        if parallel_state.get_tensor_model_parallel_rank() != 0:
            return
        hidden_states = whole_sequence(hidden_states, parallel_state.get_context_parallel_group())
        if parallel_state.get_context_parallel_rank() != 0 or self._error:
            return
        on_host = hidden_states.detach().cpu()
        self._error = atomic_io.capture_error(lambda: self._file.write(slots, on_host))


def _output(model: torch.nn.Module, batch: data.Batch) -> torch.Tensor:
    output: torch.Tensor = model(batch.get("tokens"), batch.get("position_ids"), **data.attention_inputs(batch))
    return output


def _read_ahead(file: PrefixFile, microbatches: Iterable[list[int]]) -> Iterator[torch.Tensor]:
    """Yield the input of the first active layer of each micro-batch, given its samples. Two threads read ahead."""
    with ThreadPoolExecutor(2, thread_name_prefix="prefix-cache") as threads:
        coming = (threads.submit(file.read, numpy.array(samples)) for samples in microbatches)
        ahead = deque(itertools.islice(coming, _MICROBATCHES_AHEAD))
        while ahead:
            entries = ahead.popleft()
            ahead.extend(itertools.islice(coming, 1))
            yield entries.result()


def _describe_data(config: RunConfig, dataset: Any) -> list[str]:
    """Return strings that identify the dataset: names, sizes and times of its files rather than their content."""
    parts = [type(dataset).__name__, str(getattr(dataset, "unique_description_hash", ""))]
    for word in (*(config.data.data_path or ()), *(config.data.train_data_path or ())):
        for path in (f"{word}.bin", f"{word}.idx"):
            with contextlib.suppress(OSError):
                status = os.stat(path)
                parts.append(f"{os.path.basename(path)} {status.st_size} {status.st_mtime_ns}")
    return parts
