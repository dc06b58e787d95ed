"""Which checkpoint a run looks at first, and what it says where the file that names the newest is of no use."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.bcd.checkpoint import layout, loader


def root_with(tmp_path: Path, tracker: bytes, *iterations: int) -> str:
    for iteration in iterations:
        path = Path(layout.iteration_folder(str(tmp_path), iteration))
        path.mkdir()
        (path / layout.CHECKSUMS).write_text("{}")
    (tmp_path / layout.TRACKER).write_bytes(tracker)
    return str(tmp_path)


@pytest.mark.parametrize("tracker", [b"release", b"\xff1", b"9"])
def test_a_tracker_of_no_use_is_told(tmp_path: Path, tracker: bytes) -> None:
    """A run that starts at iteration 0, or resumes from an older checkpoint, without a message."""
    iterations, problem = loader._candidates(root_with(tmp_path, tracker, 2, 5))
    assert iterations == [5, 2]
    assert problem is not None and layout.TRACKER in problem and "\n" not in problem


def test_a_tracker_without_any_checkpoint(tmp_path: Path) -> None:
    """A run that would start from random weights where a checkpoint was lost."""
    with pytest.raises(ValueError, match="iter_0000009"):
        loader._candidates(root_with(tmp_path, b"9"))


def test_a_sound_tracker_is_not_mentioned(tmp_path: Path) -> None:
    """A warning at every start."""
    assert loader._candidates(root_with(tmp_path, b"5", 2, 5, 7)) == ([5, 2], None)
    (tmp_path / layout.TRACKER).unlink()
    assert loader._candidates(str(tmp_path)) == ([7, 5, 2], None)


def test_one_of_ours_without_checksums_is_damaged_not_foreign(tmp_path: Path) -> None:
    """A checkpoint that lost its checksums would be taken for another program's, and only with --finetune."""
    (tmp_path / "metadata.json").write_text("{}")
    assert loader._is_foreign(str(tmp_path))
    (tmp_path / "run_state.json").write_text("{}")
    assert not loader._is_foreign(str(tmp_path))
