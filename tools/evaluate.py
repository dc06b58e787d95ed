#!/usr/bin/env python3
"""Evaluate a model with lm-evaluation-harness (PyPI lm_eval, which must be installed; docs/generation.md).

    python tools/evaluate.py --model out/tuned --lm-eval hellaswag,arc_easy --limit 500
    python tools/evaluate.py --model out/tuned --text valid.txt
    python tools/evaluate.py --model out/tuned --multiple-choice questions.jsonl --json out/worth.json

--lm-eval runs tasks of the harness. --text gives the perplexity of files per word and byte; --multiple-choice reads
lines {"query": "...", "choices": ["...", ...], "gold": 0}. For the loss per token, run the training script with
--skip-train.
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
from _parser import Parser, add_json, check_positive, check_writable, command, run_main, write_figures

PROG = "tools/evaluate.py"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed flags. Raises ValueError if a flag is unknown, missing or out of range."""
    parser = Parser(prog=PROG, description=__doc__)
    add_model_flags(parser)
    add = parser.add_argument_group("tasks", "give at least one").add_argument
    add("--lm-eval", metavar="TASKS", help="names of lm-evaluation-harness's tasks, separated by commas")
    add("--lm-eval-include", metavar="DIR", help="folder with more tasks for --lm-eval (YAML files)")
    add("--text", nargs="+", default=[], metavar="FILE", help="perplexity of each file, as one document")
    add("--multiple-choice", nargs="+", default=[], metavar="FILE", help="JSONL files of questions")
    add = parser.add_argument_group("options").add_argument
    add("--seq-length", type=int, metavar="N", help="longest sequence in tokens (default: the model's positions)")
    add("--limit", type=int, metavar="N", help="use only the first N questions of each file or task")
    add("--batch-size", type=int, default=8, metavar="N", help="sequences at a time (default: 8)")
    add("--stride", type=int, metavar="N", help="no longer has an effect: windows of --text do not overlap")
    add_json(parser)
    options = parser.parse_args(argv)
    if not (options.text or options.multiple_choice or options.lm_eval):
        raise ValueError("nothing to evaluate: give --lm-eval, --text or --multiple-choice")
    check_positive(options, "seq_length", "limit", "batch_size")
    return options


def perplexity_task(path: str) -> dict[str, Any]:
    """Return a task of the harness: the perplexity of the file, as one document."""
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
    """Return a task of the harness: one question per line, under any key that published files use."""

    def choices(line: dict[str, Any]) -> list[str]:
        return _value(line, "choices", "endings", "options")

    def answer_index(line: dict[str, Any]) -> int:
        answer = _value(line, "gold", "label", "answer")
        if answer in choices(line):
            return choices(line).index(answer)
        return int(answer) if str(answer).isdigit() else "ABCDEFGHIJ".index(answer)

    return {
        "task": path,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": path}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": lambda line: _value(line, "query", "context", "ctx", "question", "prompt"),
        "doc_to_choice": choices,
        "doc_to_target": answer_index,
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }


def _value(line: dict[str, Any], *names: str) -> Any:
    for name in names:
        if line.get(name) is not None:
            return line[name]
    raise ValueError(f"--multiple-choice: a question has no {' or '.join(names)}")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return the harness's results by task or file, as --json writes them. Raises ValueError if a file is missing or
    damaged, a task is unknown, or the harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("lm-evaluation-harness is not installed: pip install lm_eval")
    for path in (*options.text, *options.multiple_choice):
        if not os.path.isfile(path):
            raise ValueError(f"{path}: no such file")
    check_writable(options.json, flag="--json")
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
        evaluation = lm_eval.simple_evaluate(
            model=model, tasks=[*names, *tasks], limit=options.limit, task_manager=manager, log_samples=False
        )
    return {"model": options.model, "results": evaluation["results"]}


def table(figures: dict[str, Any]) -> str:
    """Format the results, one line per task."""
    lines = []
    for name, metrics in figures["results"].items():
        values = [f"{key.split(',')[0]} {value:.4f}" for key, value in metrics.items() if isinstance(value, float)]
        lines.append(f"{name}: {', '.join(values)}")
    return "\n".join(lines)


@command(PROG)
def main(argv: Sequence[str]) -> None:
    options = parse_arguments(argv)
    figures = run(options)
    write_figures(options.json, figures, lambda: print(table(figures)))


if __name__ == "__main__":
    run_main(main)
