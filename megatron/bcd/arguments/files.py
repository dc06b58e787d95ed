"""Read values from the files that flags name: the model of --load-hf, the checkpoint in --load."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from megatron.bcd.arguments.flags import TOKENIZER, Flag
from megatron.bcd.arguments.stock import EXPERTS, NETWORK
from megatron.bcd.checkpoint import layout, run_state
from megatron.bcd.huggingface import folder
from megatron.bcd.huggingface.architecture import TRANSFORMERS
from megatron.bcd.model.skeleton import TRUSTED, has_weights

_OF_THE_RUN = frozenset(("seq_length", "max_position_embeddings", "use_cpu_initialization"))
"""Flags of the network that don't describe a model of transformers."""


def model_values(given: Mapping[str, Any], flags: Iterable[Flag]) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return two dictionaries by field name, from the config.json of --load-hf, and lines for the run summary.

    The weights determine the first one. The second one contains defaults, which given flags replace.

    Raises:
        ValueError: the model can't be used, or a given flag contradicts it.
    """
    name = given["load_hf"]
    if given.get("trust_remote_code"):
        TRUSTED.add(name)
    path = folder.locate(name, flag="--load-hf", weights=False)
    if name in TRUSTED:
        TRUSTED.add(path)
    network = folder.read_architecture(path, transformer_impl=given.get("transformer_impl", "auto"))
    notes = []
    if network.not_in_core:
        notes.append(f"--transformer-impl transformers, because Megatron Core's layers can't: {network.not_in_core}")
    if network.family == TRANSFORMERS and not has_weights(path):
        notes.append(f"--load-hf {name}: has no weights, so they are drawn at random")
    fixed, defaults = network.flags, dict(network.defaults)
    for flag in flags if network.family == TRANSFORMERS else ():
        if flag.group in (NETWORK, EXPERTS) and flag.field in given and flag.field not in {*fixed, *_OF_THE_RUN}:
            raise ValueError(
                f"{flag.shown}: --load-hf {name} runs on transformers' layers, which have the settings of its "
                "config.json alone. Leave the flag out."
            )
    for flag in flags:
        value = given.get(flag.field)
        value = list(value) if isinstance(value, tuple) else value
        if value is not None and value != fixed.get(flag.field, value):
            asked = flag.off_names[0] if value is False else flag.names[0]
            raise ValueError(
                f"{asked}{'' if flag.type is bool else f' {value}'} contradicts --load-hf {name}, whose config.json "
                f"says {fixed[flag.field]}. Leave the flag out."
            )
    is_core, length, inner = network.family != TRANSFORMERS, given.get("seq_length"), defaults.get("hidden_dropout")
    window, outer = (is_core and getattr(network.config, name, None) for name in ("sliding_window", "embd_pdrop"))
    if window and length is not None and length > window:
        raise ValueError(
            f"--seq-length {length}: the sliding window of --load-hf {name} has {window} tokens, and attention here "
            f"has no window. Give at most {window}, or --transformer-impl transformers."
        )
    if outer not in (None, False, inner) and "hidden_dropout" not in given:
        raise ValueError(
            f"--load-hf {name}: resid_pdrop is {inner} and embd_pdrop {outer}, but --hidden-dropout sets both. Give "
            "--hidden-dropout."
        )
    has_tokenizer_flag = {"tokenizer_type", "tokenizer_model", "vocab_file", "merge_file"} & given.keys()
    if not has_tokenizer_flag and folder.has_tokenizer(path):
        defaults |= {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": os.path.abspath(path)}
    return dict(fixed), defaults, notes


_COMPUTATION = frozenset(("attention_backend", "transformer_impl", "use_cpu_initialization"))
"""Flags of the network that choose how it is computed, not what it computes."""


def take_checkpoint_flags(values: dict[str, Any], flags: Iterable[Flag], *, given: Mapping[str, Any]) -> None:
    """Set the flags of network and tokenizer in `values` to those of the checkpoint (--use-checkpoint-args).

    Flags that are `given` stay. If they contradict the checkpoint, loading it raises an error.

    Raises:
        ValueError: there is no checkpoint, another program wrote it, or its network has no query groups and the flags
            ask for some.
    """
    saved = _saved_flags(values)
    if given.get("group_query_attention") and saved["transformer"].get("num_query_groups") is None:
        raise ValueError(
            f"--group-query-attention contradicts --use-checkpoint-args: every head of the network in --load "
            f"{values['load']} has its own keys and values. Leave the flag out."
        )
    for flag in flags:
        is_of_model = flag.section and flag.group in (NETWORK, TOKENIZER) and flag.field not in _COMPUTATION
        if is_of_model and flag.field not in given:
            # an absent field of Megatron Core had its default; an absent field of ours is newer than the checkpoint
            missing = None if flag.section == "transformer" else flag.default
            value = saved[flag.section].get(flag.field, missing)
            values[flag.field] = tuple(value) if isinstance(value, list) else value
    if "group_query_attention" not in given:
        values["group_query_attention"] = saved["transformer"].get("num_query_groups") is not None


def _saved_flags(values: Mapping[str, Any]) -> Mapping[str, Any]:
    root, step = values["load"], values["ckpt_step"]
    if root is None:
        raise ValueError("--use-checkpoint-args: there is no --load. Give one.")
    iterations = layout.candidates(root) if step is None else [step]
    if not iterations:
        raise ValueError(
            f"--load {root}: holds no checkpoint, and --use-checkpoint-args needs one. Give another folder."
        )
    file = os.path.join(layout.iteration_folder(root, iterations[0]), layout.RUN_STATE)
    try:
        with open(file, encoding="utf-8") as opened:
            text = opened.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--use-checkpoint-args: {file} can't be read ({error}), and only checkpoints of this program hold flags. "
            "Give the flags of the model."
        ) from error
    flags: Mapping[str, Any] = run_state.from_json(text, path=f"--load {root}: {file}").flags
    if not all(isinstance(flags.get(section), dict) for section in ("transformer", "model", "tokenizer")):
        raise ValueError(f"--load {root}: {file} is damaged (it holds no flags). Leave out --use-checkpoint-args.")
    return flags
