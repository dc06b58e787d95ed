"""Many runs of an entry script from one process that has imported everything: a run costs a fork, and no imports.

As a program it is the server: one JSON request per line on stdin, one JSON answer per line on stdout. `ForkedRuns` is
its client. Ranks find what torchrun gives them (environment, agent store, SIGTERM to the others once one has failed).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HUNG = "hung"
CANNOT_MOUNT = 77
"""Exit code of a rank that was to see a read-only folder and may not mount one."""
_LIMIT_SECONDS = 60
_TORCHRUN_POLLS_SECONDS, _POLLS_SECONDS = 0.1, 0.01


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """How one rank ended: exit code (negative: the signal, `HUNG`: killed after 60 s) and what it wrote."""

    code: int | str
    stdout: str
    stderr: str


def said(results: Sequence[RankResult]) -> str:
    """What rank 0 of a run that ended well has said; no rank had anything to say on stderr."""
    assert [(rank.code, rank.stderr) for rank in results] == [(0, "")] * len(results), results
    return results[0].stdout


def assert_refused(results: Sequence[RankResult], *named: str, code: int = 2) -> None:
    """Every rank ended with `code`, and rank 0 alone said one line, with all of `named` in it."""
    told = "\n".join(f"rank {i}: {rank.code}\n{rank.stdout}{rank.stderr}" for i, rank in enumerate(results))
    assert [rank.code for rank in results] == [code] * len(results), told
    assert [rank.stderr for rank in results[1:]] == [""] * (len(results) - 1), told
    (line,) = results[0].stderr.splitlines()
    assert [name for name in named if name not in line] == [], line


def digests(place: Path) -> dict[str, str]:
    """Every path below `place`, with a digest of its bytes where it is a file; who holds a lock is nobody's data."""
    return {
        str(path.relative_to(place)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(place.rglob("*"))
        if path.name != ".lock"
    }


class ForkedRuns:
    """Client: starts the server, with `root` to import from, and stops it on exit."""

    def __init__(self, root: Path) -> None:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, (root, root / "tools"))),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            cwd=root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        argv: Sequence[str],
        *,
        folder: Path,
        num_ranks: int,
        script: str = "pretrain_gpt_bcd",
        read_only: Path | None = None,
    ) -> list[RankResult]:
        """Run `main` of the module `script` with `argv` in `folder`, `read_only` mounted so: the results by rank."""
        assert self._server.stdin is not None and self._server.stdout is not None
        request = {
            "script": script,
            "argv": list(argv),
            "folder": str(folder),
            "num_ranks": num_ranks,
            "read_only": str(read_only) if read_only else None,
        }
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        assert answer, "the server of forked runs is gone"
        return [RankResult(**rank) for rank in json.loads(answer)]

    def __enter__(self) -> ForkedRuns:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that a library prints may get between the answers
    importlib.import_module("megatron.bcd.training.pretrain")  # which scripts import when they run
    generate_flags = importlib.import_module("megatron.bcd.arguments.flags").generate_flags
    generate_flags()  # fills a cache that every fork then has
    gc.collect()
    gc.freeze()  # a fork's garbage collector need not look through what was imported
    for line in sys.stdin:
        request = json.loads(line)
        main = importlib.import_module(request["script"]).main
        with tempfile.TemporaryDirectory() as scratch, _agent_store(request["num_ranks"]) as environment:
            ranks = range(request["num_ranks"])
            pids = [_start(main, rank, request, environment, Path(scratch)) for rank in ranks]
            codes = _wait(pids)
            results = [
                {"code": code} | {name: _read(Path(scratch), name, rank) for name in ("stdout", "stderr")}
                for rank, code in enumerate(codes)
            ]
        answers.write(json.dumps(results) + "\n")
        answers.flush()


def _read(scratch: Path, name: str, rank: int) -> str:
    return (scratch / f"{name}.{rank}").read_text(encoding="utf-8", errors="replace")


@contextlib.contextmanager
def _agent_store(num_ranks: int) -> Iterator[dict[str, str]]:
    """The environment of torchrun's ranks; its store lives in a process of its own, so that this one has no threads."""
    if num_ranks == 1:
        yield {}  # as without torchrun
        return
    port_in, port_out = os.pipe()
    end_in, end_out = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(end_out)
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(port_out, str(store.port).encode())
        os.read(end_in, 1)
        os._exit(0)
    os.close(end_in)
    try:
        yield {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": os.read(port_in, 16).decode(),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_RUN_ID": "none",
        }
    finally:
        for end in (end_out, port_in, port_out):
            os.close(end)
        os.waitpid(pid, 0)


def _start(main: Any, rank: int, request: dict[str, Any], environment: dict[str, str], scratch: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(scratch / f"{name}.{rank}", os.O_WRONLY | os.O_CREAT), number)
    code: Any = 1
    try:
        os.environ.update(environment, **({"RANK": str(rank), "LOCAL_RANK": str(rank)} if environment else {}))
        os.chdir(request["folder"])
        sys.argv = [f"{request['script']}.py", *request["argv"]]
        if request["read_only"]:
            _mount_read_only(request["read_only"])
        code = main(*([request["argv"]] if inspect.signature(main).parameters else [])) or 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _mount_read_only(folder: str) -> None:
    """Let this process alone see `folder` as on a read-only disk, which stops root too."""
    new_mounts, new_user = 0x00020000, 0x10000000
    bind, read_only, remount, private_below = 4096, 1, 32, 0x4000 | (1 << 18)
    libc = ctypes.CDLL(None, use_errno=True)
    place = folder.encode()
    steps = (
        lambda: libc.unshare(new_mounts if os.getuid() == 0 else new_mounts | new_user),
        lambda: libc.mount(None, b"/", None, private_below, None),
        lambda: libc.mount(place, place, None, bind, None),
        lambda: libc.mount(place, place, None, bind | remount | read_only, None),
    )
    if any(step() for step in steps):
        os._exit(CANNOT_MOUNT)


def _wait(pids: Sequence[int]) -> list[int | str]:
    """Exit codes; as torchrun does, which looks ten times a second, the others get SIGTERM when one rank has failed."""
    codes: dict[int, int | str] = {}
    deadline = time.monotonic() + _LIMIT_SECONDS
    failed_at: float | None = None
    while True:
        for pid in set(pids) - set(codes):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[pid] = HUNG
        if len(codes) == len(pids):
            return [codes[pid] for pid in pids]
        if any(codes.values()):
            failed_at = failed_at or time.monotonic()
            if time.monotonic() > failed_at + _TORCHRUN_POLLS_SECONDS:
                for pid in set(pids) - set(codes):
                    os.kill(pid, signal.SIGTERM)
                failed_at = time.monotonic()
        time.sleep(_POLLS_SECONDS)


if __name__ == "__main__":
    _serve()
