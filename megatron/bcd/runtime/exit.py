"""End all ranks with one line of text, and exit code 2 if flags, files or the machine do not fit."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C, and the signals that Slurm and spot instances send some time before they end a job."""
_PATIENCE_SECONDS = 30.0
_ending = threading.Lock()


@contextlib.contextmanager
def exit_on_error(*kinds: type[Exception], prog: str) -> Iterator[None]:
    """Turn an error of these kinds, on any rank, into one line on stderr and exit code 2 of every rank.

    Ranks without an error exit too, even if they are waiting in a collective.
    """
    is_over = threading.Event()
    if _world_size() > 1:
        import torch.distributed  # noqa: F401 (for the thread; scripts set their signal handlers before they import it)

        threading.Thread(target=_end_with_the_others, args=(is_over,), daemon=True).start()
    try:
        yield
    except kinds as error:
        end_all_ranks(f"{prog}: error: {' '.join(str(error).split())}")
    finally:
        is_over.set()


def end_all_ranks(line: str) -> NoReturn:
    """Print `line` on rank 0, and end this process and all others that are inside `exit_on_error` with code 2.

    Wait up to `_PATIENCE_SECONDS` for every rank, because torchrun would kill the slower ones. If rank 0 does not
    arrive, the rank with the error prints the line.
    """
    _ending.acquire()  # never released: two threads of a rank may get here, and only one shall print
    # torchrun sends SIGTERM when the first rank ends: ignore it (1 is SIG_IGN) by a C call, because Python's own
    # signal.signal works in the main thread only
    ctypes.CDLL(None).signal(int(signal.SIGTERM), ctypes.c_void_p(1))
    rank, world_size = int(os.environ.get("RANK", "0")), _world_size()
    report_to_torchrun(line)
    if rank == 0:
        print(line, file=sys.stderr, flush=True)
    if world_size > 1 and not _all_ranks_end(line, world_size) and rank != 0:
        print(f"{line} (seen by rank {rank} only)", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(2)  # an orderly exit would hang on process groups whose other ranks wait in a collective


def report_to_torchrun(line: str) -> None:
    """Make torchrun's report of this failed rank end with `line`."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        cause = {"message": line, "extraInfo": {"py_callstack": line, "timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": cause}, file)


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def torchrun_store(timeout: datetime.timedelta) -> Any:
    """Return the store that torchrun keeps over restarts, or None with another launcher. Import torch first."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # an import statement would block while the main thread is importing torch
    return sys.modules["torch.distributed"].TCPStore(*address, is_master=False, timeout=timeout)


def _errors() -> Any:
    """Return the namespace of torchrun's store for errors in this start of the workers."""
    store = torchrun_store(datetime.timedelta(seconds=_PATIENCE_SECONDS))
    if store is None:
        raise RuntimeError("no torchrun")  # before the process group exists there is no other store
    prefix = f"bcd/error/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return sys.modules["torch.distributed"].PrefixStore(prefix, store)


def _all_ranks_end(message: str, world_size: int) -> bool:
    """Send the message to the other ranks. Return whether all of them arrive here in time."""
    try:
        store = _errors()
        store.set("message", message)
        store.add("ranks", 1)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while store.add("ranks", 0) < world_size:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True
    except Exception:  # without a store there are no other ranks to wait for
        return True


def _end_with_the_others(is_over: threading.Event) -> None:
    """Poll until `is_over` whether another rank has failed. If so, end this one."""
    try:
        store = _errors()
        while not is_over.wait(0.1):
            if store.check(["message"]):
                end_all_ranks(store.get("message").decode())
    except Exception:  # there is no store, or torchrun has ended
        return
