"""What flags of tools/plan.py and the recipes mean: the model they name, and those that would have no effect."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

from megatron.bcd.config import BcdConfig
from megatron.bcd.huggingface.architecture import CONFIG, Architecture, read_architecture
from megatron.bcd.planner.command import parts_of
from megatron.bcd.planner.recipe import MOMENTS, PRESET_OF
from megatron.bcd.planner.tables import Model, choose, columns_of, read_models

_CHUNKS = "num_virtual_stages_per_pipeline_rank"
MODELS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "examples", "models.csv")
_FLAG_OF = {
    "num_blocks": "bcd_num_blocks",
    "layout": "bcd_layout",
    "frozen": "bcd_frozen",
    "always_active": "bcd_always_active",
    "num_chunks": _CHUNKS,
}
"""Flags of Recipe's fields, where they have another name."""
_LONGEST_DEFAULT = 2048
"""Tokens of a sequence by default, where config.json allows more."""
_OF_BLOCKS = ("bcd_layout", "bcd_frozen", "bcd_always_active", _CHUNKS)
_SET_BY_PIPELINES = ("pipeline_model_parallel_size", "recompute", "pipeline_cut", "bcd_layout", _CHUNKS)
_DEFAULTS = (None, "none", "even")
"""Of these flags; --bcd-frozen none changes what a preset freezes."""


def named_model(name: str, *, models: str | None, flag: str) -> Model:
    """The network of a config.json or of the folder that holds one, else a row of the file `models` or of the built-in
    table. Raises ValueError."""
    if name.endswith(".json") or os.path.isfile(os.path.join(name, CONFIG)):
        return _model_of(read_architecture(name), path=name)
    table = read_models(MODELS) | (read_models(models) if models else {})
    try:
        return choose(table, name, flag=flag)
    except ValueError as error:
        raise ValueError(
            f"{error}; or give a {CONFIG}, the folder that holds one, or a row of your own with --models FILE "
            f"(columns {columns_of(Model)})"
        ) from None


def _model_of(network: Architecture, *, path: str) -> Model:
    folder = os.path.abspath(path if os.path.isdir(path) else os.path.dirname(path))
    return Model(
        name=os.path.basename(folder),
        form="gpt" if network.family == "gpt2" else "llama",
        layers=network.num_layers,
        hidden=network.hidden_size,
        heads=network.num_attention_heads,
        groups=network.num_query_groups,
        ffn=network.ffn_hidden_size,
        vocabulary=network.vocab_size,
        sequence=min(network.plain_positions, _LONGEST_DEFAULT),
        source=path,
        head_dim=network.head_size,
        tied=network.tied,
        biases="all" if network.linear_bias else "qkv" if network.qkv_bias else "none",
        qk_norm=network.qk_norm,
        positions=network.max_positions if network.family == "gpt2" else 0,
    )


def refuse_unused(arguments: argparse.Namespace, method: str) -> None:
    """Raises ValueError naming a flag that nothing would read."""
    if arguments.pipelines:
        for name in _SET_BY_PIPELINES:
            if getattr(arguments, name) not in _DEFAULTS:
                raise ValueError(
                    f"{_shown(arguments, name)} cannot be combined with --pipelines, which sets it itself: leave it out"
                )
        return
    refuse_blocks_without(arguments, method)
    if getattr(arguments, _CHUNKS) is not None and arguments.bcd_layout != "interleaved":
        raise ValueError(f"{_shown(arguments, _CHUNKS)} needs --bcd-layout interleaved: give both, or leave it out")


def refuse_blocks_without(arguments: argparse.Namespace, method: str) -> None:
    """Raises ValueError naming a flag of blocks beside a method that has none."""
    for name in _OF_BLOCKS if method not in PRESET_OF else ():
        if getattr(arguments, name, None) is not None:
            raise ValueError(
                f"{_shown(arguments, name)} cannot be combined with --method {method}, which has no blocks: "
                "leave it out"
            )


def add_memory_flags(group: Any) -> None:
    """Flags that save memory at a cost in quality."""
    add = group.add_argument
    add("--bcd-frozen", metavar="PARTS", help="never trained: some of embedding, head, norms, or none (default: none;"
        " with finetune embedding)")  # fmt: skip
    add("--bcd-always-active", metavar="PARTS", help="trained in every phase: some of norms, biases, embedding, head,"
        " or none; what is not belongs to a block, the head to the top one (default: the preset's)")  # fmt: skip
    add("--adam-moments-dtype", choices=MOMENTS, default="fp32", help="of Adam's moments (default: fp32)")


def memory_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Recipe's fields of `add_memory_flags`; None: the preset's. Raises ValueError for an unknown part."""
    frozen, always = arguments.bcd_frozen, arguments.bcd_always_active
    return {
        "frozen": None if frozen is None else BcdConfig(bcd_frozen=frozen).frozen,
        "always_active": None if always is None else BcdConfig(bcd_always_active=always).always_active,
        "adam_moments_dtype": arguments.adam_moments_dtype,
    }


def flags_of(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Values of flags, by name, of changed fields of a recipe; None: the default."""
    words = {name: parts_of(value) if isinstance(value, frozenset) else value for name, value in changes.items()}
    return {_FLAG_OF.get(name, name): value for name, value in words.items()}


def words_of(values: Mapping[str, Any]) -> list[str]:
    """The command line of flags, without those that are None."""
    words = []
    for name, value in values.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", f"{value:g}" if isinstance(value, float) else str(value)]
    return words


def _shown(arguments: argparse.Namespace, name: str) -> str:
    return f"--{name.replace('_', '-')} {getattr(arguments, name)}"
