"""The forward and backward passes of one iteration through the pipeline schedule.

Tensor shapes: B micro-batch size, S sequence length, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.utils import get_model_config

from megatron.bcd import data
from megatron.bcd.config import RunConfig
from megatron.bcd.model.loss import masked_loss
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


def forward_step(batches: Iterator[data.Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
    """Run one microbatch through this stage.

    If the batch holds `prefix_output` [S, B, H], the stage starts at its first active layer.

    Returns:
        The stage's output (token losses [B, S] on the last stage), and the function that reduces it to the loss.
    """
    timers = get_model_config(model).timers
    if timers is not None:
        timers("batch-generator", log_level=2).start()
    batch = next(batches)
    if timers is not None:
        timers("batch-generator").stop()
    from_prefix: dict[str, Any] = {}
    if "prefix_output" in batch:
        from_prefix = {"decoder_input": batch["prefix_output"], "extra_block_kwargs": {"behind_prefix": True}}
    output = model(
        batch.get("tokens"),
        batch.get("position_ids"),
        batch.get("attention_mask"),
        labels=batch.get("labels"),
        **from_prefix,
    )
    return output, partial(masked_loss, batch.get("loss_mask"))
