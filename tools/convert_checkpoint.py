#!/usr/bin/env python3
"""Convert a checkpoint to a model in Hugging Face's format (docs/huggingface.md). --load-hf reads such models.

    python tools/convert_checkpoint.py --input CHECKPOINT --output OUT

After an error there is no output: one line says what is wrong, and the exit code is 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from _parser import Parser, command, run_main

PROG = "tools/convert_checkpoint.py"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed flags. Raises ValueError if a flag is unknown or missing."""
    parser = Parser(prog=PROG, description=__doc__)
    add = parser.add_argument
    add("--input", required=True, help="a folder of --save (its newest checkpoint is used), or one checkpoint in it")
    add("--output", required=True, help="an empty or absent folder")
    add("--config", metavar="DIR", help="folder with the config.json to write and the tokenizer's files; default: a"
        " config.json made from the run's flags")  # fmt: skip
    return parser.parse_args(argv)


def run(argv: Sequence[str] | None = None) -> str:
    """Convert as the command line says. Return a summary. Raises ValueError if the conversion is impossible; nothing
    was written."""
    options = parse_arguments(argv)
    from megatron.bcd.huggingface import convert, run_network, tokenizer_export
    from megatron.bcd.huggingface.core_format import CoreCheckpoint

    convert.check_output(options.output, flag="--output")
    path = run_network.checkpoint_folder(options.input, flag="--input")
    described = run_network.describe_checkpoint(path, config_folder=options.config)
    convert.to_hugging_face(CoreCheckpoint(path), options.output, described)
    lines = [f"{options.output}: {described.network.family}, from {path}"]
    if described.tokenizer is not None:
        differs = tokenizer_export.find_difference(described.tokenizer, options.output)
        lines += [f"warning: {options.output}: {differs}"] if differs else []
    return "\n".join(lines)


@command(PROG)
def main(argv: Sequence[str]) -> None:
    from megatron.bcd.runtime.atomic_io import describe

    try:
        print(run(argv), flush=True)
    except (OSError, RuntimeError) as error:
        raise ValueError(describe(error)) from None


if __name__ == "__main__":
    run_main(main)
