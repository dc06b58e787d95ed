"""The forward-backward function of a phase, with Megatron Core's interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron.bcd.blocks.partition import Partition
from megatron.bcd.pipeline.breadth_first import BreadthFirstIteration, Chunks
from megatron.bcd.pipeline.execute import Iteration
from megatron.bcd.pipeline.p2p import Messages
from megatron.bcd.pipeline.plan import (
    PlanShape,
    breadth_first_shape,
    evaluation_shape,
    microbatches_ahead,
    phase_shape,
)
from megatron.bcd.pipeline.saved_inputs import SavedInputs
from megatron.bcd.runtime import device, distributed


class PipelineSchedule:
    """The forward and backward passes of one iteration, limited to those that the active block needs.

    Call it like Megatron Core's forward-backward functions. `begin_phase` sets the active block, and `prepare_next`
    allows forward-only stages to run ahead. With one pipeline stage, or with `name` "stock", it calls Megatron Core's
    function, unless `name` is "breadth-first".
    """

    def __init__(
        self,
        *,
        name: str,
        partition: Partition,
        run_ahead: int | None,
        head_passes: float = 1.0,
        timeout_minutes: int | None = None,
        pieces: Sequence[range] = (),
        chunks: Chunks | None = None,
        saves_on_host: bool = False,
        by_piece: Mapping[str, bool] | None = None,
    ) -> None:
        """
        Args:
            name: "bcd", "stock" or "breadth-first".
            run_ahead: number of microbatches; None is `default_run_ahead`.
            head_passes: time of a pass through the output head, in passes of a layer. Plans are arranged by it.
            timeout_minutes: timeout of messages between stages of the prefix; None is PyTorch's default.
            pieces: with "breadth-first", the `virtual_pieces`.
            chunks: with "breadth-first", the weights and updates of the pieces.
            saves_on_host: with "breadth-first", the inputs of pieces are saved in host memory.
            by_piece: with "breadth-first", arguments of `breadth_first_shape`.
        """
        self.name = name
        self.backward_messages = 0
        """Number of gradients that this rank sent and received in the last training iteration."""
        self._partition = partition
        self._run_ahead, self._head_passes = run_ahead, head_passes
        self._timeout_minutes = timeout_minutes
        self._block = 0
        self._is_prefix_cached = False
        self._num_next = self._done_ahead = 0
        self._inputs_ahead: dict[int, torch.Tensor] = {}
        self._groups: ProcessGroupCollection | None = None
        self._pieces, self._chunks = pieces, chunks
        self._by_piece = by_piece or {}
        self._saved_inputs = SavedInputs(on_host=saves_on_host)
        self._messages: Messages | None = None
        self._prefix_messages: Messages | None = None

    def begin_phase(self, block: int, *, is_prefix_cached: bool = False) -> None:
        """Set the active block.

        With `is_prefix_cached` the first trainable stage reads its input from the batches. The stages before it only
        join the collectives at the end of an iteration.
        """
        assert self._done_ahead == 0, "microbatches that ran ahead belong to the phase before"
        self._block, self._is_prefix_cached = block, is_prefix_cached

    def prepare_next(self, num_microbatches: int) -> None:
        """Announce that another training iteration of the same phase directly follows the coming one.

        Args:
            num_microbatches: size of that iteration. 0 if none follows: the phase or the data end, or an evaluation or
                a checkpoint comes first.
        """
        self._num_next = num_microbatches

    @property
    def is_ahead(self) -> bool:
        """Whether forward-only stages have started the next iteration. Equal on all ranks."""
        return self._done_ahead > 0

    def __call__(self, *, model: Any, num_microbatches: int, forward_only: bool = False, **arguments: Any) -> list[Any]:
        """Return the results of the loss function by microbatch on the last stage, elsewhere an empty list."""
        num_stages = self._partition.num_stages
        has_plan = self.name == "breadth-first" or (num_stages > 1 and self.name != "stock")
        if num_stages > 1 or has_plan:
            self._set_up(model)
        if not has_plan:
            reported: list[Any] = get_forward_backward_func()(
                model=model, num_microbatches=num_microbatches, forward_only=forward_only, **arguments
            )
            stage = parallel_state.get_pipeline_model_parallel_rank()
            num_backward = num_microbatches * ((stage > 0) + (stage < num_stages - 1))  # one per neighbour
        else:
            assert self._messages is not None
            self._messages.num_backward = 0
            config = get_model_config(model)
            if config.timers is not None:  # Megatron Core's functions start and stop this timer too
                config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
            reported = self.execute(self.shape(num_microbatches, forward_only=forward_only), model, **arguments)
            if config.timers is not None:
                config.timers("forward-backward").stop()
            num_backward = self._messages.num_backward
        if not forward_only:
            self.backward_messages = num_backward
        return reported

    def execute(self, shape: PlanShape, model: Any, **arguments: Any) -> list[Any]:
        """Execute this rank's part of the plan of `shape`."""
        self._set_up(model)
        assert self._groups is not None and self._messages is not None and self._prefix_messages is not None
        arguments |= {
            "messages": self._messages,
            "prefix_messages": self._prefix_messages,
            "inputs_ahead": self._inputs_ahead,
        }
        iteration: Iteration
        if shape.is_breadth_first:
            assert self._chunks is not None
            iteration = BreadthFirstIteration(
                shape, model, self._groups, chunks=self._chunks, saved_inputs=self._saved_inputs, **arguments
            )
        else:
            iteration = Iteration(shape, model, self._groups, **arguments)
        reported = iteration.run()
        self._done_ahead, self._num_next = shape.run_ahead, 0
        self._inputs_ahead = iteration.inputs_ahead()
        return reported

    def run_prefix_forward(
        self, *, model: Any, num_stages: int, num_chunks: int, num_microbatches: int, **arguments: Any
    ) -> None:
        """Collective. Run forward passes of the first chunks of the first stages, outside of an iteration.

        The last of these stages calls the second return value of the forward step with the output.
        """
        self._set_up(model)
        assert self._groups is not None
        if num_microbatches and self._groups.pp.rank() < num_stages:
            shape = evaluation_shape(num_stages=num_stages, num_chunks=num_chunks, num_microbatches=num_microbatches)
            with torch.no_grad():
                self.execute(shape, model, collect_non_loss_data=True, **arguments)

    def shape(self, num_microbatches: int, *, forward_only: bool = False) -> PlanShape:
        """Return the shape of the coming iteration."""
        partition = self._partition
        if self.name == "breadth-first" and not forward_only:
            return breadth_first_shape(
                partition, self._block, self._pieces, num_microbatches=num_microbatches, **self._by_piece
            )
        if forward_only:
            assert self._done_ahead == 0, "microbatches that ran ahead come first"
            return evaluation_shape(
                num_stages=partition.num_stages,
                num_chunks=len(self._pieces) // partition.num_stages or partition.num_chunks,
                num_microbatches=num_microbatches,
                is_breadth_first=bool(self._pieces),
            )
        ahead = 0
        if not self._is_prefix_cached:
            ahead = min(microbatches_ahead(partition, self._block, self._run_ahead), self._num_next)
        return phase_shape(
            partition,
            self._block,
            num_microbatches=num_microbatches,
            head=self._head_passes,
            is_prefix_cached=self._is_prefix_cached,
            done_ahead=self._done_ahead,
            run_ahead=ahead,
        )

    def _set_up(self, model: torch.nn.Module) -> None:
        if self._groups is not None:
            return
        self._groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "pp", "embd", "pos_embd", "cp", "dp_cp"])
        group, config = self._groups.pp, get_model_config(model)
        shape = self.shape(1, forward_only=True)
        waiting = group
        if group.size() > 1:
            waiting = distributed.build_waiting_group(group, timeout_minutes=self._timeout_minutes)
        self._messages = Messages(group, dtype=config.pipeline_dtype, max_sends=shape.max_sends)
        self._prefix_messages = Messages(
            waiting, dtype=config.pipeline_dtype, max_sends=shape.max_sends, throttles_cpu=True
        )
        if self.name == "stock":
            # PyTorch: batched messages among some of the ranks must not be the first operation of a group
            torch.distributed.all_reduce(torch.zeros(1, device=device.current()), group=group)
