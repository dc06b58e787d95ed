"""The forward-backward function of a phase, with Megatron Core's interface."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron.bcd.blocks.partition import Partition
from megatron.bcd.config import RunConfig
from megatron.bcd.model.builder import get_fp8_weights
from megatron.bcd.optim.step import Step
from megatron.bcd.pipeline.breadth_first import BreadthFirstIteration
from megatron.bcd.pipeline.execute import Iteration
from megatron.bcd.pipeline.p2p import Messages
from megatron.bcd.pipeline.plan import PlanShape, evaluation_shape, phase_shape
from megatron.bcd.pipeline.saved_tensors import SavedTensors
from megatron.bcd.runtime import device, distributed


class PipelineSchedule:
    """The forward and backward passes of one iteration, limited to those that the active block needs.

    Call it like Megatron Core's forward-backward functions. `begin_phase` sets the active block. With one pipeline
    stage, or with --bcd-schedule stock, it calls Megatron Core's function, unless the order is breadth-first.

    Args:
        partition: of the model; in breadth-first order the `Partition.in_passes`.
        kept: `PlanShape.num_kept` and `num_on_host`.
    """

    def __init__(self, config: RunConfig, partition: Partition, *, kept: dict[str, int]) -> None:
        self.name = config.bcd.bcd_schedule or "bcd"
        self._partition = partition
        self._timeout_minutes = config.training.distributed_timeout_minutes
        """Timeout of messages between stages of the prefix."""
        self._block = 0
        self._is_prefix_cached = False
        self._done_ahead = 0
        self._inputs_ahead: dict[int, torch.Tensor] = {}
        self._by_chunk = {name: getattr(config, name) for name in ("steps_block_by_chunk", "clips_by_chunk")}
        self._by_chunk |= kept
        self._saved = SavedTensors(has_inputs=config.bcd.bcd_saved_inputs == "host")
        self._channels: tuple[ProcessGroupCollection, Messages, Messages] | None = None
        """Process groups, messages between stages, and those from stages that only run forward."""

    def begin_phase(self, block: int, *, is_prefix_cached: bool = False) -> None:
        """Set the active block.

        With `is_prefix_cached` the first trainable stage reads its input from the batches. The stages before it only
        join the collectives at the end of an iteration.
        """
        assert self._done_ahead == 0, "microbatches that ran ahead belong to the phase before"
        self._block, self._is_prefix_cached = block, is_prefix_cached

    @property
    def is_ahead(self) -> bool:
        """Whether forward-only stages have started the next iteration. Equal on all ranks."""
        return self._done_ahead > 0

    def __call__(
        self,
        *,
        model: Any,
        num_microbatches: int,
        step: Step | None = None,
        num_microbatches_next: int = 0,
        **arguments: Any,
    ) -> list[Any]:
        """Run the passes of a training step, or without one those of an evaluation.

        Args:
            step: in breadth-first order it updates chunks as soon as their passes have run.
            num_microbatches_next: size of the next training iteration if it directly follows in the same phase.
                Forward-only stages run ahead with it. 0 if the phase or the data end, or an evaluation or a checkpoint
                comes first.
            arguments: what Megatron Core's functions take.

        Returns:
            The results of the loss function by microbatch on the last stage, elsewhere an empty list.
        """
        num_stages = self._partition.num_stages
        if self.name == "breadth-first" or (num_stages > 1 and self.name != "stock"):
            if step is None:
                shape = self._evaluation_shape(num_microbatches)
            else:
                shape = phase_shape(
                    self._partition,
                    self._block,
                    num_microbatches=num_microbatches,
                    is_breadth_first=self.name == "breadth-first",
                    is_prefix_cached=self._is_prefix_cached,
                    done_ahead=self._done_ahead,
                    **self._by_chunk,
                )
                shape = replace(shape, run_ahead=min(shape.microbatches_ahead, num_microbatches_next))
            return self.execute(shape, model, step=step, **arguments)
        if num_stages > 1:
            self._connect(model)
        with get_fp8_weights(model).kept():
            return get_forward_backward_func()(  # type: ignore[no-any-return]
                model=model, num_microbatches=num_microbatches, forward_only=step is None, **arguments
            )

    def execute(self, shape: PlanShape, model: Any, *, step: Step | None = None, **arguments: Any) -> list[Any]:
        """Execute this rank's part of the plan of `shape`."""
        groups, messages, prefix_messages = self._connect(model)
        arguments |= {"messages": messages, "prefix_messages": prefix_messages, "inputs_ahead": self._inputs_ahead}
        iteration: Iteration
        if shape.is_breadth_first:
            iteration = BreadthFirstIteration(
                shape,
                model,
                groups,
                step=step,
                layers=self._partition.chunks_on_stage(groups.pp.rank()),
                saved=self._saved,
                **arguments,
            )
        else:
            iteration = Iteration(shape, model, groups, **arguments)
        with get_fp8_weights(model).kept():
            reported = iteration.run()
        self._done_ahead = shape.run_ahead
        self._inputs_ahead = iteration.inputs_ahead()
        return reported

    def run_prefix_forward(
        self, *, model: Any, num_stages: int, num_chunks: int, num_microbatches: int, **arguments: Any
    ) -> None:
        """Collective. Run forward passes of the first chunks of the first stages, outside of an iteration.

        The last of these stages calls the second return value of the forward step with the output.
        """
        if num_microbatches and self._connect(model)[0].pp.rank() < num_stages:
            shape = evaluation_shape(num_stages=num_stages, num_chunks=num_chunks, num_microbatches=num_microbatches)
            with torch.no_grad():
                self.execute(shape, model, collect_non_loss_data=True, **arguments)

    def _evaluation_shape(self, num_microbatches: int) -> PlanShape:
        """Return the shape of an iteration that only runs forward."""
        assert self._done_ahead == 0, "microbatches that ran ahead come first"
        return evaluation_shape(
            num_stages=self._partition.num_stages,
            num_chunks=self._partition.num_chunks,
            num_microbatches=num_microbatches,
            is_breadth_first=self.name == "breadth-first",
        )

    def _connect(self, model: torch.nn.Module) -> tuple[ProcessGroupCollection, Messages, Messages]:
        """Return `_channels`. The first call creates them; it is a collective."""
        if self._channels is not None:
            return self._channels
        groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "pp", "embd", "pos_embd", "cp", "dp_cp"])
        group, dtype = groups.pp, get_model_config(model).pipeline_dtype
        max_sends = self._evaluation_shape(1).max_sends
        waiting = group
        if group.size() > 1:
            waiting = distributed.build_waiting_group(group, timeout_minutes=self._timeout_minutes)
        self._channels = (
            groups,
            Messages(group, dtype=dtype, max_sends=max_sends),
            Messages(waiting, dtype=dtype, max_sends=max_sends, throttles_cpu=True),
        )
        if self.name == "stock":
            # PyTorch: batched messages among some of the ranks must not be the first operation of a group
            torch.distributed.all_reduce(torch.zeros(1, device=device.current()), group=group)
        return self._channels
