"""One run, ended under torchrun by a signal, and then killed, each time restarted by the same command.

Together the parts write what an uninterrupted run writes. A rank that hangs ends the whole job.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.bad_input_cases import good_documents, write_dataset
from support.forked_runs import ForkedRuns, RankResult, read_metrics
from support.processes import ROOT, TORCHRUN, Job

from megatron.bcd.checkpoint import layout

LAST, SAVE_INTERVAL = 24, 4
FLAGS = [
    *("--pipeline-model-parallel-size", "2", "--bcd-layout", "submodel", "--bcd-num-blocks", "3"),
    *("--bcd-steps-per-block", "3", "--num-layers", "6", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "16", "--micro-batch-size", "2", "--global-batch-size", "4", "--train-iters", str(LAST)),
    *("--lr", "1e-3", "--lr-decay-style", "cosine", "--lr-warmup-iters", "2", "--data-path", "data/text_document"),
    *("--tokenizer-type", "ByteLevelTokenizer", "--split", "80,10,10"),
    *("--eval-iters", "1", "--eval-interval", "10", "--log-interval", "1", "--metrics-file", "metrics.jsonl"),
    *("--save", "saved", "--load", "saved", "--save-interval", str(SAVE_INTERVAL)),
]


def last_iteration(place: Path) -> int:
    return max((line["iteration"] for line in read_metrics(place)), default=0)


def start(place: Path, *flags: str) -> Job:
    """Start two ranks under torchrun, which read their data in another process."""
    return Job(*TORCHRUN, str(ROOT / "pretrain_gpt_bcd.py"), *FLAGS, "--num-workers", "1", *flags, folder=place)


def run(runs: ForkedRuns, place: Path, **options: Any) -> list[RankResult]:
    return runs.run([*FLAGS, "--num-workers", "0"], folder=place, num_ranks=2, **options)


@pytest.mark.timeout(900)  # starts of torchrun
def test_the_same_command_after_every_end(runs: ForkedRuns, tmp_path: Path) -> None:
    """The same command continues after a signal, which ends the job with exit code 0, and after a kill. Metrics and
    weights are those of a run without an interruption."""
    places = {name: tmp_path / name for name in ("whole", "parts")}
    for place in places.values():
        write_dataset(place / "data" / "text_document", good_documents())
    place = places["parts"]
    assert [rank.code for rank in run(runs, places["whole"])] == [0, 0]
    after_a_signal_and_a_kill(runs, place)
    newest = layout.iteration_folder(str(place / "saved"), layout.candidates(str(place / "saved"))[0])
    assert layout.damage(newest) is None
    results = run(runs, place)
    assert [(rank.code, rank.stderr) for rank in results] == [(0, "")] * 2
    assert f"resuming from saved/{os.path.basename(newest)}" in results[0].stdout
    assert read_metrics(place) == read_metrics(places["whole"])
    assert weights(place) == weights(places["whole"])


def after_a_signal_and_a_kill(runs: ForkedRuns, place: Path) -> None:
    """The starts that do not reach the end."""
    with start(place, "--async-save") as job:
        job.wait_for(lambda: last_iteration(place) >= 3)
        for rank in job.ranks():
            rank.send_signal(signal.SIGTERM)
        assert job.exit_code() == 0, job.output  # torchrun's, so every rank's
    stopped_at, *_ = layout.candidates(str(place / "saved"))
    assert stopped_at == last_iteration(place) < LAST
    metrics = place / "metrics.jsonl"
    killed_at = metrics, metrics.read_bytes().count(b"\n") + SAVE_INTERVAL + 2
    killed = run(runs, place, killed_at=killed_at)
    assert [rank.code for rank in killed] == [-signal.SIGKILL] * 2


def weights(place: Path) -> dict[str, str]:
    """Return checksums of the last checkpoint's shards, which must have the same bits at the same places."""
    records = json.loads((place / "saved" / f"iter_{LAST:07d}" / layout.CHECKSUMS).read_text())["files"]
    return {name: record["sha256"] for name, record in records.items() if name.endswith(".distcp")}


HANGING = [
    *("--pipeline-model-parallel-size", "2", "--bcd-layout", "stage"),
    *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16"),
    *("--micro-batch-size", "1", "--global-batch-size", "16", "--train-iters", "5000", "--lr", "1e-3"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--num-workers", "0"),
    *("--eval-iters", "0", "--log-interval", "1", "--bcd-steps-per-block", "1000"),
]
TIMEOUT_SECONDS = 6  # of a message, where a rank hangs


@pytest.mark.long
def test_a_rank_that_hangs(tmp_path: Path) -> None:
    """The outputs that a forward-only stage sends time out if the next stage hangs, and the whole job ends."""
    words = [str(ROOT / "tests" / "support" / "hanging_rank.py"), "1", "20", str(TIMEOUT_SECONDS)]
    with Job(*TORCHRUN, *words, *HANGING, folder=tmp_path) as job:
        job.wait_for(lambda: f"Timed out waiting {TIMEOUT_SECONDS}000ms" in job.output)
        with contextlib.suppress(IndexError, psutil.Error):
            # torchrun gives a stopped process 30 s to hear SIGTERM before it kills it
            job.ranks()[1].send_signal(signal.SIGCONT)
        assert job.exit_code() != 0
        assert job.alive() == []
