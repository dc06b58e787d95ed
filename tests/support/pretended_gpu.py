"""Megatron Core's optimizer for offload on a machine without a GPU.

HybridDeviceOptimizer needs three things of CUDA: which weights are on a GPU, streams to copy on, and pinned memory.
Here all weights claim to be on one, a stream runs its work at once, and memory is ordinary. What is copied
between "device" and host, what is stepped and what is saved is its own code and this project's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from megatron.bcd.config import RunConfig
from support import resumed_runs, worlds


class _Stream:
    """Work is done before anybody could wait for it."""

    def wait_stream(self, other: _Stream) -> None: ...
    def wait(self, other: _Stream) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self) -> _Stream:
        return self


@contextlib.contextmanager
def pretended_gpu() -> Iterator[None]:
    """While it lasts, a HybridDeviceOptimizer can be made and stepped."""
    original = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    def with_weights_on_gpu(self: Any, fraction: float) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                weight.pretends = True  # copies of it don't
        is_on_gpu = property(lambda tensor: getattr(tensor, "pretends", False))
        with (
            mock.patch.object(torch.Tensor, "is_cuda", is_on_gpu, create=True),
            mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor),
        ):
            return original(self, fraction)

    with (
        mock.patch.object(HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", with_weights_on_gpu),
        mock.patch.object(torch.cuda, "Stream", _Stream),
        mock.patch.object(torch.cuda, "current_stream", _Stream),
        mock.patch.object(torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
    ):
        yield


def train_run(config: RunConfig) -> dict[str, Any]:
    """`worlds.train_run`, and by step bytes in host memory, of this rank."""
    with pretended_gpu(), worlds.started(config) as one:
        one.train()
        rank = torch.distributed.get_rank()
        steps = one.recorder.steps
        return worlds.outcome(one) | {
            "host_bytes": steps[-1].host_state_bytes[rank],
            "model_state": list(steps[-1].model_state_bytes),
            "notes": one.recorder.summary.notes,
            "planned": one.recorder.summary.full_model_state_bytes[rank],
        }


def stopped_and_resumed(config: RunConfig, stops: list[int], root: str) -> list[str]:
    """As `resumed_runs`."""
    with pretended_gpu():
        return resumed_runs.stopped_and_resumed(config, stops, root)
