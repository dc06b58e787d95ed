"""Matrices that are stepped without Megatron Core's optimizer: the state of each, and stacks that share a gradient.

Shapes: K = matrices of a stack, M = rows, N = columns.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state

from megatron.bcd.blocks.ownership import EXPERT_STACK_ELEMENTS, matrix_stacks
from megatron.bcd.model.grouped_experts import stacked
from megatron.bcd.model.host_layers import LOW_BITS, State
from megatron.bcd.optim import bf16, low_bit_adam, low_bit_momentum, update_rules
from megatron.bcd.optim.state import COLUMN_MEANS, MAIN_PARAM, MOMENTUM, ROW_MEANS
from megatron.bcd.optim.update_rules import MatrixLayout
from megatron.bcd.runtime import device
from megatron.bcd.runtime.compat import pytorch

FACTORS = "factors"
"""Kind of state, beside LOW_BITS, MOMENTUM and Adam's entries."""
MOMENTUM_SCALE = MOMENTUM + low_bit_adam.SCALE
"""Kind of state: the scales of a momentum in 8-bit codes."""
MOMENTS = "moments"
"""Adam's entries together, in `Matrix.groups`."""


@dataclass(frozen=True, kw_only=True)
class MatrixRule:
    """The rule for stepping a set of matrices: w -= lr x (weight_decay x w + scale x direction)."""

    name: str
    """ORTHOGONAL, FACTORED or ADAM (`update_rules`)."""
    scale: float = 1.0
    """Root mean square of an update at a learning rate of 1."""
    grad_dtype: torch.dtype
    momentum: float | None = None
    """Decay of the momentum; None for no momentum."""
    nesterov: bool = False
    num_steps: int = update_rules.NEWTON_SCHULZ_STEPS
    """Newton-Schulz iterations."""
    is_by_chunk: bool = True
    """Whether breadth-first order steps the matrices right after their passes."""
    adam: Mapping[str, Any] = field(default_factory=dict)
    """With ADAM: betas, eps and decoupled_weight_decay as in PyTorch."""

    @property
    def is_clipped(self) -> bool:
        """Whether the gradients are clipped and part of the norm."""
        return self.momentum is not None or self.name == update_rules.ADAM


Rules = list[tuple[MatrixRule, Iterable[str], bool]]
"""Rule, names of matrices, and whether the active block owns them."""


