#!/usr/bin/env python3
"""What a model is worth, by lm-evaluation-harness (PyPI lm_eval, which must be installed; docs/generation.md).

    python tools/evaluate.py --model out/tuned --lm-eval hellaswag,arc_easy --limit 500
    python tools/evaluate.py --model out/tuned --text valid.txt
    python tools/evaluate.py --model out/tuned --multiple-choice questions.jsonl --json out/worth.json

--lm-eval runs tasks of the harness. --text gives the perplexity of files per word and byte; --multiple-choice reads
lines {"query": "...", "choices": ["...", ...], "gold": 0}. The loss per token is the training scripts' own evaluation
(--skip-train).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from _model_flags import add_model_flags, loaded_model
from _parser import Parser, add_json, check_can_write, command, leave_with, tell

PROG = "tools/evaluate.py"


def _parser() -> Parser:
    parser = Parser(prog=PROG, description=__doc__)
    add_model_flags(parser)
    group = parser.add_argument_group("what is evaluated", "at least one of them")
    group.add_argument("--lm-eval", metavar="TASKS", help="names of lm-evaluation-harness's tasks, with commas")
    group.add_argument("--lm-eval-include", metavar="DIR", help="folder with more tasks of --lm-eval (YAML files)")
    group.add_argument("--text", nargs="+", default=[], metavar="FILE", help="perplexity of each, as one document")
    group.add_argument("--multiple-choice", nargs="+", default=[], metavar="FILE", help="JSONL files of questions")
    group = parser.add_argument_group("how")
    group.add_argument("--seq-length", type=int, metavar="N", help="most tokens of a sequence (default: the positions)")
    group.add_argument("--limit", type=int, metavar="N", help="the first N questions of each file or task")
    group.add_argument("--batch-size", type=int, default=8, metavar="N", help="sequences at a time (default: 8)")
    group.add_argument(
        "--stride", type=int, metavar="N", help="has no effect any more: windows of --text do not overlap"
    )
    add_json(parser)
    return parser


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The checked command line.

    Raises:
        ValueError: a flag is unknown, missing or out of range, or a file is.
    """
    options = _parser().parse_args(argv)
    if not (options.text or options.multiple_choice or options.lm_eval):
        raise ValueError("nothing to evaluate: give --lm-eval, --text or --multiple-choice")
    for name in ("seq_length", "limit", "batch_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    return options


def perplexity_task(path: str) -> dict[str, Any]:
    """A task of the harness: the file as one document."""
    return {
        "task": path,
        "dataset_path": "text",
        "dataset_kwargs": {"data_files": {"test": path}, "sample_by": "document"},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
    }


def multiple_choice_task(path: str) -> dict[str, Any]:
    """A task of the harness: a question a line, under one of the names that published files have."""

    def choices_of(line: dict[str, Any]) -> list[str]:
        return _value(line, "choices", "endings", "options")

    def answer_of(line: dict[str, Any]) -> int:
        answer, choices = _value(line, "gold", "label", "answer"), choices_of(line)
        if answer in choices:
            return choices.index(answer)
        return int(answer) if str(answer).isdigit() else "ABCDEFGHIJ".index(answer)

    return {
        "task": path,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": path}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": lambda line: _value(line, "query", "context", "ctx", "question", "prompt"),
        "doc_to_choice": choices_of,
        "doc_to_target": answer_of,
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }


def _value(line: dict[str, Any], *names: str) -> Any:
    for name in names:
        if line.get(name) is not None:
            return line[name]
    raise ValueError(f"--multiple-choice: a question has no {' or '.join(names)}")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The harness's results by task, or file; what --json writes.

    Raises:
        ValueError: a file is missing or damaged, a task is unknown, or the harness is not installed.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("lm-evaluation-harness is not installed: pip install lm_eval")
    for path in (*options.text, *options.multiple_choice):
        if not os.path.isfile(path):
            raise ValueError(f"{path}: no such file")
    check_can_write(options.json, flag="--json")
    with loaded_model(options) as loaded:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager

        manager = TaskManager(include_path=options.lm_eval_include)
        names = [name.strip() for name in (options.lm_eval or "").split(",") if name.strip()]
        for name in names:
            if name not in manager.all_tasks:
                raise ValueError(f"--lm-eval {name}: lm-evaluation-harness has no such task")
        tasks = [*map(perplexity_task, options.text), *map(multiple_choice_task, options.multiple_choice)]
        model = HFLM(
            pretrained=loaded.model,
            tokenizer=loaded.tokenizer,
            batch_size=options.batch_size,
            max_length=options.seq_length or loaded.positions,
        )
        found = lm_eval.simple_evaluate(
            model=model, tasks=[*names, *tasks], limit=options.limit, task_manager=manager, log_samples=False
        )
    return {"model": options.model, "results": found["results"]}


def table(found: dict[str, Any]) -> str:
    """For people."""
    lines = []
    for name, one in found["results"].items():
        values = [f"{key.split(',')[0]} {value:.4f}" for key, value in one.items() if isinstance(value, float)]
        lines.append(f"{name}: {', '.join(values)}")
    return "\n".join(lines)


@command(PROG)
def main(argv: Sequence[str]) -> None:
    options = parse_arguments(argv)
    found = run(options)
    tell(options.json, found, lambda: print(table(found)))


if __name__ == "__main__":
    leave_with(main)
