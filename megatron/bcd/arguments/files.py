"""Values that files on the command line hold: lists of data, the model of --load-hf, the checkpoint in --load."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from megatron.bcd.arguments.flags import TOKENIZER, Flag
from megatron.bcd.arguments.stock import NETWORK
from megatron.bcd.checkpoint import layout, run_state
from megatron.bcd.huggingface import convert, folder
from megatron.bcd.huggingface.architecture import architecture_flags, default_flags

_SPLITS = ("train", "valid", "test")
_PATHS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")


def read_data_files(values: dict[str, Any]) -> None:
    """Set the data paths in `values`, by field name, to what --data-args-path or --per-split-data-args-path hold.

    Raises:
        ValueError: both a file and a path are given, or a file can't be read; one line that names the flag.
    """
    for field in ("data_args_path", "per_split_data_args_path"):
        path = values[field]
        if path is None:
            continue
        name = f"--{field.replace('_', '-')} {path}"
        for given in _PATHS:
            if values[given]:
                raise ValueError(f"{name} and --{given.replace('_', '-')} cannot be combined: give one of them")
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not text"
            raise ValueError(f"{name} can't be read ({reason}): give a file that lists prefixes of datasets") from error
        if field == "per_split_data_args_path":
            values.update(_data_by_split(text, name))
        elif not text.split():
            raise ValueError(f"{name} is empty: give a file that lists prefixes of datasets")
        else:
            values["data_path"] = tuple(text.split())


def _data_by_split(text: str, name: str) -> dict[str, tuple[str, ...] | None]:
    """A JSON object as stock's: under each split a list of words, or one string of them; null for none."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON ({error})") from error
    if not isinstance(content, dict) or set(content) != set(_SPLITS):
        raise ValueError(f'{name}: must be {{"train": [...], "valid": [...], "test": [...]}}')
    paths: dict[str, tuple[str, ...] | None] = {}
    for split, value in content.items():
        words = value.split() if isinstance(value, str) else value or []
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ValueError(f"{name}: {split} must be a list of words")
        paths[f"{split}_data_path"] = tuple(words) or None
    return paths


def values_of_model(given: Mapping[str, Any], flags: Iterable[Flag]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values by field name that --load-hf takes from the model's config.json: those that the weights depend on, and
    those that given flags replace.

    Raises:
        ValueError: the model can't be used, or a given flag contradicts it.
    """
    name = given["load_hf"]
    path = folder.locate(name, flag="--load-hf", weights=False)
    network = folder.read_architecture(path)
    fixed = architecture_flags(network)
    for flag in flags:
        value = given.get(flag.field)
        if value is not None and value != fixed.get(flag.field, value):
            asked = flag.off_names[0] if value is False else flag.names[0]
            raise ValueError(
                f"{asked}{'' if flag.type is bool else f' {value}'} contradicts --load-hf {name}, whose config.json "
                f"says {fixed[flag.field]}: leave the flag out"
            )
    window, length = network.sliding_window, given.get("seq_length")
    if window is not None and length is not None and length > window:
        raise ValueError(
            f"--seq-length {length} is longer than the sliding window of --load-hf {name}, {window} tokens, which "
            "attention here does not have: give at most that"
        )
    inner, outer = network.hidden_dropout, network.embedding_dropout
    if network.family == "gpt2" and inner != outer and "hidden_dropout" not in given:
        raise ValueError(
            f"--load-hf {name} has resid_pdrop {inner} and embd_pdrop {outer}, and --hidden-dropout is one value for "
            "both: give it"
        )
    defaults = default_flags(network)
    has_tokenizer_flag = {"tokenizer_type", "tokenizer_model", "vocab_file", "merge_file"} & given.keys()
    if not has_tokenizer_flag and folder.has_tokenizer(path):
        defaults |= {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": os.path.abspath(path)}
    return fixed, defaults


_OF_THIS_RUN = frozenset(("attention_backend", "transformer_impl", "use_cpu_initialization"))
"""Flags of the network that say how it is computed, not which it is."""


def take_checkpoint_flags(values: dict[str, Any], flags: Iterable[Flag], *, given: Mapping[str, Any]) -> None:
    """--use-checkpoint-args: set in `values` the flags of network and tokenizer that are not `given` to those that the
    checkpoint was written with. What is given and contradicts it is an error when the checkpoint is loaded.

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
        is_of_model = flag.section and flag.group in (NETWORK, TOKENIZER) and flag.field not in _OF_THIS_RUN
        if is_of_model and flag.field not in given:
            # Megatron Core's fields that are absent were left to its defaults; others are newer than the checkpoint
            missing = None if flag.section == "transformer" else flag.default
            value = saved[flag.section].get(flag.field, missing)
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
        carried = os.path.join(layout.iteration_folder(values["load"], found[0]), convert.COMPANIONS_FOLDER)
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
    file = os.path.join(layout.iteration_folder(root, found[0]), layout.RUN_STATE)
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
