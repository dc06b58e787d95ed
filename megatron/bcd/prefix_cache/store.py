"""The file with one phase's prefix outputs.

An entry is one sample's input of the first active layer. Entries are sorted by the samples' dataset indices. The file
is written under a temporary name and renamed when all ranks are done, so a file with the final name is complete.

Tensor shapes: S sequence length, B micro-batch size, H hidden size.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import shutil
from typing import Any

import numpy
import torch

from megatron.bcd.blocks.subsets import Indices
from megatron.bcd.runtime import atomic_io, device

_FILE_NAME = re.compile(r"prefix_[0-9a-f]{32}\.bin(\.incomplete)?")
_NUMPY = {2: numpy.int16, 4: numpy.float32}  # numpy has no bf16, so use its bits


class PrefixFile:
    """Entries by slot, one per sample. Any rank may write any slot, but no two may write the same one."""

    def __init__(self, root: str, *, key: str, samples: Indices, shape: tuple[int, int], dtype: str) -> None:
        """
        Args:
            key: hexadecimal hash of everything that determines the entries. It names the file.
            samples: dataset indices, ascending.
            shape: [S, H] of an entry.
            dtype: precision of the entries, that of the run.
        """
        self.path = os.path.join(root, f"prefix_{key[:32]}.bin")
        self.samples = samples
        self._root, self._incomplete = root, self.path + ".incomplete"
        self._shape, self._dtype = shape, device.DTYPES[dtype]
        self._entry_bytes: int = shape[0] * shape[1] * self._dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return len(self.samples) * self._entry_bytes

    def is_complete(self) -> bool:
        return os.path.isfile(self.path) and os.path.getsize(self.path) == self.num_bytes

    def prepare(self) -> None:
        """Remove the files of other phases, and reserve space for this one unless it is complete.

        It may take half of the free space, because checkpoints also need space. Raises OSError.
        """
        os.makedirs(self._root, exist_ok=True)
        for path in cache_files(self._root):
            if path != self.path or not self.is_complete():
                os.unlink(path)
        if self.is_complete():
            return
        free = shutil.disk_usage(self._root).free
        if self.num_bytes > free // 2:
            need, room = self.num_bytes / 2**30, free / 2**30
            raise OSError(errno.ENOSPC, f"{need:,.2f} GiB are too much for {room:,.2f} GiB of free disk space")
        with open(self._incomplete, "wb") as file:
            file.truncate(self.num_bytes)

    def write(self, slots: Indices, hidden_states: torch.Tensor) -> None:
        """Write [S, B, H] to `slots`. Padding beyond them is ignored. Raises OSError."""
        by_sample = hidden_states.transpose(0, 1)[: len(slots)].contiguous()
        with open(self._incomplete, "r+b") as file:
            for slot, entry in zip(slots.tolist(), by_sample, strict=True):
                file.seek(slot * self._entry_bytes)
                file.write(entry.view(torch.uint8).numpy().data)

    def sync(self) -> None:
        """Flush this rank's writes to disk. Raises OSError."""
        atomic_io.sync(self._incomplete)

    def publish(self) -> None:
        """Rename the file to its final name. Call this after all ranks have synced. Raises OSError."""
        os.rename(self._incomplete, self.path)

    def remove(self) -> None:
        """Remove an unpublished file. Raises OSError."""
        os.unlink(self._incomplete)

    def read(self, samples: Indices) -> torch.Tensor:
        """Return the entries of dataset indices as [S, B, H] in host memory, page-locked if there is a GPU."""
        entries = torch.from_numpy(self._entries[numpy.searchsorted(self.samples, samples)])
        by_sample = entries.view(self._dtype).view(len(samples), *self._shape)
        batch = torch.empty(by_sample.transpose(0, 1).shape, dtype=self._dtype, pin_memory=device.has_cuda())
        return batch.copy_(by_sample.transpose(0, 1))

    @functools.cached_property
    def _entries(self) -> Any:
        shape = (len(self.samples), self._shape[0] * self._shape[1])
        return numpy.memmap(self.path, mode="r", dtype=_NUMPY[self._dtype.itemsize], shape=shape)


def cache_files(root: str) -> list[str]:
    """Return the cache files below `root`, including incomplete ones. Raises OSError."""
    return [os.path.join(root, name) for name in sorted(os.listdir(root)) if _FILE_NAME.fullmatch(name)]
