"""Flags that --load-hf takes from the model's config.json."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from megatron.bcd.arguments.flags import Flag
from megatron.bcd.huggingface import folder
from megatron.bcd.huggingface.architecture import Architecture, defaults_of, flags_of


def values_of_model(given: Mapping[str, Any], flags: Iterable[Flag]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values by field name: those that the weights depend on, and those that given flags replace.

    Args:
        given: the values of the command line; ``load_hf`` names the model.
        flags: all flags, for messages.

    Raises:
        ValueError: the model can't be used, or a given flag contradicts it.
    """
    name = given["load_hf"]
    path = folder.locate(name, flag="--load-hf", weights=False)
    network = folder.read_architecture(path)
    fixed = flags_of(network)
    by_field = {flag.field: flag for flag in flags}
    for field, value in fixed.items():
        if field in given and given[field] != value:
            flag = by_field[field]
            if flag.type is bool:
                asked, said = (flag.names if given[field] else flag.off_names)[0], "the opposite"
            else:
                asked, said = f"{flag.names[0]} {given[field]}", str(value)
            raise ValueError(f"{asked} contradicts --load-hf {name}, whose config.json says {said}: leave the flag out")
    _check_window(network, given, name)
    _check_dropout(network, given, name)
    return fixed, defaults_of(network) | _tokenizer(given, path)


def _check_window(network: Architecture, given: Mapping[str, Any], name: str) -> None:
    length = given.get("seq_length")
    if network.sliding_window is not None and length is not None and length > network.sliding_window:
        raise ValueError(
            f"--seq-length {length} is longer than the sliding window of --load-hf {name}, {network.sliding_window} "
            "tokens, which attention here does not have: give at most that"
        )


def _check_dropout(network: Architecture, given: Mapping[str, Any], name: str) -> None:
    inner, outer = network.hidden_dropout, network.embedding_dropout
    if network.family == "gpt2" and inner != outer and "hidden_dropout" not in given:
        raise ValueError(
            f"--load-hf {name} has resid_pdrop {inner} and embd_pdrop {outer} in its config.json, and --hidden-dropout "
            "is one value for both: give it"
        )


def _tokenizer(given: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The model's own tokenizer, unless a flag names another."""
    named = {"tokenizer_type", "tokenizer_model", "vocab_file", "merge_file"} & given.keys()
    if named or not folder.has_tokenizer(path):
        return {}
    return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": os.path.abspath(path)}
