"""What the executors of all plans share: the walk through the actions, and Megatron Core's passes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import backward_step, forward_step, get_tensor_shapes
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config, get_model_type

from megatron.bcd.pipeline.actions import Action
from megatron.bcd.runtime import device


@dataclass(frozen=True, kw_only=True)
class TimedAction:
    """An executed action and its times, in seconds of a monotonic clock."""

    action: Action
    start: float
    end: float


class Iteration:
    """One iteration of one stage; a subclass has its actions."""

    def __init__(
        self,
        model: torch.nn.Module,
        groups: ProcessGroupCollection,
        *,
        num_microbatches: int,
        is_training: bool,
        trace: list[TimedAction] | None,
        forward_step_func: Callable[..., Any],
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        force_all_reduce: bool = False,
    ) -> None:
        self._model, self._groups, self._trace = model, groups, trace
        self._num_microbatches, self._is_training = num_microbatches, is_training
        self._config = get_model_config(model)
        self._forward_step_func = forward_step_func
        self._collect_non_loss_data, self._first_val_step = collect_non_loss_data, first_val_step
        self._force_all_reduce = force_all_reduce
        [self._tensor_shape] = get_tensor_shapes(
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=decoder_seq_length,
            config=self._config,
            tp_group=groups.tp,
            cp_group=groups.cp,
        )
        self._actions: Sequence[Action] = ()
        # under way, by what the executor names them; an input is kept until its forward pass, or its backward pass if
        # it needs a gradient
        self._inputs: dict[Any, torch.Tensor] = {}
        self._outputs: dict[Any, torch.Tensor] = {}
        self._output_gradients: dict[Any, torch.Tensor] = {}
        self._input_gradients: dict[Any, torch.Tensor] = {}
        self._reported: list[Any] = []
        self._begun = 0.0
        """When the present action began; in an interleaved plan a pass begins when what it needs has arrived."""
        self._num_tokens = torch.zeros([], dtype=torch.int, device=device.current())
        self._no_sync: contextlib.AbstractContextManager[Any] | None = None

    def _run(self, do: Callable[[Action], None], finish_sends: Callable[[], None]) -> list[Any]:
        """All actions; what the loss function reported."""
        self._defer_gradient_reduction()
        for action in self._actions:
            self._begun = self._now()
            do(action)
            if self._trace is not None:
                self._trace.append(TimedAction(action=action, start=self._begun, end=self._now()))
        finish_sends()
        if self._is_training:
            self._finish_gradients()
        return self._reported

    def _forward_step(
        self, batches: Any, number: int, input_tensor: torch.Tensor | None, *, is_last_stage: bool
    ) -> torch.Tensor:
        """Megatron Core's, of microbatch `number` of its iteration."""
        is_first = self._is_training or self._first_val_step is not False
        output, num_tokens = forward_step(
            self._forward_step_func,
            batches,
            self._model,
            self._num_microbatches,
            input_tensor,
            self._reported,
            self._config,
            cp_group_size=self._groups.cp.size(),
            collect_non_loss_data=self._collect_non_loss_data,
            is_first_microbatch=is_first and number == 0,
            current_microbatch=number,
            is_last_stage=is_last_stage,
        )
        self._num_tokens += num_tokens
        return output

    def _backward_step(
        self, received: torch.Tensor | None, output: torch.Tensor, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Megatron Core's; the input's gradient if it needs one."""
        return backward_step(received, output, gradient, get_model_type(self._model), self._config)

    def _defer_gradient_reduction(self) -> None:
        if self._is_training:
            self._no_sync = (self._config.no_sync_func or contextlib.nullcontext)()
            self._no_sync.__enter__()

    def _allow_gradient_reduction(self) -> None:
        if self._no_sync is not None:
            self._no_sync.__exit__(None, None, None)
            self._no_sync = None

    def _finish_gradients(self) -> None:
        """Reduce what is not reduced yet: data-parallel replicas, tied embeddings, sequence-parallel norms."""
        if self._no_sync is not None:
            self._allow_gradient_reduction()
            if self._config.grad_sync_func is not None:
                self._config.grad_sync_func(self._model.parameters())
        if self._config.finalize_model_grads_func is not None:
            self._config.finalize_model_grads_func(
                [self._model],
                self._num_tokens if self._config.calculate_per_token_loss else None,
                pg_collection=self._groups,
                force_all_reduce=self._force_all_reduce,
            )

    def _now(self) -> float:
        if self._trace is None:
            return 0.0
        device.synchronize()
        return time.perf_counter()
