#!/usr/bin/env python3
"""Convert a model between Hugging Face's format and this program's checkpoints (docs/huggingface.md).

    python tools/convert_checkpoint.py --from hf --to bcd --input DIR --output OUT
    python tools/convert_checkpoint.py --from bcd --to hf --input OUT --output BACK

After an error there is no output: one line says what is wrong, and the exit code is 2.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from _parser import Parser, check_positive, command, run_main

PROG = "tools/convert_checkpoint.py"
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]B)", text.strip().upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB or 500MB")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed flags. Raises ValueError if a flag is unknown, or does not belong to this direction."""
    parser = Parser(prog=PROG, description=__doc__)
    add = parser.add_argument
    add("--from", dest="source", required=True, choices=("hf", "bcd"), help="format of --input")
    add("--to", dest="target", required=True, choices=("hf", "bcd"), help="format of --output")
    add("--input", required=True, help="hf: a folder with config.json and safetensors files, or a model's name on the "
        "hub; bcd: a folder of --save (its newest checkpoint is used), or one checkpoint in it")  # fmt: skip
    add("--output", required=True, help="an empty or absent folder")
    add = parser.add_argument_group("to bcd").add_argument
    add("--make-vocab-size-divisible-by", type=int, metavar="N", help="pad the vocabulary to a multiple of N "
        "(default: 128); a run that loads it adapts the padding")  # fmt: skip
    add = parser.add_argument_group("to hf").add_argument
    add("--config", metavar="DIR", help="folder with the config.json to write and the tokenizer's files; default: "
        "those stored with the checkpoint, or else a config.json made from the run's flags")  # fmt: skip
    add("--vocab-size", type=int, metavar="N", help="rows of the embedding without padding, if neither a config.json "
        "nor the run's tokenizer gives it")  # fmt: skip
    add("--max-shard-size", type=_size, metavar="SIZE", help="size of a safetensors file (default: 5GB)")
    options = parser.parse_args(argv)
    if options.source == options.target:
        raise ValueError(f"--from {options.source} --to {options.target}: give hf and bcd, or bcd and hf")
    if options.target == "bcd":
        for flag in ("--config", "--vocab-size", "--max-shard-size"):
            if getattr(options, flag[2:].replace("-", "_")) is not None:
                raise ValueError(f"{flag} needs --to hf")
    elif options.make_vocab_size_divisible_by is not None:
        raise ValueError("--make-vocab-size-divisible-by needs --to bcd")
    check_positive(options, "vocab_size", "make_vocab_size_divisible_by")
    return options


def run(argv: Sequence[str] | None = None) -> str:
    """Convert as the command line says. Return a summary and how to continue. Raises ValueError if the conversion is
    impossible; nothing was written."""
    options = parse_arguments(argv)
    return _to_bcd(options) if options.target == "bcd" else _to_hf(options)


def _to_bcd(options: argparse.Namespace) -> str:
    from megatron.bcd.huggingface import convert, folder
    from megatron.bcd.tokenizer import padded_vocab_size

    convert.check_output(options.output, flag="--output", leftover=convert.LEFTOVER)
    source = folder.ModelFolder(folder.locate(options.input, flag="--input"))
    network = source.network
    padded = padded_vocab_size(network.vocab_size, options.make_vocab_size_divisible_by or 128, 1)
    written = convert.to_core(source, options.output, padded_vocab_size=padded)
    return (
        f"{written}: {network.family}, {network.num_layers} layers, {network.vocab_size} ids in {padded} rows\n"
        f"weights for --load {options.output} --finetune --load-hf {os.path.join(written, convert.COMPANIONS_FOLDER)}"
    )


def _to_hf(options: argparse.Namespace) -> str:
    from megatron.bcd.huggingface import convert, run_network, tokenizer_export
    from megatron.bcd.huggingface.core_format import CoreCheckpoint

    convert.check_output(options.output, flag="--output")
    path = run_network.checkpoint_folder(options.input, flag="--input")
    described = run_network.describe_checkpoint(path, config_folder=options.config, vocab_size=options.vocab_size)
    convert.to_hugging_face(
        CoreCheckpoint(path),
        options.output,
        described,
        max_shard_bytes=options.max_shard_size or convert.MAX_SHARD_BYTES,
    )
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
