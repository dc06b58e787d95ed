#!/usr/bin/env python3
"""What a model is worth: perplexity of texts, and multiple choice by likelihood (docs/generation.md).

    python tools/evaluate.py --model out/tuned --text valid.txt --stride 512
    python tools/evaluate.py --model out/tuned --multiple-choice hellaswag.jsonl --limit 500 --json out/worth.json
    python tools/evaluate.py --model out/tuned --lm-eval hellaswag,arc_easy --limit 500

--text scores every token of a file once. A window of --seq-length tokens moves by --stride, so that a token has at
least their difference before it; a smaller stride takes longer and gives a lower perplexity. --multiple-choice reads
lines {"query": "...", "choices": ["...", ...], "gold": 0}; acc compares the log-likelihoods of the choices, acc_norm
those per character. --lm-eval runs tasks of lm-evaluation-harness (PyPI lm_eval, which must be installed).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from _loaded_model import add_model_flags, loaded_model
from _long_work import check_json_file, naming_memory, write_json_file
from _parser import STDOUT, Parser, add_json, bad_input, leave_with

if TYPE_CHECKING:
    from megatron.bcd.generation.load import LoadedModel

PROG = "tools/evaluate.py"


def _parser() -> Parser:
    parser = Parser(prog=PROG, description=__doc__)
    add_model_flags(parser)
    group = parser.add_argument_group("what is evaluated", "at least one of them")
    group.add_argument("--text", nargs="+", default=[], metavar="FILE", help="perplexity of each, as one document")
    group.add_argument("--multiple-choice", nargs="+", default=[], metavar="FILE", help="JSONL files of questions")
    group.add_argument("--lm-eval", metavar="TASKS", help="names of lm-evaluation-harness's tasks, with commas")
    group.add_argument("--lm-eval-include", metavar="DIR", help="folder with more tasks of --lm-eval (YAML files)")
    group = parser.add_argument_group("how")
    group.add_argument(
        "--seq-length",
        type=int,
        metavar="N",
        help="of a window of --text (default: the model's positions, at most 4096)",
    )
    group.add_argument("--stride", type=int, metavar="N", help="between windows of --text (default: --seq-length)")
    group.add_argument("--limit", type=int, metavar="N", help="the first N questions of each file or task")
    group.add_argument("--batch-size", type=int, default=8, metavar="N", help="sequences at a time (default: 8)")
    add_json(parser)
    return parser


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The checked command line.

    Raises:
        ValueError: a flag is unknown, missing or out of range.
    """
    options = _parser().parse_args(argv)
    if not (options.text or options.multiple_choice or options.lm_eval):
        raise ValueError("nothing to evaluate: give --text, --multiple-choice or --lm-eval")
    for name in ("seq_length", "stride", "limit", "batch_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if options.lm_eval_include is not None and not options.lm_eval:
        raise ValueError("--lm-eval-include needs --lm-eval")
    for name in ("seq_length", "stride"):
        if getattr(options, name) is not None and not options.text:
            raise ValueError(f"--{name.replace('_', '-')} needs --text: questions and tasks have no windows")
    if options.limit is not None and not (options.multiple_choice or options.lm_eval):
        raise ValueError("--limit needs --multiple-choice or --lm-eval: texts are scored whole")
    return options


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All of it; what --json writes.

    Raises:
        ValueError: a file is missing or damaged, or a text is empty.
    """
    from megatron.bcd.generation.multiple_choice import read_questions

    check_json_file(options.json)
    if options.lm_eval and importlib.util.find_spec("lm_eval") is None:
        raise ValueError("--lm-eval needs lm-evaluation-harness: pip install lm_eval")
    texts = {path: _read(path) for path in options.text}
    questions = {path: read_questions(path, limit=options.limit) for path in options.multiple_choice}
    remedy = "give a lower --batch-size or --seq-length, or --precision bf16"
    with naming_memory(remedy), loaded_model(options) as loaded:
        return {
            "model": options.model,
            "precision": loaded.precision,
            "texts": {path: _perplexity(loaded, text, path, options) for path, text in texts.items()},
            "multiple_choice": {
                path: _accuracy(loaded, asked, batch_size=options.batch_size) for path, asked in questions.items()
            },
            "lm_eval": _harness(loaded, options) if options.lm_eval else {},
        }


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--text {path} can't be read ({error})") from None


def _perplexity(loaded: LoadedModel, text: str, path: str, options: argparse.Namespace) -> dict[str, float]:
    from megatron.bcd.generation.likelihood import perplexity

    try:
        found = perplexity(
            loaded, text, length=options.seq_length, stride=options.stride, batch_size=options.batch_size
        )
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith("--") else f"--text {path}: {error}") from None
    return {
        "perplexity": found.per_token,
        "word_perplexity": found.per_word,
        "bits_per_byte": found.bits_per_byte,
        "loss": found.loss,
        "tokens": found.num_tokens,
    }


def _accuracy(loaded: LoadedModel, questions: Sequence[Any], *, batch_size: int) -> dict[str, float | None]:
    from megatron.bcd.generation.multiple_choice import accuracy

    found = accuracy(loaded, questions, batch_size=batch_size)
    return {
        "acc": found.acc,
        "acc_stderr": found.stderr(found.acc),
        "acc_norm": found.acc_norm,
        "acc_norm_stderr": found.stderr(found.acc_norm),
        "questions": found.num_questions,
    }


def _harness(loaded: LoadedModel, options: argparse.Namespace) -> dict[str, Any]:
    """lm-evaluation-harness's own results by task. Raises ValueError for a task that it does not know."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    from megatron.bcd.generation.harness import HarnessModel

    manager = TaskManager(include_path=options.lm_eval_include)
    names = [name.strip() for name in options.lm_eval.split(",")]
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise ValueError(f"--lm-eval {unknown[0]}: lm-evaluation-harness has no such task")
    found = lm_eval.simple_evaluate(
        model=HarnessModel(loaded, batch_size=options.batch_size),
        tasks=names,
        limit=options.limit,
        task_manager=manager,
    )
    return dict(found["results"])


def _with_error(one: dict[str, Any], metric: str) -> str:
    error = one[f"{metric}_stderr"]
    return f"{one[metric]:.4f}" + ("" if error is None else f" +- {error:.4f}")


def table(found: dict[str, Any]) -> str:
    """For people."""
    lines = []
    for path, one in found["texts"].items():
        lines.append(
            f"{path}: perplexity {one['perplexity']:.3f} ({one['tokens']:,} tokens, loss {one['loss']:.4f}), per word "
            f"{one['word_perplexity']:.3f}, {one['bits_per_byte']:.4f} bits per byte"
        )
    for path, one in found["multiple_choice"].items():
        lines.append(
            f"{path}: acc {_with_error(one, 'acc')}, acc_norm {_with_error(one, 'acc_norm')} "
            f"({one['questions']:,} question{'' if one['questions'] == 1 else 's'})"
        )
    for name, one in found["lm_eval"].items():
        values = [f"{key.split(',')[0]} {value:.4f}" for key, value in one.items() if isinstance(value, float)]
        lines.append(f"{name}: {', '.join(values)}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    try:
        options = parse_arguments(argv)
        found = run(options)
        text = json.dumps(found, indent=1, default=str)
        if options.json == STDOUT:
            print(text)
            return 0
        print(table(found))
        if options.json:
            write_json_file(options.json, text)
            print(f"wrote {options.json}")
    except (ValueError, OSError) as error:
        return bad_input(PROG, error)
    return 0


if __name__ == "__main__":
    leave_with(main)
