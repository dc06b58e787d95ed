"""The tested versions of Python, PyTorch and Megatron Core. Imports neither of the latter two."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys

TESTED = {
    "Python": [("3.11", "3.13")],
    "torch": [("2.11", "2.13")],
    "megatron-core": [("0.16.1", "0.16.1"), ("0.19.2", "0.19.2")],
}
"""Ranges, the ends included: the pins of requirements.txt on CPUs, and those of docs/gpu.md on an H100."""


def warn_if_untested(*, prog: str) -> None:
    """Print a line on rank 0 if a version lies outside `TESTED`. Call it before imports that an old version breaks."""
    names = [f"{name} {version}" for name in TESTED if not is_tested(name, version := _version(name))]
    if names and os.environ.get("RANK", "0") == "0":
        tested = ", ".join(
            f"{name} "
            + " and ".join(oldest + (f" to {newest}" if newest != oldest else "") for oldest, newest in ranges)
            for name, ranges in TESTED.items()
        )
        print(f"{prog}: warning: {', '.join(names)}: not tested. Tested: {tested}.", file=sys.stderr, flush=True)


def is_tested(name: str, version: str) -> bool:
    """Return whether a version lies inside `TESTED`, or is empty."""
    numbers = _numbers(version)
    ranges = ((_numbers(oldest), _numbers(newest)) for oldest, newest in TESTED[name])
    return not version or any(oldest <= numbers[: len(oldest)] <= newest for oldest, newest in ranges)


def _version(name: str) -> str:
    """Return the version, or an empty string if the package is not installed."""
    try:
        return platform.python_version() if name == "Python" else importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]
