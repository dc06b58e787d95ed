"""Description of the machine for a measurement; without torch."""

from __future__ import annotations

import platform as python_platform


def cpu_model() -> str:
    """As Linux names it, else as Python does."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else python_platform.processor() or python_platform.machine()
