"""Training runs that a tool starts, and what they wrote."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {"gpt": "pretrain_gpt_bcd.py", "llama": "pretrain_llama_bcd.py"}
_NO_MEMORY = re.compile(r"OutOfMemoryError|out of memory|can't allocate memory|Cannot allocate memory", re.IGNORECASE)
_KILLED = (-9, 137)
_SCHEDULER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of a job that this tool runs in: they are not for what it starts."""


class CannotRun(RuntimeError):
    """A run did not end well; the message is one line with the reason."""

    def __init__(self, message: str, *, for_want_of_memory: bool = False) -> None:
        super().__init__(message)
        self.for_want_of_memory = for_want_of_memory


def text_commands(folder: Path) -> list[list[str]]:
    """Words after `python` that make an indexed dataset of Python's standard library by bytes, with the prefix
    FOLDER/stdlib_text_document."""
    text = str(folder / "stdlib.jsonl")
    fetch = ["examples/stdlib_text.py", "--megabytes", "0.6", "--output", text]
    tokenize = ["tools/preprocess_data.py", "--input", text, "--output-prefix", str(folder / "stdlib"), "--append-eod"]
    return [fetch, [*tokenize, "--tokenizer-type", "ByteLevelTokenizer", "--workers", "1"]]


def launcher(num_processes: int) -> list[str]:
    """What comes before a script, so that so many processes run it."""
    if num_processes == 1:
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]


def run(
    argv: Sequence[str],
    log: Path,
    *,
    cwd: Path = ROOT,
    threads: int = 1,
    environment: Mapping[str, str] | None = None,
    seconds: float = math.inf,
    until: Callable[[], bool] = lambda: False,
) -> None:
    """Start, wait, and leave no process, however it ends. Raises CannotRun unless it ends well.

    `cwd`: by default the project's root. `environment`: variables beside those of this process. `seconds`: a limit.
    `until`: as soon as it is true everything is killed, and that is a good end.
    """
    deadline = time.monotonic() + seconds
    process = start(argv, log, cwd=cwd, threads=threads, environment=environment)
    try:
        while process.poll() is None:
            if until():
                return
            if time.monotonic() > deadline:
                raise CannotRun(f"did not end within {seconds:.0f} s; see {log}")
            time.sleep(0.01)
    finally:
        kill(process)
    if process.returncode:
        raise _failure(process.returncode, log.read_text(encoding="utf-8", errors="replace"))


def start(
    argv: Sequence[str], log: Path, *, cwd: Path = ROOT, threads: int = 1, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """As `run` starts it; `kill` is the caller's."""
    kept = {name: value for name, value in os.environ.items() if name not in _SCHEDULER}
    with open(log, "wb") as output:
        return subprocess.Popen(
            argv,
            cwd=cwd,
            env=kept | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"} | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # an interrupt at the terminal is for this tool: it ends them
        )


def kill(process: subprocess.Popen[bytes]) -> None:
    """It and all that it has started; torchrun's ranks have sessions of their own."""
    import psutil  # tools/check_machine.py says where it is missing

    if process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(process.pid)
            root.suspend()  # torchrun would start anew what is killed before it
            for one in [*root.children(recursive=True), root]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
    process.wait()


def _failure(code: int, text: str) -> CannotRun:
    if _NO_MEMORY.search(text):
        return CannotRun("out of memory", for_want_of_memory=True)
    return CannotRun(last_words(text, code), for_want_of_memory=code in _KILLED)


def last_words(log: str, code: int) -> str:
    """Why a run failed: its error line, else the last exception, else its last line."""
    if code in _KILLED:
        return "was killed, for want of memory or by somebody"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    said = [line for line in lines if re.match(r"\S+: error: ", line)]
    raised = [line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception|Failed)\b: ", line)]
    return f"ended with code {code}: {(said or raised[-1:] or lines[-1:] or ['without a word'])[0]}"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file. Raises CannotRun where a run has left none."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise CannotRun(f"its metrics cannot be read ({error})") from None
    return lines
