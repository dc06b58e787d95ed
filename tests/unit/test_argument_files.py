"""Command lines that read files: lists of data, and the flags of a checkpoint."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from support.command_line import parse

from megatron.bcd.checkpoint.layout import RUN_STATE
from megatron.bcd.checkpoint.run_state import FORMAT_VERSION, RunState
from megatron.bcd.config import run_config_to_dict

SPLITS = '{"train": "1 a 2 b", "valid": ["c"], "test": null}'


def test_data_files(tmp_path: Path) -> None:
    """Data paths are read from the files of --data-args-path and --per-split-data-args-path."""
    (tmp_path / "list").write_text("0.3 a\n0.7 b\n")
    (tmp_path / "splits").write_text(SPLITS)
    config = parse("--data-args-path", str(tmp_path / "list"), without=("--data-path",))
    assert config.data.data_path == ("0.3", "a", "0.7", "b")
    config = parse("--per-split-data-args-path", str(tmp_path / "splits"), without=("--data-path",))
    assert (config.data.train_data_path, config.data.valid_data_path) == (("1", "a", "2", "b"), ("c",))
    assert config.data.test_data_path is None and config.data.data_path is None


@pytest.mark.parametrize(
    ("flag", "content"),
    [
        ("--data-args-path", None),
        ("--data-args-path", b" \n"),
        ("--data-args-path", b"\xff\xfe\x00"),
        ("--per-split-data-args-path", b"{"),
        ("--per-split-data-args-path", b"[" * 100000),
        ("--per-split-data-args-path", b'{"train": ["a"]}'),
        ("--per-split-data-args-path", SPLITS.replace("null", "[3]").encode()),
    ],
)
def test_bad_data_file(flag: str, content: bytes | None, tmp_path: Path) -> None:
    """A bad data file is refused in one line that names its flag, before the run begins."""
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=flag) as error:
        parse(flag, str(file), without=("--data-path",))
    assert "\n" not in str(error.value)


def test_use_checkpoint_args(tmp_path: Path) -> None:
    """--use-checkpoint-args takes the checkpoint's network; a given dropout wins, a contradicting flag is refused."""
    network = ("--group-query-attention", "--num-query-groups", "2", "--swiglu", "--disable-bias-linear")
    more = ("--position-embedding-type", "rope", "--rotary-base", "5000", "--hidden-dropout", "0")
    config = parse(*network, *more)
    folder = tmp_path / "iter_0000007"
    folder.mkdir()
    state = {field.name: 0 for field in dataclasses.fields(RunState)}
    state |= {"flags": run_config_to_dict(config), "format_version": FORMAT_VERSION}
    (folder / RUN_STATE).write_text(json.dumps(state))
    (folder / "checksums.json").write_text("{}")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    left_out = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--tokenizer-type")
    load = ("--use-checkpoint-args", "--load", str(tmp_path))
    result = parse(*load, "--hidden-dropout", "0.5", without=left_out)
    assert result.transformer == config.transformer | {"hidden_dropout": 0.5}
    assert (result.model, result.tokenizer) == (config.model, config.tokenizer)
    plain = run_config_to_dict(parse("--swiglu"))
    (folder / RUN_STATE).write_text(json.dumps(state | {"flags": plain}))
    with pytest.raises(ValueError, match="--group-query-attention contradicts --use-checkpoint-args"):
        parse(*load, "--group-query-attention", without=left_out)
    (folder / RUN_STATE).unlink()
    for words, word in (
        (load, "only checkpoints of this program"),
        (load[:1], "--use-checkpoint-args: there is no --load"),
    ):
        with pytest.raises(ValueError, match=word):
            parse(*words)
