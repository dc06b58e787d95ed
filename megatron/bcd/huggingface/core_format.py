"""Read and write Megatron Core's distributed checkpoints tensor by tensor in one process, without process groups.

The format is that of torch.distributed.checkpoint. `_Plan` and `_Target` implement the part of its planner interface
that its file writer and reader call.
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
from megatron.bcd.checkpoint.shard_writer import IndexWriter, write_beside_shards


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A contiguous part of one tensor to write. `read` returns its values when they are needed."""

    key: str
    whole: tuple[int, ...]
    """Shape of the whole tensor."""
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
    """The planner for PyTorch's writer: reads a piece when it is about to be written."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = {(piece.key, torch.Size(piece.offsets)): piece for piece in pieces}

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        piece = self._pieces[write_item.index.fqn, write_item.index.offset or torch.Size(())]
        return piece.read().reshape(piece.shape)


def write(folder: str, files: Sequence[Sequence[Piece]]) -> None:
    """Write a checkpoint without its ``checksums.json``. Only the pieces of one file are in memory at a time.

    Raises:
        OSError, RuntimeError: a file can't be written.
    """
    writer = IndexWriter(folder)
    writer.set_up_storage_writer(True)
    local = [writer.prepare_local_plan(SavePlan([piece.item() for piece in pieces])) for pieces in files]
    plans, metadata = create_default_global_save_plan(local)
    results = []
    for plan, pieces in zip(writer.prepare_global_plan(plans), files, strict=True):
        results.append(writer.write_data(plan, _Plan(pieces)).wait())  # type: ignore[arg-type]
    writer.finish(metadata, results)
    write_beside_shards(folder, iteration=0)


class _Target:
    """The planner for PyTorch's reader: copies everything that is read into one tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part = self._tensor
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass  # `resolve_tensor` has returned a view


class CoreCheckpoint:
    """A checkpoint of Megatron Core with any parallel sizes, from any program."""

    def __init__(self, folder: str) -> None:
        """Read the index.

        Raises:
            ValueError: the index can't be read, or contains more than data.
        """
        self.folder = folder
        try:
            with only_data():
                self._metadata: Metadata = FileSystemReader(folder).read_metadata()
        except (Exception, CheckpointException) as error:  # unpickling can raise many types
            raise unreadable(folder, error) from None
        self.tensors = {
            key: entry
            for key, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not key.startswith("optimizer.")
        }

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        return tuple(self.tensors[key].size)

    def dtype(self, key: str) -> torch.dtype:
        """Return the stored dtype of the tensor."""
        dtype: torch.dtype = self.tensors[key].properties.dtype
        return dtype

    def read(self, key: str, *, layer: int | None = None, num_rows: int | None = None) -> Tensor:
        """Return a tensor: layer `layer` of a stacked one, or the first `num_rows` rows of another one.

        Raises:
            ValueError: a file can't be read, or a part of the tensor is missing.
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
        except (Exception, CheckpointException) as error:  # the readers can raise many types
            raise unreadable(self.folder, error) from None
        return target if layer is None else target[0]
