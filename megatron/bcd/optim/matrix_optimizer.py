"""Steps matrices without Megatron Core's optimizer: those of inactive layers by stateless updates
(--bcd-inactive-update), with --optimizer muon the active block's, which keep a momentum, and with
--bcd-embedding-update factored the embedding and an untied head.

Each matrix has one rank of the data-parallel x context-parallel group as its owner: gradients are reduced to the owner,
it computes the new weights, and broadcasts them. The owner alone holds what exists beside weight and gradient: the
momentum, the factors of the rule `factored` (means by row and by column), and in bf16 the 16 bits that the weight lacks
of its fp32 value. Owners never change, so a switch moves none of it. Matrices of one shape, rule and owner are reduced
and stepped together, in stacks.

Shapes: K = matrices of a stack, M = rows, N = columns.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron.bcd.blocks.ownership import matrix_owners, matrix_stacks
from megatron.bcd.config import RunConfig
from megatron.bcd.optim import bf16, update_rules
from megatron.bcd.optim.update_rules import MatrixLayout
from megatron.bcd.runtime import device, memory, replicas
from megatron.bcd.runtime.compat import pytorch

MOMENTUM = "momentum_buffer"
"""Name of the momentum in checkpoints."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class MatrixRule:
    """How a set of matrices is stepped: w -= lr x (weight_decay x w + scale x direction)."""

    name: str
    """ORTHOGONAL or FACTORED (`update_rules`)."""
    scale: float
    """Root mean square of an update at a learning rate of 1."""
    grad_dtype: torch.dtype
    momentum: float | None = None
    """Decay of the momentum; None keeps none."""
    nesterov: bool = False
    num_steps: int
    """Newton-Schulz iterations."""
    scale_mode: str = "spectral"
    """A key of `update_rules.SCALES`."""


Rules = list[tuple[MatrixRule, Iterable[str], bool]]
"""Rule, names of matrices, and whether the active block owns them."""


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A matrix of a layer, or this rank's tensor-parallel slice of it."""

    name: str
    parameter: torch.nn.Parameter
    owner: int
    """Rank in the data-parallel x context-parallel group."""
    layout: MatrixLayout

    @property
    def num_factors(self) -> int:
        """Elements that the rule `factored` keeps of it."""
        rows, columns = self.parameter.shape
        return update_rules.num_factors(rows, columns, len(self.layout.parts) or 1)


class Stack:
    """Matrices of one shape, owner and layout in one phase, up to `ownership.STACK_ELEMENTS`: they share a gradient
    buffer, its reduction, and every product and kernel of their update."""

    def __init__(self, matrices: Sequence[Matrix], grad_dtype: torch.dtype) -> None:
        self.matrices = matrices
        self.owner, self.layout = matrices[0].owner, matrices[0].layout
        weight = matrices[0].parameter
        self.gradient = torch.zeros((len(matrices), *weight.shape), dtype=grad_dtype, device=weight.device)
        """[K, M, N]; each matrix' `main_grad` is a slice."""
        self._num_missing = len(matrices)
        self.is_reducing = False
        self.is_shared = getattr(weight, "shared_embedding", False)
        """Whether it is a tied embedding with a copy on another stage (Megatron Core's attribute). Gradients of both
        stages are added up after the passes, before the reduction."""
        self._reduction: torch.distributed.Work | None = None

    @property
    def weights(self) -> list[torch.Tensor]:
        return [matrix.parameter.data for matrix in self.matrices]

    def zero_grad(self) -> None:
        self.gradient.zero_()
        self._num_missing, self.is_reducing = len(self.matrices), False

    def count_final(self, group: torch.distributed.ProcessGroup) -> None:
        """One more of the gradients is final; the last one starts the reduction."""
        self._num_missing -= 1
        if self._num_missing == 0 and not self.is_shared:
            self.start_reduction(group)

    def start_reduction(self, group: torch.distributed.ProcessGroup) -> None:
        """Average the gradient over the group, on the owner, unless that has begun in this step. A collective."""
        if group.size() > 1 and not self.is_reducing:
            self.gradient.div_(group.size())
            if self.is_shared:  # both stages add up in one order, whoever owns the copies, so that these stay equal
                self._reduction = torch.distributed.all_reduce(self.gradient, group=group, async_op=True)
            else:
                owner = torch.distributed.get_global_rank(group, self.owner)
                self._reduction = torch.distributed.reduce(self.gradient, dst=owner, group=group, async_op=True)
        self.is_reducing = True

    def finish_reduction(self) -> None:
        if self._reduction is not None:
            self._reduction.wait()
            self._reduction = None


