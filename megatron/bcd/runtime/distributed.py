"""Process groups: the rendezvous under torchrun, the backend, and Megatron Core's parallel groups."""

from __future__ import annotations

import datetime
import os
import time
import uuid
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from megatron.bcd.runtime import collectives, device, packages
from megatron.bcd.runtime.compat import cpu, megatron_core, pytorch
from megatron.bcd.runtime.exit import torchruns_store

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""CUDA's queues to a GPU. With one, kernels start in the order of their launch: with tensor parallelism Megatron Core
counts on that to overlap communication with computation, on GPUs before Blackwell. A value that is set stays."""


MOST_CTAS = 2
"""Of a group for messages that wait: thread blocks of NCCL's kernels, each of which holds a multiprocessor."""


def initialize(
    *,
    backend: str,
    timeout_minutes: int,
    tensor_size: int,
    pipeline_size: int,
    context_size: int = 1,
    hierarchical_context_sizes: Sequence[int] | None = None,
) -> bool:
    """Join the process group of torchrun's environment and create Megatron Core's parallel groups.

    Without that environment the world is this process. Returns whether torchrun has started these ranks before, the
    same on every rank.

    Raises:
        ValueError: fewer GPUs on this node than processes, GPUs that are hidden from some processes, ranks that don't
            know their number on their node, or a backend that does not fit the machine.
    """
    from megatron.core import parallel_state

    if tensor_size > 1:  # read when CUDA starts
        os.environ.setdefault(CONNECTIONS, "1")
    megatron_core.patch_optimizer_offload()
    megatron_core.patch_norm_recomputation()
    megatron_core.patch_grad_norm()
    if backend == "auto":
        backend = "nccl" if device.has_cuda() else "gloo"
    if backend == "nccl" and not device.has_cuda():
        raise ValueError("--distributed-backend nccl needs a GPU and this machine shows none; use gloo or auto")
    if backend == "gloo" and device.has_cuda():
        raise ValueError(
            "--distributed-backend gloo is for CPUs and this machine shows a GPU; use nccl or auto, or hide the "
            "GPU with CUDA_VISIBLE_DEVICES="
        )
    if device.has_cuda():
        torch.cuda.set_device(_own_gpu())
        if packages.optimizer_implementation() == packages.PYTORCH_OPTIMIZER:
            megatron_core.patch_adam()
    else:
        cpu.patch_megatron_core()
    if backend == "gloo":
        pytorch.share_gloo_device()
    start = 1
    if not torch.distributed.is_initialized():
        timeout = datetime.timedelta(minutes=timeout_minutes)
        start, arguments = _rendezvous(timeout)
        torch.distributed.init_process_group(backend, timeout=timeout, **arguments)
    # a bound device would give messages of the pipeline's links and batches one communicator, and one order
    warnings.filterwarnings("ignore", r"barrier\(\): using the device under current context")
    assert torch.distributed.group.WORLD.bound_device_id is None, "no device is bound to the process group"
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_size,
        pipeline_model_parallel_size=pipeline_size,
        context_parallel_size=context_size,
        hierarchical_context_parallel_sizes=None
        if hierarchical_context_sizes is None
        else list(hierarchical_context_sizes),
        distributed_timeout_minutes=timeout_minutes,
    )
    return start > 1


def group_for_waiting(
    group: torch.distributed.ProcessGroup, *, timeout_minutes: int | None = None
) -> torch.distributed.ProcessGroup:
    """A group of the same ranks for messages that are received long before they are sent. A collective over all ranks.

    Under NCCL such a receive is a kernel that spins: it gets at most MOST_CTAS of the multiprocessors. Without a GPU it
    is the group itself.
    """
    if not device.has_cuda():
        return group
    from megatron.core import parallel_state

    mine = tuple(torch.distributed.get_process_group_ranks(group))
    timeout = None if timeout_minutes is None else datetime.timedelta(minutes=timeout_minutes)
    groups = {  # every rank takes part in the creation of every group
        ranks: torch.distributed.new_group(
            list(ranks),
            timeout=timeout,
            backend="nccl",
            pg_options=parallel_state.get_nccl_options("few", {"few": {"min_ctas": 1, "max_ctas": MOST_CTAS}}),
        )
        for ranks in sorted(set(collectives.gather_objects(mine)))
    }
    return groups[mine]


def leave() -> None:
    """Undo `initialize`, and what Megatron Core keeps of a run for its process."""
    from megatron.core import num_microbatches_calculator, parallel_state

    num_microbatches_calculator.unset_num_microbatches_calculator()
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def _own_gpu() -> int:
    """The number of this process's GPU on its node. Raises ValueError as `initialize`."""
    given = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID"))
    if given is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            "LOCAL_RANK, the number of a process on its node, is not set, nor is SLURM_LOCALID; start the processes "
            "with torchrun or srun, or set it"
        )
    number, count = int(given or "0"), torch.cuda.device_count()
    if number >= count == 1:
        raise ValueError(
            f"process {number + 1} of this node sees one GPU; if the node has more, each process must see all of them: "
            "leave out srun's --gpus-per-task and --gpu-bind and a CUDA_VISIBLE_DEVICES per process; if it has one, "
            "start one process"
        )
    if number >= count:
        raise ValueError(
            f"--nproc-per-node asks for at least {number + 1} processes on this node and it has {count} GPU(s); start "
            "one process per GPU"
        )
    return number


def _rendezvous(timeout: datetime.timedelta) -> tuple[int, dict[str, Any]]:
    """Which start of these ranks this is, from 1, and the arguments of `init_process_group` that it can't find by
    itself, or would get wrong after a restart."""
    if "RANK" not in os.environ:
        return 1, {"rank": 0, "world_size": 1, "store": torch.distributed.HashStore()}
    store = torchruns_store(timeout)
    if store is None:
        return 1, {}
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    start = number_of_start(store, rank=rank, world_size=world_size, timeout=timeout)
    store = torch.distributed.PrefixStore(f"bcd/start {start}", store)
    return start, {"rank": rank, "world_size": world_size, "store": store}


def number_of_start(store: Any, *, rank: int, world_size: int, timeout: datetime.timedelta) -> int:
    """A number that all ranks share and that no earlier start had.

    torchrun keeps its store over restarts (pytorch issue 135712), so a rank would find the address of one that is
    gone. Its restart count can't separate starts, because each node has its own. So rank 0 draws a number and
    acknowledges each other rank by a name that is new for this start: an acknowledged rank has the newest number.

    Raises:
        RuntimeError: rank 0 did not answer within `timeout`.
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
    raise RuntimeError(f"rank {rank} waited {timeout} for rank 0 to start")
