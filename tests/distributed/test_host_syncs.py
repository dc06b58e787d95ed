"""How often the CPU waits for the device in a step. Here nothing is on a device: all that a step reads counts."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from support import worlds
from support.dist import World

ITERATIONS, COUNTED = 4, 2
"""A step without a log line before or after it: steps 1 and 4 have one."""
READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")
IN_HOST_MEMORY = (
    "/compat/cpu",
    "/torch/optim/",
    "/datasets/",
    "/bcd/data/",
    "/support/strict_backend.py",
)
"""What stands in for CUDA's kernels on a CPU, step counters, batches, and with --backend strict its own messages."""


class Reads:
    """Counts reads of tensors by the CPU. A copy in host memory may be read again."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.is_on = False
        self._on_host: dict[int, torch.Tensor] = {}

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name in READS:
                stack.enter_context(mock.patch.object(torch.Tensor, name, self._reader(name)))
            stack.enter_context(mock.patch.object(torch.cuda, "synchronize", self._wait))
            yield

    def _reader(self, name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def read(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            if self.is_on and tensor.untyped_storage().data_ptr() not in self._on_host:
                self._note(name)
                if name == "cpu":
                    copy = tensor.clone()
                    self._on_host[copy.untyped_storage().data_ptr()] = copy
                    return copy
            return original(tensor, *arguments, **named)

        return read

    def _wait(self, *_: Any) -> None:
        if self.is_on:
            self._note("synchronize")

    def _note(self, name: str) -> None:
        frame = sys._getframe(2)
        file = frame.f_code.co_filename
        # the run that records a test's steps reads the loss scale, which training does at log lines, in fp16
        if not any(part in file for part in IN_HOST_MEMORY) and frame.f_code.co_name != "loss_scale":
            self.found.append(name)


def reads_of_a_step(config: Any) -> list[str]:
    reads = Reads()

    def before_step(one: worlds.RecordedRun) -> None:
        reads.is_on = one.iteration == COUNTED  # until the next step begins

    with worlds.started(config, before_step=before_step) as one, reads.patched():
        one.train()
        reads.is_on = False
    return reads.found


@pytest.mark.parametrize("cut", [{}, {"world_size": 2, "pipeline_model_parallel_size": 2}], ids=["one", "pipeline2"])
def test_a_step_waits_for_loss_and_norm_only(world1: World, world2: World, text_data: str, cut: dict[str, Any]) -> None:
    """A step that reads loss, requests to stop, writers and times one by one: a GPU without work in between."""
    flags = {
        "bcd_num_blocks": 1,
        "train_iters": ITERATIONS,
        "log_interval": 100,
        "eval_iters": 0,
        "num_workers": 0,
        "bcd_steps_per_block": 100,
    }
    config = worlds.run_config(data_path=text_data, **flags | cut)
    for found in (world1, world2)[cut.get("world_size", 1) - 1].run(reads_of_a_step, config):
        assert found == ["cpu", "item"]  # stock Megatron-LM reads three: the norm twice, and whether all ranks stepped


def test_resting_layers_add_one_read(world1: World, text_data: str) -> None:
    """The norm of inactive layers, waited for before the other norm is computed."""
    flags = {
        "bcd_preset": "pretrain",
        "train_iters": ITERATIONS,
        "log_interval": 100,
        "eval_iters": 0,
        "bcd_steps_per_block": 100,
    }
    [found] = world1.run(reads_of_a_step, worlds.run_config(data_path=text_data, num_workers=0, **flags))
    # the copy to host memory is under way before the CPU waits for the norm
    assert [read for read in found if read in ("cpu", "item")] == ["cpu", "item"]
    assert sorted(found) == ["cpu", "item", "tolist"]
