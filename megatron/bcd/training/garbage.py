"""Collect Python garbage at fixed intervals (--manual-gc)."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from megatron.bcd.config import TrainingConfig


class GarbageCollection:
    """Python's garbage collector during training. Without --manual-gc it runs as usual."""

    def __init__(self, config: TrainingConfig) -> None:
        self._is_manual, self._interval = config.manual_gc, config.manual_gc_interval

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Inside the context, disable automatic collection. Enable it at the end, because a program may go on."""
        if self._is_manual:
            gc.disable()
        try:
            yield
        finally:
            if self._is_manual:
                gc.enable()

    def after_step(self, iteration: int) -> None:
        """Collect if --manual-gc-interval asks for it after `iteration`."""
        if self._is_manual and self._interval and iteration % self._interval == 0:
            gc.collect()
