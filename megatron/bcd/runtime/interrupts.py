"""Signals that end a process before it trains: one line from rank 0, within seconds."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType

from megatron.bcd.runtime.exit import end_all_ranks

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C, and what Slurm and spot instances send some time before they end a job."""


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
