"""A workaround for PyTorch 2.13: one device for all gloo groups."""

from __future__ import annotations

import datetime
import functools
import os
from typing import Any


@functools.cache
def share_gloo_device() -> None:
    """Give all gloo groups of this process one device (one per network in GLOO_SOCKET_IFNAME). Permanent; once per
    process, before its first group.

    Each device has a thread that wakes up 100 times a second. Megatron Core creates about twenty groups: idle ranks
    would take a tenth of a core from those that compute.
    """
    from torch.distributed import ProcessGroupGloo

    networks = os.environ.get("GLOO_SOCKET_IFNAME")
    devices = (
        [ProcessGroupGloo.create_device(interface=name) for name in networks.split(",")]
        if networks
        else [ProcessGroupGloo.create_default_device()]
    )
    original = ProcessGroupGloo.__init__

    def init(group: Any, store: Any, rank: int, size: int, timeout: Any = datetime.timedelta(minutes=30)) -> None:
        options = timeout
        if isinstance(timeout, datetime.timedelta):
            options = ProcessGroupGloo._Options()
            options._timeout, options._devices = timeout, devices
            options._threads = 2 * len(devices)  # the default without options
        original(group, store, rank, size, options)

    ProcessGroupGloo.__init__ = init
