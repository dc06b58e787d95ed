"""Steps matrices without Megatron Core's optimizer.

In a run with an inactive update, Muon or updates by chunk these are all matrices of layers, in every phase, and the
embedding and an untied head with --bcd-embedding-update factored. Megatron Core's optimizer steps the rest. In other
runs it steps all parameters.

Each matrix has an owner among the ranks with the same weights, which alone has its state (docs/update_rules.md,
Parallelism). Owners never change, so a switch moves no state between ranks. With `--bcd-schedule breadth-first` the
rules with `is_by_chunk` step chunk by chunk: a chunk has gradients only between `open_chunk` and `step_chunk`. If they
are clipped, `step_chunk` keeps those of the block in host memory, and `step_kept_chunk` steps the chunk when the norm
is known.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state

from megatron.bcd.blocks.ownership import matrix_owners
from megatron.bcd.model.host_layers import GRADIENT, LOW_BITS, State
from megatron.bcd.optim import update_rules
from megatron.bcd.optim.low_bit_adam import BLOCK
from megatron.bcd.optim.matrix import (
    FACTORS,
    MOMENTS,
    MOMENTUM_SCALE,
    Matrix,
    Rules,
    Stack,
    build_stacks,
    sum_of_squares,
)
from megatron.bcd.optim.matrix_update import update_stack
from megatron.bcd.optim.state import MOMENTUM, ParamState
from megatron.bcd.optim.update_rules import MatrixLayout
from megatron.bcd.runtime import device, replicas
from megatron.bcd.runtime.compat import pytorch


class MatrixOptimizer:
    """Steps the matrices of this pipeline stage. Methods that `CoreOptimizer` has, too, do the same.

    Args:
        matrices: parameter and layout of each matrix that some phase steps, by name.
        group: the ranks that hold the same weights, except experts of expert-parallel ranks.
        groups: the state of each matrix that checkpoints store (`Matrix.groups`).
        sharing_groups: the group of each matrix whose elements the ranks share evenly (`matrix_owners`).
        offloads_low_bits: low bits are in host memory while their matrix is not stepped. For matrices that only the
            phases of one block step.
        moments_dtype: precision of momenta or of Adam's moments, on the device and in host memory.
        has_signed_squares: see `Matrix`.
        overlaps_reduction: a stack is reduced as soon as the last microbatch has its gradients. `no_sync` encloses
            the other microbatches. Otherwise `reduce_gradients` reduces all stacks.
        max_norm: gradients that enter a momentum are clipped to this norm, as by Megatron Core; 0 clips nothing.
        places: tensors in host memory, by kind, for the state of matrices that are not always on the device. Ranks may
            share this memory. Only a matrix's owner writes it.
        stage_group: all ranks of this pipeline stage; None for all ranks.
        pipeline_group: with chunks on several stages, a rank of each stage. They step at different times.
        is_compiled: updates are compiled functions.
        is_used: whether any rank steps matrices. Otherwise no call is a collective.
    """

    def __init__(
        self,
        matrices: Mapping[str, tuple[torch.nn.Parameter, MatrixLayout]],
        *,
        group: torch.distributed.ProcessGroup,
        groups: Mapping[str, Mapping[str, tuple[str, int | None]]] | None = None,
        sharing_groups: Mapping[str, Hashable] | None = None,
        offloads_low_bits: bool = False,
        moments_dtype: torch.dtype = torch.float32,
        has_signed_squares: bool = False,
        overlaps_reduction: bool = False,
        max_norm: float = 0.0,
        places: Mapping[torch.nn.Parameter, State] | None = None,
        stage_group: torch.distributed.ProcessGroup | None = None,
        pipeline_group: torch.distributed.ProcessGroup | None = None,
        is_compiled: bool = False,
        is_used: bool = True,
    ) -> None:
        self._overlaps_reduction, self._max_norm, self._is_used = overlaps_reduction, max_norm, is_used
        self._is_last_microbatch, self._is_compiled = True, is_compiled
        self._stage_group, self._pipeline_group = stage_group, pipeline_group
        groups = groups or {name: {} for name in matrices}
        owners = _owners({name: parameter for name, (parameter, _) in matrices.items()}, group, sharing_groups or {})
        self.matrices = dict[str, Matrix]()
        for name, (parameter, layout) in matrices.items():
            ranks, owner = owners[name]
            on_host = (places or {}).get(parameter, {}) if owner == ranks.rank() else {}
            if MOMENTUM_SCALE in on_host and parameter.dim() == 3 and (size := parameter[0].numel()) % BLOCK:
                raise ValueError(
                    f"--muon-momentum-dtype int8: {name} has experts of {size:,} elements, not a multiple of {BLOCK}, "
                    "with layers in host memory. Give bf16."
                )
            self.matrices[name] = Matrix(
                name=name,
                parameter=parameter,
                layout=layout,
                owner=owner,
                group=ranks,
                num_ranks=group.size(),
                groups=groups[name],
                moments_dtype=moments_dtype,
                has_signed_squares=has_signed_squares,
                offloads_low_bits=offloads_low_bits or LOW_BITS in on_host,
                places=on_host,
            )
        self.param_groups: list[dict[str, Any]] = []
        """Groups of the present phase: lr and weight_decay as the scheduler sets them; the rule, the matrices, and
        whether the active block owns them."""
        self.stacks: list[Stack] = []
        """The stacks of the present phase that are stepped at the end of a step."""
        self._chunks: dict[int, list[Stack]] = {}
        """The stacks that the present phase steps by chunk, by number of the chunk. They are open only meanwhile."""
        self._skipped = torch.zeros(1)
        """Number of layers that were not stepped since the last `zero_grad`, on the device."""
        self._chunk_squares: list[torch.Tensor] = []
        """Sums of squares of this rank's clipped gradients by chunk since the last `zero_grad`, on the device."""
        self._block = 0
        self.num_steps = Counter[int]()
        """Number of Adam's steps of the moments of each block, with those of chunks that were skipped."""
        self._squares: device.HostCopy | None = None
        """Sums of squares of the gradients with and without a momentum, and the number of skipped layers."""
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    @property
    def _has_chunks(self) -> bool:
        """Whether any stage steps matrices by chunk."""
        return bool(self._chunks) or self._pipeline_group is not None

    # ---------------------------------------------------------------------------------------------------------- phase

    def begin(
        self,
        rules: Rules,
        chunk_of: Callable[[str], int | None] | None = None,
        *,
        streamed: Container[torch.nn.Parameter] = (),
        block: int = 0,
    ) -> None:
        """Begin a phase that steps these matrices.

        Their weights require a gradient and get a gradient buffer, `main_grad` as in Megatron Core's DDP.

        Args:
            rules: the matrices and their rules.
            chunk_of: returns the chunk that steps a matrix of a rule with `is_by_chunk`, given the matrix's name; None
                to step it at the end of the step. It has a gradient buffer only while its chunk is open.
            streamed: parameters that are in host memory in this phase. Their state stays in its places.
            block: number of the active block.
        """
        self._block = block
        self._skipped = torch.zeros(1, device=device.current())
        for rule, names, is_of_block in rules:
            matrices = {name: self.matrices[name] for name in names}
            if not matrices:
                continue
            group: dict[str, Any] = {"params": [], "lr": 0.0, "weight_decay": 0.0}
            group |= {"matrices": [*matrices.values()], "rule": rule, "is_of_block": is_of_block}
            self.param_groups.append(group)
            by_chunk = dict[tuple[int | None, bool], list[Matrix]]()
            for name, matrix in matrices.items():
                chunk = chunk_of(name) if chunk_of is not None and rule.is_by_chunk else None
                is_tied = chunk is not None and getattr(matrix.parameter, "zero_out_wgrad", False)  # Megatron Core's
                by_chunk.setdefault((chunk, is_tied), []).append(matrix)
            for (chunk, is_tied), some in by_chunk.items():
                stacks = self.stacks if chunk is None else self._chunks.setdefault(chunk, [])
                stacks += build_stacks(some, group, is_tied=is_tied)
            for matrix in matrices.values():
                matrix.begin(rule, is_streamed=matrix.parameter in streamed)
                hook = functools.partial(self._accumulate, matrix)
                self._hooks.append(matrix.parameter.register_post_accumulate_grad_hook(hook))
        for stack in self.stacks:
            stack.open()

    def end(self, *, keeps_moments: bool) -> None:
        """End the phase: free gradients, and move momenta and moments to host memory or drop them."""
        self._close_all()
        for stack in self.stacks:
            stack.close()
        for handle in self._hooks:
            handle.remove()
        for matrix in (matrix for group in self.param_groups for matrix in group["matrices"]):
            matrix.end(keeps_moments=keeps_moments)
        if not keeps_moments:
            del self.num_steps[self._block]
        self.param_groups, self.stacks, self._chunks, self._hooks = [], [], {}, []

    # ------------------------------------------------------------------------------------------------------- gradients

    def zero_grad(self) -> None:
        self._close_all()
        for stack in self.stacks:
            stack.finish_reduction()  # of a step that was skipped
            stack.prepare_step()
        pytorch.zero_each([stack.gradient for stack in self.stacks])
        if self._has_chunks:
            self._skipped.zero_()
        self._chunk_squares = []

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

    @torch.no_grad()
    def reduce_gradients(self, *, gradient_scale: float = 1.0) -> None:
        """Average the gradients on the owners and start to sum their squares over all ranks of the run. A collective.

        `add_norm` reads the sums when the CPU has waited for the device anyway.
        """
        if not self._is_used:
            return
        self.start_reductions(with_shared=True)
        for stack in self.stacks:
            stack.finish_reduction()
        _scale(self.stacks, gradient_scale)
        by_kind = ([stack for stack in self.stacks if stack.rule.is_clipped == each] for each in (True, False))
        squares = torch.stack([*map(sum_of_squares, by_kind)])
        if self._chunk_squares:
            squares[0] += torch.stack(self._chunk_squares).sum()
        torch.distributed.all_reduce(squares)
        if self._pipeline_group is not None:
            torch.distributed.all_reduce(self._skipped, group=self._pipeline_group)
        self._squares = device.HostCopy(torch.cat([squares, self._skipped]) if self._has_chunks else squares)

    def add_norm(self, norm: float) -> tuple[float, bool, int]:
        """Add the clipped gradients to the gradient norm of a step. The result is the same on every rank.

        Inactive updates are neither clipped nor part of the norm: their size does not depend on that of the gradient.
        Those by chunk have been checked before, and chunks that were skipped do not count.

        Returns:
            The norm, whether the other gradients are finite, and the number of layers that this step left as they were.
        """
        if not self._is_used:
            return norm, True, 0
        assert self._squares is not None, "reduce_gradients() comes first"
        clipped, others, *skipped = self._squares.tolist()
        return math.sqrt(norm**2 + clipped), math.isfinite(others), int(sum(skipped))

    # ---------------------------------------------------------------------------------------------------------- chunks

    @torch.no_grad()
    def open_chunk(
        self, chunk: int, state: Callable[[torch.nn.Parameter], State] | None = None, *, is_kept: bool = False
    ) -> None:
        """Allocate the gradients of a chunk's matrices. Its backward passes follow.

        `state` returns the state of a streamed parameter, which the step writes in place. A tied embedding opens with
        the first chunk that runs backward, which has the head. With `is_kept`, the state has the gradients.
        """
        for stack in self._kept(chunk) if is_kept else self._opened_in(chunk):
            if not stack.is_open:
                stack.open()
        for stack in self._chunks.get(chunk, []):
            for matrix in stack.matrices:
                if matrix.streamed_places:
                    matrix.state |= matrix.places if state is None else state(matrix.parameter)
                if is_kept and GRADIENT in matrix.state:
                    matrix.parameter.main_grad.copy_(matrix.state[GRADIENT])  # type: ignore[attr-defined]

    @torch.no_grad()
    def step_chunk(
        self,
        chunk: int,
        *,
        num_layers: int = 1,
        gradient_scale: float = 1.0,
        skip_non_finite: bool = True,
        keep: Callable[[torch.nn.Parameter, torch.Tensor], None] | None = None,
    ) -> None:
        """Step the matrices of a chunk of `num_layers` layers and free their gradients. A collective over the stage.

        With `skip_non_finite` the weights and state of the chunk stay as they were, bit for bit, if a gradient is not
        finite on any rank. The CPU waits for nothing. With `keep`, which copies a gradient to host memory, gradients
        that are clipped wait there for `step_kept_chunk`.
        """
        of_chunk = stacks = self._chunks.get(chunk, [])
        for stack in stacks:
            if stack.is_partial:
                torch.distributed.all_reduce(stack.gradient, group=parallel_state.get_tensor_model_parallel_group())
            stack.start_reduction()
        for stack in stacks:
            stack.finish_reduction()
        clipped = [stack for stack in stacks if stack.is_owner and stack.rule.is_clipped]
        _scale(clipped, gradient_scale)
        if clipped:
            self._chunk_squares.append(sum_of_squares(clipped))
        if keep is not None:
            for matrix in (matrix for stack in clipped for matrix in stack.matrices):
                keep(matrix.parameter, matrix.parameter.main_grad)  # type: ignore[attr-defined]
            stacks = [stack for stack in stacks if not stack.rule.is_clipped]
        if stacks:
            squares = sum_of_squares(stacks)
            torch.distributed.all_reduce(squares, group=self._stage_group)
            is_skipped = torch.isfinite(squares).logical_not_()
            self._skipped.add_(is_skipped & skip_non_finite, alpha=num_layers)
            if clipped and keep is None:
                self._chunk_squares[-1].masked_fill_(is_skipped & skip_non_finite, 0.0)
            for stack in stacks:
                stack.is_skipped = is_skipped if skip_non_finite else None
            self._step(stacks, gradient_scale=gradient_scale)
        self._close(of_chunk)

    @torch.no_grad()
    def step_kept_chunk(self, chunk: int, *, norm: float) -> None:
        """Step the matrices of a chunk whose gradients `step_chunk` kept, clipped by the norm of all gradients."""
        stacks = self._kept(chunk)
        self._step(stacks, clip_coefficient=self._clip_coefficient(norm))
        self._close(stacks)

    def _kept(self, chunk: int) -> list[Stack]:
        return [stack for stack in self._chunks.get(chunk, []) if stack.rule.is_clipped]

    def close_chunk(self, chunk: int) -> None:
        """Free the gradients of a chunk without a step."""
        self._close(self._opened_in(chunk))

    def _opened_in(self, chunk: int) -> list[Stack]:
        """Return the stacks whose gradients must be open in the backward passes of a chunk."""
        tied = (
            stack for number, stacks in self._chunks.items() if number != chunk for stack in stacks if stack.is_tied
        )
        return [*self._chunks.get(chunk, []), *tied]

    def _close(self, stacks: Iterable[Stack]) -> None:
        for stack in stacks:
            if stack.is_open:
                stack.close()
            for matrix in stack.matrices:
                for kind in matrix.streamed_places:
                    matrix.state.pop(kind, None)

    def _close_all(self) -> None:
        for stacks in self._chunks.values():
            self._close(stacks)

    # ------------------------------------------------------------------------------------------------------------ step

    @torch.no_grad()
    def step(self, *, norm: float = 0.0, gradient_scale: float = 1.0) -> None:
        """Step every matrix that is not stepped by chunk.

        A collective over data- and tensor-parallel groups; `reduce_gradients` comes first.
        """
        self._step(self.stacks, clip_coefficient=self._clip_coefficient(norm), gradient_scale=gradient_scale)
        self.num_steps[self._block] += 1

    def _step(self, stacks: Sequence[Stack], *, clip_coefficient: float = 1.0, gradient_scale: float = 1.0) -> None:
        settings: dict[str, Any] = {"clip_coefficient": clip_coefficient, "gradient_scale": gradient_scale}
        settings |= {"num_steps": self.num_steps[self._block], "is_compiled": self._is_compiled}
        # most stacks have the same numbers
        settings["on_device"] = functools.cache(functools.partial(torch.full, (), device=device.current()))
        for stack in stacks:
            for part in stack.divided() if stack.is_owner else ():
                update_stack(part, **settings)
        for stack in stacks:  # after all updates, so that all owners compute at the same time
            stack.broadcast()

    def _clip_coefficient(self, norm: float) -> float:
        # as in Megatron Core's `clip_grad_by_total_norm_fp32`
        return min(1.0, self._max_norm / (norm + 1e-6)) if self._max_norm > 0.0 else 1.0

    # ----------------------------------------------------------------------------------------------------------- state

    def state(self) -> Iterator[ParamState]:
        for name, matrix in self.matrices.items():
            for kind, (group, block) in matrix.groups.items():
                num_steps: int | torch.Tensor = 0
                if kind == FACTORS and (factors := matrix.get(FACTORS)) is not None:
                    num_steps = factors.view(-1)[-1]
                elif kind != MOMENTUM and block is not None:
                    num_steps = self.num_steps[block]
                yield ParamState(
                    group=group,
                    block=block,
                    name=name,
                    parameter=matrix.parameter,
                    set=functools.partial(self._set_state, matrix, kind),
                    tensors=matrix.tensors(kind),
                    value=matrix.value() if kind == LOW_BITS else (),
                    num_steps=num_steps,
                    saver=matrix.owner,
                    is_resting=matrix.rule is None if kind == LOW_BITS else block not in (None, self._block),
                    shapes=matrix.shapes(kind),
                )

    def _set_state(
        self, matrix: Matrix, kind: str, tensors: Mapping[str, torch.Tensor], num_steps: int, _start: int = 0
    ) -> None:
        matrix.set_state(kind, tensors, num_steps)
        _, block = matrix.groups[kind]
        if kind == MOMENTS and block is not None:
            self.num_steps[block] = num_steps

    def main_param(self, name: str) -> torch.Tensor:
        return self.matrices[name].main_param()

    def set_main_param(self, name: str, value: torch.Tensor) -> None:
        self.matrices[name].set_main_param(value)

    def gradients(self) -> Iterator[torch.Tensor]:
        return (stack.gradient for stack in itertools.chain(self.stacks, *self._chunks.values()) if stack.is_open)

    def state_tensors(self, *, on_host: bool) -> Iterator[torch.Tensor]:
        for matrix in self.matrices.values():
            yield from (matrix.offloaded if on_host else matrix.state).values()


