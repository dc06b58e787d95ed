"""Trains a SentencePiece tokenizer on the user's own text.

    python tools/train_tokenizer.py --input corpus.txt --vocab-size 8000 --output-prefix out/corpus_sp

writes out/corpus_sp.model, for --tokenizer-type SentencePieceTokenizer --tokenizer-model
out/corpus_sp.model. The model is lossless: text is not normalised, white space is kept, and a character
that is not a piece is encoded in bytes.
"""

from __future__ import annotations

import argparse
import io
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import sentencepiece
from _parser import Parser, command, leave_with, write_aside
from _text_files import Source, add_input_flags, read_batches, read_documents, sources_of

PROG = "tools/train_tokenizer.py"

SEED = 1234
"""Of the random choice of lines that --input-sentence-size asks for."""

MAX_LINE_CHARACTERS = 200_000
"""Longer lines are cut: SentencePiece would leave them out without a word."""

MAX_LINE_BYTES = 4 * MAX_LINE_CHARACTERS
"""A character has at most four bytes in UTF-8."""


def read_lines(sources: Sequence[Source], json_keys: Sequence[str]) -> Iterator[str]:
    """Non-empty lines of all documents, each at most MAX_LINE_CHARACTERS long."""
    for batch in read_batches(sources):
        for _, document in read_documents(batch, json_keys):
            # Plain text stands under every key, JSON texts under their own.
            texts = dict.fromkeys(text for texts in document.values() for text in texts)
            for line in (line for text in texts for line in text.splitlines()):
                for start in range(0, len(line), MAX_LINE_CHARACTERS):
                    yield line[start : start + MAX_LINE_CHARACTERS]


def train(lines: Iterator[str], args: argparse.Namespace) -> bytes:
    """The trained model file's bytes; ids: 0 unknown, 1 begin, 2 end of document, then 256 bytes and pieces.

    Raises ValueError when the text has too few or too many different pieces for --vocab-size.
    """
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
    """`lines`, keeping the error that ends them: the trainer replaces it with one of its own."""
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
        return "--input: no text in it to train on"
    return f"SentencePiece cannot train: {' '.join(message.split())}"


def build_parser() -> Parser:
    parser = Parser(prog=PROG, description=__doc__)
    add_input_flags(parser)
    group = parser.add_argument_group("model")
    group.add_argument("--output-prefix", required=True, metavar="PREFIX", help="folders are created")
    group.add_argument("--vocab-size", type=int, required=True, metavar="N", help="total number of ids")
    group.add_argument("--model-type", choices=("bpe", "unigram"), default="bpe", help="default: bpe")
    group.add_argument(
        "--character-coverage",
        type=float,
        default=0.9995,
        metavar="SHARE",
        help="share of the text's characters that become pieces; the rest is encoded in bytes (default: 0.9995)",
    )
    group.add_argument(
        "--input-sentence-size",
        type=int,
        default=0,
        metavar="N",
        help="train on N lines chosen at random, for text too large for memory (default: all)",
    )
    group.add_argument("--num-threads", type=int, default=os.cpu_count() or 1, metavar="N")
    return parser


def run(args: argparse.Namespace) -> str:
    """Does the work and returns the summary. Raises ValueError for bad input; then nothing is written."""
    for flag, value in (("--vocab-size", args.vocab_size), ("--num-threads", args.num_threads)):
        if value < 1:
            raise ValueError(f"{flag} {value} must be at least 1")
    if args.input_sentence_size < 0:
        raise ValueError(f"--input-sentence-size {args.input_sentence_size} must be 0 (all) or more")
    if not 0.9 <= args.character_coverage <= 1:
        raise ValueError(f"--character-coverage {args.character_coverage} must be from 0.9 to 1")
    model = train(read_lines(sources_of(args), args.json_keys), args)
    path = f"{args.output_prefix}.model"
    write_aside(path, lambda aside: Path(aside).write_bytes(model), flag="--output-prefix")
    return (
        f"{path}: {args.vocab_size:,} ids; use it with --tokenizer-type SentencePieceTokenizer --tokenizer-model {path}"
    )


@command(PROG)
def main(argv: Sequence[str]) -> None:
    print(run(build_parser().parse_args(argv)))


if __name__ == "__main__":
    leave_with(main)
