"""Profile some training steps (--profile)."""

from __future__ import annotations

from typing import Any

import torch

from megatron.bcd.config import ReportConfig
from megatron.bcd.runtime import device


class StepProfiler:
    """Profiles the steps after --profile-step-start up to --profile-step-end, on the ranks of --profile-ranks.

    With --use-pytorch-profiler it writes a trace to --tensorboard-dir. Without it it marks the steps for Nsight Systems
    (``nsys profile --capture-range=cudaProfilerApi``), which needs a GPU.
    """

    def __init__(self, config: ReportConfig) -> None:
        is_profiled = config.profile and torch.distributed.get_rank() in config.profile_ranks
        self._start = config.profile_step_start if is_profiled else -1
        self._end = config.profile_step_end
        self._trace_folder = config.tensorboard_dir if config.use_pytorch_profiler else None
        self._running: Any = None

    def before_step(self, iteration: int) -> None:
        """Start the profiler if it is due. `iteration` is the number of completed steps."""
        if iteration != self._start:
            return
        if self._trace_folder is not None:
            handler = torch.profiler.tensorboard_trace_handler(self._trace_folder)
            self._running = torch.profiler.profile(on_trace_ready=handler, record_shapes=True)
        else:
            self._running = device.cuda_profiler_range()
        self._running.__enter__()

    def after_step(self, iteration: int, *, is_last: bool) -> None:
        """Stop the profiler if it is due. `iteration` is the number of completed steps, including this one."""
        if self._running is None or (iteration < self._end and not is_last):
            return
        running, self._running = self._running, None
        running.__exit__(None, None, None)  # writes the trace
