"""A test that is only collected by name: it starts a process in a new session, stops it, and waits."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path


def test_that_is_interrupted() -> None:
    """See tests/e2e/test_signals.py."""
    child = subprocess.Popen(["sleep", "100"], start_new_session=True)
    child.send_signal(signal.SIGSTOP)
    note = Path(os.environ["PID_FILE"])
    note.with_suffix(".new").write_text(str(child.pid))
    note.with_suffix(".new").rename(note)
    time.sleep(100)
