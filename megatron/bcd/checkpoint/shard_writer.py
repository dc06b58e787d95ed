"""Megatron Core's distributed checkpoint format, written inside the process that trains.

Megatron Core forks writer processes and starts a manager process for their results. A writer that is killed leaves the
training waiting for ever, and a rank that is killed leaves the manager behind. Here the same bytes are written by this
process, at once or by a thread, and a file that can't be written is an answer, not an exception on one rank alone.
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
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from megatron.bcd.checkpoint.layout import FileRecord, file_record
from megatron.bcd.runtime import compat, device

Record = FileRecord


class _InProcessStrategy(TorchDistSaveShardedStrategy):
    """Plans as Megatron Core does and leaves the writing to `ShardWrite`."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)
        self.writer: Any = None
        self.finalize: Any = None

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> AsyncRequest:
        request = super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)
        self.writer, [self.finalize] = writer, request.finalize_fns
        return request


class ShardWrite:
    """The weights and the optimizer state of one checkpoint on their way to the disk.

    Constructing it is a collective that plans who writes what and copies this rank's tensors to host memory; `start`
    writes them, in the background if asked; `finish` is a collective that completes the shards' index.
    """

    def __init__(
        self, entries: dict[str, ShardedTensor | ShardedTensorFactory], aside: str, *, in_background: bool
    ) -> None:
        self.error: BaseException | None = None
        self.records: dict[str, Record] = {}
        self._in_background = in_background
        live = {
            entry.data.untyped_storage().data_ptr()
            for name, entry in entries.items()
            if torch.is_tensor(entry.data) and not name.startswith("optimizer.")  # those are copies already
        }
        sharded, _ = save_preprocess(dict(entries))  # type: ignore[arg-type]
        strategy = _InProcessStrategy()
        with compat.checkpoint_results_in_process():
            strategy.async_save(sharded, Path(aside))
        self._writer, self._finalize = strategy.writer, strategy.finalize
        self._buckets: list[Any] = []
        try:
            self._buckets = [
                (path, key, (blobs, [(item, self._on_host(tensor, live)) for item, tensor in tensors]))
                for path, key, (blobs, tensors) in self._writer.write_buckets
            ]
            device.synchronize()
        except (RuntimeError, MemoryError) as error:  # no host memory: the other ranks hear of it in `finish`
            self.error, self._buckets = error, []
        self._thread = threading.Thread(target=self._write, name="checkpoint writer", daemon=True)

    def _on_host(self, tensor: torch.Tensor, live: set[int]) -> torch.Tensor:
        """A copy where training would change the tensor while it is written; planning has copied some already."""
        if tensor.device.type != "cpu":
            return tensor.to("cpu", non_blocking=True)
        is_live = tensor.untyped_storage().data_ptr() in live
        return tensor.clone() if self._in_background and is_live else tensor

    def start(self) -> None:
        if self._in_background:
            self._thread.start()
        else:
            self._write()

    @property
    def is_writing(self) -> bool:
        return self._thread.is_alive()

    def _write(self) -> None:
        """Each bucket is a file; what Megatron Core's writer answers for it goes where its finalisation looks."""
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
                self.error = answer
                break
            answers[index] = answer
        self._buckets = []
        try:
            if self.error is None:
                for path, key, _ in self._writer.write_buckets:
                    self.records[key] = file_record(path)
        except OSError as error:
            self.error = error
        if self._writer.results_queue is not None:
            self._writer.results_queue.put(self.error if self.error is not None else answers)

    def finish(self) -> None:
        """Wait for this rank's files, and let rank 0 write the index of all; a collective. Look at `error` then."""
        if self._thread.ident is not None:
            self._thread.join()
        index_writer = self._writer.finish

        def finish_and_tell(*args: Any, **kwargs: Any) -> None:
            vars(args[0] if args else kwargs["metadata"]).pop("all_local_plans", None)  # a cache that nobody reads
            try:  # an exception here would leave the other ranks in the broadcast that follows
                index_writer(*args, **kwargs)
            except OSError as error:
                self.error = error

        self._writer.finish = finish_and_tell
        try:
            self._finalize()
        except CheckpointException as failed:
            if self.error is None:
                reasons = [str(error) for error, _ in failed.failures.values()]
                self.error = RuntimeError(reasons[0] if reasons else "another rank could not write its shard")
