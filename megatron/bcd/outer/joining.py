"""Check a replica group that joins the others, and copy their state to it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import megatron.bcd
from megatron.bcd.checkpoint import loader
from megatron.bcd.config import RunConfig, run_config_to_dict
from megatron.bcd.optim.active_block import ActiveBlock
from megatron.bcd.runtime import collectives, memory

_NODE_FLAGS = ("lighthouse", "replica_id", "data_path", "train_data_path", "valid_data_path", "test_data_path",
               "data_args_path", "per_split_data_args_path", "data_cache_path", "num_workers", "tokenizer_model",
               "vocab_file", "merge_file")  # fmt: skip
"""Flags that may differ: places on a node's disk. The contents of these places are compared instead."""
_EXCHANGE_FLAGS = ("save_interval", "save_hf_interval", "exit_interval")
"""The only flags compared in the sections `checkpoint` and `report`: they decide when groups exchange."""

Identity = dict[str, str]
"""Properties that groups must have in common to train one model, by flag or part."""


def run_identity(config: RunConfig, *, train: Any) -> Identity:
    """Return the identity of this run. A collective.

    `train` is this rank's training split, or None.
    """
    flags: Identity = {}
    for section, values in run_config_to_dict(config).items():
        for name, value in values.items():
            if name in _EXCHANGE_FLAGS if section in ("checkpoint", "report") else name not in _NODE_FLAGS:
                flags["--" + name.replace("_", "-")] = str(value)
    first = "" if train is None else f"{len(train)} {train[0]['tokens'].tolist()}"
    digests = collectives.gather_objects(hashlib.sha256(first.encode()).hexdigest()[:12])
    return flags | {
        "the layout": str(loader.current_layout()),
        "the training data": " ".join(sorted(set(digests))),
        "torch": version("torch"),
        "megatron-core": version("megatron-core"),
        "the code": f"{megatron.bcd.__version__} {collectives.on_rank_0(_code_digest)}",
    }


def difference(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """Describe the first difference of two identities; None if they are equal."""
    for name in [*mine, *theirs]:
        if (here := mine.get(name, "nothing")) != (there := theirs.get(name, "nothing")):
            return f"{name} is {here} here and {there} in the groups that train"
    return None


def _code_digest() -> str:
    root = Path(os.path.dirname(megatron.bcd.__file__))
    files = sorted(root.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


def rank_state(active: ActiveBlock) -> dict[str, Any]:
    """Return copies in host memory of the weights and all optimizer state of this rank.

    The same rank of a group that joins loads them, so that its next step is the step of the others.
    """
    active.leave_buffers()
    return memory.copy_to_host({"weights": active.parameters.all(), "outer_momenta": active.outer_momenta}) | {
        "owners": [owner.rank_state() for owner in active.owners]
    }


def load_rank_state(active: ActiveBlock, state: Mapping[str, Any], build: Callable[[], None]) -> None:
    """Load the `rank_state` of the same rank of a group with the same layout. A collective.

    Must be called while no block is active; `build` then activates the block of the other group.
    """
    state = memory.copy_to_host(state)  # torchft receives tensors that must not be written
    for name, parameter in active.parameters.all().items():
        parameter.data.copy_(state["weights"][name])
    active.outer_momenta = dict(state["outer_momenta"])
    for owner, owner_state in zip(active.owners, state["owners"], strict=True):
        owner.load_rank_state(owner_state)
    build()
    active.core.load_rank_shards(state["owners"][0])
