"""Invariant 6: a forward-only stage holds no gradient, no optimizer state and no activation, and exchanges no backward
message. Its peak memory does not depend on the number of microbatches."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from support import worlds
from support.dist import World
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.bcd.config import RunConfig
from megatron.bcd.pipeline.p2p import Messages

SEQUENCE, MICRO_BATCH, HIDDEN = 32, 2, 64
MESSAGE_BYTES = SEQUENCE * MICRO_BATCH * HIDDEN * 4  # fp32
STEPS_PER_BLOCK = 2
NUM_STAGES = 4
FEW, MANY = 2, 8  # microbatches
COUNTED = ("gradient_bytes", "optimizer_state_bytes", "model_state_bytes")


def config_of(num_microbatches: int, **flags: Any) -> RunConfig:
    """Return a small run on four stages, with one rank each, that visits every block once."""
    values: dict[str, Any] = {
        "num_layers": 2 * NUM_STAGES,
        "hidden_size": HIDDEN,
        "micro_batch_size": MICRO_BATCH,
        "global_batch_size": MICRO_BATCH * num_microbatches,
        "world_size": NUM_STAGES,
        "pipeline_model_parallel_size": NUM_STAGES,
        "bcd_layout": "stage",
        "bcd_num_blocks": None,
        "bcd_steps_per_block": STEPS_PER_BLOCK,
        "train_iters": STEPS_PER_BLOCK * NUM_STAGES,
    }
    return worlds.run_config(**values | flags)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors created inside, each storage once, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for storage in _storages(result) - _storages((args, kwargs)) - set(self._known):
            self._known.add(storage)
            self.now += storage.nbytes()
            weakref.finalize(storage, self._let_go, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _let_go(self, num_bytes: int) -> None:
        self.now -= num_bytes


def _storages(tree: Any) -> set[torch.UntypedStorage]:
    return {leaf.untyped_storage() for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)}


@contextlib.contextmanager
def counting_sends(count: dict[str, int]) -> Iterator[None]:
    """Count the peak number of a stage's unfinished sends in `peak`, which may be reset to 0 at any time."""
    original = Messages.send

    def send(messages: Messages, *args: Any, **kwargs: Any) -> None:
        original(messages, *args, **kwargs)
        count["peak"] = max(count["peak"], len(messages._sent))

    with mock.patch.object(Messages, "send", send):
        yield


@contextlib.contextmanager
def counting_messages(count: Counter[int]) -> Iterator[None]:
    """Count the messages that this rank passes to the backend, by receiver."""
    kind: Any = torch.distributed.ProcessGroup
    original = vars(kind)["send"]  # an attribute lookup gives a function that binds no self

    def send(group: Any, tensors: Any, rank_in_group: int, tag: int) -> Any:
        count[torch.distributed.get_global_rank(group, rank_in_group)] += 1
        return original(group, tensors, rank_in_group, tag)

    kind.send = send
    try:
        yield
    finally:
        kind.send = original


