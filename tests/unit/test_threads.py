"""The number of threads of a process, and what determines it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from megatron.bcd.runtime import threads


@pytest.mark.parametrize("given, number", [(None, 8), ("1", 1)])
def test_threads(monkeypatch: pytest.MonkeyPatch, given: str | None, number: int) -> None:
    """A process has a thread for each core, unless the user or torchrun has set the number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # what torch read at its import
    monkeypatch.setattr(threads, "usable_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    threads.set_threads()
    assert torch.get_num_threads() == number
    torch.set_num_threads(before)


@pytest.mark.parametrize("text, cores", [("150000 100000\n", 1), ("400000 100000\n", 4), ("max 100000\n", 6)])
def test_a_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, cores: int) -> None:
    """The usable cores are those of the container's quota, or of the process without one."""
    (tmp_path / "cpu.max").write_text(text)
    monkeypatch.setattr(threads, "_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    assert threads.usable_cores() == cores
