"""Megatron Core's distributed checkpoints, read and written tensor by tensor in one process, without process groups.

The format is that of torch.distributed.checkpoint: `_Plan` and `_Target` tell its file reader and writer where tensors
come from and go to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron.bcd.checkpoint.safe_loading import only_data, unreadable
from megatron.bcd.checkpoint.shard_writer import Writer, write_beside_shards


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A contiguous part of one tensor, to be written; `read` gives it when its turn comes."""

    key: str
    whole: tuple[int, ...]
    """Shape of the tensor."""
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    def item(self) -> WriteItem:
        offsets, sizes = torch.Size(self.offsets), torch.Size(self.shape)
        return WriteItem(
            index=MetadataIndex(self.key, offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
                properties=TensorProperties(dtype=self.dtype),
                size=torch.Size(self.whole),
            ),
        )


class _Plan:
    """What PyTorch's writer asks of a planner: reads a piece when it is about to be written."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = {(piece.key, torch.Size(piece.offsets)): piece for piece in pieces}

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        piece = self._pieces[write_item.index.fqn, write_item.index.offset or torch.Size(())]
        return piece.read().reshape(piece.shape)


def write(folder: str, files: Sequence[Sequence[Piece]]) -> None:
    """Write a checkpoint without its ``checksums.json``; a file's pieces are in memory together, no more.

    Raises:
        OSError, RuntimeError: a file can't be written.
    """
    writer = Writer(folder)
    writer.set_up_storage_writer(True)
    local = [writer.prepare_local_plan(SavePlan([piece.item() for piece in pieces])) for pieces in files]
    plans, metadata = create_default_global_save_plan(local)
    results = []
    for plan, pieces in zip(writer.prepare_global_plan(plans), files, strict=True):
        results.append(writer.write_data(plan, _Plan(pieces)).wait())  # type: ignore[arg-type]
    writer.finish(metadata, results)
    write_beside_shards(folder, iteration=0)


class _Target:
    """What PyTorch's reader asks of a planner: what is read is copied into one tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part = self._tensor
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass  # `resolve_tensor` gave a view


class CoreCheckpoint:
    """A checkpoint of Megatron Core, whoever wrote it under whatever parallel sizes."""

    def __init__(self, folder: str) -> None:
        """Read the index.

        Raises:
            ValueError: it can't be read, or contains more than data.
        """
        self.folder = folder
        try:
            with only_data():
                self._metadata: Metadata = FileSystemReader(folder).read_metadata()
        except (Exception, CheckpointException) as error:  # the unpickler raises many types
            raise unreadable(folder, error) from None
        self.tensors = {
            key: entry
            for key, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not key.startswith("optimizer.")
        }

    def shape(self, key: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(self.tensors[key].size)

    def dtype(self, key: str) -> torch.dtype:
        """Of the tensor as it is stored."""
        dtype: torch.dtype = self.tensors[key].properties.dtype
        return dtype

    def read(self, key: str, *, layer: int | None = None, num_rows: int | None = None) -> Tensor:
        """A tensor; of one that is stacked, that of `layer`; of any other, the first `num_rows`.

        Raises:
            ValueError: a file can't be read, or a part of the tensor is in none.
        """
        shape = list(self.shape(key))
        offsets = [0] * len(shape)
        if layer is not None:
            offsets[0], shape[0] = layer, 1
        elif num_rows is not None:
            shape[0] = num_rows
        wanted = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(shape))
        items = create_read_items_for_chunk_list(key, self.tensors[key], [wanted])
        target = torch.empty(shape, dtype=self.dtype(key))
        if sum(item.lengths.numel() for item in items) != target.numel():
            raise ValueError(f"{self.folder}: a part of {key} is missing")
        try:
            with only_data():
                reader = FileSystemReader(self.folder)
                reader.set_up_storage_reader(self._metadata, True)
                reader.read_data(LoadPlan(items), _Target(target)).wait()  # type: ignore[arg-type]
        except (Exception, CheckpointException) as error:  # the readers raise many types
            raise unreadable(self.folder, error) from None
        return target if layer is None else target[0]
