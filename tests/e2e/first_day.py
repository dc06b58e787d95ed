"""A newcomer's first day: book, tokens, training, Ctrl-C, resume on two processes, evaluation, report, plan.

    python tests/e2e/first_day.py out/first_day

Every command is one that the documents show, with a tiny model. The script stops at the first one that does not end
as it should, or that prints a traceback. `test_first_day.py` runs it, and the same commands without a terminal.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import shlex
import signal
import string
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOKENIZE = """--input book.txt --output-prefix book --workers 1 --append-eod --tokenizer-type ByteLevelTokenizer"""
TRAIN = """--num-layers 6 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2
    --global-batch-size 8 --lr 1e-2 --lr-decay-style constant --hidden-dropout 0 --attention-dropout 0
    --tokenizer-type ByteLevelTokenizer --data-path book_text_document --split 90,10,0 --num-workers 1
    --eval-interval 20 --eval-iters 2 --eval-fixed --log-interval 1
    --bcd-preset pretrain --bcd-steps-per-block 5 --save run --load run"""
METRICS = "--metrics-file metrics.jsonl"
RESUME = "--pipeline-model-parallel-size 2 --metrics-file resumed.jsonl"
EVALUATE = "--skip-train --metrics-file evaluation.jsonl"
REPORT = "--run first=metrics.jsonl --run resumed=resumed.jsonl --figure loss.png"
PLAN = "--model G-1.6B --gpu rtx4090 --num-gpus 4 --compare"
STEPS, STOP_AFTER, MORE_STEPS = 2000, 5, 10
TIMEOUT_SECONDS = 280


def write_book(path: Path) -> None:
    """Wrapped prose in paragraphs, as books come: what the standard library says about itself."""
    texts = [inspect.cleandoc(module.__doc__ or "") for module in (json, shlex, string, subprocess, textwrap, math)]
    texts += [inspect.getsource(textwrap), inspect.getsource(json.decoder)]
    path.write_text("\n\n".join(textwrap.fill(text, 60) for text in texts) + "\n", encoding="utf-8")


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a metrics file; none before it is there."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def last_iteration(folder: Path) -> int:
    return max((line["iteration"] for line in lines_of(folder / "metrics.jsonl")), default=0)


def check_evaluation(folder: Path) -> str:
    """The evaluation of the checkpoint is the run's own last one. Raises RuntimeError."""
    own = [line for line in lines_of(folder / "resumed.jsonl") if line.get("is_final")][-1]
    (again,) = lines_of(folder / "evaluation.jsonl")
    (loss, repeated), iteration = ([line["validation_loss"] for line in (own, again)], own["iteration"])
    if again["iteration"] != iteration or not math.isclose(loss, repeated, rel_tol=1e-5):
        raise RuntimeError(
            f"evaluation: {repeated} at {again['iteration']}, and the run's own is {loss} at {iteration}"
        )
    return f"validation loss {loss:.4f} at iteration {iteration}, by the run and by --skip-train"


class Day:
    """Runs commands in a folder, and prints them and what they say."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}

    def run(self, title: str, *words: str, stop_after: int | None = None) -> None:
        """One command; Ctrl-C once it has done so many steps. Raises RuntimeError if it does not end well."""
        print(f"\n== {title}\n$ python {shlex.join(words)}", flush=True)
        log = self.folder / "output.txt"
        with open(log, "wb") as output:
            process = subprocess.Popen(
                [sys.executable, *words],
                cwd=self.folder,
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches every process of a terminal's job
            )
        try:
            deadline = time.monotonic() + TIMEOUT_SECONDS
            while stop_after is not None and last_iteration(self.folder) < stop_after and process.poll() is None:
                time.sleep(0.01)
                if time.monotonic() > deadline:
                    break
            if stop_after is not None and process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
            code: int | None = process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        text = log.read_text(errors="replace")
        print(text, flush=True)
        if code != 0 or "Traceback" in text:
            raise RuntimeError(f"{title}: {'it hangs' if code is None else f'exit code {code}'}\n{text}")
        if stop_after is not None and "signal SIGINT" not in text:
            raise RuntimeError(f"{title}: the run was over before Ctrl-C")


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print("usage: python tests/e2e/first_day.py FOLDER", file=sys.stderr)
        return 2
    folder = Path(argv[0]).absolute()
    folder.mkdir(parents=True)  # a folder of another day is not touched
    write_book(folder / "book.txt")
    day, script = Day(folder), str(ROOT / "pretrain_gpt_bcd.py")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    train = shlex.split(TRAIN)
    day.run("tokens", str(ROOT / "tools" / "preprocess_data.py"), *shlex.split(TOKENIZE))
    metrics = shlex.split(METRICS)
    day.run("train, then Ctrl-C", script, *train, *metrics, "--train-iters", str(STEPS), stop_after=STOP_AFTER)
    last = str(last_iteration(folder) + MORE_STEPS)
    day.run("resume on two processes", *launcher, script, *train, "--train-iters", last, *shlex.split(RESUME))
    day.run("evaluate", script, *train, *shlex.split(EVALUATE))
    print(check_evaluation(folder))
    day.run("report", str(ROOT / "tools" / "report.py"), *shlex.split(REPORT))
    day.run("plan", str(ROOT / "tools" / "plan.py"), *shlex.split(PLAN))
    print(f"\nThe first day went well; its files are in {folder}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (RuntimeError, FileExistsError) as error:
        print(f"first_day.py: error: {error}", file=sys.stderr)
        sys.exit(1)
