"""Inputs and activations of passes that wait for the backward pass in host memory.

Autograd's hooks for saved tensors collect what a pass saves, each storage once. It is copied to one flat buffer of
page-locked host memory while the next pass computes, and back during the backward pass before its own. So the device
has the activations of two passes. Weights, which graphs save too, stay where they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container

import torch
from torch import Tensor

from megatron.bcd.runtime import device, host_memory

Place = tuple[int, int]
"""Chunk and microbatch."""
_ALIGNMENT = 512
"""In bytes, as those of the allocator: kernels read vectors, and all dtypes divide it."""


class SavedTensors:
    """Tensors by place. Host memory is allocated once per place, and reused by the next iteration.

    Args:
        has_inputs: whether inputs of passes that are repeated wait here, too.
    """

    def __init__(self, *, has_inputs: bool = False) -> None:
        self.has_inputs = has_inputs
        self._buffers: dict[Place, Tensor] = {}
        self._storages: dict[int, tuple[int, Tensor]] = {}
        """What was packed since the last `save`, as bytes, by address: position in the buffer, and storage."""
        self._size = 0
        """Its bytes in the buffer."""
        self._leaving: list[Tensor] = []
        """Storages on their way to host memory."""
        self._copied: dict[Place, tuple[int, device.Copied]] = {}
        """Bytes of places in host memory, and the end of their copies."""
        self._left: device.Copied = None
        """The last of these."""
        self._coming: dict[Place, tuple[Tensor, device.Copied]] = {}
        """Buffers on the device, and the end of their copies."""
        self._out, self._back = device.CopyStream(), device.CopyStream()

    def pack(self, place: Place, stays: Container[int], tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        """Pack a tensor of a place. Return a function that returns it between `load` and `drop`.

        Storages at the addresses in `stays`, and on other devices, are not packed: it returns the tensor.
        """
        storage, here = tensor.untyped_storage(), device.current()
        is_other = tensor.device.type != here.type or tensor.layout is not torch.strided or tensor.is_conj()
        if is_other or not storage.nbytes() or storage.data_ptr() in stays:
            return tensor
        if storage.data_ptr() not in self._storages:
            whole = torch.empty(0, dtype=torch.uint8, device=here).set_(storage)  # type: ignore[call-overload]
            self._storages[storage.data_ptr()] = self._size, whole
            self._size += -(-len(whole) // _ALIGNMENT) * _ALIGNMENT
        start = self._storages[storage.data_ptr()][0] // tensor.element_size() + tensor.storage_offset()
        return functools.partial(self._view, place, tensor.dtype, tensor.size(), tensor.stride(), start)

    def _view(self, place: Place, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], start: int) -> Tensor:
        return self._coming[place][0].view(dtype).as_strided(size, stride, start)

    @torch.no_grad()
    def save(self, place: Place) -> None:
        """Start to copy what was packed to host memory. The device's memory is free for kernels after the next call."""
        self.release()
        if len(self._buffers.get(place, ())) < self._size:
            device.synchronize()  # copies of the old buffer
            self._buffers[place] = host_memory.allocate_private(self._size, what="--bcd-saved-activations")
        for start, storage in self._storages.values():
            to = self._buffers[place][start : start + len(storage)]
            self._left = self._out.copy(storage, to=to, is_kept=True)
            self._leaving.append(storage)
        self._copied[place] = self._size, self._left
        self._storages, self._size = {}, 0

    def release(self) -> None:
        """Make later kernels wait for the copies of the last `save`, and free what they read.

        If the allocator waited instead, until the copies are done when the CPU asks for memory, the CPU's lead over the
        device would decide how much memory a step takes.
        """
        self._out.wait(self._left)
        self._left, self._leaving = None, []

    @torch.no_grad()
    def prefetch(self, place: Place) -> None:
        """Start to copy the tensors of a place back to the device, if they are in host memory."""
        if place not in self._copied:
            return
        size, copied = self._copied.pop(place)
        flat = torch.empty(size, dtype=torch.uint8, device=device.current())
        self._coming[place] = flat, self._back.copy(self._buffers[place][:size], to=flat, after=(copied,))

    def load(self, place: Place) -> None:
        """Make the tensors of a place available to later kernels, until `drop`."""
        self.prefetch(place)
        self._back.wait(self._coming[place][1])

    def drop(self, place: Place) -> None:
        """Free what `load` has loaded."""
        del self._coming[place]
