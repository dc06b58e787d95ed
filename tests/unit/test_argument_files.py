"""Command lines that read the flags of a checkpoint."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from support.command_line import parse

from megatron.bcd.checkpoint.layout import RUN_STATE
from megatron.bcd.checkpoint.run_state import FORMAT_VERSION, RunState
from megatron.bcd.config import run_config_to_dict


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
