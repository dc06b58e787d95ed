"""A small valid command line, for tests that add or remove flags."""

from __future__ import annotations

import importlib
from typing import Any

from megatron.bcd.arguments import parse_run_config
from megatron.bcd.config import RunConfig

PROG = "pretrain_gpt_bcd.py"
BASE = {
    "--num-layers": "6",
    "--hidden-size": "64",
    "--num-attention-heads": "4",
    "--seq-length": "32",
    "--micro-batch-size": "2",
    "--train-iters": "10",
    "--lr": "1e-3",
    "--tokenizer-type": "ByteLevelTokenizer",
    "--data-path": "some_text_document",
}


def parse(
    *extra: str, without: tuple[str, ...] = (), world_size: int = 1, defaults: dict[str, object] | None = None
) -> RunConfig:
    """Parse BASE without the flags in ``without``, followed by ``extra``."""
    words = [word for flag, value in BASE.items() if flag not in without for word in (flag, value)]
    return parse_run_config([*words, *extra], prog=PROG, world_size=world_size, defaults=defaults)


def read_flags(tool: str, words: list[str]) -> Any:
    """Parse a command line with the tool's parser."""
    module = importlib.import_module(tool)
    if hasattr(module, "parse_arguments"):
        return module.parse_arguments(words)
    return module.build_parser().parse_args(words)