@dataclass(kw_only=True, eq=False)
class Matrix:
    """A matrix of a layer, or this rank's tensor-parallel slice of it, with its state.

    A parameter [E, M, N] of E experts has the state of E matrices.
    """

    name: str
    parameter: torch.nn.Parameter
    layout: MatrixLayout
    owner: int
    """Rank of the owner in `group`, the ranks with the same matrix."""
    group: torch.distributed.ProcessGroup
    num_ranks: int
    """Number of ranks whose gradients the matrix averages. Those of an expert have arrived with its tokens."""
    groups: Mapping[str, tuple[str, int | None]]
    """The state that checkpoints store, by kind: the group's key, and the block in whose phases alone it is stepped."""
    moments_dtype: torch.dtype
    """Precision of the momentum or of Adam's moments. int8: codes, and scales as kinds of their own."""
    has_signed_squares: bool
    """Whether weights round like Megatron Core's, which takes the signs of Adam's second moment (`bf16.split`)."""
    offloads_low_bits: bool
    """Whether low bits are in host memory while the matrix is not stepped."""
    places: State
    """The owner's preallocated host memory, by kind of state; empty on other ranks."""
    rule: MatrixRule | None = None
    """The rule that steps it in the present phase."""
    is_streamed: bool = False
    """Whether its weight is in host memory in the present phase."""
    stack: Stack | None = None
    """The stack with its gradient buffer, while it has one."""
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    """The owner's state on the device, by kind."""
    offloaded: dict[str, torch.Tensor] = field(default_factory=dict)
    """The owner's state in host memory, by kind."""

    @property
    def is_owner(self) -> bool:
        return self.owner == self.group.rank()

    def begin(self, rule: MatrixRule, *, is_streamed: bool) -> None:
        """Begin a phase in which `rule` steps the matrix. The owner restores or creates the state that it needs."""
        self.rule, self.is_streamed = rule, is_streamed
        self.parameter.requires_grad_(True)
        if not self.is_owner:
            return
        for kind, place in self.streamed_places.items():
            if self.get(kind) is None:
                self.offloaded[kind] = place.zero_()
        if rule.momentum is not None:
            self._prepare(MOMENTUM, lambda: self._zeros(self.moments_dtype))
            if self.moments_dtype == torch.int8:
                self._prepare(
                    MOMENTUM_SCALE,
                    functools.partial(low_bit_momentum.zero_scales, self.parameter.shape, device.current()),
                )
        if rule.name == update_rules.ADAM:
            if not self.adam_state():
                self.state |= low_bit_adam.zeros(self.parameter.numel(), self.moments_dtype, device.current())
            self._restore(*self.adam_state())
        if rule.name == update_rules.FACTORED:
            self._prepare(FACTORS, self.zero_factors)
        if self.parameter.dtype == torch.bfloat16:
            self._prepare(LOW_BITS, lambda: self._zeros(torch.int16))

    def end(self, *, keeps_moments: bool) -> None:
        """End the phase: move its momentum or Adam's moments to host memory, or drop them."""
        self.parameter.requires_grad_(False)
        self.rule = None
        moments = [MOMENTUM, MOMENTUM_SCALE, *self.adam_state()]
        for kind in moments if not keeps_moments else ():
            self.state.pop(kind, None)
        self.offload([*moments, LOW_BITS] if self.offloads_low_bits else moments)

    @property
    def streamed_places(self) -> State:
        """Places of the state that stays in host memory in this phase, except while its chunk is open."""
        return self.places if self.is_streamed else {}

    def _prepare(self, kind: str, create: Callable[[], torch.Tensor]) -> None:
        """Restore the state of a kind to the device, or create it there, unless it is streamed."""
        self._restore(kind)
        if self.get(kind) is None:
            self.state[kind] = create()

    def _restore(self, *kinds: str) -> None:
        """Move state of these kinds from host memory to the device, unless it is streamed."""
        for kind in kinds:
            if kind in self.offloaded and kind not in self.streamed_places:
                self.state[kind] = self.offloaded.pop(kind).to(device.current(), copy=kind in self.places)

    def _zeros(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros_like(self.parameter, dtype=dtype, device=device.current())

    def offload(self, kinds: Iterable[str]) -> None:
        """Move state of these kinds to host memory."""
        for kind in self.state.keys() & kinds:
            self.store_on_host(kind, self.state.pop(kind))

    def store_on_host(self, kind: str, tensor: torch.Tensor) -> None:
        """Set the state of a kind in host memory, in its place if there is one."""
        place = self.places.get(kind)
        self.offloaded[kind] = tensor.cpu() if place is None else place.copy_(tensor.view_as(place))

    def get(self, kind: str) -> torch.Tensor | None:
        """Return the state of a kind, on the device or in host memory; None if there is none."""
        return self.state.get(kind, self.offloaded.get(kind))

    def zero_factors(self) -> torch.Tensor:
        """Return the factors before the first step, [F] or [E, F]."""
        *experts, rows, columns = self.parameter.shape
        size = update_rules.num_factors(rows, columns, len(self.layout.parts) or 1)
        return torch.zeros(*experts, size, device=device.current())

    def split_factors(self, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return views of this matrix's factors, split as by `update_rules.split_factors`."""
        return update_rules.split_factors(factors, self.parameter.shape[-2], len(self.layout.parts) or 1)

    def adam_state(self) -> State:
        """Return the owner's entries of Adam's moments, flat."""
        kinds = [name + suffix for name in low_bit_adam.MOMENTS for suffix in ("", low_bit_adam.SCALE)]
        return {kind: entry.view(-1) for kind in kinds if (entry := self.get(kind)) is not None}

    def signed_squares(self) -> torch.Tensor | None:
        """Return Adam's second moment if its signs belong to the fp32 value (`bf16.split`).

        They do in updates by chunk. Other matrices keep their value at a switch, where they may lose the moment.
        """
        squares = self.get("exp_avg_sq") if self.has_signed_squares else None
        return None if squares is None else squares.view_as(self.parameter)

    # ------------------------------------------------------------------------------------------- as checkpoints have it

    def tensors(self, kind: str) -> dict[str, Callable[[], torch.Tensor]]:
        """Return functions that return the owner's state of a kind, from where it is now, by name in checkpoints."""
        if not self.is_owner:
            return {}
        if kind == LOW_BITS:
            return {} if self.parameter.dtype == torch.float32 else {MAIN_PARAM: self.main_param_reader()}
        if kind == MOMENTS:
            state = self.adam_state()
            return {name: functools.partial(_read_moment, state, name) for name in low_bit_adam.names(state)}
        if (tensor := self.get(kind)) is None:
            return {}
        if kind == MOMENTUM:
            scales = self.get(MOMENTUM_SCALE)
            return {MOMENTUM: lambda: _read_momentum(tensor.detach(), scales)}
        rows, columns, _ = self.split_factors(tensor)
        return {ROW_MEANS: rows.detach, COLUMN_MEANS: columns.detach}

    def shapes(self, kind: str) -> dict[str, torch.Size]:
        """Return the shapes of these tensors."""
        if kind == FACTORS:
            *experts, rows, columns = self.parameter.shape
            num_parts = len(self.layout.parts) or 1
            return {
                ROW_MEANS: torch.Size([*experts, rows]),
                COLUMN_MEANS: torch.Size([*experts, num_parts, columns]),
            }
        names = low_bit_adam.MOMENTS if kind == MOMENTS else [MAIN_PARAM if kind == LOW_BITS else MOMENTUM]
        return dict.fromkeys(names, self.parameter.shape)

    def set_state(self, kind: str, tensors: Mapping[str, torch.Tensor], num_steps: int) -> None:
        """Set the owner's state of a kind in host memory, or its factors on the device, and all copies of a weight."""
        if not tensors:
            return
        if kind == LOW_BITS:
            self.set_main_param(tensors[MAIN_PARAM])
        elif not self.is_owner:
            return
        elif kind == MOMENTUM and self.moments_dtype == torch.int8:
            codes, scales = low_bit_momentum.encode(tensors[MOMENTUM].view(self.parameter.shape))
            self.store_on_host(MOMENTUM, codes)
            self.store_on_host(MOMENTUM_SCALE, scales)
        elif kind == MOMENTUM:
            self.store_on_host(MOMENTUM, tensors[MOMENTUM].to(self.moments_dtype, copy=True))
        elif kind == MOMENTS:
            moments = {name: tensor.reshape(-1) for name, tensor in tensors.items()}
            entries = low_bit_adam.encode(moments) if self.moments_dtype == torch.int8 else moments
            for entry, value in entries.items():
                self.store_on_host(entry, value.clone())
        else:
            factors = self.state[FACTORS] = self.zero_factors()
            values = tensors[ROW_MEANS], tensors[COLUMN_MEANS], torch.tensor(num_steps)
            for view, value in zip(self.split_factors(factors), values, strict=True):
                view.copy_(value)

    def value(self) -> tuple[torch.Tensor, ...]:
        """Return the weight, with the low bits on the owner in bf16."""
        low_bits = self.get(LOW_BITS)
        return (self.parameter,) if low_bits is None else (self.parameter, low_bits)

    def main_param_reader(self) -> Callable[[], torch.Tensor]:
        """Return a function that returns the owner's fp32 value, flat, from where weight and low bits are now."""
        weight, low_bits, squares = self.parameter.detach(), self.get(LOW_BITS), self.signed_squares()
        if low_bits is None:  # this optimizer has not stepped it yet
            return lambda: weight.float().view(-1)
        return lambda: bf16.join(weight, low_bits.to(weight.device), squares).view(-1)

    @torch.no_grad()
    def main_param(self) -> torch.Tensor:
        """Return the fp32 value, flat, on every rank. A collective over the group."""
        weight = self.parameter.detach().to(device.current())
        if weight.dtype == torch.float32:
            return weight.view(-1)
        low_bits = self.get(LOW_BITS)
        if low_bits is None:  # not the owner, or never stepped here
            low_bits = torch.zeros_like(weight, dtype=torch.int16)
        low_bits = low_bits.to(weight.device)
        if self.group.size() > 1:
            torch.distributed.broadcast(low_bits.view(torch.uint8), group=self.group, group_src=self.owner)
        return bf16.join(weight, low_bits).view(-1)

    @torch.no_grad()
    def set_main_param(self, value: torch.Tensor) -> None:
        """Set weight and low bits to an fp32 value."""
        weight = self.parameter.data
        value = value.to(weight.device).view_as(weight)
        if weight.dtype == torch.float32 or (self.has_signed_squares and not self.is_owner):
            weight.copy_(value)
            return
        if self.is_owner and self.get(LOW_BITS) is None:
            self.state[LOW_BITS] = self._zeros(torch.int16)
            if self.offloads_low_bits and self.rule is None:
                self.offload([LOW_BITS])
        bf16.split(value, weight=weight, low_bits=self.get(LOW_BITS), squares=self.signed_squares())


def _read_moment(state: State, name: str) -> torch.Tensor:
    moment = low_bit_adam.read(state, name)
    return moment.abs() if name == "exp_avg_sq" else moment  # without the signs of `bf16.split`


def _read_momentum(stored: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    if scales is None:
        return stored.float()
    return low_bit_momentum.decode(stored, scales.view(*stored.shape[:-2], -1))


class Stack:
    """Matrices of one shape, owner and layout in one phase, up to `ownership.STACK_ELEMENTS` elements.

    They share a gradient buffer, its reduction, and every product and kernel of their update.
    """

    def __init__(self, matrices: Sequence[Matrix], param_group: dict[str, Any], *, is_tied: bool) -> None:
        self.matrices, self.param_group, self.is_tied = matrices, param_group, is_tied
        self.owner, self.group, self.layout = matrices[0].owner, matrices[0].group, matrices[0].layout
        self.is_owner, self.num_ranks = matrices[0].is_owner, matrices[0].num_ranks
        weight = matrices[0].parameter
        self.rule: MatrixRule = param_group["rule"]
        self.gradient = torch.empty(0)
        """[K, M, N] while it is open; the `main_grad` of each matrix is a slice."""
        self.experts = slice(None)
        """The experts of a parameter that `weights` and `state` return."""
        self._num_missing = 0
        self.is_reducing = False
        self.is_shared = getattr(weight, "shared_embedding", False)
        """Whether it is a tied embedding with a copy on another stage (Megatron Core's attribute). The gradients of
        both stages are added after the passes, before the reduction."""
        self.is_partial = getattr(weight, "sequence_parallel", False)  # Megatron Core's attribute
        """Whether the weight is whole on each tensor-parallel rank and its gradient is a part of the sequence's, as a
        router's. Megatron Core sums the parts after the passes."""
        self.is_reduced_late = self.is_shared or self.is_partial or is_tied
        """Whether the reduction must not start with the last microbatch's gradient, because more are to come."""
        self._reduction: torch.distributed.Work | None = None
        self.is_skipped: torch.Tensor | None = None
        """On the device: whether the update changes neither weights nor state. None if it does not."""

    @property
    def is_open(self) -> bool:
        """Whether it has its gradient buffer."""
        return self.gradient.numel() > 0

    @property
    def weights(self) -> list[torch.Tensor]:
        """The weights of each parameter, [1, M, N] or [E, M, N]."""
        return [self._view(matrix, matrix.parameter.data) for matrix in self.matrices]

    def state(self, kind: str) -> list[torch.Tensor]:
        """Return the state of a kind of each parameter that has it on the device, [1, ...] or [E, ...]."""
        return [self._view(matrix, matrix.state[kind]) for matrix in self.matrices if kind in matrix.state]

    def _view(self, matrix: Matrix, tensor: torch.Tensor) -> torch.Tensor:
        if matrix.parameter.dim() == 2:
            return tensor[None]
        return tensor.view(len(matrix.parameter), -1, *tensor.shape[2:])[self.experts]

    def divided(self) -> Iterator[Stack]:
        """Yield views of this stack with some experts of a single large parameter each, to save temporary memory."""
        at_once = max(1, EXPERT_STACK_ELEMENTS // self.gradient[0].numel())
        if len(self.matrices) > 1 or self.rule.name == update_rules.ADAM:  # Adam steps a parameter by itself in parts
            at_once = len(self.gradient)
        for start in range(0, len(self.gradient), at_once):
            part = copy.copy(self)
            part.experts = slice(start, start + at_once)
            part.gradient = self.gradient[part.experts]
            yield part

    def open(self) -> None:
        """Allocate the gradient buffer, and give each matrix its slice."""
        shape = self.matrices[0].parameter.shape
        shape = torch.Size([len(self.matrices) * shape[:-2].numel(), *shape[-2:]])
        self.gradient = torch.zeros(shape, dtype=self.rule.grad_dtype, device=device.current())
        self._num_missing, self.is_reducing, self.is_skipped = len(self.matrices), False, None
        for matrix, gradient in zip(self.matrices, self.gradient.chunk(len(self.matrices)), strict=True):
            matrix.stack = self
            matrix.parameter.main_grad = gradient.view_as(matrix.parameter)  # type: ignore[attr-defined]
            matrix.parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def close(self) -> None:
        """Free the gradient buffer."""
        self.finish_reduction()
        self.gradient = torch.empty(0)
        for matrix in self.matrices:
            matrix.stack = matrix.parameter.grad = None
            del matrix.parameter.main_grad, matrix.parameter.grad_added_to_main_grad

    def prepare_step(self) -> None:
        """Expect the gradients of a step, which the caller has zeroed."""
        self._num_missing, self.is_reducing = len(self.matrices), False
        for matrix in self.matrices:
            matrix.parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def count_final(self) -> None:
        """Count a gradient as final. The last one starts the reduction."""
        self._num_missing -= 1
        if self._num_missing == 0 and not self.is_reduced_late:
            self.start_reduction()

    def start_reduction(self) -> None:
        """Start to average the gradient on the owner, unless this step has started it before. A collective."""
        if self.num_ranks > 1 and not self.is_reducing:
            self.gradient.div_(self.num_ranks)
            if self.is_shared:  # both copies must stay equal: their stages must add in one order, whoever owns them
                self._reduction = torch.distributed.all_reduce(self.gradient, group=self.group, async_op=True)
            elif self.group.size() > 1:
                owner = torch.distributed.get_global_rank(self.group, self.owner)
                self._reduction = torch.distributed.reduce(self.gradient, dst=owner, group=self.group, async_op=True)
        self.is_reducing = True

    def finish_reduction(self) -> None:
        if self._reduction is not None:
            self._reduction.wait()
            self._reduction = None

    def broadcast(self) -> None:
        """Copy the weights from the owner to the other ranks. A collective."""
        if self.group.size() > 1:
            weights = join(self.weights).contiguous()
            torch.distributed.broadcast(weights, group=self.group, group_src=self.owner)
            write_back(weights, self.weights)


def build_stacks(matrices: Sequence[Matrix], param_group: dict[str, Any], *, is_tied: bool) -> list[Stack]:
    """Divide matrices of one parameter group into stacks.

    With `is_tied` it is a tied embedding that is stepped by chunk: its gradient is open from the first backward pass,
    which has the head.
    """
    shapes = [matrix.parameter.shape for matrix in matrices]
    keys = [(each.owner, each.group, each.layout, shape) for each, shape in zip(matrices, shapes, strict=True)]
    stacks = matrix_stacks(keys, [each.name for each in matrices], [shape.numel() for shape in shapes])
    if not param_group["rule"].is_clipped:  # experts in the order of their memory, which `join` need not copy then
        stacks = [sorted(indices) if ".local_experts." in matrices[indices[0]].name else indices for indices in stacks]
    return [Stack([matrices[index] for index in indices], param_group, is_tied=is_tied) for indices in stacks]


def join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors [E, ...] joined as [K, ...]: a view if one tensor holds them in order, otherwise a copy."""
    if len(tensors) > 1 and len(tensors[0]) == 1:
        return stacked([tensor[0] for tensor in tensors])
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def write_back(values: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Write `values` back into the tensors that `join` copied, if it did."""
    if values.data_ptr() != tensors[0].data_ptr():
        pytorch.copy_each(tensors, values.chunk(len(tensors)))


def sum_of_squares(stacks: Iterable[Stack]) -> torch.Tensor:
    """Return the sum over the gradients that this rank owns, without those that another tensor-parallel rank counts."""
    gradients = [
        stack.gradient
        for stack in stacks
        if stack.is_owner and not (stack.is_partial and parallel_state.get_tensor_model_parallel_rank() > 0)
    ]
    if not gradients:
        return torch.zeros((), device=device.current())
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return torch.stack(norms).square().sum()
