"""Directions of `update_rules` for a layer's matrices as Megatron Core stores them: sliced over tensor-parallel ranks,
with queries, keys and values in one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron.bcd.optim import update_rules
from megatron.bcd.optim.update_rules import AllReduce

SCALES: dict[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
    "shape_scaling": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}
"""Megatron's --muon-scale-mode: the factor of an orthogonal matrix. `spectral` gives a root mean square of 1."""
_QKV = "linear_qkv.weight"


@dataclass(frozen=True, kw_only=True)
class MatrixLayout:
    """What a matrix is made of, and how it is sliced."""

    parts: tuple[int, ...] = ()
    """Rows per query group of queries, keys and values, which are interleaved by group; empty: the matrix is one."""
    sharded_dim: int | None = None
    """Dimension that is sliced over the tensor-parallel ranks; None: it is whole, or each slice counts as a matrix."""
    group: torch.distributed.ProcessGroup | None = None
    """The tensor-parallel group, where the matrix is sliced."""
    gathers: bool = False
    """Every rank gathers the whole matrix (--muon-tp-mode duplicated)."""


def layout_of(
    name: str,
    parameter: torch.nn.Parameter,
    *,
    qkv_parts: tuple[int, int, int] | None,
    group: torch.distributed.ProcessGroup,
    tp_mode: str,
) -> MatrixLayout:
    """The layout of the parameter that GPTModel calls `name`.

    `qkv_parts` is the rows per query group of queries, keys and values, or None to take them as one matrix.
    """
    is_split = qkv_parts is not None and name.endswith(_QKV) and parameter.shape[0] % sum(qkv_parts) == 0
    dim = getattr(parameter, "partition_dim", -1)  # Megatron Core's: -1 where each rank has all of it
    is_sliced = group.size() > 1 and tp_mode != "blockwise" and dim >= 0
    return MatrixLayout(
        parts=qkv_parts if is_split and qkv_parts is not None else (),
        sharded_dim=dim if is_sliced else None,
        group=group if is_sliced else None,
        gathers=tp_mode == "duplicated",
    )


def direction(
    rule: str, gradient_KMN: torch.Tensor, layout: MatrixLayout, *, num_steps: int, scale_mode: str = "spectral"
) -> torch.Tensor:
    """The direction of `rule` of each of K matrices; `num_steps` and `scale_mode`, a key of SCALES, are of
    `orthogonal`. A collective over the tensor-parallel group."""
    if rule == "sign":
        return gradient_KMN.sign()
    if rule == "normalized":
        return _normalized(gradient_KMN, layout)
    if not layout.parts:
        return _orthogonal(gradient_KMN, layout, num_steps, scale_mode)
    # queries, keys and values have no common singular vectors to preserve
    by_group = gradient_KMN.unflatten(1, (-1, sum(layout.parts)))
    done: list[torch.Tensor] = []
    for _, parts in itertools.groupby(by_group.split(layout.parts, dim=2), key=lambda part: part.shape):
        of_one_shape = torch.stack(list(parts))
        directions = _orthogonal(of_one_shape.flatten(2, 3).flatten(0, 1), layout, num_steps, scale_mode)
        done += directions.view_as(of_one_shape).unbind()
    return torch.cat(done, dim=2).view_as(gradient_KMN)


def _normalized(gradient_KMN: torch.Tensor, layout: MatrixLayout) -> torch.Tensor:
    if layout.sharded_dim != 1 or layout.group is None:
        return update_rules.normalize_rows(gradient_KMN)
    return update_rules.normalize_rows(gradient_KMN, num_slices=layout.group.size(), all_reduce=_all_reduce(layout))


def _orthogonal(gradient_KMN: torch.Tensor, layout: MatrixLayout, num_steps: int, scale_mode: str) -> torch.Tensor:
    dim, group = layout.sharded_dim, layout.group
    _, rows, columns = gradient_KMN.shape
    if dim is None or group is None:
        scale = SCALES[scale_mode](rows, columns)
        return update_rules.orthogonalize(gradient_KMN, num_steps=num_steps, scale=scale)
    rows, columns = (rows * group.size(), columns) if dim == 0 else (rows, columns * group.size())
    scale = SCALES[scale_mode](rows, columns)
    if layout.gathers:
        slices = [torch.empty_like(gradient_KMN) for _ in range(group.size())]
        torch.distributed.all_gather(slices, gradient_KMN.contiguous(), group=group)
        whole = update_rules.orthogonalize(torch.cat(slices, dim=1 + dim), num_steps=num_steps, scale=scale)
        return whole.chunk(group.size(), dim=1 + dim)[group.rank()]
    return update_rules.orthogonalize(
        gradient_KMN, num_steps=num_steps, scale=scale, sharded_dim=dim, all_reduce=_all_reduce(layout)
    )


def _all_reduce(layout: MatrixLayout) -> AllReduce:
    def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(tensor, group=layout.group)
        return tensor

    return all_reduce
