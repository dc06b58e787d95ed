"""Start training runs from a tool and read what they wrote."""

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
"""Variables of a surrounding job, which child processes must not see."""


class CannotRun(RuntimeError):
    """A run failed; the message gives the reason in one line."""

    def __init__(self, message: str, *, is_out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.is_out_of_memory = is_out_of_memory


def text_commands(folder: Path) -> list[list[str]]:
    """Return two commands (words after `python`) that tokenize the source of Python's standard library by bytes.

    The dataset has the prefix FOLDER/stdlib_text_document.
    """
    text = str(folder / "stdlib.jsonl")
    fetch = ["examples/stdlib_text.py", "--megabytes", "0.6", "--output", text]
    tokenize = ["tools/preprocess_data.py", "--input", text, "--output-prefix", str(folder / "stdlib"), "--append-eod"]
    return [fetch, [*tokenize, "--tokenizer-type", "ByteLevelTokenizer", "--workers", "1"]]


def launcher(num_processes: int) -> list[str]:
    """Return the words that start a script in this many processes."""
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
    """Run a process in `cwd` with additional variables, and kill it with its children however this ends.

    Killing it once `until` returns True counts as success. Raises CannotRun if it fails or exceeds the limit of
    `seconds`.
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
    """Start a process like `run` does; the caller must `kill` it."""
    inherited = {name: value for name, value in os.environ.items() if name not in _SCHEDULER}
    with open(log, "wb") as output:
        return subprocess.Popen(
            argv,
            cwd=cwd,
            env=inherited | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"} | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C must reach this tool only, which then kills its children
        )


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and all its descendants; torchrun starts its ranks in other sessions."""
    import psutil  # tools/check_machine.py says where it is missing

    if process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(process.pid)
            root.suspend()  # or torchrun would restart the ranks that are killed before it
            for child in [*root.children(recursive=True), root]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
    process.wait()


def _failure(code: int, text: str) -> CannotRun:
    if _NO_MEMORY.search(text):
        return CannotRun("out of memory", is_out_of_memory=True)
    return CannotRun(failure_reason(text, code), is_out_of_memory=code in _KILLED)


def failure_reason(log: str, code: int) -> str:
    """Return why a run failed: its error line, or else its last exception or its last line."""
    if code in _KILLED:
        return "was killed: out of memory, or by a signal"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"\S+: error: ", line)]
    raised = [line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception|Failed)\b: ", line)]
    return f"ended with code {code}: {(errors or raised[-1:] or lines[-1:] or ['no output'])[0]}"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file. Raises CannotRun if there is none."""
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise CannotRun(f"its metrics cannot be read ({error})") from None
