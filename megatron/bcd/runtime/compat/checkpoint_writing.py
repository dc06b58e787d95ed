"""Megatron Core's plan of a checkpoint without the processes that it starts to write it."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy


class PlanningStrategy(TorchDistSaveShardedStrategy):
    """Megatron Core's planning of who writes what; the writing is left to the caller."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)
        self.writer: Any = None
        self.finalize: Any = None

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> AsyncRequest:
        request = super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)
        self.writer, [self.finalize] = writer, request.finalize_fns
        return request


@contextlib.contextmanager
def results_in_process() -> Iterator[None]:
    """Inside, checkpoint planning creates a plain queue for the writers' results, not a manager process.

    A manager process outlives a rank that is killed.
    """
    original = filesystem_async._get_write_results_queue
    filesystem_async._get_write_results_queue = queue.Queue
    try:
        yield
    finally:
        filesystem_async._get_write_results_queue = original
