"""Plans in breadth-first order: each chunk runs all microbatches, is updated after its last backward pass, and nothing
is updated before the loss is known."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.plan_checker import Message, action_message, check_no_deadlock

from megatron.bcd.blocks.partition import Partition, partition
from megatron.bcd.config.sections import ALWAYS_ACTIVE
from megatron.bcd.pipeline.build import build_plan, host_passes, kept_passes, peak_graphs
from megatron.bcd.pipeline.plan import Kind, Plan, PlanShape, evaluation_shape, phase_shape
from megatron.bcd.pipeline.simulate import simulate


def _partition(**changes: object) -> Partition:
    keywords = {"num_layers": 6, "num_stages": 1, "num_blocks": 3, "layout": "spread", "tied": False} | changes
    return partition(**keywords)  # type: ignore[arg-type]


_INACTIVE = {"has_inactive_updates": True, "always_active": frozenset(ALWAYS_ACTIVE)}
_CASES = {
    "blocks": (_partition(), 1),
    "last_block": (_partition(), 2),
    "head_phase": (_partition(head_phase=True), 3),
    "factored": (_partition(num_blocks=0, embedding_update="factored", **_INACTIVE), 0),
    "pretrain": (_partition(**_INACTIVE), 1),
}


def _shape(case: str, layers_per_pass: int) -> PlanShape:
    blocks, block = _CASES[case]
    return phase_shape(blocks.in_passes(layers_per_pass), block, num_microbatches=4, is_breadth_first=True)


def check_order(shape: PlanShape) -> None:
    """Check that each stage does everything once and in an order that data and messages allow."""
    plan = build_plan(shape)
    sent = Counter(message for stage in range(shape.num_stages) for message in _check_stage(plan, stage))
    assert set(sent.values()) <= {1}
    check_no_deadlock(plan)


def _check_stage(plan: Plan, stage: int) -> Iterator[Message]:
    """Check one stage. Yield the messages that it sends."""
    shape, actions = plan.shape, plan.stages[stage]
    forward, graphs, gradients, updated, is_loss_known = set(), set(), set(), set(), False
    on_stage = [virtual for virtual in range(shape.num_virtual) if shape.stage_of(virtual) == stage]
    arrived: set[Message] = set()

    def has(source: int, target: int, microbatch: int) -> bool:
        if shape.num_stages > 1:
            return Message(source, target, microbatch) in arrived
        return (source, microbatch) in (gradients if source > target else forward)

    for action in actions:
        virtual, microbatch = shape.virtual_stage(stage, action.chunk), action.microbatch
        place = (virtual, microbatch)
        if (message := action_message(virtual, action)) is not None:
            if message.target == virtual:
                arrived.add(message)
            elif action.kind is Kind.SEND_LOSS:
                assert is_loss_known and (virtual, microbatch - 1) in gradients
            else:
                assert place in (gradients if message.is_backward else forward)
            if message.source == virtual:
                yield message
            is_loss_known |= action.kind is Kind.RECEIVE_LOSS
        elif action.kind.is_forward:
            assert virtual == 0 or has(virtual - 1, virtual, microbatch)
            assert (place in forward) == (action.kind is Kind.RECOMPUTE)
            forward.add(place)
            if action.kind.keeps_graph:
                graphs.add(place)
        elif action.kind.is_backward:
            graphs.remove(place)
            assert virtual == shape.last or has(virtual + 1, virtual, microbatch)
            assert action.kind is shape.backward_kind(virtual)
            gradients.add(place)
        elif action.kind is Kind.LOSS:
            is_loss_known = all((shape.last, number) in gradients for number in range(shape.num_microbatches))
            assert is_loss_known
        else:
            assert action.kind is Kind.UPDATE and is_loss_known and virtual not in updated
            assert all((virtual, number) in gradients for number in range(shape.num_microbatches))
            updated.add(virtual)
    trainable = [virtual for virtual in on_stage if virtual >= shape.first_trainable]
    microbatches = range(shape.num_microbatches)
    assert forward == set(itertools.product(on_stage, microbatches))
    assert gradients == set(itertools.product(trainable, microbatches))
    assert updated == {virtual for virtual in trainable if shape.updated[virtual]} and not graphs
    kept, on_host = set(kept_passes(shape, stage)), host_passes(shape, stage)
    expected = len(kept) + len(on_host) + (shape.last in trainable) if kept or on_host else bool(trainable)
    assert peak_graphs(actions) == expected, "activations of one microbatch at a time, and those that wait"
    per_chunk = Counter(chunk for chunk, _ in on_host if (chunk, 0) not in kept)
    assert not kept & {*on_host} and (not per_chunk or max(per_chunk.values()) - min(per_chunk.values()) <= 1)


@pytest.mark.parametrize("layers_per_pass", [1, 2, 4, 6])
@pytest.mark.parametrize("case", _CASES)
def test_order(case: str, layers_per_pass: int) -> None:
    """Each pass runs once and after its inputs, and each update follows all gradients and the loss."""
    check_order(_shape(case, layers_per_pass))


def test_order_of_a_single_block() -> None:
    """Every chunk of a single block is updated once."""
    whole = _partition(num_blocks=1)
    shape = phase_shape(whole.in_passes(2), 0, num_microbatches=4, is_breadth_first=True, steps_block_by_chunk=True)
    assert all(shape.updated)
    check_order(shape)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_several_stages(stages: int) -> None:
    """Several stages run in order without deadlock, and idle only at the ends if there are enough microbatches."""
    for chunks, number in itertools.product((1, 2, 4), (1, 2, 3, 5, 8, 12)):
        num_virtual = stages * chunks
        check_order(
            evaluation_shape(num_stages=stages, num_chunks=chunks, num_microbatches=number, is_breadth_first=True)
        )
        for first in {0, num_virtual // 2, num_virtual - 1}:
            active = tuple(virtual >= first for virtual in range(num_virtual))
            shape = PlanShape(
                num_stages=stages,
                num_chunks=chunks,
                num_microbatches=number,
                first_trainable=first,
                active=active,
                is_breadth_first=True,
                updated=active,
            )
            check_order(shape)
            check_order(replace(shape, num_kept=number * (chunks // 2), num_on_host=chunks))
            if first == 0 and number >= stages:
                assert simulate(build_plan(shape)).iteration_time <= 4 * chunks * number + 3 * (stages - 1)
            simulate(build_plan(shape), message=0.1)


def test_virtual_chunks() -> None:
    """A stage has only its own chunks, and numbers their layers from its own first one."""
    chunks = _partition(num_layers=12, num_stages=2, layout="interleaved")
    assert chunks.in_passes(2).virtual_stages == tuple(range(first, first + 2) for first in range(0, 12, 2))
    assert chunks.in_passes(2).chunks_on_stage(1) == (range(0, 2), range(2, 4), range(4, 6))
    uneven = _partition(num_layers=7, num_stages=2, layout="interleaved")
    assert [len(layers) for layers in uneven.in_passes(1).virtual_stages] == [2, 1, 1, 1, 1, 1]
    assert uneven.in_passes(1).chunks_on_stage(0) == (range(0, 2), range(2, 3), range(3, 4))
    tied = {"has_inactive_updates": True, "embedding_update": "factored", "tied": True, "num_blocks": 2}
    tied |= {"always_active": frozenset({"embedding"}), "num_layers": 4, "num_parts": 2}
    for stages, expected in ((1, (True, False, True, True)), (2, (False, False, True, True))):
        blocks = _partition(num_stages=stages, layout="interleaved", **tied)
        assert phase_shape(blocks.in_passes(1), 0, num_microbatches=1, is_breadth_first=True).updated == expected


def test_what_is_trained() -> None:
    """The backward pass reaches exactly the chunks that train, and every chunk with an inactive update is updated."""
    blocks = _shape("blocks", 1)
    assert (blocks.first_trainable, blocks.active, any(blocks.updated)) == (
        2,
        (False, False, True, True, False, False),
        False,
    )
    assert _shape("last_block", 4).first_trainable == 1  # layers 4 and 5
    assert _shape("head_phase", 2).first_trainable == 2
    assert _shape("factored", 2).updated == (True, True, True)
    assert _shape("pretrain", 1).updated == (True, True, False, False, True, True)
    assert _shape("pretrain", 1).first_trainable == 0
    head_only = _partition(
        has_inactive_updates=True, embedding_update="factored", always_active=frozenset({"norms", "biases", "head"})
    )
    shape = phase_shape(head_only.in_passes(1), 2, num_microbatches=1, is_breadth_first=True)
    assert shape.updated == (True, True, True, True, False, True), "the head, although its layer is the active block"


def test_each_microbatch_is_read_by_every_chunk() -> None:
    """An evaluation runs every microbatch through every chunk, without a graph."""
    [actions] = build_plan(
        evaluation_shape(num_stages=1, num_chunks=3, num_microbatches=2, is_breadth_first=True)
    ).stages
    assert [(action.kind, action.chunk, action.microbatch) for action in actions] == [
        (Kind.FORWARD_ONLY, chunk, microbatch) for chunk in range(3) for microbatch in range(2)
    ]


def test_simulated_time() -> None:
    """Repeated forward passes take time, and updates take none."""
    shape = _shape("factored", 1)
    timeline = simulate(build_plan(shape))
    assert timeline.iteration_time == 4 * (6 + 5 + 12) and timeline.bubble == 0
