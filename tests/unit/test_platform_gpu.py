"""The start of a run on a machine with GPUs, tested without GPUs: CUDA's answers are made up."""

from __future__ import annotations

import os
import sys
import types
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from megatron.bcd.pipeline.p2p import Messages
from megatron.bcd.runtime import device, distributed, packages
from megatron.bcd.runtime.compat import megatron_core


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Simulate a node with two GPUs, no fused optimizers and an existing world; record what `initialize` does."""
    done: list[str] = []
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: done.append(f"GPU {number}"))
    monkeypatch.setattr(megatron_core, "patch_adam", lambda: done.append("fused Adam"))
    monkeypatch.setattr(packages, "optimizer_implementation", lambda: packages.PYTORCH_OPTIMIZER)
    monkeypatch.setattr(megatron_core, "patch_optimizer_offload", lambda: None)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    world = SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=None))
    monkeypatch.setattr(torch.distributed, "group", world)
    monkeypatch.setattr("megatron.core.parallel_state.initialize_model_parallel", lambda **_: done.append("groups"))
    for name in ("LOCAL_RANK", "SLURM_LOCALID", "WORLD_SIZE", distributed.CONNECTIONS):
        monkeypatch.delenv(name, raising=False)
    return done


def initialize(tensor_size: int = 1) -> None:
    distributed.initialize(backend="auto", timeout_minutes=1, tensor_size=tensor_size, pipeline_size=1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, "expandable_segments:True"), ("PYTORCH_CUDA_ALLOC_CONF", "mine"), ("PYTORCH_ALLOC_CONF", None)],
)
def test_the_allocator_is_configured_once(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str | None
) -> None:
    """The allocator has expandable segments, unless the user has configured it."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "mine")  # undone at the end, also what initialize() sets
        if name != given:
            monkeypatch.delenv(name)
    initialize()
    assert os.environ.get("PYTORCH_CUDA_ALLOC_CONF") == expected


@pytest.mark.parametrize(
    ("environment", "gpu"),
    [({}, 0), ({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, 1), ({"SLURM_LOCALID": "1", "WORLD_SIZE": "8"}, 1)]
    + [({"SLURM_LOCALID": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "8"}, 0)],
)
def test_every_process_takes_its_own_gpu(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], gpu: int
) -> None:
    """Every process takes the GPU of its local rank, also under plain srun."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    initialize()
    assert calls[0] == f"GPU {gpu}"


@pytest.mark.parametrize(
    ("environment", "num_gpus", "message"),
    [
        ({"WORLD_SIZE": "2"}, 2, "LOCAL_RANK"),
        ({"LOCAL_RANK": "2"}, 2, "--nproc-per-node"),
        ({"SLURM_LOCALID": "1"}, 1, "--gpus-per-task"),
    ],
)
def test_processes_without_a_gpu(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], num_gpus: int, message: str
) -> None:
    """A process that would share a GPU is refused with the reason, before it takes one."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    with pytest.raises(ValueError, match=message):
        initialize()
    assert calls == []


def test_one_queue_to_the_gpu_with_tensor_parallelism(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With tensor parallelism there is one queue to the GPU, unless the user has set a number."""
    initialize()
    assert distributed.CONNECTIONS not in os.environ
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: calls.append(os.environ[distributed.CONNECTIONS]))
    initialize(tensor_size=2)
    assert calls[-3:] == ["1", "fused Adam", "groups"]
    monkeypatch.setenv(distributed.CONNECTIONS, "8")
    initialize(tensor_size=2)
    assert os.environ[distributed.CONNECTIONS] == "8"


class Mark:
    """An event of a GPU that is as far behind as the CPU allows: it reaches a mark only when the CPU waits for it."""

    to_come: ClassVar[list[Mark]] = []
    most_ahead: ClassVar[int] = 0

    def record(self) -> None:
        self.to_come.append(self)
        Mark.most_ahead = max(Mark.most_ahead, len(self.to_come))

    def synchronize(self) -> None:
        if self in self.to_come:
            del self.to_come[: self.to_come.index(self) + 1]


@pytest.mark.parametrize("receives", [False, True])
def test_few_messages_are_held(monkeypatch: pytest.MonkeyPatch, receives: bool) -> None:
    """The CPU is at most three messages ahead of the GPU, whether it sends or receives."""
    monkeypatch.setattr(Mark, "to_come", [])
    monkeypatch.setattr(Mark, "most_ahead", 0)
    done = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    for name in ("isend", "irecv"):
        monkeypatch.setattr(torch.distributed, name, lambda *_: done)
    monkeypatch.setattr(torch.distributed, "get_global_rank", lambda group, place: place)
    monkeypatch.setattr(device, "current", lambda: torch.device("cpu"))
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    messages = Messages(group, dtype=torch.float32, max_sends=2, throttles_cpu=True)
    for _ in range(20):
        if receives:
            messages.wait_for(messages.receive((1,)))
        else:
            messages.send(torch.zeros(1))
    assert Mark.most_ahead == 3


ENGINE = ("transformer_engine", "transformer_engine.pytorch")
APEX = ("apex", "apex.optimizers", "apex.normalization", "amp_C")


@pytest.mark.parametrize(
    ("installed", "has_cuda", "has_engine", "has_apex"),
    [
        ((), True, False, False),
        (ENGINE + APEX, True, True, True),
        (ENGINE + APEX, False, False, False),
        (("apex",), True, False, False),  # PyPI's unrelated package of that name
    ],
)
def test_packages(
    monkeypatch: pytest.MonkeyPatch, installed: tuple[str, ...], has_cuda: bool, has_engine: bool, has_apex: bool
) -> None:
    """Transformer Engine and Apex are used if they are whole and there is a GPU; PyPI's package named apex is not."""
    monkeypatch.setattr(device, "has_cuda", lambda: has_cuda)
    for name in ENGINE + APEX:
        result = types.ModuleType(name) if name in installed else None  # None: "not installed", to an import
        monkeypatch.setitem(sys.modules, name, result)
    assert (packages.has_transformer_engine(), packages.has_apex()) == (has_engine, has_apex)
