"""Counts the bytes that autograd keeps for the backward pass, and their peak."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import torch


class _Saved:
    """One saved tensor; decrements the meter when the graph frees it."""

    __slots__ = ("_address", "_meter", "_num_bytes", "tensor")

    def __init__(self, meter: ActivationMeter, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.tensor = tensor
        self._meter = meter
        # of now: Megatron Core empties the storage of a recomputed norm, and fills it again in the backward pass
        self._address, self._num_bytes = storage.data_ptr(), storage.nbytes()
        meter.keep(self._address, self._num_bytes)

    def __del__(self) -> None:
        self._meter.let_go(self._address, self._num_bytes)


class ActivationMeter:
    """Live bytes of the tensors that autograd saved while `measuring`, storages counted once, weights left out.

    `peak_bytes` is the highest since the last `measuring` began. Recomputed activations count while they live,
    outputs of recomputed norms (--recompute-modules layernorm) also where they are discarded.

    With `allocated_bytes`, the GPU allocator's count after every forward pass is used instead (`after_forward`), which
    includes the stage's output: under hooks, a saved weight is not the parameter that Megatron Core's fused weight
    gradients need.
    """

    def __init__(self, allocated_bytes: Callable[[], int] | None = None) -> None:
        self.peak_bytes = 0
        self._allocated_bytes = allocated_bytes
        self._bytes_before: int | None = None
        self._live_bytes = 0
        self._uses: Counter[tuple[int, int]] = Counter()
        self._left_out: frozenset[int] = frozenset()

    @contextlib.contextmanager
    def measuring(self, weights: Iterable[torch.Tensor]) -> Iterator[None]:
        """Count what is saved inside; `weights` are there anyway and do not count."""
        self.peak_bytes = self._live_bytes
        if self._allocated_bytes is not None:
            self.peak_bytes, self._bytes_before = 0, self._allocated_bytes()
            yield
            self._bytes_before = None
            return
        self._left_out = frozenset(weight.untyped_storage().data_ptr() for weight in weights)
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def after_forward(self) -> None:
        """To be called after the forward pass of each microbatch; without a graph nothing is kept."""
        if self._allocated_bytes is not None and self._bytes_before is not None and torch.is_grad_enabled():
            self.peak_bytes = max(self.peak_bytes, self._allocated_bytes() - self._bytes_before)

    def _pack(self, tensor: torch.Tensor) -> _Saved | torch.Tensor:
        if tensor.untyped_storage().data_ptr() in self._left_out:
            return tensor
        # detached: an operation's own output would keep its graph alive, and the graph what is returned here
        return _Saved(self, tensor.detach())

    @staticmethod
    def _unpack(saved: _Saved | torch.Tensor) -> torch.Tensor:
        return saved.tensor if isinstance(saved, _Saved) else saved

    # by address and size: the storage of a norm that is recomputed is emptied, and its address given to another
    def keep(self, address: int, num_bytes: int) -> None:
        self._uses[address, num_bytes] += 1
        if self._uses[address, num_bytes] == 1:
            self._live_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)

    def let_go(self, address: int, num_bytes: int) -> None:
        self._uses[address, num_bytes] -= 1
        if not self._uses[address, num_bytes]:
            del self._uses[address, num_bytes]
            self._live_bytes -= num_bytes