def stacked(matrices: Sequence[Matrix], grad_dtype: torch.dtype) -> list[Stack]:
    """All matrices of one rule in stacks."""
    shapes = [matrix.parameter.shape for matrix in matrices]
    keys = [(matrix.owner, matrix.layout, shape) for matrix, shape in zip(matrices, shapes, strict=True)]
    stacks = matrix_stacks(keys, [shape.numel() for shape in shapes])
    return [Stack([matrices[index] for index in indices], grad_dtype) for indices in stacks]


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """[K, ...]: a copy, or a view of the only one."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(list(tensors))


def distribute(values: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Write back what `joined` has copied of several tensors."""
    if len(tensors) > 1:
        pytorch.copy_each(tensors, values.unbind())


def sum_of_squares(gradients: list[torch.Tensor]) -> torch.Tensor:
    if not gradients:
        return torch.zeros((), device=device.current())
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return torch.stack(norms).square().sum()


class MatrixOptimizer:
    """The matrices of this pipeline stage. `begin` and `end` enclose a phase; low bits and momenta outlive it.

    With `keeps_low_bits_on_host` low bits are in host memory while their matrix is not stepped: for matrices that are
    stepped in the phases of one block only. Momenta are held in `momentum_dtype`, on the device and in host memory.
    With `overlaps_reduction` a stack is reduced as soon as the last microbatch has its gradients (`no_sync` encloses
    the others), else all of them in `reduce_gradients`.
    """

    def __init__(
        self,
        matrices: Mapping[str, tuple[torch.nn.Parameter, MatrixLayout]],
        *,
        group: torch.distributed.ProcessGroup,
        keeps_low_bits_on_host: bool = False,
        momentum_dtype: torch.dtype = torch.float32,
        overlaps_reduction: bool = False,
    ) -> None:
        self._keeps_low_bits_on_host = keeps_low_bits_on_host
        self._momentum_dtype = momentum_dtype
        self._overlaps_reduction = overlaps_reduction
        self._is_last_microbatch = True
        self._group = group
        self._rank, self._size = group.rank(), group.size()
        owners = matrix_owners([parameter.numel() for parameter, _ in matrices.values()], self._size)
        self.matrices = {
            name: Matrix(name=name, parameter=parameter, owner=owner, layout=layout)
            for owner, (name, (parameter, layout)) in zip(owners, matrices.items(), strict=True)
        }
        self.param_groups: list[dict[str, Any]] = []
        """Of the present phase, as the learning-rate scheduler sets them: lr, weight_decay; the matrices, their
        stacks and their rule."""
        self.momenta: dict[str, torch.Tensor] = {}
        """By name, on the owner: of the present phase on the device, kept ones in host memory."""
        self.factors: dict[str, torch.Tensor] = {}
        """By name, on the owner: what `update_rules.factored_` keeps, also while another rule steps the matrix."""
        self._low_bits: dict[str, torch.Tensor] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def is_owner(self, name: str) -> bool:
        """Whether this rank steps the matrix."""
        return self.matrices[name].owner == self._rank

    @property
    def stacks(self) -> Iterator[Stack]:
        return (stack for group in self.param_groups for stack in group["stacks"])

    @property
    def held(self) -> Iterator[Matrix]:
        """The matrices that are stepped here in the present phase."""
        return (matrix for group in self.param_groups for matrix in group["matrices"])

    def begin(self, rules: Iterable[tuple[MatrixRule, Iterable[str], bool]]) -> None:
        """Step these matrices from now on: by rule, names, and whether the active block owns them.

        Their weights require a gradient and get a gradient buffer, `main_grad` as in Megatron Core's DDP.
        """
        for rule, names, is_of_block in rules:
            matrices = [self.matrices[name] for name in names]
            if not matrices:
                continue
            stacks = stacked(matrices, rule.grad_dtype)
            self.param_groups.append(
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
            for stack in stacks:
                for matrix, gradient in zip(stack.matrices, stack.gradient, strict=True):
                    self._attach(matrix, rule, stack, gradient)

    def end(self, *, keeps_momenta: bool) -> None:
        """Free gradients and momenta; `keeps_momenta` moves momenta to host memory, where `begin` finds them."""
        self._finish_reductions()
        for handle in self._hooks:
            handle.remove()
        self._hooks = []
        for matrix in self.held:
            matrix.parameter.grad = None
            del matrix.parameter.main_grad, matrix.parameter.grad_added_to_main_grad
            matrix.parameter.requires_grad_(False)
            if self._keeps_low_bits_on_host and matrix.name in self._low_bits:
                self._low_bits[matrix.name] = self._low_bits[matrix.name].cpu()
        for name in self._names_with_momentum():
            if keeps_momenta:
                self.momenta[name] = self.momenta[name].cpu()
            else:
                del self.momenta[name]
        self.param_groups = []

    def _attach(self, matrix: Matrix, rule: MatrixRule, stack: Stack, gradient: torch.Tensor) -> None:
        parameter = matrix.parameter
        parameter.requires_grad_(True)
        parameter.main_grad = gradient  # type: ignore[attr-defined]
        parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        hook = functools.partial(self._accumulate, stack)
        self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
        if rule.momentum is not None and self.is_owner(matrix.name):
            kept = self.momenta.get(matrix.name)
            momentum = torch.zeros_like(parameter, dtype=self._momentum_dtype) if kept is None else kept
            self.momenta[matrix.name] = momentum.to(parameter.device, self._momentum_dtype)
        if rule.name == update_rules.FACTORED and self.is_owner(matrix.name) and matrix.name not in self.factors:
            self.factors[matrix.name] = self._zero_factors(matrix.name)
        if parameter.dtype == torch.bfloat16 and self.is_owner(matrix.name):
            low_bits = self._low_bits.get(matrix.name)
            if low_bits is None:
                low_bits = torch.zeros_like(parameter, dtype=torch.int16)
            self._low_bits[matrix.name] = low_bits.to(parameter.device)

    def zero_grad(self) -> None:
        """Set the gradient buffers to zero."""
        self._finish_reductions()  # of a step that was skipped
        for stack in self.stacks:
            stack.zero_grad()
        for matrix in self.held:
            matrix.parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients are not final yet: more microbatches follow."""
        self._is_last_microbatch = False
        try:
            yield
        finally:
            self._is_last_microbatch = True

    @torch.no_grad()
    def _accumulate(self, stack: Stack, parameter: torch.Tensor) -> None:
        """Add a microbatch's gradient to the buffer, unless the matrix product has written it there.

        With a tied head it has written the head's part, and left zeros to which the embedding's part was added.
        """
        has_more = getattr(parameter, "zero_out_wgrad", False)
        if has_more or not parameter.grad_added_to_main_grad:  # type: ignore[attr-defined]
            parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None
        if self._overlaps_reduction and self._is_last_microbatch:
            stack.count_final(self._group)

    @torch.no_grad()
    def start_reductions(self, *, with_shared: bool = False) -> None:
        """Begin all reductions of this step that have not begun, without those of shared embeddings. A collective."""
        for stack in self.stacks:
            if with_shared or not stack.is_shared:
                stack.start_reduction(self._group)

    def _finish_reductions(self) -> None:
        for stack in self.stacks:
            stack.finish_reduction()

    @torch.no_grad()
    def reduce_gradients(self) -> device.HostCopy:
        """Average the gradients over the replicas, on each matrix's owner.

        Returns:
            The sums of squares of all gradients with a momentum, and of those without, over all ranks of the run and
            the same on every rank; not finite if one gradient is not. To be read once the CPU has waited for the
            device anyway. A collective.
        """
        self.start_reductions(with_shared=True)
        self._finish_reductions()
        own: tuple[list[torch.Tensor], ...] = ([], [])
        for group in self.param_groups:
            own[group["rule"].momentum is None].extend(
                stack.gradient for stack in group["stacks"] if stack.owner == self._rank
            )
        squares = torch.stack([sum_of_squares(gradients) for gradients in own])
        torch.distributed.all_reduce(squares)
        return device.HostCopy(squares)

    @torch.no_grad()
    def step(self, *, clip_coefficient: float = 1.0, gradient_scale: float = 1.0) -> None:
        """Step every matrix. A collective over data- and tensor-parallel groups; `reduce_gradients` comes first.

        `clip_coefficient` multiplies the gradients that enter a momentum, `gradient_scale` those that enter a second
        moment, which bounds its update by itself. Other directions do not depend on the scale of a gradient.
        """
        for group in self.param_groups:
            for stack in group["stacks"]:
                if stack.owner == self._rank:
                    self._update(stack, group, clip_coefficient, gradient_scale)
        if self._size > 1:
            for stack in self.stacks:  # after all updates: every owner computes at the same time
                owner = torch.distributed.get_global_rank(self._group, stack.owner)
                weights = joined(stack.weights)
                torch.distributed.broadcast(weights, src=owner, group=self._group)
                distribute(weights, stack.weights)

    def _update(self, stack: Stack, group: Mapping[str, Any], clip_coefficient: float, gradient_scale: float) -> None:
        rule: MatrixRule = group["rule"]
        is_factored, rate = rule.name == update_rules.FACTORED, group["lr"] * rule.scale
        update = None if is_factored else self._orthogonal(stack, rule, clip_coefficient)
        weights = joined(stack.weights)
        low_bits = [self._low_bits[matrix.name] for matrix in stack.matrices if matrix.name in self._low_bits]
        bits = joined(low_bits) if low_bits else None
        value = weights if bits is None else bf16.join(weights, bits)
        value.mul_(1.0 - group["lr"] * group["weight_decay"])
        if update is None:
            by_matrix = [self.factors[matrix.name] for matrix in stack.matrices]
            factors = joined(by_matrix)
            update_rules.factored_(
                value, stack.gradient, factors, stack.layout, rate=rate, gradient_scale=gradient_scale
            )
            distribute(factors, by_matrix)
        else:
            value.add_(update, alpha=-rate)
        del update
        if bits is not None:
            bf16.split(value, weight=weights, low_bits=bits)
            distribute(bits, low_bits)
        distribute(weights, stack.weights)

    def _orthogonal(self, stack: Stack, rule: MatrixRule, clip_coefficient: float) -> torch.Tensor:
        gradient = stack.gradient.float()
        if rule.momentum is not None:
            if clip_coefficient < 1.0:
                gradient = gradient * clip_coefficient
            gradient = self._with_momentum(stack, gradient, rule)
        return update_rules.orthogonal(gradient, stack.layout, num_steps=rule.num_steps, scale_mode=rule.scale_mode)

    def _with_momentum(self, stack: Stack, gradient: torch.Tensor, rule: MatrixRule) -> torch.Tensor:
        assert rule.momentum is not None
        momenta = [self.momenta[matrix.name] for matrix in stack.matrices]
        momentum = joined(momenta)
        # Muon's running mean, as in Megatron Core; PyTorch's SGD sums, which is the same up to the scale
        momentum.copy_(momentum.float().lerp_(gradient, 1 - rule.momentum))
        distribute(momentum, momenta)
        return gradient.lerp(momentum.float(), rule.momentum) if rule.nesterov else momentum.float()

    def main_params(self) -> dict[str, torch.Tensor]:
        """Of bf16 matrices that this rank owns: their fp32 values, by name, made when they are taken. Where there are
        no low bits the weight is the value: it has not been stepped here yet."""
        values = {}
        for name, matrix in self.matrices.items():
            weight, low_bits = matrix.parameter.data, self._low_bits.get(name)
            if self.is_owner(name) and weight.dtype == torch.bfloat16:
                values[name] = weight.float() if low_bits is None else bf16.join(weight, low_bits.to(weight.device))
        return values

    @torch.no_grad()
    def set_main_param(self, name: str, value: torch.Tensor) -> None:
        """Set weight and, on the owner, low bits of a bf16 matrix to an fp32 value."""
        matrix = self.matrices[name]
        weight = matrix.parameter.data
        if self.is_owner(name) and name not in self._low_bits:
            is_inactive = self._keeps_low_bits_on_host and not any(matrix.name == name for matrix in self.held)
            place = torch.device("cpu") if is_inactive else weight.device
            self._low_bits[name] = torch.zeros_like(weight, dtype=torch.int16, device=place)
        bf16.split(value.to(weight.device).view_as(weight), weight=weight, low_bits=self._low_bits.get(name))

    def set_momentum(self, name: str, value: torch.Tensor) -> None:
        """Set a momentum on the matrix's owner; of the present phase, or in host memory until its next one."""
        if not self.is_owner(name):
            return
        if (held := self.momenta.get(name)) is not None:
            held.copy_(value)
        else:
            self.momenta[name] = value.to(self._momentum_dtype, copy=True)

    def set_factors(self, name: str, row_means: torch.Tensor, column_means: torch.Tensor, *, num_steps: int) -> None:
        """Set what the rule `factored` keeps, on the matrix's owner; shapes as in `update_rules.split_factors`."""
        if self.is_owner(name):
            factors = self.factors[name] = self._zero_factors(name)
            for view, value in zip(
                self.split_factors(name, factors), (row_means, column_means, num_steps), strict=True
            ):
                view.copy_(torch.as_tensor(value))

    def new_factors(self, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Zeros, as `split_factors`."""
        return self.split_factors(name, self._zero_factors(name))

    def _zero_factors(self, name: str) -> torch.Tensor:
        matrix = self.matrices[name]
        return matrix.parameter.new_zeros(matrix.num_factors, dtype=torch.float32)

    def split_factors(self, name: str, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `update_rules.split_factors`, of a matrix."""
        matrix = self.matrices[name]
        return update_rules.split_factors(factors, matrix.parameter.shape[0], len(matrix.layout.parts) or 1)

    def take_main_param(self, name: str) -> torch.Tensor:
        """As `whole_main_param`, and drop the low bits. For the active block, whose optimizer has main parameters of
        its own."""
        value = self.whole_main_param(name)
        self._low_bits.pop(name, None)
        return value

    @torch.no_grad()
    def whole_main_param(self, name: str) -> torch.Tensor:
        """The fp32 value of a bf16 matrix on every replica, a collective over it."""
        matrix = self.matrices[name]
        low_bits = self._low_bits.get(name)
        if low_bits is None:  # not the owner, or never stepped here
            low_bits = torch.zeros_like(matrix.parameter, dtype=torch.int16)
        if self._size > 1:
            owner = torch.distributed.get_global_rank(self._group, matrix.owner)
            torch.distributed.broadcast(low_bits.view(torch.uint8), src=owner, group=self._group)
        return bf16.join(matrix.parameter.data, low_bits)

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Copies in host memory of all that this rank holds beside weights and gradients."""
        return memory.copy_to_host({"momenta": self.momenta, "low_bits": self._low_bits, "factors": self.factors})

    def set_state(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Load what `state` returned on the same rank of a run of the same layout; between phases."""
        self.momenta = dict(state["momenta"])
        self.factors = {
            name: factors.to(self.matrices[name].parameter.device) for name, factors in state["factors"].items()
        }
        self._low_bits = {
            name: bits if self._keeps_low_bits_on_host else bits.to(self.matrices[name].parameter.device)
            for name, bits in state["low_bits"].items()
        }

    def tensors_to_step(self, *, is_of_block: bool) -> Iterator[torch.Tensor]:
        """The weights of the active block's matrices, or of inactive ones, and their low bits that this rank holds."""
        for group in self.param_groups:
            for matrix in group["matrices"] if group["is_of_block"] == is_of_block else ():
                yield matrix.parameter
                if matrix.name in self._low_bits:
                    yield self._low_bits[matrix.name]

    def gradients(self) -> Iterator[torch.Tensor]:
        """Gradient buffers of the present phase."""
        return (stack.gradient for stack in self.stacks)

    def state_on_device(self) -> Iterator[torch.Tensor]:
        """Momenta of the present phase, factors and low bits."""
        yield from self.factors.values()
        on_host = self._low_bits_on_host()
        yield from (bits for name, bits in self._low_bits.items() if name not in on_host)
        yield from (self.momenta[name] for name in self._names_with_momentum())

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory: momenta of blocks that are not active, and low bits that are kept there."""
        present = set(self._names_with_momentum())
        momenta = sum(momentum.nbytes for name, momentum in self.momenta.items() if name not in present)
        return momenta + sum(self._low_bits[name].nbytes for name in self._low_bits_on_host())

    def _low_bits_on_host(self) -> set[str]:
        return set(self._low_bits) - {matrix.name for matrix in self.held} if self._keeps_low_bits_on_host else set()

    def _names_with_momentum(self) -> list[str]:
        """The matrices whose momentum is used in the present phase, and held here."""
        return [
            matrix.name
            for group in self.param_groups
            for matrix in group["matrices"]
            if group["rule"].momentum is not None and self.is_owner(matrix.name)
        ]


def build_matrix_optimizer(
    config: RunConfig, model: torch.nn.Module, matrices: Mapping[str, torch.nn.Parameter]
) -> MatrixOptimizer | None:
    """For the matrices of this stage, by name; None if Megatron Core's optimizer steps all that is updated."""
    if not (config.is_muon or config.bcd.bcd_inactive_update != "none"):
        return None
    built, settings = get_model_config(model), config.optimizer
    heads, groups, width = built.num_attention_heads, built.num_query_groups, built.kv_channels
    assert groups is not None and width is not None
    qkv_parts = (heads // groups * width, width, width)
    tensor_group = parallel_state.get_tensor_model_parallel_group()

    def layout_of(name: str, parameter: torch.nn.Parameter) -> MatrixLayout:
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
        keeps_low_bits_on_host=config.bcd.bcd_inactive_update == "none",  # of Muon's matrices
        momentum_dtype=DTYPES[config.bcd.muon_momentum_dtype],
        overlaps_reduction=config.ddp.overlap_grad_reduce,
    )


def rules_of_phase(
    config: RunConfig, *, inactive: Iterable[str], outside_layers: Iterable[str], of_block: Iterable[str]
) -> Rules:
    """What the matrix optimizer steps in a phase: matrices of inactive layers, embedding and head if the rule
    `factored` steps them, and with Muon the block's own."""
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
            nesterov=settings.muon_use_nesterov,
            num_steps=settings.muon_num_ns_steps,
            scale_mode=settings.muon_scale_mode,
        )
        rules.append((muon, of_block, True))
    return rules
