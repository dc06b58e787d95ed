"""The number of threads of a process, and what determines it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron.bcd.runtime import threads

NAMES = ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")
NAMES += ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
NAMES += ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with eight cores and no variables set."""
    before = torch.get_num_threads()
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "usable_cores", lambda: 8)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("processes, number", [(None, 8), ("2", 4), ("3", 2), ("16", 1)])
def test_cores_are_shared(monkeypatch: pytest.MonkeyPatch, processes: str | None, number: int) -> None:
    """Processes share the cores, and each has at least one thread."""
    if processes:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    threads.set_threads()
    assert torch.get_num_threads() == number


@pytest.mark.parametrize("user, number", [(None, 4), ("1", 1)])
def test_under_torchrun(monkeypatch: pytest.MonkeyPatch, user: str | None, number: int) -> None:
    """torchrun sets 1 for several processes if the user has set nothing: that is not the user's word."""
    environment = {"PATH": os.environ["PATH"]} | ({"OMP_NUM_THREADS": user} if user else {})
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(["sh", "-c", "echo; read line"], env=environment, **pipes) as torchrun:  # type: ignore[call-overload]
        torchrun.stdout.readline()  # Popen returns before the kernel shows the new program's environment
        torch.set_num_threads(1)
        monkeypatch.setattr(os, "getppid", lambda: torchrun.pid)
        for name, value in {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}.items():
            monkeypatch.setenv(name, value)
        threads.set_threads()
        torchrun.kill()
    assert torch.get_num_threads() == number


@pytest.mark.parametrize("text, cores", [("150000 100000\n", 1), ("400000 100000\n", 4), ("max 100000\n", 6)])
def test_a_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, cores: int) -> None:
    """The usable cores are those of the container's quota, or of the process without one."""
    monkeypatch.undo()
    (tmp_path / "cpu.max").write_text(text)
    monkeypatch.setattr(threads, "_QUOTA_V2", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    assert threads.usable_cores() == cores
