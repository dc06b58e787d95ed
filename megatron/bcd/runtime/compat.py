"""Replacements of private functions of Megatron Core and torch."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator


@contextlib.contextmanager
def checkpoint_results_in_process() -> Iterator[None]:
    """Let Megatron Core's checkpoint planning make a plain queue, not a manager process, for the writers' results."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    original = filesystem_async._get_write_results_queue
    filesystem_async._get_write_results_queue = queue.Queue
    try:
        yield
    finally:
        filesystem_async._get_write_results_queue = original
