"""Rates of this machine: matrix products, memory, links, an optimizer on the host. A program of its own under torchrun.

    torchrun --nproc-per-node 2 tools/_check_measure.py FILE [--quick]

Rank 0 writes FILE as JSON. --quick: links only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

SIZES = {"cuda": (1024, 2048, 4096, 8192), "cpu": (256, 512, 1024)}
MESSAGE_BYTES = {"cuda": 2**26, "cpu": 2**22}
TENSOR_BYTES = {"cuda": 2**30, "cpu": 2**26}
ADAM_ELEMENTS = {"cuda": 2**25, "cpu": 2**22}
ADAM_BYTES = 16
"""Per parameter: weight, gradient and two moments in fp32, as the planner counts an optimizer on the host."""


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def best_seconds(work: Callable[[], Any], device: torch.device, *, rounds: int = 5, repeats: int = 3) -> float:
    """The shortest time of one call, over some rounds: other programs make it longer, nothing makes it shorter."""
    work()
    times = []
    for _ in range(rounds):
        wait(device)
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        wait(device)
        times.append((time.perf_counter() - start) / repeats)
    return min(times)


def matrix_products(device: torch.device) -> dict[str, dict[str, float]]:
    """10^12 floating-point operations per second by type and size of square matrices."""
    found: dict[str, dict[str, float]] = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        found[name] = {}
        for size in SIZES[device.type]:
            one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
            found[name][str(size)] = 2 * size**3 / best_seconds(lambda a=one, b=other: a @ b, device) / 1e12
    return found


def memory(device: torch.device) -> dict[str, float]:
    """10^9 bytes per second, read and written: of a copy, and of element-wise work like a layer's."""
    source = torch.randn(TENSOR_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / best_seconds(lambda: target.copy_(source), device)
    small = source[: source.numel() // 16]
    moved = 2 * small.nbytes / best_seconds(lambda: torch.nn.functional.gelu(small), device)
    return {"copy": copied / 1e9, "element_wise": min(moved, copied) / 1e9}


def links(device: torch.device) -> dict[str, Any]:
    """10^9 bytes per second, one way, between neighbours by pair; and of an all-reduce over all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    message = torch.ones(MESSAGE_BYTES[device.type] // 4, device=device)
    by_pair = {}
    for sender in range(size - 1):
        dist.barrier()
        if rank in (sender, sender + 1):
            seconds = best_seconds(lambda other=sender: _pass_on(message, other, rank), device, repeats=2)
            by_pair[f"{sender}-{sender + 1}"] = message.nbytes / seconds / 1e9
    seconds = best_seconds(lambda: dist.all_reduce(message.fill_(1.0)), device, repeats=2)
    every: list[Any] = [None] * size
    dist.all_gather_object(every, by_pair)
    return {
        "by_pair": {pair: min(one[pair] for one in every if pair in one) for pair in _pairs(every)},
        "all_reduce": 2 * (size - 1) / size * message.nbytes / seconds / 1e9,
    }


def _pairs(every: Iterable[dict[str, float]]) -> list[str]:
    return sorted({pair for one in every for pair in one})


def _pass_on(message: torch.Tensor, sender: int, rank: int) -> None:
    if rank == sender:
        dist.send(message, sender + 1)
    else:
        dist.recv(message, sender)


def host_optimizer(device: torch.device) -> float:
    """10^9 bytes of model state per second that Adam on the host steps, with the ways of gradient and weight."""
    count = ADAM_ELEMENTS[device.type]
    on_device, gradient = (torch.zeros(count, device=device) for _ in range(2))
    weight = torch.zeros(count, pin_memory=device.type == "cuda", requires_grad=True)
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], lr=1e-3, fused=True)

    def step() -> None:
        if device.type == "cuda":
            weight.grad.copy_(gradient)
        optimizer.step()
        if device.type == "cuda":
            on_device.copy_(weight.detach())

    return ADAM_BYTES * count / best_seconds(step, device, repeats=1) / 1e9


def framework_bytes(device: torch.device) -> int:
    """What a process needs beside its tensors."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()
    import psutil

    return int(psutil.Process().memory_info().rss)


def device_bytes(device: torch.device) -> int:
    """Memory that this rank has for itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    import psutil

    return int(psutil.virtual_memory().total) // dist.get_world_size()


def measure(*, quick: bool) -> dict[str, Any]:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    found: dict[str, Any] = {"device": device.type, "num_ranks": dist.get_world_size()}
    if dist.get_world_size() > 1:
        found["links"] = links(device)
    if not quick:  # all ranks at once, as in training: on a CPU they share its memory's bandwidth
        import megatron.bcd.trainer  # noqa: F401  (counted as framework)

        found |= {"framework_bytes": framework_bytes(device), "device_bytes": device_bytes(device)}
        found |= {"matrix_products": matrix_products(device), "memory": memory(device)}
        found["host_optimizer"] = host_optimizer(device)
    dist.barrier()
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    figures = measure(quick="--quick" in sys.argv)
    if int(os.environ.get("RANK", "0")) == 0:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(figures, file)
