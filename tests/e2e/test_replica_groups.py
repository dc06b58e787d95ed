"""Replica groups as users start them: one process each, or each with its own torchrun."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.bad_input_cases import command_line, good_documents, write_dataset
from support.processes import ROOT, TORCHRUN, Job

from megatron.bcd.checkpoint import layout

pytest.importorskip("torchft")


@pytest.fixture
def lighthouse() -> Iterator[str]:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=5000, heartbeat_timeout_ms=1000)
    yield f"127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()


def iteration_of(job: Job) -> int:
    return max((int(number) for number in re.findall(r"iteration +(\d+)/", job.output)), default=0)


def stop(job: Job) -> None:
    """Stop a group like a machine that is taken away; torchrun forwards the signal and reports it in its exit code."""
    job.process.send_signal(signal.SIGTERM)
    job.exit_code()
    assert "stopping after iteration" in job.output and "FAILED" not in job.output, job.output


@pytest.mark.timeout(600)  # starts of the script
@pytest.mark.long  # in one process each: distributed/test_replica_groups.py
def test_a_group_leaves_and_comes_back(tmp_path: Path, lighthouse: str) -> None:
    """A SIGTERM ends one group cleanly, the other goes on alone, and the first joins it again from its state. Both save
    in one folder."""
    flags = ("--train-iters", "1000000", "--eval-iters", "0", "--bcd-steps-per-block", "20", "--outer-interval", "5")
    flags += ("--save", str(tmp_path / "saved"), "--load", str(tmp_path / "saved"), "--save-interval", "500")

    def start(name: str) -> Job:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        if not (folder / "data").exists():
            write_dataset(folder / "data" / "text_document", good_documents())
        words = command_line(*flags, "--lighthouse", lighthouse, "--replica-id", name, num_ranks=2)
        return Job(*TORCHRUN, str(ROOT / "pretrain_gpt_bcd.py"), *words, folder=folder)

    with start("a") as a:
        with start("b") as b:
            for job in (a, b):
                job.wait_for(lambda: "2 replica groups" in a.output and iteration_of(b) > 5)
            stop(b)
        before = iteration_of(a)
        a.wait_for(lambda: "1 replica group," in a.output and iteration_of(a) > before + 20)
        with start("b") as b:
            b.wait_for(lambda: "state of another replica group" in b.output and iteration_of(b) > before + 20)
            stop(b)
            stop(a)
    (newest, *_) = layout.candidates(str(tmp_path / "saved"))
    assert layout.damage(layout.iteration_folder(str(tmp_path / "saved"), newest)) is None
