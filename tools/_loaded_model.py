"""Flags and the model of tools that read one (generate, evaluate)."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from megatron.bcd.tokenizer import TOKENIZER_TYPES

if TYPE_CHECKING:
    from megatron.bcd.generation.load import LoadedModel

PRECISIONS = ("fp32", "bf16", "fp16")


def add_model_flags(parser: Any) -> None:
    """--model, its precision, and a tokenizer in place of its own."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="DIR",
        help="a model in Hugging Face's format, as --save-hf writes it, a folder of --save (its newest checkpoint is "
        "taken), or one checkpoint in it",
    )
    parser.add_argument("--precision", choices=PRECISIONS, help="of weights and arithmetic (default: the weights')")
    group = parser.add_argument_group("tokenizer", "instead of the model's own, as the training scripts' flags")
    group.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, metavar="TYPE", help=", ".join(TOKENIZER_TYPES))
    group.add_argument(
        "--tokenizer-model", metavar="PATH", help="SentencePiece model, folder of Hugging Face, or file of TikTokenizer"
    )
    group.add_argument("--vocab-file", metavar="FILE", help="of GPT2BPETokenizer")
    group.add_argument("--merge-file", metavar="FILE", help="of GPT2BPETokenizer")
    group.add_argument("--vocab-size", type=int, metavar="N", help="of NullTokenizer or TikTokenizer")
    group.add_argument("--tiktoken-pattern", choices=("v1", "v2"), default="v2", help="of TikTokenizer (default: v2)")
    group.add_argument(
        "--tiktoken-num-special-tokens", type=int, default=1000, metavar="N", help="of TikTokenizer (default: 1000)"
    )


@contextlib.contextmanager
def loaded_model(options: argparse.Namespace) -> Iterator[LoadedModel]:
    """The model of the flags, in groups of this process alone.

    Raises:
        ValueError: it can't be read, or does not fit the machine.
    """
    from megatron.bcd.generation import load
    from megatron.bcd.runtime import distributed

    load.start()
    try:
        tokenizer = load.TokenizerFlags(
            tokenizer_type=options.tokenizer_type,
            tokenizer_model=options.tokenizer_model,
            vocab_file=options.vocab_file,
            merge_file=options.merge_file,
            vocab_size=options.vocab_size,
            tiktoken_pattern=options.tiktoken_pattern,
            tiktoken_num_special_tokens=options.tiktoken_num_special_tokens,
        )
        yield load.open_model(options.model, precision=options.precision, tokenizer=tokenizer)
    finally:
        distributed.leave()
