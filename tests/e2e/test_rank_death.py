"""A rank that hangs or fails ends the whole job: no rank waits forever for a message.

test_resume_torchrun.py kills a rank.
"""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import psutil
import pytest
from support.processes import ROOT, TORCHRUN, Job

FLAGS = [
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
    with Job(*TORCHRUN, *words, *FLAGS, folder=tmp_path) as job:
        job.wait_for(lambda: f"Timed out waiting {TIMEOUT_SECONDS}000ms" in job.output)
        with contextlib.suppress(IndexError, psutil.Error):
            # torchrun gives a stopped process 30 s to hear SIGTERM before it kills it
            job.ranks()[1].send_signal(signal.SIGCONT)
        assert job.exit_code() != 0
        assert job.alive() == []
