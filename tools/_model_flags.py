"""The flags --model and --tokenizer-* of the tools that read a model (generate, evaluate)."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from megatron.bcd.tokenizer import TOKENIZER_TYPES, build_tokenizer

if TYPE_CHECKING:
    from megatron.bcd.huggingface.in_memory import LoadedModel


def add_model_flags(parser: Any) -> None:
    """Add --model, its precision and device, and the flags of another tokenizer."""
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="a model in Hugging Face's format (--save-hf), a folder of "
        "--save (its newest checkpoint is used), or one checkpoint in it")  # fmt: skip
    add("--precision", "--dtype", choices=("fp32", "bf16", "fp16"), help="precision of weights and arithmetic "
        "(default: that of the weights)")  # fmt: skip
    add("--device", help="cuda, cuda:1, cpu, ... (default: the first GPU, or else the CPU)")
    group = parser.add_argument_group("tokenizer", "replaces the model's tokenizer; same flags as the training scripts")
    add_tokenizer_flags(group)


def add_tokenizer_flags(group: Any, **options: Any) -> None:
    """Add the training scripts' tokenizer flags; `options` go to --tokenizer-type."""
    add = group.add_argument
    add("--tokenizer-type", choices=TOKENIZER_TYPES, **options)
    add("--vocab-file", metavar="FILE", help="GPT2BPETokenizer: encoder.json")
    add("--merge-file", metavar="FILE", help="GPT2BPETokenizer: vocab.bpe")
    add("--tokenizer-model", metavar="PATH", help="SentencePiece model file, local Hugging Face folder, or JSON "
        "vocabulary of TikTokenizer")  # fmt: skip
    add("--vocab-size", type=int, metavar="N", help="NullTokenizer: ids 0..N-1, and N ends a document; TikTokenizer: "
        "all ids (default: 131072)")  # fmt: skip
    add("--tiktoken-pattern", choices=("v1", "v2"), default="v2", help="TikTokenizer (default: v2)")
    add("--tiktoken-num-special-tokens", type=int, default=1000, metavar="N", help="TikTokenizer (default: 1000)")


def tokenizer_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `build_tokenizer`, without the type."""
    names = "vocab_file merge_file tokenizer_model vocab_size tiktoken_pattern tiktoken_num_special_tokens"
    return {name: getattr(options, name) for name in names.split()}


@contextlib.contextmanager
def loaded_model(options: argparse.Namespace) -> Iterator[LoadedModel]:
    """Yield the model that the flags name. Raises ValueError if the model cannot be read, or memory is exhausted while
    loading or using it."""
    import torch

    from megatron.bcd.huggingface.in_memory import open_model

    tokenizer = None
    if options.tokenizer_type is not None:
        tokenizer = build_tokenizer(options.tokenizer_type, **tokenizer_options(options))
    elif options.tokenizer_model or options.vocab_file or options.merge_file or options.vocab_size:
        raise ValueError("--tokenizer-model, --vocab-file, --merge-file, --vocab-size: need --tokenizer-type")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device}: {str(error).splitlines()[0]}") from None
    try:
        yield open_model(options.model, precision=options.precision, device=device, tokenizer=tokenizer)
    except (MemoryError, torch.OutOfMemoryError):
        raise ValueError("out of memory: give --precision bf16, or shorter or fewer texts at a time") from None
