"""Read Megatron Core's distributed checkpoints tensor by tensor in one process, without process groups.

The format is that of torch.distributed.checkpoint.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron.bcd.checkpoint.safe_loading import only_data, unreadable


class _Target(DefaultLoadPlanner):
    """Copies everything that is read into one tensor."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self._tensor = tensor

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._tensor


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
                reader.read_data(LoadPlan(items), _Target(target)).wait()
        except (Exception, CheckpointException) as error:  # the readers can raise many types
            raise unreadable(self.folder, error) from None
        return target if layer is None else target[0]
