"""Count the bytes that autograd saves for the backward pass on a CPU, and their peak."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator

import torch


class _Saved:
    """One saved tensor. It reports to the meter when the graph frees it."""

    __slots__ = ("_address", "_meter", "_num_bytes", "tensor")

    def __init__(self, meter: ActivationMeter, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.tensor = tensor
        self._meter = meter
        # stored now: Megatron Core may empty the storage
        self._address, self._num_bytes = storage.data_ptr(), storage.nbytes()
        meter.retain(self._address, self._num_bytes)

    def __del__(self) -> None:
        self._meter.release(self._address, self._num_bytes)


class ActivationMeter:
    """Live bytes of the tensors that autograd has saved while `measuring`. Weights do not count; storages count once.

    `peak_bytes` is the highest value since the last `measuring` began. Recomputed activations count while they live.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._live_bytes = 0
        self._uses: Counter[tuple[int, int]] = Counter()
        self._excluded: frozenset[int] = frozenset()

    @contextlib.contextmanager
    def measuring(self, weights: Iterable[torch.Tensor]) -> Iterator[None]:
        """Count what autograd saves inside the context, except `weights`."""
        self.peak_bytes = self._live_bytes
        self._excluded = frozenset(weight.untyped_storage().data_ptr() for weight in weights)
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: torch.Tensor) -> _Saved | torch.Tensor:
        if tensor.untyped_storage().data_ptr() in self._excluded:
            return tensor
        # detach: saving an operation's own output would make the graph and this object keep each other alive
        return _Saved(self, tensor.detach())

    @staticmethod
    def _unpack(saved: _Saved | torch.Tensor) -> torch.Tensor:
        return saved.tensor if isinstance(saved, _Saved) else saved

    # the key includes the size: an emptied storage may pass its address on to another tensor
    def retain(self, address: int, num_bytes: int) -> None:
        self._uses[address, num_bytes] += 1
        if self._uses[address, num_bytes] == 1:
            self._live_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)

    def release(self, address: int, num_bytes: int) -> None:
        self._uses[address, num_bytes] -= 1
        if not self._uses[address, num_bytes]:
            del self._uses[address, num_bytes]
            self._live_bytes -= num_bytes
