"""Process groups: rendezvous under torchrun, backend, and Megatron Core's parallel groups."""

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
from megatron.bcd.runtime.exit import torchrun_store

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Number of hardware queues to a GPU. With one, kernels start in the order of their launch. With tensor parallelism
Megatron Core relies on that to overlap communication with computation on GPUs before Blackwell."""


MAX_WAITING_CTAS = 2
"""NCCL thread blocks per message in a waiting group. Each occupies a multiprocessor while it waits."""


def initialize(
    *,
    backend: str,
    timeout_minutes: int,
    tensor_size: int,
    pipeline_size: int,
    context_size: int = 1,
    hierarchical_context_sizes: Sequence[int] | None = None,
    expert_size: int = 1,
    expert_tensor_size: int | None = None,
) -> None:
    """Join the process group that torchrun's environment describes, and create Megatron Core's parallel groups.

    Without that environment the world is this process.

    Raises:
        ValueError: this node has fewer GPUs than processes, GPUs are hidden from some processes, a rank does not know
            its number on the node, or the backend does not fit the machine.
    """
    from megatron.core import parallel_state

    device.set_allocator()
    if tensor_size > 1:  # CUDA reads it when it starts
        os.environ.setdefault(CONNECTIONS, "1")
    for patch in (
        megatron_core.patch_optimizer_offload,
        megatron_core.patch_recomputation,
        megatron_core.patch_grad_norm,
        megatron_core.patch_main_param_copies,
        megatron_core.patch_experts,
    ):
        patch()
    fitting, given = ("nccl", "a") if device.has_cuda() else ("gloo", "no")
    if backend not in (fitting, "auto"):
        raise ValueError(f"--distributed-backend {backend}: this machine shows {given} GPU. Give {fitting} or auto.")
    if device.has_cuda():
        torch.cuda.set_device(_local_gpu())
        if packages.optimizer_implementation() == packages.PYTORCH_OPTIMIZER:
            megatron_core.patch_adam()
    else:
        cpu.patch_megatron_core()
    if fitting == "gloo":
        pytorch.share_gloo_device()
    if not torch.distributed.is_initialized():
        timeout = datetime.timedelta(minutes=timeout_minutes)
        torch.distributed.init_process_group(fitting, timeout=timeout, **_rendezvous(timeout))
    # with a bound device, messages between all pairs of stages would share one communicator and wait for each other
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
        expert_model_parallel_size=expert_size,
        expert_tensor_parallel_size=expert_tensor_size,
    )


def build_waiting_group(
    group: torch.distributed.ProcessGroup, *, timeout_minutes: int | None = None
) -> torch.distributed.ProcessGroup:
    """Collective over all ranks. Build a group of the same ranks for receives that are posted long before the send.

    A pending NCCL receive is a kernel that spins. In this group it occupies at most MAX_WAITING_CTAS multiprocessors.
    Without a GPU, return the group itself.
    """
    if not device.has_cuda():
        return group
    from megatron.core import parallel_state

    mine = tuple(torch.distributed.get_process_group_ranks(group))
    timeout = None if timeout_minutes is None else datetime.timedelta(minutes=timeout_minutes)
    groups = {  # every rank must call new_group for every group
        ranks: torch.distributed.new_group(
            list(ranks),
            timeout=timeout,
            backend="nccl",
            pg_options=parallel_state.get_nccl_options("few", {"few": {"min_ctas": 1, "max_ctas": MAX_WAITING_CTAS}}),
        )
        for ranks in sorted(set(collectives.gather_objects(mine)))
    }
    return groups[mine]


def leave() -> None:
    """Undo `initialize`, and clear what Megatron Core keeps per process."""
    from megatron.core import num_microbatches_calculator, parallel_state

    num_microbatches_calculator.unset_num_microbatches_calculator()
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def _local_gpu() -> int:
    """Return the index of this process's GPU on its node. Raises ValueError like `initialize`."""
    local_rank = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID"))
    if local_rank is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            "LOCAL_RANK: neither it, the number of a process on its node, nor SLURM_LOCALID is set. Start the "
            "processes with torchrun or srun, or set it."
        )
    number, count = int(local_rank or "0"), torch.cuda.device_count()
    if number >= count == 1:
        raise ValueError(
            f"process {number + 1} of this node sees only one GPU. If the node has more, let each process see all of "
            "them: omit srun's --gpus-per-task and --gpu-bind, and CUDA_VISIBLE_DEVICES per process. Otherwise start "
            "one process."
        )
    if number >= count:
        raise ValueError(
            f"--nproc-per-node: this node has at least {number + 1} processes, but only {count} GPU(s). Start one "
            "process per GPU."
        )
    return number


def _rendezvous(timeout: datetime.timedelta) -> dict[str, Any]:
    """Return the arguments of `init_process_group`.

    There are none if PyTorch's own rendezvous works. After a restart by torchrun it would not.
    """
    if "RANK" not in os.environ:
        return {"rank": 0, "world_size": 1, "store": torch.distributed.HashStore()}
    store = torchrun_store(timeout)
    if store is None:
        return {}
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    start = draw_start_number(store, rank=rank, world_size=world_size, timeout=timeout)
    store = torch.distributed.PrefixStore(f"bcd/start {start}", store)
    return {"rank": rank, "world_size": world_size, "store": store}


def draw_start_number(store: Any, *, rank: int, world_size: int, timeout: datetime.timedelta) -> int:
    """Return a number that all ranks agree on and that no earlier start had.

    torchrun keeps its store over restarts (pytorch issue 135712), so a rank could read the address of a rank 0 that is
    gone. torchrun's restart count does not help, because each node counts by itself. So rank 0 draws a number. Every
    other rank writes a random name under the newest number it sees, until rank 0 acknowledges that name: the number is
    then the current one.

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
