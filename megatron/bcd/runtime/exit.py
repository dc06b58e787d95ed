"""Ends all ranks with one line: exit code 2 where flags, files or machine don't fit, 1 by a signal before training."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C, and what Slurm and spot instances send some time before they end a job."""
_PATIENCE_SECONDS = 30.0
_ending = threading.Lock()


@contextlib.contextmanager
def exit_on_error(*kinds: type[Exception], prog: str) -> Iterator[None]:
    """Turn an error of the given kinds, on any rank, into one line on stderr and exit code 2 of every rank.

    Ranks without an error end too, also those that wait in a collective.
    """
    is_over = threading.Event()
    if _world_size() > 1:
        import torch.distributed  # noqa: F401 (for the thread; scripts set their signal handlers before they import it)

        threading.Thread(target=_end_with_the_others, args=(is_over,), daemon=True).start()
    try:
        yield
    except kinds as error:
        end_all_ranks(f"{prog}: error: {' '.join(str(error).split())}", code=2)
    finally:
        is_over.set()


@contextlib.contextmanager
def ending_on_signals(*, prog: str) -> Iterator[None]:
    """Inside, a signal of `SIGNALS` ends every rank with exit code 1, also one that waits in a library's C code.

    Handlers that are set inside, such as those of the training loop, take over while they are set. Only in the main
    thread.
    """
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    before = {number: signal.signal(number, _leave_to_the_thread) for number in SIGNALS}
    # a Python handler runs only when the main thread is back in Python; this is written at once
    wakeup = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_end_on_signal, args=(receiver, prog), name="signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        sender.close()


def _leave_to_the_thread(number: int, frame: FrameType | None) -> None:
    pass


def _end_on_signal(receiver: socket.socket, prog: str) -> None:
    while received := receiver.recv(1):
        if received[0] in SIGNALS and signal.getsignal(received[0]) is _leave_to_the_thread:
            name = signal.Signals(received[0]).name
            end_all_ranks(f"{prog}: stopped by {name} outside of training; checkpoints are as they were", code=1)


def end_all_ranks(line: str, *, code: int) -> NoReturn:
    """End this process, and the others that are inside `exit_on_error`, after `line` from rank 0.

    Waits up to `_PATIENCE_SECONDS` for every rank: torchrun would end the slower ones with its own signal. If rank 0
    does not arrive, the rank with the error prints it.
    """
    _ending.acquire()  # never released: one of this rank's two threads prints
    ctypes.CDLL(None).signal(int(signal.SIGTERM), ctypes.c_void_p(1))  # SIG_IGN; Python's own is for the main thread
    rank, world_size = int(os.environ.get("RANK", "0")), _world_size()
    report_to_torchrun(line)
    if rank == 0:
        print(line, file=sys.stderr, flush=True)
    if world_size > 1 and not _all_ranks_end(f"{code} {line}", world_size) and rank != 0:
        print(f"{line} (seen by rank {rank} only)", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)  # a process group whose other ranks wait in a collective can't be torn down


def report_to_torchrun(line: str) -> None:
    """Make torchrun end its report of this failed rank with `line`. Without torchrun do nothing."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        cause = {"message": line, "extraInfo": {"py_callstack": line, "timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": cause}, file)


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def torchruns_store(timeout: datetime.timedelta) -> Any:
    """The store that torchrun keeps over restarts; None with another launcher. torch has to be imported."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # an import would wait while the main thread imports it
    return sys.modules["torch.distributed"].TCPStore(*address, is_master=False, timeout=timeout)


def _errors() -> Any:
    """The part of torchrun's store for messages of `exit_on_error` in this start of the workers."""
    store = torchruns_store(datetime.timedelta(seconds=_PATIENCE_SECONDS))
    if store is None:
        raise RuntimeError("no torchrun here")  # before the process group there is no other store
    prefix = f"bcd/error/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return sys.modules["torch.distributed"].PrefixStore(prefix, store)


def _all_ranks_end(message: str, world_size: int) -> bool:
    """Send the message to the other ranks; whether all of them arrive here in time."""
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
    except Exception:  # without a store there is nothing to wait for
        return True


def _end_with_the_others(is_over: threading.Event) -> None:
    """Until `is_over`, poll whether another rank has failed; if so, end this one."""
    try:
        store = _errors()
        while not is_over.wait(0.1):
            if store.check(["message"]):
                code, line = store.get("message").decode().split(" ", 1)
                end_all_ranks(line, code=int(code))
    except Exception:  # no store, or torchrun has ended
        return