def _scale(stacks: Iterable[Stack], gradient_scale: float) -> None:
    """Scale the gradients of Adam's stacks, as Megatron Core scales its buffers."""
    for stack in stacks if gradient_scale != 1.0 else ():
        if stack.rule.name == update_rules.ADAM:
            stack.gradient.mul_(gradient_scale)


def _owners(
    parameters: Mapping[str, torch.nn.Parameter],
    group: torch.distributed.ProcessGroup,
    sharing_groups: Mapping[str, Hashable],
) -> dict[str, tuple[torch.distributed.ProcessGroup, int]]:
    """Return the ranks with the same values of each matrix, which are fewer for experts than `group`, and its owner."""
    by_group = dict[torch.distributed.ProcessGroup, list[str]]()
    for name, parameter in parameters.items():
        ranks = replicas.group(parameter) if replicas.is_expert(parameter) else group
        by_group.setdefault(ranks, []).append(name)
    result = dict[str, tuple[torch.distributed.ProcessGroup, int]]()
    for ranks, names in by_group.items():
        sizes = [parameters[name].numel() for name in names]
        owners = matrix_owners(sizes, ranks.size(), [sharing_groups.get(name) for name in names])
        result |= {name: (ranks, owner) for name, owner in zip(names, owners, strict=True)}
    return result
