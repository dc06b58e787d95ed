"""How tools/generate.py and tools/evaluate.py name too little memory, and a file that they can't write."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import _long_work
import evaluate
import generate
import pytest
import torch


def on_a_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def on_a_cpu() -> None:
    torch.empty(10**15)


def in_python() -> None:
    raise MemoryError


@pytest.mark.parametrize("fails", [on_a_gpu, on_a_cpu, in_python])
@pytest.mark.parametrize(
    ("tool", "flag", "named"), [(generate, "--prompt", "--precision"), (evaluate, "--text", "--batch-size")]
)
def test_too_little_memory(
    tool: Any,
    flag: str,
    named: str,
    fails: Callable[[], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A traceback in place of the flag that helps."""

    @contextlib.contextmanager
    def loaded(options: object) -> Iterator[None]:
        fails()
        yield

    monkeypatch.setattr(tool, "loaded_model", loaded)
    (tmp_path / "text").write_text("words")
    assert tool.main(["--model", "m", flag, str(tmp_path / "text")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert named in line


def test_other_errors_stay() -> None:
    """A defect of the program that is told as too little memory."""
    with pytest.raises(RuntimeError, match="shapes"), _long_work.naming_memory("buy more"):
        raise RuntimeError("shapes differ")


def test_json_files(tmp_path: Path) -> None:
    """A file that is emptied, left behind or taken for unwritable by the check; a line without the flag."""
    path = tmp_path / "out.json"
    _long_work.check_json_file(None)
    _long_work.check_json_file("-")
    _long_work.check_json_file(str(path))
    assert not list(tmp_path.iterdir())
    path.write_text("before")
    _long_work.check_json_file(str(path))
    assert path.read_text() == "before"
    with pytest.raises(ValueError, match="--json .*no/out.json"):
        _long_work.check_json_file(str(tmp_path / "no" / "out.json"))
    with pytest.raises(ValueError, match="--json"):
        _long_work.check_json_file(str(tmp_path))
    with pytest.raises(ValueError, match="--json /dev/full"):
        _long_work.write_json_file("/dev/full", "{}")
