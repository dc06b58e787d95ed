"""Write Megatron Core's distributed checkpoint format inside the training process.

Megatron Core forks writer processes and starts a manager process for their results. If a writer is killed, training
waits for ever; if a rank is killed, its manager process survives. Here this process writes, or one of its threads. If a
file cannot be written, the error is a value instead of an exception on one rank.

PyTorch's writer has the same format, but keeps all tensors of a file until its end. Here each tensor is created when
the one before is written and freed.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem

from megatron.bcd.checkpoint.layout import FileDigest, file_digest
from megatron.bcd.runtime import atomic_io, collectives
from megatron.bcd.runtime.compat import pytorch


class IndexWriter(FileSystemWriter):
    """PyTorch's writer of the index, without storage metadata."""

    def storage_meta(self) -> StorageMeta:
        """Return empty metadata. PyTorch's contains the folder before its renaming, as a pickled object."""
        return StorageMeta()


def write_beside_shards(folder: str, *, iteration: int) -> None:
    """Write the other files that Megatron Core's reader expects. Raises OSError."""
    with open(os.path.join(folder, "common.pt"), "wb") as common:  # with a path, PyTorch does not say what failed
        torch.save({"iteration": iteration, "checkpoint_version": 3.0}, common)
    save_config(CheckpointingConfig("torch_dist", 1), folder)


def expert_key(key: str, expert: int) -> str:
    """Return a name of an expert's tensor. All experts of a layer have one key, and their number as first offset."""
    return f"{key}[{expert}]"


class Planner(MCoreSavePlanner):
    """Megatron Core's planner, which also creates tensors just before they are written.

    A tensor on the meta device is a placeholder for a part of such a tensor. `deferred` maps its key to the function
    that returns the whole tensor.
    """

    def __init__(self, deferred: Mapping[str, Callable[[], torch.Tensor]]) -> None:
        super().__init__(flatten_state_dict=False)
        self._deferred = deferred

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return a tensor to write."""
        part = super().lookup_object(index)
        if not torch.is_tensor(part) or not part.is_meta:
            return part
        key = index.fqn
        if key not in self._deferred:
            assert index.offset is not None
            key = expert_key(key, index.offset[0])
        whole = self._deferred[key]()
        return whole.as_strided(part.shape, part.stride(), whole.storage_offset() + part.storage_offset())


class ShardWrite:
    """Writes the weights and the optimizer state of one checkpoint.

    The constructor is a collective. It checks that each shard has one writer. For a write in the background, it copies
    to host memory all weights that training may change before `finish`: all but those that `is_constant`. `start`
    writes this rank's files. `finish` is a collective and writes the index. `deferred`: see `Planner`.
    """

    def __init__(
        self,
        entries: dict[str, ShardedTensor | ShardedTensorFactory],
        folder: str,
        *,
        in_background: bool,
        is_constant: Callable[[torch.Tensor], bool] = lambda _: False,
        deferred: Mapping[str, Callable[[], torch.Tensor]] | None = None,
    ) -> None:
        self.digests: dict[str, FileDigest] = {}
        """Checksums of this rank's files; on rank 0 after `finish`, of all files."""
        self._error: str | None = None
        self._results: list[Any] = []
        self._in_background, self._is_constant = in_background, is_constant
        self._folder, self._rank = folder, torch.distributed.get_rank()
        sharded, _ = save_preprocess(dict(entries))  # type: ignore[arg-type]
        by_key = defaultdict(list)
        for part in nested_values(sharded):
            if is_main_replica(part.replica_id):
                by_key[part.unique_key if isinstance(part, ShardedObject) else part.key].append(part)
        try:
            for parts in by_key.values():
                for part in parts:
                    if isinstance(part, ShardedTensor):
                        part.data = self._on_host(part)
        except (RuntimeError, MemoryError) as error:  # out of host memory: `finish` reports it to the other ranks
            self._error = atomic_io.describe(error)
        self._planner: Planner | None = Planner(deferred or {})
        self._planner.set_up_planner(mcore_to_pyt_state_dict(by_key), is_coordinator=self._rank == 0)
        # a rank's plan does not depend on the others': each shard has one rank that writes it
        self._plan = self._planner.create_local_plan()
        self._thread = threading.Thread(target=self._write, name="checkpoint writer", daemon=True)

    def _on_host(self, part: ShardedTensor) -> torch.Tensor:
        """Return the tensor in host memory: a copy if training may change it. Optimizer state is a copy already."""
        assert part.data is not None
        if part.data.is_meta:
            return part.data
        is_live = self._in_background and not part.key.startswith("optimizer.") and not self._is_constant(part.data)
        return part.data.detach().to("cpu", copy=is_live)

    def add(self, name: str, content: bytes) -> None:
        """Write another file of this rank beside the shards."""
        path = os.path.join(self._folder, name)

        def write() -> None:
            atomic_io.write(path, content)
            self.digests[name] = file_digest(path)

        self._error = self._error or atomic_io.capture_error(write)

    def start(self) -> None:
        """Write this rank's files, in a thread if `in_background`."""
        if self._in_background:
            self._thread.start()
        else:
            self._write()

    @property
    def is_writing(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    def _write(self) -> None:
        planner, self._planner = self._planner, None  # so that the copies are freed
        if self._error is not None or planner is None:
            return
        name = f"__{self._rank}_0.distcp"
        path = os.path.join(self._folder, name)
        try:
            with open(path, "wb") as file:
                self._results = [_write_item(file, name, item, planner) for item in self._plan.items]
                file.flush()
                os.fsync(file.fileno())
            self.digests[name] = file_digest(path)
        except Exception as error:  # described here, because other ranks receive only the text
            self._error = atomic_io.describe(error)

    def finish(self) -> str | None:
        """Wait for the files of all ranks and write their index on rank 0. Return the first error, on every rank."""
        if self._thread.ident is not None:
            self._thread.join()
        ranks: list[Any] = [None] * torch.distributed.get_world_size()
        mine = (self._plan, self._results, self.digests)
        torch.distributed.gather_object(mine, ranks if self._rank == 0 else None)
        error = collectives.first_error(self._error)
        return error or collectives.on_rank_0(lambda: atomic_io.capture_error(lambda: self._write_index(ranks)))

    def _write_index(self, ranks: list[Any]) -> None:
        plans, results, digests = map(list, zip(*ranks, strict=True))
        _, metadata = MCoreSavePlanner(flatten_state_dict=False).create_global_plan(plans)
        IndexWriter(self._folder).finish(metadata, results)
        self.digests = {name: digest for by_name in digests for name, digest in by_name.items()}
        for name in set(os.listdir(self._folder)) - self.digests.keys():  # the index, and other files of rank 0
            self.digests[name] = file_digest(os.path.join(self._folder, name))


def _write_item(file: BinaryIO, name: str, item: WriteItem, planner: Planner) -> Any:
    """Append a tensor or an object to the file `name`."""
    start, data = file.tell(), planner.resolve_data(item)
    if torch.is_tensor(data):
        tensor = data.detach().cpu()
        is_part = tensor.untyped_storage().nbytes() != tensor.nbytes  # of memory that `torch.save` would write whole
        torch.save(tensor.clone() if is_part else tensor, file)
    else:
        file.write(data.getbuffer())
    return pytorch.write_result(item.index, name, start, file.tell() - start)
