"""--use-checkpoint-args: the network and the tokenizer of the checkpoint in --load."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from megatron.bcd.arguments.flag_groups import NETWORK, TOKENIZER
from megatron.bcd.arguments.flags import Flag
from megatron.bcd.checkpoint import layout, run_state
from megatron.bcd.huggingface import convert, folder

_OF_THIS_RUN = frozenset(("attention_backend", "transformer_impl", "use_cpu_initialization"))
"""Flags of these groups that say how a network is computed, not which."""


def take_checkpoint_flags(values: dict[str, Any], flags: Iterable[Flag], *, given: Mapping[str, Any]) -> None:
    """Set in `values` the flags of network and tokenizer that are not `given` to those that the checkpoint was written
    with. What is given and contradicts it is refused when the checkpoint is loaded.

    Raises:
        ValueError: there is no checkpoint, another program wrote it, or query groups are asked for that its network
            does not have; one line.
    """
    saved = _saved_flags(values)
    if given.get("group_query_attention") and saved["transformer"].get("num_query_groups") is None:
        raise ValueError(
            f"--group-query-attention contradicts --use-checkpoint-args: every head of the network in --load "
            f"{values['load']} has its own keys and values; leave the flag out"
        )
    for flag in flags:
        if flag.group not in (NETWORK, TOKENIZER) or flag.field in given or flag.field in _OF_THIS_RUN:
            continue
        if not flag.sections:
            continue
        [section, *_] = flag.sections
        # Megatron Core's fields that are absent were left to its defaults; others are newer than the checkpoint
        value = saved[section].get(flag.field, None if section == "transformer" else flag.default)
        values[flag.field] = tuple(value) if isinstance(value, list) else value
    if "group_query_attention" not in given:
        values["group_query_attention"] = saved["transformer"].get("num_query_groups") is not None


def positions_of_checkpoint(values: Mapping[str, Any]) -> int | None:
    """--max-position-embeddings of the weights with which --finetune starts; None where nothing says it."""
    if values["load"] is None or not values["finetune"]:
        return None
    try:
        saved: int | None = _saved_flags(values)["model"].get("max_position_embeddings")
        return saved
    except ValueError:  # no run has written it
        found = layout.candidates(values["load"]) if values["ckpt_step"] is None else [values["ckpt_step"]]
    try:
        carried = os.path.join(layout.iteration_folder(values["load"], found[0]), convert.CARRIED)
        return folder.read_architecture(carried).plain_positions
    except (ValueError, IndexError):
        return None  # if that matters, loading the weights says so


def _saved_flags(values: Mapping[str, Any]) -> Mapping[str, Any]:
    root, step = values["load"], values["ckpt_step"]
    if root is None:
        raise ValueError("--use-checkpoint-args needs --load")
    found = layout.candidates(root) if step is None else [step]
    if not found:
        raise ValueError(f"--load {root}: holds no checkpoint, and --use-checkpoint-args needs one")
    file = os.path.join(layout.iteration_folder(root, found[0]), run_state.FILE_NAME)
    try:
        with open(file, encoding="utf-8") as opened:
            text = opened.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--use-checkpoint-args: {file} can't be read ({error}); only checkpoints of this program hold flags: give "
            "those of the model"
        ) from error
    flags: Mapping[str, Any] = run_state.from_json(text, path=f"--load {root}: {file}").flags
    if not all(isinstance(flags.get(section), dict) for section in ("transformer", "model", "tokenizer")):
        raise ValueError(f"--load {root}: {file} is damaged (it holds no flags)")
    return flags
