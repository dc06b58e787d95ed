"""A newcomer's first day: book, tokens, training, resuming on two processes, evaluation, report, plan."""

from __future__ import annotations

import inspect
import json
import shlex
import textwrap
from pathlib import Path
from typing import Any

import pytest
from support.forked_runs import ForkedRuns

TRAIN = """--num-layers 6 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2
    --global-batch-size 8 --lr 1e-2 --lr-decay-style constant --hidden-dropout 0 --attention-dropout 0
    --tokenizer-type ByteLevelTokenizer --data-path book_text_document --split 90,10,0 --num-workers 1
    --eval-interval 20 --eval-iters 2 --eval-fixed --log-interval 1
    --bcd-preset pretrain --bcd-steps-per-block 5 --save run --load run"""
RESUMED = "--train-iters 8 --pipeline-model-parallel-size 2 --metrics-file resumed.jsonl"
# script, ranks, command line
STEPS = (
    ("preprocess_data", 1, "--input book.txt --output-prefix book --workers 1 --append-eod"
     " --tokenizer-type ByteLevelTokenizer"),
    ("pretrain_gpt_bcd", 1, f"{TRAIN} --metrics-file metrics.jsonl --train-iters 20 --exit-interval 4"),
    ("pretrain_gpt_bcd", 2, f"{TRAIN} {RESUMED}"),
    ("pretrain_gpt_bcd", 1, f"{TRAIN} --skip-train --metrics-file evaluation.jsonl"),
    ("report", 1, "--run first=metrics.jsonl --run resumed=resumed.jsonl --figure loss.png"),
    ("plan", 1, "--model G-1.6B --gpu rtx4090 --num-gpus 4 --compare"),
)  # fmt: skip


def evaluations(file: Path) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, file.read_text().splitlines()) if "validation_loss" in line]


def test_the_day(runs: ForkedRuns, tmp_path: Path) -> None:
    """A step of the first day that ends in a traceback or another exit code; or evaluates what the run did not."""
    text = inspect.getsource(textwrap) + inspect.getsource(json.decoder)
    (tmp_path / "book.txt").write_text(text, encoding="utf-8")
    for script, num_ranks, words in STEPS:
        for rank in runs.run(shlex.split(words), folder=tmp_path, num_ranks=num_ranks, script=script):
            said = rank.stdout + rank.stderr
            assert rank.code == 0 and "Traceback" not in said, f"{script} {words}\n{said}"
    own, (again,) = evaluations(tmp_path / "resumed.jsonl")[-1], evaluations(tmp_path / "evaluation.jsonl")
    assert own["is_final"] and own["iteration"] == again["iteration"] == 8
    assert again["validation_loss"] == pytest.approx(own["validation_loss"], rel=1e-5)
    assert (tmp_path / "loss.png").stat().st_size > 1000
