"""Count bytes and operations of modules under fake tensors, which have shapes and no values."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

MATRIX_PRODUCTS = ("aten.mm", "aten.addmm", "aten._grouped_mm")
"""Operators of weights, by their names in `count_flops`."""


def fake_tensors() -> FakeTensorMode:
    """Return a context in which new tensors are fake."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def count_flops(module: torch.nn.Module, *args: Any, **kwargs: Any) -> dict[str, int]:
    """Run the module without a graph, and return its floating-point operations by operator."""
    not_counted = {  # PyTorch's counter does not know them
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
        torch.ops.aten._grouped_mm: lambda left, right, *_, **__: 2 * prod(left) * int(right[-1]),
    }
    with FlopCounterMode(display=False, custom_mapping=not_counted) as flops, torch.no_grad():
        module(*args, **kwargs)
    return {str(operator): number for operator, number in flops.get_flop_counts()["Global"].items()}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that are created inside and still alive (`now`), and their `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {each.untyped_storage()._cdata for each in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for each in _tensors(result):
            storage = each.untyped_storage()
            if storage._cdata not in before | self._known:
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _tensors(values: Any) -> Iterator[Tensor]:
    return (each for each in tree_leaves(values) if isinstance(each, Tensor))
