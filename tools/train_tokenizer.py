"""Train a SentencePiece tokenizer on your text.

    python tools/train_tokenizer.py --input corpus.txt --vocab-size 8000 --output-prefix out/corpus_sp

This writes out/corpus_sp.model, for --tokenizer-type SentencePieceTokenizer --tokenizer-model out/corpus_sp.model. The
model is lossless: it does not normalise text, keeps white space, and encodes rare characters in bytes.
"""

from __future__ import annotations

import argparse
import io
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import sentencepiece
from _parser import Parser, check_positive, command, run_main, write_atomically
from _text_files import add_input_flags, find_sources, read_batches, read_documents

PROG = "tools/train_tokenizer.py"
SEED = 1234
"""Seed with which --input-sentence-size selects lines."""
MAX_LINE_CHARACTERS = 200_000
"""Longer lines are split, because SentencePiece would skip them silently."""
MAX_LINE_BYTES = 4 * MAX_LINE_CHARACTERS
"""A character has at most four bytes in UTF-8."""


def read_lines(sources: Sequence[tuple[str, str]], json_keys: Sequence[str]) -> Iterator[str]:
    """Yield the non-empty lines of all documents, each with at most MAX_LINE_CHARACTERS."""
    for batch in read_batches(sources):
        for _, document in read_documents(batch, json_keys):
            # Plain text is returned for every key: use it once.
            texts = dict.fromkeys(text for texts in document.values() for text in texts)
            for line in (line for text in texts for line in text.splitlines()):
                for start in range(0, len(line), MAX_LINE_CHARACTERS):
                    yield line[start : start + MAX_LINE_CHARACTERS]


def train(lines: Iterator[str], args: argparse.Namespace) -> bytes:
    """Return the bytes of the trained model. Ids: 0 unknown, 1 begin, 2 end of document, then 256 bytes, then pieces.
    Raises ValueError if the text has too few or too many different pieces for --vocab-size."""
    model = io.BytesIO()
    input_errors: list[ValueError] = []
    sentencepiece.set_random_generator_seed(SEED)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_keep_error(lines, input_errors),
            model_writer=model,
            vocab_size=args.vocab_size,
            model_type=args.model_type,
            character_coverage=args.character_coverage,
            input_sentence_size=args.input_sentence_size,
            shuffle_input_sentence=args.input_sentence_size > 0,
            max_sentence_length=MAX_LINE_BYTES,
            num_threads=args.num_threads,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            minloglevel=2,
        )
    except RuntimeError as error:
        if input_errors:
            raise input_errors[0] from None
        raise ValueError(_explain(str(error), args.vocab_size)) from error
    return model.getvalue()


def _keep_error(lines: Iterator[str], errors: list[ValueError]) -> Iterator[str]:
    """Yield `lines`, and store the error that ends them, because the trainer replaces it."""
    try:
        yield from lines
    except ValueError as error:
        errors.append(error)
        raise


def _explain(message: str, vocab_size: int) -> str:
    if match := re.search(r"too high .* a value <= (\d+)", message):
        return f"--vocab-size {vocab_size} is more than this text has pieces for; at most {match[1]}"
    if match := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return (
            f"--vocab-size {vocab_size} is too small for this text's characters; more than {match[1]}, "
            "or less --character-coverage"
        )
    if "!sentences_.empty()" in message:
        return "--input: contains no text. Give files with text."
    return f"SentencePiece cannot train: {' '.join(message.split())}"


def build_parser() -> Parser:
    parser = Parser(prog=PROG, description=__doc__)
    add_input_flags(parser)
    add = parser.add_argument_group("model").add_argument
    add("--output-prefix", required=True, metavar="PREFIX", help="folders are created")
    add("--vocab-size", type=int, required=True, metavar="N", help="total number of ids")
    add("--model-type", choices=("bpe", "unigram"), default="bpe", help="default: bpe")
    add("--character-coverage", type=float, default=0.9995, metavar="SHARE",
        help="share of the text's characters that become pieces; others are encoded in bytes (0.9995)")  # fmt: skip
    add("--input-sentence-size", type=int, default=0, metavar="N",
        help="train on N randomly selected lines, if the text does not fit in memory (default: all)")  # fmt: skip
    add("--num-threads", type=int, default=os.cpu_count() or 1, metavar="N")
    return parser


def run(args: argparse.Namespace) -> str:
    """Train, write the model and return a summary. Raises ValueError for bad input; then nothing is written."""
    check_positive(args, "vocab_size", "num_threads")
    if args.input_sentence_size < 0:
        raise ValueError(f"--input-sentence-size {args.input_sentence_size}: must be 0 (all) or more")
    if not 0.9 <= args.character_coverage <= 1:
        raise ValueError(f"--character-coverage {args.character_coverage}: must be from 0.9 to 1")
    model = train(read_lines(find_sources(args), args.json_keys), args)
    path = f"{args.output_prefix}.model"
    write_atomically(path, lambda temporary: Path(temporary).write_bytes(model), flag="--output-prefix")
    return (
        f"{path}: {args.vocab_size:,} ids; use it with --tokenizer-type SentencePieceTokenizer --tokenizer-model {path}"
    )


@command(PROG)
def main(argv: Sequence[str]) -> None:
    print(run(build_parser().parse_args(argv)))


if __name__ == "__main__":
    run_main(main)
