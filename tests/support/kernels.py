"""Tests that run with each choice of --cpu-kernels."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def with_cpu_kernels(cases: Iterable[str], *, megatron: Collection[str]) -> list[Any]:
    """Parameters (case, kernels): each case with the fast kernels, those of `megatron` with Megatron Core's functions
    too, and the other cases with the latter under --long."""
    parameters = []
    for case in cases:
        marks = () if case in megatron else pytest.mark.long
        parameters.append(pytest.param(case, "fast", id=case))
        parameters.append(pytest.param(case, "megatron", id=f"{case}-megatron", marks=marks))
    return parameters
