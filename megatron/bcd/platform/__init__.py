"""Device, backend, and every patch of Megatron Core: the only room that says "cuda".

Megatron Core is written for CUDA devices. Where there is none, `patch_megatron_core` teaches it the CPU; where there
is one, nothing is patched. What was found out about Megatron Core stands in ``docs/megatron_core_notes.md``.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import importlib.util
import os
import queue
import random
import resource
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch

from megatron.bcd.platform import cpu
from megatron.bcd.platform.offload import patch_offload


def has_cuda() -> bool:
    return torch.cuda.is_available()


def num_gpus() -> int:
    """That this process sees; asks the driver and leaves no context on any of them."""
    return torch.cuda.device_count() if has_cuda() else 0


def device() -> torch.device:
    """The device of this process: its own GPU, or the CPU."""
    if has_cuda():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def is_importable(module: str) -> bool:
    """Whether ``import module`` works here; a package that is installed but broken counts as absent."""
    try:
        importlib.import_module(module)
    except Exception:  # a broken binary package may raise anything at import
        return False
    return True


def has_transformer_engine() -> bool:
    """Transformer Engine is importable and there is a GPU to run it on."""
    return has_cuda() and is_importable("transformer_engine.pytorch")


def transformer_engine_version() -> str:
    """Of the one that is used; empty where none is."""
    if not has_transformer_engine():
        return ""
    import transformer_engine

    return str(getattr(transformer_engine, "__version__", "unknown"))


def device_name() -> str:
    """The GPU's model, or "cpu"."""
    return torch.cuda.get_device_name() if has_cuda() else "cpu"


def has_apex() -> bool:
    """NVIDIA's Apex (not the unrelated PyPI package of that name) with its fused kernels, and a GPU."""
    return (
        has_cuda()
        and is_importable("apex.optimizers")
        and is_importable("apex.normalization")
        and is_importable("amp_C")
    )


def optimizer_implementation() -> str:
    """Where Megatron Core takes its Adam from; it decides by importability when it is imported."""
    from megatron.core.optimizer import Adam

    module = Adam.__module__
    if module.startswith("transformer_engine"):
        return "Transformer Engine fused Adam"
    return "Apex fused Adam" if module.startswith("apex") else "PyTorch AdamW"


def check_can_offload() -> None:
    """Raises ValueError where there is no GPU that --optimizer-cpu-offload could take something off."""
    if not has_cuda():
        raise ValueError(
            "--optimizer-cpu-offload needs a CUDA GPU, and none is visible here: leave it out (without a GPU all is in "
            "host memory anyway)"
        )


def synchronize() -> None:
    if has_cuda():
        torch.cuda.synchronize()


