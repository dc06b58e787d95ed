"""Runs that outlive the page. All that the page knows of a run is in the run's output folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import psutil
from _parser import write_atomically
from _processes import _SCHEDULER, ROOT, failure_reason

LOG, RECORD, EXIT, STOP, LOCK = "log.txt", "board_run.json", "exit_code", "stop_requested", ".board_lock"
LAUNCHER, GENERATE = str(ROOT / "tools" / "launch.py"), str(ROOT / "tools" / "generate.py")
SAMPLES = ".samples.jsonl"
FORMS = {"instruction": "instruction", "chat": "chat", "text": "plain text"}
"""Forms of a prompt, which are flags of tools/generate.py except text, and their labels."""
_LOCKING, _ANSWERING = threading.Lock(), threading.Lock()


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[IO[str] | None]:
    """Lock a folder, or yield None while a run has the lock, which its processes inherit."""
    with _LOCKING, open(out / LOCK, "a", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield lock


def start(out: Path, command: str = "") -> None:
    """Start a command, by default the folder's last one, in a new session. Raises ValueError if one is going."""
    record = {"command": command, "folder": os.getcwd()} if command else _record(out)
    if not record:
        raise ValueError(f"{out}: no run was started there. Start one.")
    _, *words = shlex.split(record["command"].replace("\\\n", " "))
    out.mkdir(parents=True, exist_ok=True)
    with _locked(out) as lock, open(out / LOG, "ab") as log:
        if lock is None:
            raise ValueError(f"{out}: a run is going there. Stop it first, or give another folder.")
        (out / EXIT).unlink(missing_ok=True)
        (out / STOP).unlink(missing_ok=True)
        record["log_start"] = log.tell()
        words = ["sh", "-c", '"$@"; echo $? > "$0"', str((out / EXIT).resolve()), sys.executable, LAUNCHER, *words]
        environment = {name: value for name, value in os.environ.items() if name not in _SCHEDULER}
        files = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "pass_fds": [lock.fileno()]}
        process = subprocess.Popen(words, cwd=record["folder"], env=environment, start_new_session=True, **files)
        text = json.dumps(record | {"pid": process.pid})
        write_atomically(str(out / RECORD), lambda name: Path(name).write_text(text, "utf-8"), flag="output folder")


def stop(out: Path) -> None:
    """Ask the ranks of a run to save and end. Raises ValueError without a run."""
    if not state(out)["is_alive"]:
        raise ValueError(f"{out}: no run is going there.")
    (out / STOP).touch()
    with contextlib.suppress(psutil.NoSuchProcess):
        for launcher in psutil.Process(_record(out)["pid"]).children():
            # not through the launcher, which kills ranks that need more than 30 seconds to save
            ranks = [each for each in launcher.children() if any(word.endswith("_bcd.py") for word in each.cmdline())]
            for process in ranks or [launcher]:
                process.terminate()


def state(out: Path) -> dict[str, Any]:
    """Return the status of a run, its command, its progress and the end of its log."""
    if not (record := _record(out)):
        return {"status": "", "is_alive": False, "command": ""}
    with _locked(out) as lock:
        is_alive = lock is None
    with open(out / LOG, "rb") as file:
        file.seek(max(record["log_start"], os.path.getsize(out / LOG) - 60_000))
        text = file.read().decode("utf-8", "replace")
    code = (out / EXIT).read_text().strip() if (out / EXIT).exists() else ""
    steps = re.findall(r"^iteration +(\d+)/(\d+) .*?([^|]+ left)", text, re.MULTILINE)
    is_at_end, reason = bool(steps) and steps[-1][0] == steps[-1][1], ""
    is_stopped = (out / STOP).exists() and not is_at_end
    if is_alive:
        status = "stopping" if is_stopped else "running" if steps else "starting"
    else:
        status = "stopped" if is_stopped else "finished" if code == "0" else "failed"
    if status == "failed":
        reason = failure_reason(text, int(code)) if code else "was killed, or the machine restarted"
    return {
        "status": status,
        "is_alive": is_alive,
        "command": record["command"],
        "reason": reason,
        "step": [*map(int, steps[-1][:2]), steps[-1][2].strip()] if steps else None,
        "log": "\n".join(text.splitlines()[-14:]),
    }


def _record(out: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads((out / RECORD).read_text(encoding="utf-8")))
    return {}


def answers(metrics: Path) -> list[dict[str, Any]]:
    """Return the answers of a run's model, newest first."""
    with contextlib.suppress(OSError, ValueError):
        return [json.loads(line) for line in metrics.with_suffix(SAMPLES).read_text("utf-8").splitlines()][::-1]
    return []


def ask(metrics: Path, prompt: str, form: str) -> None:
    """Let a run's model continue a prompt in one of FORMS, and keep the answer. Raises ValueError without a model, or
    with the line of tools/generate.py."""
    if form not in FORMS:
        raise ValueError(f"Form {form}: is unknown. Give one of {', '.join(FORMS)}.")
    folder, stem = metrics.parent, metrics.with_suffix("")  # this page's places, and those of examples/finetune.sh
    places = (folder / "hf", Path(f"{stem}-hf"), folder / "checkpoints", stem)
    files = ("config.json", "latest_checkpointed_iteration.txt")
    model = next((each for each in places if any((each / name).exists() for name in files)), None)
    if model is None:
        raise ValueError(f"{metrics}: there is no model beside it yet. Wait for its first checkpoint.")
    words = [sys.executable, GENERATE, f"--model={model}", f"--prompt={prompt}", "--json", "--max-new-tokens", "64"]
    words += [f"--{form}"] * (form != "text") + ["--device=cpu"] * state(folder)["is_alive"]  # training has the card
    with _ANSWERING:
        done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise ValueError((done.stderr.strip().splitlines() or ["tools/generate.py ended without a word"])[-1])
    with open(metrics.with_suffix(SAMPLES), "a", encoding="utf-8") as file:
        file.write(json.dumps(json.loads(done.stdout)[0] | {"model": model.name}) + "\n")
