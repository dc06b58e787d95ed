"""A rank that dies or hangs ends the whole job: no rank waits for ever for a message that will not come."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import psutil
from support.processes import ROOT, TORCHRUN, Job

FLAGS = [
    *("--pipeline-model-parallel-size", "2", "--bcd-layout", "stage"),
    *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16"),
    *("--micro-batch-size", "1", "--global-batch-size", "16", "--train-iters", "5000", "--lr", "1e-3"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--num-workers", "0"),
    *("--eval-iters", "0", "--log-interval", "1"),
]
TIMEOUT_SECONDS = 6  # of a message, where a rank hangs


def is_stopped(job: Job, rank: int) -> bool:
    try:
        return job.ranks()[rank].status() == psutil.STATUS_STOPPED
    except (IndexError, psutil.Error):  # it is not there yet
        return False


def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    """A job of which one rank is left, waiting for the other: a machine that is paid for and does nothing."""
    metrics = tmp_path / "metrics.jsonl"
    flags = [*FLAGS, "--bcd-steps-per-block", "3", "--metrics-file", str(metrics)]
    with Job(*TORCHRUN, str(ROOT / "pretrain_gpt_bcd.py"), *flags, folder=tmp_path) as job:
        job.wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 5)
        job.ranks()[1].send_signal(signal.SIGKILL)
        assert job.exit_code() != 0
        assert job.alive() == []


def test_a_rank_that_hangs(tmp_path: Path) -> None:
    """A one-way message without a timeout: a forward-only stage that waits for ever in `send` for the receiver of its
    outputs, or the first trainable stage in `receive` for its inputs."""
    with contextlib.ExitStack() as stack:
        jobs = {}
        for hanging in (0, 1):  # both at once: they wait rather than compute
            (tmp_path / str(hanging)).mkdir()
            words = [str(ROOT / "tests" / "support" / "hanging_rank.py"), str(hanging), "40", str(TIMEOUT_SECONDS)]
            flags = [*FLAGS, "--bcd-steps-per-block", "1000"]
            jobs[hanging] = stack.enter_context(Job(*TORCHRUN, *words, *flags, folder=tmp_path / str(hanging)))
        for hanging, job in jobs.items():
            job.wait_for(lambda job=job, hanging=hanging: is_stopped(job, hanging) or "Timed out" in job.output)
        for hanging, job in jobs.items():
            job.wait_for(lambda job=job: f"Timed out waiting {TIMEOUT_SECONDS}000ms" in job.output)
            with contextlib.suppress(IndexError, psutil.Error):
                # torchrun gives a stopped process 30 s to hear SIGTERM before it kills it
                job.ranks()[hanging].send_signal(signal.SIGCONT)
            assert job.exit_code() != 0
            assert job.alive() == []
