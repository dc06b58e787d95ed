"""The inputs of chunks that a backward pass reads again, on the device or in host memory (--bcd-saved-inputs)."""

from __future__ import annotations

from collections import deque

import torch

from megatron.bcd.runtime import device, memory

Place = tuple[int, int]
"""Chunk and microbatch."""
_NUM_LEAVING = 2
"""Tensors that may be on their way to host memory while later passes compute."""


class SavedInputs:
    """Saves one tensor per place from the forward to the backward pass.

    In host memory, tensors are copied on separate streams while other passes compute. Host memory is page-locked,
    allocated once per place, and reused by the next iteration.
    """

    def __init__(self, *, on_host: bool) -> None:
        self._on_host = on_host and device.has_cuda()
        self._saved: dict[Place, torch.Tensor] = {}
        """Tensors on the device."""
        self._copies: dict[Place, torch.Tensor] = {}
        """Page-locked buffers."""
        self._copied: dict[Place, device.Copied] = {}
        """The ends of copies to host memory, of tensors that are there and not on the device."""
        self._coming: dict[Place, device.Copied] = {}
        """The ends of copies to the device, for tensors in `_saved`."""
        self._leaving: deque[tuple[torch.Tensor, device.Copied]] = deque()
        """Tensors on their way to host memory, and the ends of their copies."""
        self._out, self._back = device.CopyStream(), device.CopyStream()

    def save(self, place: Place, tensor: torch.Tensor) -> None:
        """Save a tensor. The caller may drop it."""
        if not self._on_host:
            self._saved[place] = tensor
            return
        copy = self._copies.get(place)
        if copy is None or copy.shape != tensor.shape:
            copy = memory.empty_host_tensor(tensor.numel(), tensor.dtype).view(tensor.shape)
            self._copies[place] = copy
        self._copied[place] = copied = self._out.copy(tensor, to=copy, is_kept=True)
        self._leaving.append((tensor, copied))
        self._free_leaving(_NUM_LEAVING)

    def _free_leaving(self, number: int) -> None:
        """Free the first tensors until `number` are leaving. Later kernels wait for their copies and reuse the memory.

        If the allocator waited instead, until the copies are done when the CPU asks for memory, the CPU's lead over the
        device would decide how much memory a step takes.
        """
        while len(self._leaving) > number:
            _, copied = self._leaving.popleft()
            self._out.wait(copied)

    def prefetch(self, place: Place) -> None:
        """Start to copy a saved tensor back to the device, if it is in host memory."""
        if place not in self._copied:
            return
        copied, copy = self._copied.pop(place), self._copies[place]
        tensor = torch.empty_like(copy, device=device.current())
        self._saved[place], self._coming[place] = tensor, self._back.copy(copy, to=tensor, after=(copied,))

    def take(self, place: Place) -> torch.Tensor:
        """Return a saved tensor on the device, and forget it."""
        self._free_leaving(0)
        self.prefetch(place)
        self._back.wait(self._coming.pop(place, None))
        return self._saved.pop(place)
