"""What replica groups must have in common to train one model."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import megatron.bcd
from megatron.bcd.checkpoint import loader
from megatron.bcd.config import RunConfig, run_config_to_dict
from megatron.bcd.runtime import collectives

_OF_ANY_NODE = ("lighthouse", "replica_id", "data_path", "train_data_path", "valid_data_path", "test_data_path",
                "data_args_path", "per_split_data_args_path", "data_cache_path", "num_workers", "tokenizer_model",
                "vocab_file", "merge_file")  # fmt: skip
"""Flags that may differ: places on a node's disk. What lies there is compared by its contents."""
_OF_CHECKPOINTS = ("save_interval", "save_hf_interval", "exit_interval")
"""Of these sections only flags that decide when groups exchange are compared."""

Identity = dict[str, str]


def identity_of(config: RunConfig, *, train: Any) -> Identity:
    """By flag or part; `train`: this rank's training split, if it has one. A collective."""
    found: Identity = {}
    for section, values in run_config_to_dict(config).items():
        for name, value in values.items():
            is_compared = name in _OF_CHECKPOINTS if section in ("checkpoint", "report") else name not in _OF_ANY_NODE
            if is_compared:
                found["--" + name.replace("_", "-")] = str(value)
    first = "" if train is None else f"{len(train)} {train[0]['tokens'].tolist()}"
    digests = collectives.gather_objects(hashlib.sha256(first.encode()).hexdigest()[:12])
    return found | {
        "the layout": str(loader.current_layout()),
        "the training data": " ".join(sorted(set(digests))),
        "torch": version("torch"),
        "megatron-core": version("megatron-core"),
        "the code": f"{megatron.bcd.__version__} {collectives.on_rank_0(_digest_of_code)}",
    }


def difference(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """The first thing that differs, for people."""
    for name in [*mine, *theirs]:
        if (here := mine.get(name, "nothing")) != (there := theirs.get(name, "nothing")):
            return f"{name} is {here} here and {there} in the groups that train"
    return None


def _digest_of_code() -> str:
    root = Path(os.path.dirname(megatron.bcd.__file__))
    files = sorted(root.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]
