"""Ctrl-C and other signals at every stage of a run, as a terminal or a scheduler sends them: a clean end in seconds."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

from support.bad_input_cases import command_line
from support.processes import ROOT, Job

from megatron.bcd.checkpoint import layout


def handles(job: Job, number: signal.Signals) -> bool:
    """Return True if the process has a handler for the signal."""
    status = Path(f"/proc/{job.process.pid}/status").read_text()
    return bool(int(re.findall(r"SigCgt:\s*(\w+)", status)[0], 16) >> (number - 1) & 1)


def imports_torch(job: Job) -> bool:
    return "libtorch" in Path(f"/proc/{job.process.pid}/maps").read_text()


def test_ctrl_c_under_the_launcher(workplace: Path) -> None:
    """Ctrl-C ends a run under the launcher, also during an evaluation and while readers run, with a complete checkpoint
    and a last line that names SIGINT. The launcher forwards the signal: the same Ctrl-C arrives twice."""
    flags = ("--eval-iters", "1000000", "--eval-interval", "3", "--train-iters", "30", "--save", "saved")
    words = command_line(*flags, "--num-workers", "1", num_ranks=2)
    launcher = (str(ROOT / "tools" / "launch.py"), "--standalone", "--nproc-per-node", "2")
    with Job(*launcher, str(ROOT / "pretrain_gpt_bcd.py"), *words, folder=workplace) as run:
        run.wait_for(lambda: re.search(r"iteration +3/", run.output))
        time.sleep(0.5)  # the evaluation begins
        for process in run.alive():
            process.send_signal(signal.SIGINT)
        assert run.exit_code() == 128 + signal.SIGINT, run.output
    assert "SIGINT" in run.output.splitlines()[-1] and "Traceback" not in run.output
    assert layout.candidates(str(workplace / "saved")) == [3]
    assert layout.damage(layout.iteration_folder(str(workplace / "saved"), 3)) is None


def test_while_it_imports(workplace: Path) -> None:
    """Ctrl-C during the imports ends the run at once, without a traceback."""
    words = command_line("--save", "saved", "--train-iters", "1000000")
    with Job(str(ROOT / "pretrain_gpt_bcd.py"), *words, folder=workplace) as run:
        run.wait_for(lambda: imports_torch(run) and not handles(run, signal.SIGINT))
        run.process.send_signal(signal.SIGINT)
        assert run.exit_code() == -signal.SIGINT
    assert run.output == "" and not (workplace / "saved").exists()
