"""Writes Megatron Core's distributed checkpoint format inside the training process.

Megatron Core forks writer processes and starts a manager process for their results. If a writer is killed, training
waits for ever; if a rank is killed, its manager stays behind. Here this process, or a thread of it, writes the same
bytes, and a file that can't be written becomes an error value instead of an exception on one rank.
"""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.api import CheckpointException

from megatron.bcd.checkpoint.layout import FileDigest, file_digest
from megatron.bcd.runtime import atomic_io, device
from megatron.bcd.runtime.compat.checkpoint_writing import PlanningStrategy, results_in_process


class ShardWrite:
    """Writes the weights and the optimizer state of one checkpoint.

    The constructor is a collective: it assigns shards to ranks and copies this rank's tensors to host memory. `start`
    writes this rank's files. `finish` is a collective: it writes the index of all shards.
    """

    def __init__(
        self, entries: dict[str, ShardedTensor | ShardedTensorFactory], folder: str, *, in_background: bool
    ) -> None:
        self.error: BaseException | None = None
        self.digests: dict[str, FileDigest] = {}
        self._in_background = in_background
        live = {
            entry.data.untyped_storage().data_ptr()
            for name, entry in entries.items()
            if torch.is_tensor(entry.data) and not name.startswith("optimizer.")  # those are copies already
        }
        sharded, _ = save_preprocess(dict(entries))  # type: ignore[arg-type]
        strategy = PlanningStrategy()
        with results_in_process():
            strategy.async_save(sharded, Path(folder))
        self._writer, self._finalize = strategy.writer, strategy.finalize
        self._buckets: list[Any] = []
        try:
            self._buckets = [
                (path, key, (blobs, [(item, self._on_host(tensor, live)) for item, tensor in tensors]))
                for path, key, (blobs, tensors) in self._writer.write_buckets
            ]
            device.synchronize()
        except (RuntimeError, MemoryError) as error:  # out of host memory: `finish` reports it to the other ranks
            self.error, self._buckets = error, []
        self._thread = threading.Thread(target=self._write, name="checkpoint writer", daemon=True)

    def _on_host(self, tensor: torch.Tensor, live: set[int]) -> torch.Tensor:
        """A copy, unless training does not change the tensor while it is written; planning has copied some already."""
        if tensor.device.type != "cpu":
            return tensor.to("cpu", non_blocking=True)
        is_live = tensor.untyped_storage().data_ptr() in live
        return tensor.clone() if self._in_background and is_live else tensor

    def start(self) -> None:
        """Write this rank's files, in a thread if in the background."""
        if self._in_background:
            self._thread.start()
        else:
            self._write()

    @property
    def is_writing(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def _write(self) -> None:
        """Write each bucket as a file, and put the writer's results where Megatron Core's finalization reads them."""
        answers: dict[int, Any] = {}
        for index, bucket in enumerate(self._buckets):
            results: queue.Queue[Any] = queue.Queue()
            count: queue.Queue[int] = queue.Queue()
            count.put(index)
            FileSystemWriterAsync.write_preloaded_data(
                [self._writer.transforms] if hasattr(self._writer, "transforms") else [],
                index,
                bucket,
                results,  # type: ignore[arg-type]
                count,  # type: ignore[arg-type]
                True,
            )
            _, answer = results.get()
            if isinstance(answer, BaseException):
                self.error = atomic_io.os_error(answer)  # here: on its way to other ranks it loses its context
                break
            answers[index] = answer
        self._buckets = []
        try:
            if self.error is None:
                for path, key, _ in self._writer.write_buckets:
                    self.digests[key] = file_digest(path)
        except OSError as error:
            self.error = error
        if self._writer.results_queue is not None:
            self._writer.results_queue.put(self.error if self.error is not None else answers)

    def finish(self) -> None:
        """Wait for this rank's files, and write the index on rank 0. A collective. Sets `error` on failure."""
        if self._thread.ident is not None:
            self._thread.join()
        write_index = self._writer.finish

        def write_index_without_raising(*args: Any, **kwargs: Any) -> None:
            vars(args[0] if args else kwargs["metadata"]).pop("all_local_plans", None)  # a cache that nothing reads
            try:  # an exception here would leave the other ranks in the broadcast that follows
                write_index(*args, **kwargs)
            except OSError as error:
                self.error = error

        self._writer.finish = write_index_without_raising
        try:
            self._finalize()
        except CheckpointException as failed:
            if self.error is None:
                reasons = [error for error, _ in failed.failures.values()]
                self.error = reasons[0] if reasons else RuntimeError("another rank could not write its shard")
