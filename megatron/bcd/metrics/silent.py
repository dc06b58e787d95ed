"""The reporter of every rank but the first."""

from __future__ import annotations

from typing import Any

from megatron.bcd.metrics.reporter import Reporter


class SilentReporter(Reporter):
    """Same interface as `Reporter`, no output, so that all ranks run the same code."""

    def __init__(self) -> None:
        pass

    def banner(self, *args: Any, **kwargs: Any) -> None:
        pass

    step = progress = evaluation = phase = note = warning = close = banner
