"""The file of one phase's prefix outputs.

An entry is one sample's input of the first active layer. Entries lie in the order of the samples' dataset indices, and
behind them a CRC-32 of each, written after it. So a fill that was killed, a truncated file and a flipped bit are one
case: entries that are missing.

Tensor shapes: S sequence length, B micro-batch size, H hidden size.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import zlib
from typing import Any

import numpy
import numpy.typing
import torch

from megatron.bcd.runtime import device

_FILE_NAME = re.compile(r"prefix_[0-9a-f]{32}\.bin")
_NUMPY = {"fp32": numpy.float32, "bf16": numpy.int16}  # numpy has no bf16: its bits
_TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16}

Indices = numpy.typing.NDArray[numpy.int64]


class PrefixFile:
    """Entries by slot, 0 to the number of samples. Any rank may write any slot; no two write the same one."""

    def __init__(self, root: str, *, key: str, samples: Indices, shape: tuple[int, int], dtype: str) -> None:
        """`key`: a hexadecimal hash of all that decides what the entries hold. It names the file and goes into every
        checksum. `samples`: dataset indices, ascending; `shape`: [S, H] of an entry in `dtype`, fp32 or bf16."""
        self.path = os.path.join(root, f"prefix_{key[:32]}.bin")
        self.samples = samples
        self._root, self._key = root, key
        self._shape, self._dtype = shape, dtype
        self._entry_bytes: int = shape[0] * shape[1] * _TORCH[dtype].itemsize

    @property
    def num_bytes(self) -> int:
        return len(self.samples) * (self._entry_bytes + 4)

    def prepare(self, *, max_bytes: int | None) -> str:
        """Create the file and remove those of other phases; entries that are there stay. Why there is no room for it,
        else "". Without `max_bytes` it may take half of the free space: checkpoints need some, too. Raises OSError."""
        os.makedirs(self._root, exist_ok=True)
        for path in cache_files(self._root):
            if path != self.path or os.path.getsize(path) != self.num_bytes:
                os.unlink(path)
        if max_bytes is not None and self.num_bytes > max_bytes:
            return f"more than --bcd-prefix-cache-max-gib {max_bytes / 2**30:g}"
        if os.path.exists(self.path):
            return ""
        free = shutil.disk_usage(self._root).free
        if self.num_bytes > (free if max_bytes is not None else free // 2):
            return f"too much for {free / 2**30:,.2f} GiB of free disk space"
        with open(self.path, "wb") as file:
            file.truncate(self.num_bytes)  # of holes, whose checksums are 0
        return ""

    def remove(self) -> None:
        """Raises OSError."""
        os.unlink(self.path)

    def missing(self, slots: Indices) -> Indices:
        """Of `slots`, those whose entry was not written or is damaged. Raises OSError."""
        entries = self._mapped()
        checksums = numpy.fromfile(self.path, dtype="<u4", offset=entries.nbytes)
        found = [i for i in slots.tolist() if not checksums[i] or checksums[i] != self._checksum(i, entries[i])]
        return numpy.array(found, dtype=numpy.int64)

    def write(self, slots: Indices, hidden_states: torch.Tensor) -> None:
        """The samples of `slots`, of [S, B, H]; what is padded behind them is not written. Raises OSError."""
        by_sample = hidden_states.transpose(0, 1)[: len(slots)].contiguous()
        with open(self.path, "r+b") as file:
            for slot, entry in zip(slots.tolist(), by_sample, strict=True):
                content = entry.view(torch.uint8).numpy()
                file.seek(slot * self._entry_bytes)
                file.write(content.data)
                file.seek(len(self.samples) * self._entry_bytes + 4 * slot)  # flushes the entry
                file.write(self._checksum(slot, content).to_bytes(4, "little"))

    def to_entries(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[S, B, H] in the precision of the file, in host memory."""
        return hidden_states.detach().to(_TORCH[self._dtype]).cpu()

    def read(self, samples: Indices, dtype: torch.dtype) -> torch.Tensor:
        """The entries of these dataset indices as [S, B, H], in host memory (page-locked where there is a GPU)."""
        entries = torch.from_numpy(self._entries[numpy.searchsorted(self.samples, samples)])
        by_sample = entries.view(_TORCH[self._dtype]).view(len(samples), *self._shape)
        batch = torch.empty(by_sample.transpose(0, 1).shape, dtype=dtype, pin_memory=device.has_cuda())
        return batch.copy_(by_sample.transpose(0, 1))

    @functools.cached_property
    def _entries(self) -> Any:
        """Mapped when the file is complete: an earlier mapping could show old pages of a network's disk."""
        return self._mapped()

    def _mapped(self) -> Any:
        shape = (len(self.samples), self._shape[0] * self._shape[1])
        return numpy.memmap(self.path, mode="r", dtype=_NUMPY[self._dtype], shape=shape)

    def _checksum(self, slot: int, entry: numpy.typing.NDArray[Any]) -> int:
        return zlib.crc32(entry.data, zlib.crc32(f"{self._key} {slot}".encode())) or 1  # 0: never written


def cache_files(root: str) -> list[str]:
    """Of any phase, below `root`. Raises OSError."""
    return [os.path.join(root, name) for name in sorted(os.listdir(root)) if _FILE_NAME.fullmatch(name)]
