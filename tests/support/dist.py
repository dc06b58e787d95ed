"""Worlds: several ranks that stay alive and run one function after another.

Importing PyTorch and Megatron Core takes seconds in every process, so a test session starts one world per size and
sends it functions (`World.run`). Every function runs on all ranks at once, in a process group. The results are returned
by rank, and an exception on any rank is raised in the test with that rank's traceback.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

TIMEOUT_SECONDS = 240.0  # shorter than pytest's limit, so that a hanging world is ended here and shows where it hangs
MAX_THREADS = 400  # gloo leaks threads with every set of groups; a world with this many is restarted
_GRACE_SECONDS = 5.0  # time for the other ranks to fail after the first one has


Answer = tuple[bool, bytes, int]
"""Success, pickled result or traceback, and the number of the rank's threads."""


class RankError(AssertionError):
    """A rank raised, died or did not answer; the message has the output of each rank."""


_STARTING = threading.Lock()
"""Several threads may start worlds, but this process has only one environment and one forkserver."""


def warm_context() -> multiprocessing.context.ForkServerContext:
    """Return a context whose processes are forked from one that has imported `support.imported`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.imported"])
    # the server keeps its search path, and must not initialise CUDA, which forks could not use then
    variables = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    with mock.patch.dict(os.environ, variables):
        forkserver.ensure_running()
    return context


class World:
    """`size` processes with one process group. They start at the first `run` and after a failure."""

    def __init__(self, size: int, *, backend: str | None = None, **environment: str) -> None:
        """Prepare a world of `size` ranks. `backend` is by default the session's --backend;
        `environment` holds variables of the ranks."""
        self.size = size
        backend = backend or os.environ.get("BCD_TEST_BACKEND", "gloo")
        self._environment = environment | {"BCD_TEST_BACKEND": backend}
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._store: Any = None

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT_SECONDS, **kwargs: Any
    ) -> list[Any]:
        """Run `function(*args, **kwargs)` on every rank and return the results by rank.

        `function` must be defined at module level, because the ranks find it by file and name. Arguments and results
        are pickled, so results cannot have types of the test's file.

        Raises:
            RankError: a rank raised, died, or was silent for `timeout` seconds. The world is then ended.
        """
        with _STARTING:
            if not self._processes:
                self._start()
        call = pickle.dumps((function.__code__.co_filename, function.__qualname__, args, kwargs))
        for connection in self._connections:
            connection.send_bytes(call)
        answers = self._collect(time.monotonic() + timeout)
        if all(answer is not None and answer[0] for answer in answers):
            if max(answer[2] for answer in answers if answer is not None) > MAX_THREADS:
                self.close()
            return [pickle.loads(answer[1]) for answer in answers if answer is not None]
        message = f"{function.__name__} failed\n" + "\n".join(
            self._describe(rank, answer) for rank, answer in enumerate(answers) if answer is None or not answer[0]
        )
        self.close()
        raise RankError(message)

    def close(self) -> None:
        """End all ranks and the processes that they started, such as Megatron Core's checkpoint writers."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(_GRACE_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        self._processes, self._connections, self._store = [], [], None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        from torch.distributed import TCPStore

        # this process owns the store, which takes a free port: no rank can use a port before it is open
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory(prefix="world_")
        atexit.register(self.close)  # daemons may not start processes, so ranks are none
        context = warm_context()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.size),
                "LOCAL_WORLD_SIZE": str(self.size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "OMP_NUM_THREADS": "1",
                **self._environment,
            }
            process = context.Process(target=_serve, args=(theirs, environment, self._log(rank)))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _log(self, rank: int) -> str:
        assert self._folder is not None
        return os.path.join(self._folder.name, f"rank_{rank}.log")

    def _collect(self, deadline: float) -> list[Answer | None]:
        """Return the answers by rank; None for a rank that died or did not answer."""
        answers: list[Answer | None] = [None] * self.size
        waiting = {id(connection): rank for rank, connection in enumerate(self._connections)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait([self._connections[rank] for rank in waiting.values()], timeout=left):
                rank = waiting.pop(id(connection))
                with contextlib.suppress(EOFError, OSError):
                    answers[rank] = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                answer = answers[rank]
                if answer is None or not answer[0]:
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        return answers

    def _describe(self, rank: int, answer: Answer | None) -> str:
        if answer is not None:
            return f"--- rank {rank} of {self.size} raised\n{answer[1].decode()}"
        process = self._processes[rank]
        process.join(1)  # until its exit code is available
        state = "did not answer" if process.exitcode is None else f"died with exit code {process.exitcode}"
        log = Path(self._log(rank)).read_text(errors="replace")[-2000:]
        return f"--- rank {rank} of {self.size} {state}; the end of its output:\n{log}"


def _serve(connection: Connection, environment: dict[str, str], log: str) -> None:
    """Run the functions that a rank receives and answer, until the world closes the connection."""
    os.setpgid(0, 0)
    os.environ.update(environment)
    if "EMU_LATE" in environment:
        sys.modules["emulated_kernels"].observe()
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    while True:
        try:
            path, name, args, kwargs = pickle.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)  # nothing outlives the world, and a normal interpreter exit takes seconds
        try:
            is_success, content = True, pickle.dumps(_import_function(path, name)(*args, **kwargs))
        except BaseException:
            is_success, content = False, traceback.format_exc().encode()
        answer: Answer = (is_success, content, len(os.listdir("/proc/self/task")))
        connection.send_bytes(pickle.dumps(answer))


def _import_function(path: str, name: str) -> Callable[..., Any]:
    """Return the function `name` of the file `path`, which is imported once under a unique name."""
    module_name = "rank_" + path.replace(os.sep, "_").removesuffix(".py")
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return getattr(module, name)
