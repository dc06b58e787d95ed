"""Steps matrices without Megatron Core's optimizer.

These are matrices of inactive layers (--bcd-inactive-update), the active block's with --optimizer muon, the embedding
and an untied head with --bcd-embedding-update factored, and all matrices of a single block that is stepped by piece.

Each matrix has an owner among the ranks with the same weights (`replicas`). Gradients are reduced to the owner, which
computes the new weights and broadcasts them. Only the owner keeps state beside weight and gradient: the momentum,
Adam's moments, the factors of the rule `factored` (means by row and by column), and in bf16 the 16 bits that the weight
lacks of its fp32 value. Owners never change, so a switch moves no state between ranks. Matrices of one shape, rule and
owner are reduced and stepped together, in stacks.

With `--bcd-schedule breadth-first` the rules with `is_by_piece` step their matrices piece by piece during the passes. A
piece has gradients only between `open_piece` and `step_piece`. If gradients are clipped, `step_piece` keeps those of
the block in host memory, and `step_kept_piece` steps the piece when the norm is known.

Shapes: K = matrices of a stack, M = rows, N = columns.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron.bcd.blocks.ownership import matrix_owners, matrix_stacks
from megatron.bcd.config import RunConfig
from megatron.bcd.model.frozen_weights import GRADIENT, LOW_BITS, State
from megatron.bcd.optim import bf16, low_bit_adam, update_rules
from megatron.bcd.optim.param_shard import MAIN_PARAM
from megatron.bcd.optim.state_owner import StateOwner, host_sample
from megatron.bcd.optim.update_rules import MatrixLayout
from megatron.bcd.runtime import device, memory, replicas
from megatron.bcd.runtime.compat import pytorch
from megatron.bcd.runtime.device import DTYPES

MOMENTUM, FACTORS = "momentum_buffer", "factors"
"""Kinds of state, beside LOW_BITS and Adam's entries. The first is also the momentum's name in checkpoints."""
_KINDS = (MOMENTUM, FACTORS, LOW_BITS)


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
    scale_mode: str = "spectral"
    """A key of `update_rules.SCALES`."""
    is_by_piece: bool = True
    """Whether breadth-first order steps the matrices right after their passes."""
    adam: Mapping[str, Any] = field(default_factory=dict)
    """With ADAM: betas, eps and decoupled_weight_decay as in PyTorch; `dtype`, the precision of the moments."""

    @property
    def is_clipped(self) -> bool:
        """Whether the gradients are clipped and part of the norm."""
        return self.momentum is not None or self.name == update_rules.ADAM


Rules = list[tuple[MatrixRule, Iterable[str], bool]]
"""Rule, names of matrices, and whether the active block owns them."""


class Matrix:
    """A matrix of a layer, or this rank's tensor-parallel slice of it, with its state."""

    def __init__(
        self,
        name: str,
        parameter: torch.nn.Parameter,
        layout: MatrixLayout,
        *,
        owner: int,
        group: torch.distributed.ProcessGroup,
        num_ranks: int | None = None,
        places: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.name, self.parameter, self.layout = name, parameter, layout
        self.owner, self.group = owner, group
        """Rank of the owner in the group of ranks with the same matrix."""
        self.num_ranks = num_ranks or group.size()
        """Number of ranks whose gradients the matrix averages. Those of an expert have arrived with its tokens."""
        self.is_owner = owner == group.rank()
        """Whether this rank is the owner."""
        self.places = dict(places or {}) if self.is_owner else {}
        """The owner's preallocated host memory, by kind of state."""
        self.is_stepped = False
        """Whether the present phase steps it."""
        self.stack: Stack | None = None
        """The stack with its gradient buffer, while it has one."""
        self.state: dict[str, torch.Tensor] = {}
        """The owner's state on the device, by kind."""
        self.offloaded: dict[str, torch.Tensor] = {}
        """The owner's state in host memory, by kind."""

    def offload(self, kinds: Iterable[str] = _KINDS) -> None:
        """Move state of these kinds to host memory."""
        for kind in self.state.keys() & kinds:
            self.store_on_host(kind, self.state.pop(kind))

    def store_on_host(self, kind: str, tensor: torch.Tensor) -> None:
        """Set the state of a kind in host memory, in its place if there is one."""
        self.offloaded[kind] = self.places[kind].copy_(tensor) if kind in self.places else tensor.cpu()

    def create_low_bits(self, *, on_host: bool) -> None:
        """Create low bits of zeros on the owner."""
        self.state[LOW_BITS] = torch.zeros_like(self.parameter, dtype=torch.int16, device=device.current())
        if on_host:
            self.offload([LOW_BITS])

    def restore(self, kinds: Iterable[str] = _KINDS) -> None:
        """Move offloaded state of these kinds to the device."""
        for kind in self.offloaded.keys() & kinds:
            self.state[kind] = self.offloaded.pop(kind).to(device.current(), copy=kind in self.places)

    def get(self, kind: str) -> torch.Tensor | None:
        """Return the state of a kind, on the device or in host memory; None if there is none."""
        return self.state.get(kind, self.offloaded.get(kind))

    def drop(self, kind: str) -> None:
        """Free the state of a kind."""
        self.state.pop(kind, None)
        self.offloaded.pop(kind, None)

    def zero_factors(self) -> torch.Tensor:
        """Return the factors before the first step, flat."""
        rows, columns = self.parameter.shape
        size = update_rules.num_factors(rows, columns, len(self.layout.parts) or 1)
        return torch.zeros(size, device=device.current())

    def split_factors(self, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return views of this matrix's factors, split as by `update_rules.split_factors`."""
        return update_rules.split_factors(factors, self.parameter.shape[0], len(self.layout.parts) or 1)

    def main_param_reader(self) -> Callable[[], torch.Tensor]:
        """Return a function that returns the owner's fp32 value, flat, from where weight and low bits are now."""
        weight, low_bits, squares = self.parameter.detach(), self.get(LOW_BITS), self.get("exp_avg_sq")
        if low_bits is None:  # this optimizer has not stepped it yet
            return lambda: weight.float().view(-1)
        squares = None if squares is None else squares.view_as(weight)
        return lambda: bf16.join(weight, low_bits.to(weight.device), squares).view(-1)

    def adam_state(self, *names: str) -> State:
        """Return the owner's entries of Adam's moments, or of some, flat."""
        kinds = [name + suffix for name in names or low_bit_adam.MOMENTS for suffix in ("", low_bit_adam.SCALE)]
        return {kind: entry.view(-1) for kind in kinds if (entry := self.get(kind)) is not None}

    def read_moment(self, name: str) -> torch.Tensor:
        """Return one of the owner's moments, flat, in fp32."""
        moment = low_bit_adam.decode(self.adam_state(name))[name]
        return moment.abs() if name == "exp_avg_sq" else moment  # without the signs of `bf16.split`


class Stack:
    """Matrices of one shape, owner and layout in one phase, up to `ownership.STACK_ELEMENTS` elements.

    They share a gradient buffer, its reduction, and every product and kernel of their update.
    """

    def __init__(self, matrices: Sequence[Matrix], grad_dtype: torch.dtype) -> None:
        self.matrices = matrices
        self.owner, self.group, self.layout = matrices[0].owner, matrices[0].group, matrices[0].layout
        self.is_owner, self.num_ranks = matrices[0].is_owner, matrices[0].num_ranks
        weight = matrices[0].parameter
        self.gradient = torch.zeros((len(matrices), *weight.shape), dtype=grad_dtype, device=device.current())
        """[K, M, N]; the `main_grad` of each matrix is a slice."""
        self._num_missing = len(matrices)
        self.is_reducing = False
        self.is_shared = getattr(weight, "shared_embedding", False)
        """Whether it is a tied embedding with a copy on another stage (Megatron Core's attribute). The gradients of
        both stages are added after the passes, before the reduction."""
        self.is_partial = getattr(weight, "sequence_parallel", False)  # Megatron Core's attribute
        """Whether the weight is whole on each tensor-parallel rank and its gradient is a part of the sequence's, as a
        router's. Megatron Core sums the parts after the passes."""
        self.is_reduced_late = self.is_shared or self.is_partial
        """Whether the reduction must not start with the last microbatch's gradient, because more are to come."""
        self._reduction: torch.distributed.Work | None = None
        self.is_skipped: torch.Tensor | None = None
        """On the device: whether the update leaves weights and state as they are. None if it does not."""

    @property
    def weights(self) -> list[torch.Tensor]:
        return [matrix.parameter.data for matrix in self.matrices]

    def state(self, kind: str) -> list[torch.Tensor]:
        """Return the state of a kind of each matrix that has it on the device."""
        return [matrix.state[kind] for matrix in self.matrices if kind in matrix.state]

    def zero_grad(self) -> None:
        self.gradient.zero_()
        self._num_missing, self.is_reducing = len(self.matrices), False

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


@dataclass(kw_only=True)
class PieceMatrices:
    """The matrices of a piece that one parameter group steps."""

    param_group: dict[str, Any]
    matrices: list[Matrix]
    is_tied: bool
    """Whether it is a tied embedding: its gradient is open from the first backward pass, which has the head."""
    stacks: list[Stack] = field(default_factory=list)
    """The matrices and their gradients while the piece is open; otherwise empty."""


def build_stacks(matrices: Sequence[Matrix], grad_dtype: torch.dtype) -> list[Stack]:
    """Divide the matrices of one rule into stacks."""
    shapes = [matrix.parameter.shape for matrix in matrices]
    keys = [(each.owner, each.group, each.layout, shape) for each, shape in zip(matrices, shapes, strict=True)]
    stacks = matrix_stacks(keys, [each.name for each in matrices], [shape.numel() for shape in shapes])
    return [Stack([matrices[index] for index in indices], grad_dtype) for indices in stacks]


def _join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return matrices stacked as [K, ...]: a view of a single one, otherwise a copy."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(list(tensors))


def _write_back(values: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Write `values` back into the tensors that `_join` copied."""
    if len(tensors) > 1:
        pytorch.copy_each(tensors, values.unbind())


def _is_copy(stack: Stack) -> bool:
    """Return whether another tensor-parallel rank counts the stack's gradient in a norm."""
    return stack.is_partial and parallel_state.get_tensor_model_parallel_rank() > 0


def _sum_of_squares(gradients: list[torch.Tensor]) -> torch.Tensor:
    if not gradients:
        return torch.zeros((), device=device.current())
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return torch.stack(norms).square().sum()


class MatrixOptimizer(StateOwner):
    """Steps the matrices of this pipeline stage.

    Args:
        matrices: parameter and layout of each matrix that some phase steps, by name.
        group: the ranks that hold the same weights, except experts of expert-parallel ranks.
        offloads_low_bits: low bits are in host memory while their matrix is not stepped. For matrices that only the
            phases of one block step.
        momentum_dtype: precision of momenta, on the device and in host memory.
        overlaps_reduction: a stack is reduced as soon as the last microbatch has its gradients. `no_sync` encloses
            the other microbatches. Otherwise `reduce_gradients` reduces all stacks.
        max_norm: gradients that enter a momentum are clipped to this norm, as by Megatron Core; 0 clips nothing.
        places: tensors in host memory, by kind, for the state of matrices that are not always on the device. Ranks may
            share this memory. Only a matrix's owner writes it.
        stage_group: all ranks of this pipeline stage; None for all ranks.
        pipeline_group: with pieces on several stages, a rank of each stage. They step at different times.
    """

    def __init__(
        self,
        matrices: Mapping[str, tuple[torch.nn.Parameter, MatrixLayout]],
        *,
        group: torch.distributed.ProcessGroup,
        offloads_low_bits: bool = False,
        momentum_dtype: torch.dtype = torch.float32,
        overlaps_reduction: bool = False,
        max_norm: float = 0.0,
        places: Mapping[torch.nn.Parameter, State] | None = None,
        stage_group: torch.distributed.ProcessGroup | None = None,
        pipeline_group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        self._offloads_low_bits = offloads_low_bits
        self._momentum_dtype = momentum_dtype
        self._overlaps_reduction = overlaps_reduction
        self._max_norm = max_norm
        self._is_last_microbatch = True
        self._stage_group, self._pipeline_group = stage_group, pipeline_group
        groups = {  # the ranks with the same weights
            name: replicas.group(parameter) if replicas.is_expert(parameter) else group
            for name, (parameter, _) in matrices.items()
        }
        owners = dict[str, int]()
        for each in dict.fromkeys(groups.values()):
            sizes = {name: matrices[name][0].numel() for name in groups if groups[name] is each}
            owners |= zip(sizes, matrix_owners([*sizes.values()], each.size()), strict=True)
        self.matrices = {
            name: Matrix(
                name,
                parameter,
                layout,
                owner=owners[name],
                group=groups[name],
                num_ranks=group.size(),
                places=None if places is None else places.get(parameter),
            )
            for name, (parameter, layout) in matrices.items()
        }
        self._param_groups: list[dict[str, Any]] = []
        """Groups of the present phase: lr and weight_decay as the scheduler sets them; the rule, the matrices and the
        stacks of those that are stepped at the end of a step; whether the active block owns them."""
        self._pieces: dict[int, list[PieceMatrices]] = {}
        """The matrices that the present phase steps by piece, by number of the piece."""
        self._skipped = torch.zeros(1)
        """Number of layers that were not stepped since the last `zero_grad`, on the device."""
        self._piece_squares: list[torch.Tensor] = []
        """Sums of squares of this rank's clipped gradients by piece since the last `zero_grad`, on the device."""
        self.keep: Callable[[torch.nn.Parameter, torch.Tensor], None] | None = None
        """Copies a clipped gradient of a piece to host memory."""
        self.num_steps = 0
        """Number of Adam's steps, with those of pieces that were skipped."""
        self._streamed: Container[torch.nn.Parameter] = ()
        self._squares: device.HostCopy | None = None
        """Sums of squares of the gradients with and without a momentum, and the number of skipped layers."""
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._param_groups

    def block_param_groups(self) -> list[dict[str, Any]]:
        return [group for group in self._param_groups if group["is_of_block"]]

    @property
    def stacks(self) -> Iterator[Stack]:
        """Yield the stacks of the present phase that are stepped at the end of a step."""
        return (stack for group in self._param_groups for stack in group["stacks"])

    @property
    def stepped(self) -> Iterator[Matrix]:
        """Yield the matrices that the present phase steps."""
        return (matrix for group in self._param_groups for matrix in group["matrices"])

    @property
    def _has_pieces(self) -> bool:
        """Whether any stage steps matrices by piece."""
        return bool(self._pieces) or self._pipeline_group is not None

    def steps(self, name: str) -> bool:
        """Return whether the present phase steps a matrix of this name."""
        return name in self.matrices and self.matrices[name].is_stepped

    # ---------------------------------------------------------------------------------------------------------- phase

    def begin(
        self,
        rules: Rules,
        piece_of: Callable[[str], int | None] | None = None,
        *,
        streamed: Container[torch.nn.Parameter] = (),
    ) -> None:
        """Begin a phase that steps these matrices.

        Their weights require a gradient and get a gradient buffer, `main_grad` as in Megatron Core's DDP.

        Args:
            rules: the matrices and their rules.
            piece_of: returns the piece that steps a matrix of a rule with `is_by_piece`, given the matrix's name; None
                to step it at the end of the step. It has a gradient buffer only while its piece is open.
            streamed: parameters that are in host memory in this phase. Their state stays in its places.
        """
        self._streamed, self._skipped = streamed, torch.zeros(1, device=device.current())
        for rule, names, is_of_block in rules:
            matrices = [self.matrices[name] for name in names]
            if not matrices:
                continue
            is_by_piece = piece_of is not None and rule.is_by_piece
            pieces = {each.name: piece_of(each.name) for each in matrices} if is_by_piece else {}  # type: ignore[misc]
            stacks = build_stacks([each for each in matrices if pieces.get(each.name) is None], rule.grad_dtype)
            self._param_groups.append(
                {
                    "params": [],
                    "lr": 0.0,
                    "weight_decay": 0.0,
                    "matrices": matrices,
                    "stacks": stacks,
                    "rule": rule,
                    "is_of_block": is_of_block,
                }
            )
            for matrix in matrices:
                if (piece := pieces.get(matrix.name)) is not None:
                    self._add_to_piece(piece, matrix, self._param_groups[-1])
                self._prepare(matrix, rule)
            for stack in stacks:
                self._attach_gradients(stack)

    def _add_to_piece(self, piece: int, matrix: Matrix, param_group: dict[str, Any]) -> None:
        parts = self._pieces.setdefault(piece, [])
        is_tied = getattr(matrix.parameter, "zero_out_wgrad", False)  # Megatron Core's attribute
        for part in parts:
            if part.param_group is param_group and part.is_tied == is_tied:
                part.matrices.append(matrix)
                return
        parts.append(PieceMatrices(param_group=param_group, matrices=[matrix], is_tied=is_tied))

    def end(self, *, keeps_momenta: bool) -> None:
        """End the phase: free gradients, and move momenta to host memory or drop them."""
        self._finish_reductions()
        self._close_all()
        for stack in self.stacks:
            self._detach_gradients(stack)
        for handle in self._hooks:
            handle.remove()
        self._hooks = []
        for matrix in self.stepped:
            matrix.parameter.requires_grad_(False)
            matrix.is_stepped = False
            if not keeps_momenta:
                matrix.state.pop(MOMENTUM, None)
            offloads_low_bits = self._offloads_low_bits or LOW_BITS in matrix.places
            matrix.offload([MOMENTUM, LOW_BITS] if offloads_low_bits else [MOMENTUM])
        self._param_groups, self._pieces, self._streamed = [], {}, ()

    def _prepare(self, matrix: Matrix, rule: MatrixRule) -> None:
        matrix.is_stepped = True
        matrix.parameter.requires_grad_(True)
        hook = functools.partial(self._accumulate, matrix)
        self._hooks.append(matrix.parameter.register_post_accumulate_grad_hook(hook))
        if matrix.is_owner:
            self._prepare_state(matrix, rule)

    def _attach_gradients(self, stack: Stack) -> None:
        for matrix, gradient in zip(stack.matrices, stack.gradient, strict=True):
            matrix.stack = stack
            matrix.parameter.main_grad = gradient  # type: ignore[attr-defined]
            matrix.parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def _detach_gradients(self, stack: Stack) -> None:
        stack.finish_reduction()
        for matrix in stack.matrices:
            matrix.stack = matrix.parameter.grad = None
            del matrix.parameter.main_grad, matrix.parameter.grad_added_to_main_grad

    def _prepare_state(self, matrix: Matrix, rule: MatrixRule) -> None:
        """Restore or create the state that the rule needs on the matrix's owner."""
        parameter, state = matrix.parameter, matrix.state
        places = matrix.places if self._keeps_in_place(matrix) else {}
        for kind, place in places.items():
            if matrix.get(kind) is None:
                matrix.offloaded[kind] = place.zero_()
        if rule.momentum is not None and MOMENTUM not in places:
            matrix.restore([MOMENTUM])
            if MOMENTUM not in state:
                state[MOMENTUM] = torch.zeros_like(parameter, dtype=self._momentum_dtype, device=device.current())
        if rule.name == update_rules.ADAM and not matrix.adam_state():
            state |= low_bit_adam.zeros(parameter.numel(), rule.adam["dtype"], device.current())
        if rule.name == update_rules.FACTORED:
            matrix.restore([FACTORS])
            if FACTORS not in state:
                state[FACTORS] = matrix.zero_factors()
        if parameter.dtype == torch.bfloat16 and LOW_BITS not in places:
            matrix.restore([LOW_BITS])
            if LOW_BITS not in state:
                matrix.create_low_bits(on_host=False)

    def _keeps_in_place(self, matrix: Matrix) -> bool:
        """Return whether the state stays in host memory in this phase, except while the piece is open."""
        return bool(matrix.places) and matrix.parameter in self._streamed

    # ------------------------------------------------------------------------------------------------------- gradients

    def zero_grad(self) -> None:
        self._finish_reductions()  # of a step that was skipped
        self._close_all()
        for stack in self.stacks:
            stack.zero_grad()
            for matrix in stack.matrices:
                matrix.parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        if self._has_pieces:
            self._skipped.zero_()
        self._piece_squares = []

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._is_last_microbatch = False
        try:
            yield
        finally:
            self._is_last_microbatch = True

    @torch.no_grad()
    def _accumulate(self, matrix: Matrix, parameter: torch.Tensor) -> None:
        """Add a microbatch's gradient to the buffer, unless the matrix product has written it there.

        With a tied head the product has written the head's part to the buffer, and zeros to `grad`. Autograd has added
        the embedding's part to these zeros.
        """
        has_more = getattr(parameter, "zero_out_wgrad", False)
        if has_more or not parameter.grad_added_to_main_grad:  # type: ignore[attr-defined]
            parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None
        if self._overlaps_reduction and self._is_last_microbatch:
            assert matrix.stack is not None
            matrix.stack.count_final()

    @torch.no_grad()
    def start_reductions(self, *, with_shared: bool = False) -> None:
        """Start all reductions of this step that have not started. A collective.

        Shared embeddings and partial gradients wait for their sum over stages or tensor-parallel ranks, unless
        `with_shared`.
        """
        for stack in self.stacks:
            if with_shared or not stack.is_reduced_late:
                stack.start_reduction()

    def _finish_reductions(self) -> None:
        for stack in self.stacks:
            stack.finish_reduction()

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Average the gradients on the owners and start to sum their squares over all ranks of the run. A collective.

        `add_norm` reads the sums when the CPU has waited for the device anyway.
        """
        self.start_reductions(with_shared=True)
        self._finish_reductions()
        gradients: tuple[list[torch.Tensor], ...] = ([], [])
        for group in self._param_groups:
            gradients[not group["rule"].is_clipped].extend(
                stack.gradient for stack in group["stacks"] if stack.is_owner and not _is_copy(stack)
            )
        squares = torch.stack([_sum_of_squares(each) for each in gradients])
        if self._piece_squares:
            squares[0] += torch.stack(self._piece_squares).sum()
        torch.distributed.all_reduce(squares)
        if self._pipeline_group is not None:
            torch.distributed.all_reduce(self._skipped, group=self._pipeline_group)
        self._squares = device.HostCopy(torch.cat([squares, self._skipped]) if self._has_pieces else squares)

    def add_norm(self, norm: float) -> tuple[float, bool]:
        """Add the clipped gradients to the gradient norm of a step. The result is the same on every rank.

        Stateless updates are neither clipped nor part of the norm: their size does not depend on that of the gradient.
        Those by piece have been checked before, and pieces that were skipped do not count.

        Returns:
            The norm, and whether the other gradients are finite.
        """
        assert self._squares is not None, "reduce_gradients() comes first"
        clipped, others, *_ = self._squares.tolist()
        return math.sqrt(norm**2 + clipped), math.isfinite(others)

    def skipped(self) -> int:
        """Return the number of layers that this step left as they were. `reduce_gradients` comes first.

        Like `add_norm` it reads what has been copied to the host. The result is the same on every rank.
        """
        assert self._squares is not None, "reduce_gradients() comes first"
        return int(self._squares.tolist()[2]) if self._has_pieces else 0

    # ---------------------------------------------------------------------------------------------------------- pieces

    @torch.no_grad()
    def open_piece(
        self, piece: int, state: Callable[[torch.nn.Parameter], State] | None = None, *, is_kept: bool = False
    ) -> None:
        """Allocate the gradients of a piece's matrices. Its backward passes follow.

        `state` returns the state of a streamed parameter, which the step writes in place. A tied embedding opens with
        the first piece that runs backward, which has the head. With `is_kept`, the state has the gradients.
        """
        for part in self._kept_parts(piece) if is_kept else self._parts(piece):
            if part.stacks:
                continue
            part.stacks = build_stacks(part.matrices, part.param_group["rule"].grad_dtype)
            for stack in part.stacks:
                stack.is_reduced_late |= part.is_tied
                self._attach_gradients(stack)
        for part in self._pieces.get(piece, []):
            for matrix in part.matrices:
                if self._keeps_in_place(matrix):
                    matrix.state |= matrix.places if state is None else state(matrix.parameter)
                if is_kept and GRADIENT in matrix.state:
                    matrix.parameter.main_grad.copy_(matrix.state[GRADIENT])  # type: ignore[attr-defined]

    @torch.no_grad()
    def step_piece(
        self, piece: int, *, num_layers: int = 1, gradient_scale: float = 1.0, skip_non_finite: bool = True
    ) -> None:
        """Step the matrices of a piece of `num_layers` layers and free their gradients. A collective over the stage.

        With `skip_non_finite` the weights and state of the piece stay as they were, bit for bit, if a gradient is not
        finite on any rank. The CPU waits for nothing. With `keep` clipped gradients wait for `step_kept_piece`.
        """
        parts = self._pieces.get(piece, [])
        by_stack = [(stack, part.param_group) for part in parts for stack in part.stacks]
        for stack, _ in by_stack:
            if stack.is_partial:
                torch.distributed.all_reduce(stack.gradient, group=parallel_state.get_tensor_model_parallel_group())
            stack.start_reduction()
        for stack, _ in by_stack:
            stack.finish_reduction()
        owned = [(stack, group) for stack, group in by_stack if stack.is_owner]
        clipped = [(stack, group) for stack, group in owned if group["rule"].is_clipped]
        for stack, group in clipped:
            if group["rule"].name == update_rules.ADAM and gradient_scale != 1.0:  # as Megatron Core scales its buffers
                stack.gradient *= torch.tensor(gradient_scale, device=stack.gradient.device)
        if clipped:
            counted = [stack.gradient for stack, _ in clipped if not _is_copy(stack)]
            self._piece_squares.append(_sum_of_squares(counted))
        if self.keep is not None:
            for matrix in (matrix for stack, _ in clipped for matrix in stack.matrices):
                self.keep(matrix.parameter, matrix.parameter.main_grad)  # type: ignore[attr-defined]
            owned = [(stack, group) for stack, group in owned if not group["rule"].is_clipped]
            by_stack = [(stack, group) for stack, group in by_stack if not group["rule"].is_clipped]
        if by_stack:
            squares = _sum_of_squares([stack.gradient for stack, _ in owned])
            torch.distributed.all_reduce(squares, group=self._stage_group)
            is_skipped = torch.isfinite(squares).logical_not_()
            self._skipped.add_(is_skipped & skip_non_finite, alpha=num_layers)
            if clipped and self.keep is None:
                self._piece_squares[-1].masked_fill_(is_skipped & skip_non_finite, 0.0)
            for stack, group in owned:
                stack.is_skipped = is_skipped if skip_non_finite else None
                self._update(stack, group, gradient_scale=gradient_scale)
            self._broadcast(stack for stack, _ in by_stack)
        self._close(parts)

    @torch.no_grad()
    def step_kept_piece(self, piece: int, *, norm: float) -> None:
        """Step the matrices of a piece whose gradients `step_piece` kept, clipped by the norm of all gradients."""
        parts, coefficient = self._kept_parts(piece), self._clip_coefficient(norm)
        by_stack = [(stack, part.param_group) for part in parts for stack in part.stacks]
        for stack, group in by_stack:
            if stack.is_owner:
                self._update(stack, group, clip_coefficient=coefficient, gradient_scale=1.0)
        self._broadcast(stack for stack, _ in by_stack)
        self._close(parts)

    def _kept_parts(self, piece: int) -> list[PieceMatrices]:
        return [part for part in self._pieces.get(piece, []) if part.param_group["rule"].is_clipped]

    def close_piece(self, piece: int) -> None:
        """Free the gradients of a piece without a step."""
        self._close(self._parts(piece))

    def _parts(self, piece: int) -> list[PieceMatrices]:
        """Return the matrices whose gradients must be open in the backward passes of a piece."""
        tied = (part for number, parts in self._pieces.items() if number != piece for part in parts if part.is_tied)
        return [*self._pieces.get(piece, []), *tied]

    def _close(self, parts: Iterable[PieceMatrices]) -> None:
        for part in parts:
            for stack in part.stacks:
                self._detach_gradients(stack)
            part.stacks = []
            for matrix in part.matrices:
                for kind in matrix.places if self._keeps_in_place(matrix) else ():
                    matrix.state.pop(kind, None)

    def _close_all(self) -> None:
        for parts in self._pieces.values():
            self._close(parts)

    # ------------------------------------------------------------------------------------------------------------ step

    @torch.no_grad()
    def step(self, *, norm: float = 0.0, gradient_scale: float = 1.0) -> None:
        """Step every matrix that is not stepped by piece.

        A collective over data- and tensor-parallel groups; `reduce_gradients` comes first.

        Clipping applies to gradients that enter a momentum, `gradient_scale` to those that enter a second moment, which
        bounds its update by itself. Other directions do not depend on the scale of a gradient.
        """
        clip_coefficient = self._clip_coefficient(norm)
        for group in self._param_groups:
            for stack in group["stacks"]:
                if stack.is_owner:
                    self._update(stack, group, clip_coefficient=clip_coefficient, gradient_scale=gradient_scale)
        self._broadcast(self.stacks)  # after all updates, so that all owners compute at the same time
        self.num_steps += 1

    def _clip_coefficient(self, norm: float) -> float:
        # as in Megatron Core's `clip_grad_by_total_norm_fp32`
        return min(1.0, self._max_norm / (norm + 1e-6)) if self._max_norm > 0.0 else 1.0

    def _broadcast(self, stacks: Iterable[Stack]) -> None:
        for stack in stacks:
            if stack.group.size() > 1:
                weights = _join(stack.weights)
                torch.distributed.broadcast(weights, group=stack.group, group_src=stack.owner)
                _write_back(weights, stack.weights)

    def _update(
        self, stack: Stack, group: Mapping[str, Any], *, clip_coefficient: float = 1.0, gradient_scale: float
    ) -> None:
        """Compute the new weights and state of a stack on its owner.

        If `is_skipped` is true, weights and state keep their bits: the gradient becomes zero and the decay 1,
        so nothing is added, and other state is restored. The CPU does not know it, because it would have to wait.
        """
        rule: MatrixRule = group["rule"]
        is_skipped = stack.is_skipped
        if rule.name == update_rules.ADAM:
            return self._step_adam(stack, group, clip_coefficient)
        decay: float | torch.Tensor = 1.0 - group["lr"] * group["weight_decay"]
        if is_skipped is not None:
            stack.gradient.masked_fill_(is_skipped, 0.0)
            decay = torch.full_like(is_skipped, decay, dtype=torch.float32).masked_fill_(is_skipped, 1.0)
        rate = group["lr"] * rule.scale
        update = None if rule.name == update_rules.FACTORED else self._orthogonal(stack, rule, clip_coefficient)
        weights, low_bits = _join(stack.weights), stack.state(LOW_BITS)
        bits = _join(low_bits) if low_bits else None

        def load(rows: slice) -> torch.Tensor:
            return weights[:, rows] if bits is None else bf16.join(weights[:, rows], bits[:, rows])

        rows = [slice(None)] if update is not None else update_rules.rows_at_once(stack.gradient, stack.layout)
        value: torch.Tensor | None = load(rows[0])  # before a factored direction, because it takes temporary memory
        direction = self._factored_direction(stack, gradient_scale) if update is None else None
        for some in rows:
            value = (load(some) if value is None else value).mul_(decay)
            if direction is None:
                value.add_(update, alpha=-rate)
            else:
                direction.subtract_from(value, some, rate=rate)
            if bits is not None:
                bf16.split(value, weight=weights[:, some], low_bits=bits[:, some])
            value = None
        if bits is not None:
            _write_back(bits, low_bits)
        _write_back(weights, stack.weights)

    def _factored_direction(self, stack: Stack, gradient_scale: float) -> update_rules.FactoredDirection:
        """Return the directions of a stack, and update its means unless it is skipped.

        The number of steps counts a skipped one too, so it stays the same for all matrices of a checkpoint's group.
        """
        by_matrix = stack.state(FACTORS)
        factors = _join(by_matrix)
        means = factors[:, :-1]
        before = None if stack.is_skipped is None else means.clone()
        direction = update_rules.FactoredDirection(stack.gradient, factors, stack.layout, gradient_scale=gradient_scale)
        if stack.is_skipped is not None:
            torch.where(stack.is_skipped, before, means, out=means)
        _write_back(factors, by_matrix)
        return direction

    def _step_adam(self, stack: Stack, group: Mapping[str, Any], clip_coefficient: float) -> None:
        """Step the matrices of a stack with Adam, some elements at a time, which bounds temporary memory."""
        settings = {**group["rule"].adam, "lr": group["lr"], "weight_decay": group["weight_decay"]}
        settings["step"] = self.num_steps + 1
        for matrix, gradients in zip(stack.matrices, stack.gradient, strict=True):
            state = {kind: tensor.view(-1) for kind, tensor in matrix.state.items() if kind != GRADIENT}
            parts = low_bit_adam.parts(matrix.parameter.data.view(-1), gradients.view(-1), state)
            for start, weight, gradient, part in parts:
                if clip_coefficient < 1.0:
                    gradient = gradient * clip_coefficient
                written, squares, bits = [weight, *part.values()], part["exp_avg_sq"], part.get(LOW_BITS)
                before = [] if stack.is_skipped is None else [tensor.clone() for tensor in written]
                value = weight if bits is None else bf16.join(weight, bits, squares)
                if squares.is_floating_point():
                    squares.abs_()
                low_bit_adam.step_part(value, gradient, part, settings, first=start)
                if bits is not None:
                    bf16.split(value, weight=weight, low_bits=bits, squares=squares)
                for tensor, old in zip(written, before, strict=False):
                    torch.where(stack.is_skipped, old, tensor, out=tensor)  # type: ignore[call-overload]

    def _orthogonal(self, stack: Stack, rule: MatrixRule, clip_coefficient: float) -> torch.Tensor:
        gradient = stack.gradient.float()
        if rule.momentum is not None:
            if clip_coefficient < 1.0:
                gradient = gradient * clip_coefficient
            gradient = self._apply_momentum(stack, gradient, rule)
        update = update_rules.orthogonal(gradient, stack.layout, num_steps=rule.num_steps, scale_mode=rule.scale_mode)
        is_skipped = None if rule.momentum is None else stack.is_skipped  # the gradient is zero, not the momentum
        return update if is_skipped is None else update.masked_fill_(is_skipped, 0.0)

    def _apply_momentum(self, stack: Stack, gradient: torch.Tensor, rule: MatrixRule) -> torch.Tensor:
        assert rule.momentum is not None
        momenta = stack.state(MOMENTUM)
        momentum = _join(momenta)
        # Muon's running mean, as in Megatron Core; PyTorch's SGD sums, which is the same up to the scale
        if stack.is_skipped is None:
            momentum.copy_(momentum.float().lerp_(gradient, 1 - rule.momentum))
        else:
            new = momentum.float().lerp(gradient, 1 - rule.momentum)
            momentum.copy_(torch.where(stack.is_skipped, momentum, new))
            del new  # before the direction takes memory
        _write_back(momentum, momenta)
        return gradient.lerp(momentum.float(), rule.momentum) if rule.nesterov else momentum.float()

    # ----------------------------------------------------------------------------------------------------------- state

    @torch.no_grad()
    def main_param(self, name: str) -> torch.Tensor:
        matrix = self.matrices[name]
        weight = matrix.parameter.detach().to(device.current())
        if weight.dtype == torch.float32:
            return weight.view(-1)
        low_bits = matrix.get(LOW_BITS)
        if low_bits is None:  # not the owner, or never stepped here
            low_bits = torch.zeros_like(weight, dtype=torch.int16)
        low_bits = low_bits.to(weight.device)
        if matrix.group.size() > 1:
            torch.distributed.broadcast(low_bits.view(torch.uint8), group=matrix.group, group_src=matrix.owner)
        return bf16.join(weight, low_bits).view(-1)

    @torch.no_grad()
    def set_main_param(self, name: str, value: torch.Tensor) -> None:
        matrix = self.matrices[name]
        weight = matrix.parameter.data
        value = value.to(weight.device).view_as(weight)
        if weight.dtype == torch.float32:
            weight.copy_(value)
            return
        if matrix.is_owner and matrix.get(LOW_BITS) is None:
            is_offloaded = self._offloads_low_bits or LOW_BITS in matrix.places
            matrix.create_low_bits(on_host=is_offloaded and not matrix.is_stepped)
        bf16.split(value, weight=weight, low_bits=matrix.get(LOW_BITS))

    def set_momentum(self, name: str, value: torch.Tensor) -> None:
        """Set the momentum of a matrix on its owner.

        It is on the device if the matrix is stepped with a momentum in this phase, otherwise in host memory.
        """
        matrix = self.matrices[name]
        if not matrix.is_owner:
            return
        if MOMENTUM in matrix.state:
            matrix.state[MOMENTUM].copy_(value)
        else:
            matrix.store_on_host(MOMENTUM, value.to(self._momentum_dtype, copy=True))

    @torch.no_grad()
    def set_adam(self, name: str, tensors: Mapping[str, torch.Tensor], *, num_steps: int) -> None:
        """Set a matrix that Adam steps: its main parameter, if it is not the weight, and its moments."""
        matrix, self.num_steps = self.matrices[name], num_steps
        weight, state, low_bits = matrix.parameter.data, matrix.adam_state(), matrix.get(LOW_BITS)
        [dtype] = {group["rule"].adam["dtype"] for group in self._param_groups if group["rule"].adam}
        moments = {kind: tensors[kind].reshape(-1) for kind in low_bit_adam.MOMENTS if kind in tensors}
        for kind, entry in low_bit_adam.encode(moments, dtype).items() if matrix.is_owner else ():
            state[kind].copy_(entry)
        if (main_param := tensors.get(MAIN_PARAM)) is not None:
            main_param, squares = main_param.to(weight.device).view_as(weight), state.get("exp_avg_sq")
            if squares is None or low_bits is None:
                weight.copy_(main_param)
            else:
                bf16.split(main_param, weight=weight, low_bits=low_bits, squares=squares.view_as(weight))

    def set_factors(self, name: str, row_means: torch.Tensor, column_means: torch.Tensor, *, num_steps: int) -> None:
        """Set the state of the rule `factored` on the matrix's owner; shapes as in `update_rules.split_factors`."""
        matrix = self.matrices[name]
        if matrix.is_owner:
            factors = matrix.state[FACTORS] = matrix.zero_factors()
            values = row_means, column_means, torch.tensor(num_steps)
            for view, value in zip(matrix.split_factors(factors), values, strict=True):
                view.copy_(value)

    def rank_state(self) -> dict[str, Any]:
        states = {name: (matrix.state, matrix.offloaded) for name, matrix in self.matrices.items()}
        return memory.copy_to_host(states)

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        for name, (on_device, offloaded) in state.items():
            matrix = self.matrices[name]
            matrix.offloaded = {}
            for kind, tensor in offloaded.items():
                matrix.store_on_host(kind, tensor)
            matrix.state = {kind: tensor.to(device.current()) for kind, tensor in on_device.items()}
            matrix.offload(matrix.places)

    def stepped_tensors(self, *, is_of_block: bool) -> Iterator[torch.Tensor]:
        for group in self._param_groups:
            for matrix in group["matrices"] if group["is_of_block"] == is_of_block else ():
                low_bits = matrix.get(LOW_BITS)
                tensors = [matrix.parameter, *([] if low_bits is None else [low_bits])]
                yield from map(host_sample, tensors) if matrix.parameter in self._streamed else tensors

    def gradients(self) -> Iterator[torch.Tensor]:
        opened = (stack for parts in self._pieces.values() for part in parts for stack in part.stacks)
        return (stack.gradient for stack in itertools.chain(self.stacks, opened))

    def device_state(self) -> Iterator[torch.Tensor]:
        return (tensor for matrix in self.matrices.values() for tensor in matrix.state.values())

    def host_bytes(self) -> int:
        return sum(tensor.nbytes for matrix in self.matrices.values() for tensor in matrix.offloaded.values())


class NoMatrixOptimizer(MatrixOptimizer):
    """The matrix optimizer of a run in which Megatron Core's optimizer steps all parameters."""

    def __init__(self) -> None:
        super().__init__({}, group=replicas.group())

    def reduce_gradients(self) -> None:
        """Do nothing: no rank has gradients to reduce."""

    def add_norm(self, norm: float) -> tuple[float, bool]:
        return norm, True

    def skipped(self) -> int:
        return 0


def build_matrix_optimizer(
    config: RunConfig,
    model: torch.nn.Module,
    matrices: Mapping[str, torch.nn.Parameter],
    *,
    places: Mapping[torch.nn.Parameter, State],
) -> MatrixOptimizer:
    """Build the optimizer of this stage's `matrices`, by name. `places` as for `MatrixOptimizer`."""
    if not _has_matrix_optimizer(config):
        return NoMatrixOptimizer()
    model_config, settings = get_model_config(model), config.optimizer
    heads, groups, width = model_config.num_attention_heads, model_config.num_query_groups, model_config.kv_channels
    assert groups is not None and width is not None
    qkv_parts = (heads // groups * width, width, width)

    def layout_of(name: str, parameter: torch.nn.Parameter) -> MatrixLayout:
        tensor_group = replicas.tensor_group(parameter)
        is_qkv = settings.muon_split_qkv and name.endswith("linear_qkv.weight")
        dim = getattr(parameter, "partition_dim", -1)  # Megatron Core's: -1 where each rank has all of it
        is_sliced = tensor_group.size() > 1 and dim >= 0
        return MatrixLayout(
            parts=qkv_parts if is_qkv and parameter.shape[0] % sum(qkv_parts) == 0 else (),
            sharded_dim=dim if is_sliced else None,
            group=tensor_group if is_sliced else None,
            tensor_mode=settings.muon_tp_mode,
        )

    return MatrixOptimizer(
        {name: (parameter, layout_of(name, parameter)) for name, parameter in matrices.items()},
        group=replicas.group(),
        offloads_low_bits=config.bcd.bcd_inactive_update == "none",  # only Muon's own blocks step the matrices
        momentum_dtype=DTYPES[config.bcd.muon_momentum_dtype],
        overlaps_reduction=config.ddp.overlap_grad_reduce,
        max_norm=config.optimizer.clip_grad,
        places=places,
        stage_group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        pipeline_group=(
            parallel_state.get_pipeline_model_parallel_group()
            if config.is_breadth_first and config.pipeline_size > 1
            else None
        ),
    )


def phase_rules(
    config: RunConfig, *, inactive: Iterable[str], outside_layers: Iterable[str], block: Iterable[str]
) -> Rules:
    """Return the matrices that the matrix optimizer steps in a phase, with their rules.

    These are the matrices of `inactive` layers, the embedding and the head with rule `factored`, and with Muon the
    matrices of the block.
    """
    if not _has_matrix_optimizer(config):
        return []
    bcd, settings = config.bcd, config.optimizer
    assert bcd.bcd_inactive_lr_ratio is not None, "arguments.derive sets the default of the rule"
    stateless = MatrixRule(
        name=bcd.bcd_inactive_update,
        scale=bcd.bcd_inactive_lr_ratio,
        grad_dtype=DTYPES[bcd.bcd_inactive_grad_dtype],
        num_steps=settings.muon_num_ns_steps,
    )
    embedding = replace(stateless, name=bcd.bcd_embedding_update, scale=1.0)
    rules: Rules = [(stateless, inactive, False), (embedding, outside_layers, False)]
    if config.is_muon:
        muon = MatrixRule(
            name=update_rules.ORTHOGONAL,
            scale=settings.muon_extra_scale_factor,
            grad_dtype=DTYPES[bcd.muon_grad_dtype],
            momentum=settings.muon_momentum,
            is_by_piece=config.steps_block_by_piece,
            nesterov=settings.muon_use_nesterov,
            num_steps=settings.muon_num_ns_steps,
            scale_mode=settings.muon_scale_mode,
        )
        rules.append((muon, block, True))
    elif config.steps_block_by_piece:
        adam = {"betas": (settings.adam_beta1, settings.adam_beta2), "eps": settings.adam_eps}
        adam |= {"dtype": config.training.adam_moments_dtype, "decoupled_weight_decay": settings.decoupled_weight_decay}
        rule = MatrixRule(name=update_rules.ADAM, grad_dtype=DTYPES[config.main_grad_dtype], adam=adam)
        rules.append((rule, block, True))
    return rules


def _has_matrix_optimizer(config: RunConfig) -> bool:
    return config.is_muon or config.bcd.bcd_inactive_update != "none" or config.steps_block_by_piece
