"""The forward and backward passes of one iteration through the pipeline schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron.bcd import data
from megatron.bcd.config import RunConfig
from megatron.bcd.model.loss import forward_step
from megatron.bcd.optim.active_block import ActiveBlock
from megatron.bcd.pipeline.schedule import PipelineSchedule
from megatron.bcd.runtime.activation_meter import ActivationMeter
from megatron.bcd.training.stragglers import Stragglers


class ForwardBackward:
    """Runs the pipeline schedule on the model, wrapped in DDP while a block is active."""

    def __init__(
        self, config: RunConfig, *, active: ActiveBlock, pipeline: PipelineSchedule, meter: ActivationMeter
    ) -> None:
        self.active = active
        self.pipeline = pipeline
        self.meter = meter
        self.stragglers = Stragglers(config.report)
        self._seq_length = config.model.seq_length
        self._micro_batch_size = config.training.micro_batch_size

    @property
    def module(self) -> torch.nn.Module:
        """The model as the schedule takes it."""
        return self.active.wrapped or self.active.model

    def __call__(
        self, batches: Iterator[data.Batch], num_microbatches: int, *, forward_only: bool
    ) -> list[dict[str, Any]]:
        """What the loss function reported by microbatch, on the last stage; an empty list on the others."""
        return self.pipeline(
            forward_step_func=self._forward_step,
            data_iterator=batches,
            model=self.module,
            num_microbatches=num_microbatches,
            seq_length=self._seq_length,
            micro_batch_size=self._micro_batch_size,
            decoder_seq_length=self._seq_length,
            forward_only=forward_only,
        )

    def _forward_step(self, batches: Iterator[data.Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        with self.stragglers.timing(batches) as timed:
            output = forward_step(timed, model)
        self.meter.after_forward()
        return output