def empty_in_host_memory(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor; pinned where there is a GPU, so that copies need not wait for each other."""
    return torch.empty(num_elements, dtype=dtype, pin_memory=has_cuda())


def release_cached_memory() -> None:
    """Give freed memory back to the driver or the system, so that a phase's peak is this phase's own."""
    if has_cuda():
        torch.cuda.empty_cache()
    else:
        cpu.return_freed_memory()


def reset_peak_memory() -> None:
    if has_cuda():
        torch.cuda.reset_peak_memory_stats()
        return
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # Linux: the peak resident set starts again from the present one
    except OSError:
        pass  # elsewhere the peak stays the whole process's


def allocator() -> Callable[[], int] | None:
    """What asks the GPU's allocator for the bytes that are allocated now; None on a CPU, which keeps no count."""
    return torch.cuda.memory_allocated if has_cuda() else None


def peak_memory_bytes() -> int:
    """Peak since `reset_peak_memory`: bytes allocated on the GPU, or the process's resident set on a CPU."""
    if has_cuda():
        return torch.cuda.max_memory_allocated()
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def initialize_distributed(*, backend: str, timeout_minutes: int, tensor_size: int, pipeline_size: int) -> None:
    """Join the process group that torchrun announces and cut it into Megatron Core's parallel groups.

    Without torchrun's environment this is a world of one process.

    Raises:
        ValueError: there are fewer GPUs on this node than processes, or NCCL is asked for without a GPU.
    """
    from megatron.core import parallel_state

    patch_offload()
    if backend == "auto":
        backend = "nccl" if has_cuda() else "gloo"
    if backend == "nccl" and not has_cuda():
        raise ValueError("--distributed-backend nccl needs a GPU and this machine shows none; use gloo or auto")
    if backend == "gloo" and has_cuda():
        raise ValueError(
            "--distributed-backend gloo is for CPUs and this machine shows a GPU; use nccl or auto, or hide the "
            "GPU with CUDA_VISIBLE_DEVICES="
        )
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if has_cuda():
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
    """Whether torchrun has started these ranks before; after `initialize_distributed`, the same on every rank."""
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


def seed_everything(seed: int, *, data_parallel_random_init: bool = False) -> None:
    """Seed Python, NumPy, PyTorch and Megatron Core's tracker as stock Megatron-LM does: each stage its own seed."""
    from megatron.core import parallel_state, tensor_parallel

    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    if data_parallel_random_init:
        seed += 10 * parallel_state.get_data_parallel_rank()
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    state = torch.get_rng_state()
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.set_rng_state(state)  # on a CPU the tracker above drew on the very generator that initialises the weights


def device_rng_state() -> torch.Tensor | None:
    """State of the GPU's random generator; None where the CPU's is the only one."""
    return torch.cuda.get_rng_state() if has_cuda() else None


def set_device_rng_state(state: torch.Tensor) -> None:
    torch.cuda.set_rng_state(state)


@contextlib.contextmanager
def random_generators_kept() -> Iterator[None]:
    """What is drawn inside, dropout included, leaves PyTorch's generators and Megatron Core's tracker as they were."""
    from megatron.core import tensor_parallel

    tracker = tensor_parallel.get_cuda_rng_tracker()
    states = {name: state.clone() for name, state in tracker.get_states().items()}
    on_cpu, on_device = torch.get_rng_state(), device_rng_state()
    try:
        yield
    finally:
        tracker.set_states(states)
        torch.set_rng_state(on_cpu)
        if on_device is not None:
            set_device_rng_state(on_device)


def use_deterministic_algorithms() -> None:
    """Make PyTorch take deterministic kernels only, and fail where there is none (--deterministic-mode)."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # Transformer Engine's attention asks for it
    torch.use_deterministic_algorithms(True)


def draw_as_stock_warm_up_does(
    *, seq_length: int, micro_batch_size: int, hidden_size: int, ffn_hidden_size: int, dtype: torch.dtype
) -> None:
    """Draw from the CPU's generator what stock Megatron-LM draws on a CPU before it builds the model.

    It warms its fused functions up (bias + GELU, bias + dropout + residual, 5 times with and 5 times without gradient)
    on random tensors of its device. On a GPU they leave the generator that initialises the weights alone; on a CPU they
    advance it, and without them the initial weights are not stock's. ``ffn_hidden_size`` is this tensor-parallel
    rank's part.
    """
    torch.rand(ffn_hidden_size, dtype=dtype)
    torch.rand(seq_length, micro_batch_size, ffn_hidden_size, dtype=dtype)
    hidden = torch.rand(seq_length, micro_batch_size, hidden_size, dtype=dtype)
    torch.rand(seq_length, micro_batch_size, hidden_size, dtype=dtype)
    torch.rand(hidden_size, dtype=dtype)
    for _ in range(10):
        torch.nn.functional.dropout(hidden, p=0.1, training=True)


@contextlib.contextmanager
def checkpoint_results_in_process() -> Iterator[None]:
    """Let Megatron Core's checkpoint planning make a plain queue, not a manager process, for the writers' results."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    original = filesystem_async._get_write_results_queue
    filesystem_async._get_write_results_queue = queue.Queue
    try:
        yield
    finally:
        filesystem_async._get_write_results_queue = original
