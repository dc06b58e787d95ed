"""Many runs of an entry script, forked from one process that has imported everything, so that runs import nothing.

`ForkedRuns` is the client. Its server is forked like the ranks of `dist.World`. The ranks of runs get what torchrun
provides: environment, agent store, and SIGTERM after another rank has failed.
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
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support.dist import warm_context

HUNG = "hung"
CANNOT_MOUNT = 77
"""Exit code of a rank that should mount a folder read-only but may not."""
_LIMIT_SECONDS = 60
_TORCHRUN_POLLS_SECONDS, _POLLS_SECONDS = 0.1, 0.01


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """How one rank ended: exit code (negative: a signal, `HUNG`: killed after 60 s) and its output."""

    code: int | str
    stdout: str
    stderr: str


def said(results: Sequence[RankResult]) -> str:
    """Return rank 0's output of a successful run, and check that stderr is empty on all ranks."""
    assert [(rank.code, rank.stderr) for rank in results] == [(0, "")] * len(results), results
    return results[0].stdout


def assert_refused(results: Sequence[RankResult], *named: str, code: int = 2) -> None:
    """Check that every rank ended with `code`, and only rank 0 printed one line, which has all of `named`."""
    told = "\n".join(f"rank {i}: {rank.code}\n{rank.stdout}{rank.stderr}" for i, rank in enumerate(results))
    assert [rank.code for rank in results] == [code] * len(results), told
    assert [rank.stderr for rank in results[1:]] == [""] * (len(results) - 1), told
    (line,) = results[0].stderr.splitlines()
    assert [name for name in named if name not in line] == [], line


def digests(place: Path) -> dict[str, str]:
    """Return every path below `place` with a digest of its bytes if it is a file; lock files are left out."""
    return {
        str(path.relative_to(place)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(place.rglob("*"))
        if path.name != ".lock"
    }


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without values that depend on the machine; the last may be incomplete."""
    names = ("iteration", "consumed_samples", "loss", "grad_norm", "learning_rate", "block", "phase")
    names += ("validation_loss", "test_loss")
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    whole = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [{name: line[name] for name in names if name in line} for line in whole]


class ForkedRuns:
    """The client: starts the server, which imports from `root`, and stops it on exit."""

    def __init__(self, root: Path) -> None:
        context = warm_context()
        self._connection, theirs = context.Pipe()
        self._server = context.Process(target=_serve, args=(theirs, root))
        self._server.start()
        theirs.close()

    def run(
        self,
        argv: Sequence[str],
        *,
        folder: Path,
        num_ranks: int,
        script: str = "pretrain_gpt_bcd",
        read_only: Path | None = None,
        killed_at: tuple[Path, int] | None = None,
    ) -> list[RankResult]:
        """Run `main` of the module `script` with `argv` in `folder`; `read_only` is mounted read-only. All ranks are
        killed when a file has as many lines as `killed_at` says. Return the results by rank."""
        request = {
            "script": script,
            "argv": list(argv),
            "folder": str(folder),
            "num_ranks": num_ranks,
            "read_only": str(read_only) if read_only else None,
            "killed_at": killed_at,
        }
        self._connection.send(request)
        results: list[RankResult] = self._connection.recv()
        return results

    def __enter__(self) -> ForkedRuns:
        return self

    def __exit__(self, *exception: object) -> None:
        self._connection.close()
        self._server.join()


def _serve(connection: Connection, root: Path) -> None:
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    MockGPTLowLevelDataset.size = 100_000  # Megatron Core's, which `worlds` has changed
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (root, root / "tools")))
    os.chdir(root)
    importlib.import_module("megatron.bcd.training.pretrain")  # modules that scripts import when they run
    gc.collect()
    gc.freeze()  # exempts the imported modules from the forks' garbage collection
    while True:
        try:
            request = connection.recv()
        except EOFError:
            os._exit(0)  # a normal interpreter exit takes seconds
        main = importlib.import_module(request["script"]).main
        with tempfile.TemporaryDirectory() as scratch, _agent_store(request["num_ranks"]) as environment:
            ranks = range(request["num_ranks"])
            pids = [_start(main, rank, request, environment, Path(scratch)) for rank in ranks]
            codes = _wait(pids, request["killed_at"])
            results = [
                RankResult(code=code, **{name: _read(Path(scratch), name, rank) for name in ("stdout", "stderr")})
                for rank, code in enumerate(codes)
            ]
        connection.send(results)


def _read(scratch: Path, name: str, rank: int) -> str:
    return (scratch / f"{name}.{rank}").read_text(encoding="utf-8", errors="replace")


@contextlib.contextmanager
def _agent_store(num_ranks: int) -> Iterator[dict[str, str]]:
    """Set the environment of torchrun's ranks; a separate process holds the store, so this one has no threads."""
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
    """Mount `folder` read-only for this process only, which also stops root from writing."""
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


def _wait(pids: Sequence[int], killed_at: tuple[Path, int] | None) -> list[int | str]:
    """Return the exit codes. After a rank fails, send the others SIGTERM, as torchrun does ten times a second."""
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
        if killed_at and killed_at[0].read_bytes().count(b"\n") >= killed_at[1]:
            killed_at = None
            for pid in set(pids) - set(codes):
                os.kill(pid, signal.SIGKILL)
        if len(codes) == len(pids):
            return [codes[pid] for pid in pids]
        if any(codes.values()):
            failed_at = failed_at or time.monotonic()
            if time.monotonic() > failed_at + _TORCHRUN_POLLS_SECONDS:
                for pid in set(pids) - set(codes):
                    os.kill(pid, signal.SIGTERM)
                failed_at = time.monotonic()
        time.sleep(_POLLS_SECONDS)
