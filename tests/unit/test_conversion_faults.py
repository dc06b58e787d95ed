"""tools/convert_checkpoint.py on full disks, over links, and after a conversion that was killed."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import convert_checkpoint
import pytest
import safetensors
from support import huggingface_models as models

from megatron.bcd.huggingface import folder


def convert(source: str, given: Path, written: Path) -> int:
    target = "hf" if source == "bcd" else "bcd"
    return convert_checkpoint.main(["--from", source, "--to", target, "--input", str(given), "--output", str(written)])


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of transformers, made once."""
    return models.write_model("qwen2", tmp_path_factory.mktemp("models") / "qwen2")


@contextlib.contextmanager
def disk_for(num_bytes: int) -> Iterator[None]:
    """No file of this process can grow beyond `num_bytes`: what writes meet on a full disk, for any user."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_safetensors_errors(
    given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The library's own error, which is no OSError, as a traceback; half of a model beside the output folder."""
    assert convert("hf", given, tmp_path / "bcd") == 0
    capsys.readouterr()
    with disk_for(5000):
        assert convert("bcd", tmp_path / "bcd", tmp_path / "back") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "model.safetensors" in line

    class Unreadable:
        def get_slice(self, name: str) -> object:
            raise safetensors.SafetensorError("input/output error")

        get_tensor = get_slice

    source = folder.ModelFolder(str(given))
    monkeypatch.setattr(safetensors, "safe_open", lambda *_, **__: contextlib.nullcontext(Unreadable()))
    for read in (lambda: source.read(source.rows[1]), lambda: source.read_rows(source.rows[0], 0, 1)):
        with pytest.raises(ValueError, match="input/output error"):
            read()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bcd"]


def test_others_may_read_the_weights(given: Path, tmp_path: Path) -> None:
    """Weights that their owner alone may read, beside a config.json that all may."""
    assert convert("hf", given, tmp_path / "bcd") == 0
    for mask, mode in ((0o022, 0o644), (0o077, 0o600)):
        before = os.umask(mask)
        try:
            assert convert("bcd", tmp_path / "bcd", tmp_path / f"{mask}") == 0
        finally:
            os.umask(before)
        modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / f"{mask}").iterdir()}
        assert modes["model.safetensors"] == modes["config.json"] == mode


def test_what_a_killed_conversion_leaves(given: Path, tmp_path: Path) -> None:
    """A tool that refuses its own unfinished folder, or writes over a whole checkpoint."""
    leftover = tmp_path / "bcd" / "iter_0000000.incomplete"
    (leftover / "huggingface").mkdir(parents=True)
    (leftover / "__0_0.distcp").write_bytes(b"half")
    assert convert("hf", given, tmp_path / "bcd") == 0
    assert convert("bcd", tmp_path / "bcd", tmp_path / "back") == 0
    assert models.differing(models.tensors_of(given), models.tensors_of(tmp_path / "back")) == []
    leftover.mkdir()
    assert convert("hf", given, tmp_path / "bcd") == 2
    assert (tmp_path / "bcd" / "iter_0000000" / "checksums.json").exists()