def measured_run(config: RunConfig) -> list[dict[str, Any]]:
    """Return by step what the run counts (by rank), and what is measured on this rank.

    `sent_back`: messages to the previous stage. `peak_bytes`: of tensors created in the schedule. `peak_sends`:
    unfinished sends. `weight_bytes`: of this rank.
    """
    steps: list[dict[str, Any]] = []
    sends, messages = {"peak": 0}, Counter[int]()
    with counting_sends(sends), counting_messages(messages), worlds.started(config) as run:

        def measured(forward_backward: Any, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
            sends["peak"] = 0
            messages.clear()
            with LiveBytes() as live:
                reported = forward_backward(*args, **kwargs)
            steps.append(
                {"peak_bytes": live.peak, "peak_sends": sends["peak"], "sent_back": messages[run.active.stage - 1]}
            )
            return reported

        run.wrapper = measured
        run.meters = True
        run.train()
        weight_bytes = sum(parameter.numel() * parameter.element_size() for parameter in run.model.parameters())
        for step, record, saved in zip(steps, run.recorder.steps, run.saved_activation_bytes, strict=True):
            step |= {name: getattr(record, name) for name in COUNTED} | {"block": record.block}
            step["saved_activation_bytes"] = saved
            step["weight_bytes"] = weight_bytes
        return steps


Steps = list[list[dict[str, Any]]]
"""Figures by step and rank."""


def measure(world: World, config: RunConfig) -> Steps:
    ranks = world.run(measured_run, config)
    return [list(step) for step in zip(*ranks, strict=True)]


@pytest.fixture(scope="module")
def runs(world4: World, text_data: str) -> dict[tuple[str, int], Steps]:
    """Runs on four stages in layout stage, so that block k's first trainable stage is k, by schedule and
    microbatches. Those with the stock schedule have one step of the last block."""
    last = {"bcd_order": "descending", "train_iters": 1}
    return {
        (schedule, number): measure(world4, config_of(number, data_path=text_data, bcd_schedule=schedule, **flags))
        for schedule, flags in (("bcd", {}), ("stock", last))
        for number in (FEW, MANY)
    }


def assert_counts(steps: Steps, *, num_microbatches: int) -> None:
    """Check invariant 6 for every step."""
    assert len(steps) == NUM_STAGES * STEPS_PER_BLOCK
    for ranks in steps:
        counted, first_trainable = ranks[0], ranks[0]["block"]
        # a stage behind the first trainable stage sends one gradient per microbatch to the one before it
        sent = [num_microbatches * (stage > first_trainable) for stage in range(NUM_STAGES)]
        assert [rank["sent_back"] for rank in ranks] == sent
        for stage, rank in enumerate(ranks):
            forward_only = stage < first_trainable
            assert (counted["saved_activation_bytes"][stage] == 0) == forward_only
            if forward_only:
                assert counted["gradient_bytes"][stage] == counted["optimizer_state_bytes"][stage] == 0
                # after its own phase a stage keeps its weights in Megatron Core's padded buffer
                assert counted["model_state_bytes"][stage] == pytest.approx(rank["weight_bytes"], rel=0.005)
        assert counted["gradient_bytes"][first_trainable] > 0 and counted["optimizer_state_bytes"][first_trainable] > 0
        assert counted["model_state_bytes"][first_trainable] > 1.5 * ranks[first_trainable]["weight_bytes"]


def test_a_forward_only_stage_holds_weights_only(runs: dict[tuple[str, int], Steps]) -> None:
    """A forward-only stage stores weights only, and no gradient is sent to it."""
    for number in (FEW, MANY):
        assert_counts(runs["bcd", number], num_microbatches=number)


def peak(steps: Steps, block: int, stage: int) -> int:
    """Return the peak bytes of `stage` in the phase of `block`."""
    return max(ranks[stage]["peak_bytes"] for ranks in steps if ranks[0]["block"] == block)


def test_peak_memory_does_not_grow_with_microbatches(runs: dict[tuple[str, int], Steps]) -> None:
    """The peak memory of a forward-only stage does not grow with the number of microbatches."""
    few, many = runs["bcd", FEW], runs["bcd", MANY]
    for first_trainable in range(1, 4):
        for stage in range(first_trainable):
            assert abs(peak(many, first_trainable, stage) - peak(few, first_trainable, stage)) <= MESSAGE_BYTES
            # two outputs on their way, one input on its way, and what one layer needs at once
            assert MESSAGE_BYTES < peak(many, first_trainable, stage) < 16 * MESSAGE_BYTES
    stock_few, stock_many = runs["stock", FEW], runs["stock", MANY]
    assert peak(stock_many, 3, 1) > peak(stock_few, 3, 1) + 16 * MESSAGE_BYTES, "what is measured can't grow"


def test_sends_under_way_are_bounded(runs: dict[tuple[str, int], Steps]) -> None:
    """A forward-only stage has up to two unfinished sends, and no stage has more."""
    for ranks in runs["bcd", MANY]:
        first_trainable = ranks[0]["block"]
        assert [rank["peak_sends"] for rank in ranks[:first_trainable]] == [2] * first_trainable
        assert max(rank["peak_sends"] for rank in ranks) <= 2
