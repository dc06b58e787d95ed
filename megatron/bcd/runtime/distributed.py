"""Process groups: the rendezvous under torchrun, the backend, and Megatron Core's parallel groups."""

from __future__ import annotations

import datetime
import os
import time
import uuid
from typing import Any

import torch

from megatron.bcd.runtime import cpu, device
from megatron.bcd.runtime.offload import patch_offload


def initialize(*, backend: str, timeout_minutes: int, tensor_size: int, pipeline_size: int) -> None:
    """Join the process group that torchrun announces and cut it into Megatron Core's parallel groups.

    Without torchrun's environment this is a world of one process.

    Raises:
        ValueError: there are fewer GPUs on this node than processes, or NCCL is asked for without a GPU.
    """
    from megatron.core import parallel_state

    patch_offload()
    if backend == "auto":
        backend = "nccl" if device.has_cuda() else "gloo"
    if backend == "nccl" and not device.has_cuda():
        raise ValueError("--distributed-backend nccl needs a GPU and this machine shows none; use gloo or auto")
    if backend == "gloo" and device.has_cuda():
        raise ValueError(
            "--distributed-backend gloo is for CPUs and this machine shows a GPU; use nccl or auto, or hide the "
            "GPU with CUDA_VISIBLE_DEVICES="
        )
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device.has_cuda():
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"--nproc-per-node asks for at least {local_rank + 1} processes on this node and it has "
                f"{torch.cuda.device_count()} GPU(s); start one process per GPU"
            )
        torch.cuda.set_device(local_rank)
    else:
        cpu.patch_megatron_core()
        cpu.keep_freed_memory()
    if backend == "gloo":
        share_gloo_device()
    if not torch.distributed.is_initialized():
        timeout = datetime.timedelta(minutes=timeout_minutes)
        torch.distributed.init_process_group(backend, timeout=timeout, **_rendezvous(timeout))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_size,
        pipeline_model_parallel_size=pipeline_size,
        distributed_timeout_minutes=timeout_minutes,
    )


def share_gloo_device() -> None:
    """Let all of this process's gloo groups use one device (one for each network that GLOO_SOCKET_IFNAME names); to be
    called before the first group is made.

    Each device has a thread that wakes up 100 times a second, and Megatron Core makes some twenty groups: idle ranks
    would take a tenth of a core from those that compute.
    """
    from torch.distributed import ProcessGroupGloo

    if hasattr(ProcessGroupGloo, "bcd_shared_devices"):
        return
    networks = os.environ.get("GLOO_SOCKET_IFNAME")
    ProcessGroupGloo.bcd_shared_devices = (
        [ProcessGroupGloo.create_device(interface=name) for name in networks.split(",")]
        if networks
        else [ProcessGroupGloo.create_default_device()]
    )
    original = ProcessGroupGloo.__init__

    def make(group: Any, store: Any, rank: int, size: int, timeout: Any = datetime.timedelta(minutes=30)) -> None:
        options = timeout
        if isinstance(timeout, datetime.timedelta):
            options = ProcessGroupGloo._Options()
            options._timeout, options._devices = timeout, ProcessGroupGloo.bcd_shared_devices
            options._threads = 2 * len(options._devices)  # what it takes without options
        original(group, store, rank, size, options)

    ProcessGroupGloo.__init__ = make


_start = 1
"""Which start of these ranks this is, the same on all of them; torchrun's own count differs between nodes."""


def is_restart() -> bool:
    """Whether torchrun has started these ranks before; after `initialize`, the same on every rank."""
    return _start > 1


def _rendezvous(timeout: datetime.timedelta) -> dict[str, Any]:
    """Where the ranks meet: what `init_process_group` can't find out by itself, or what it would get wrong."""
    if "RANK" not in os.environ:
        return {"rank": 0, "world_size": 1, "store": torch.distributed.HashStore()}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = torch.distributed.TCPStore(*address, is_master=False, timeout=timeout)
    global _start
    _start = start = number_of_start(store, rank=rank, world_size=world_size, timeout=timeout)
    return {"rank": rank, "world_size": world_size, "store": torch.distributed.PrefixStore(f"bcd/start {start}", store)}


def number_of_start(store: Any, *, rank: int, world_size: int, timeout: datetime.timedelta) -> int:
    """A number that all ranks share and that no earlier start of them had.

    torchrun keeps its store over restarts (pytorch issue 135712): a rank would find the address of one that is gone.
    Its restart count does not tell starts apart, because nodes count for themselves. So rank 0 draws a number, and
    welcomes the others, each by a name that it has for this start only: whoever is welcomed knows the newest number.

    Raises:
        RuntimeError: not all ranks came in time.
    """
    if rank == 0:
        start = store.add("bcd/starts", 1)
        for other in range(1, world_size):
            name = store.get(f"bcd/start {start}/rank {other}").decode()
            store.set(f"bcd/start {start}/welcome {name}", "")
        return start
    name, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        start = store.add("bcd/starts", 0)
        store.set(f"bcd/start {start}/rank {rank}", name)
        time.sleep(0.05)
        if store.check([f"bcd/start {start}/welcome {name}"]):
            return start
    raise RuntimeError(f"rank {rank} has waited {timeout} for rank 0 to start")
