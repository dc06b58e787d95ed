"""Plans in breadth-first order: each piece runs all microbatches, is updated after its last backward pass, and nothing
is updated before the loss is known."""

from __future__ import annotations

import pytest

from megatron.bcd.blocks.partition import Partition, partition
from megatron.bcd.blocks.pieces import virtual_pieces
from megatron.bcd.pipeline.build import build_plan, peak_graphs
from megatron.bcd.pipeline.plan import Kind, PlanShape, breadth_first_shape, evaluation_shape
from megatron.bcd.pipeline.simulate import ActionCosts, simulate


def _partition(**changes: object) -> Partition:
    keywords = {"num_layers": 6, "num_stages": 1, "num_blocks": 3, "layout": "spread", "tied": False} | changes
    return partition(**keywords)  # type: ignore[arg-type]


_CASES = {
    "blocks": (_partition(), 1),
    "last_block": (_partition(), 2),
    "head_phase": (_partition(head_phase=True), 3),
    "factored": (
        _partition(
            num_blocks=0,
            has_stateless_updates=True,
            embedding_update="factored",
            always_active=frozenset({"norms", "biases", "embedding", "head"}),
        ),
        0,
    ),
    "pretrain": (
        _partition(has_stateless_updates=True, always_active=frozenset({"norms", "biases", "embedding", "head"})),
        1,
    ),
}


def _shape(case: str, layers_per_pass: int) -> PlanShape:
    blocks, block = _CASES[case]
    return breadth_first_shape(blocks, block, virtual_pieces(blocks, layers_per_pass), num_microbatches=4)


@pytest.mark.parametrize("layers_per_pass", [1, 2, 4, 6])
@pytest.mark.parametrize("case", _CASES)
def test_order(case: str, layers_per_pass: int) -> None:
    """Bug: a pass is missing, comes twice or too early, or an update precedes a gradient or the loss."""
    shape = _shape(case, layers_per_pass)
    [actions] = build_plan(shape).stages
    forward, graphs, gradients, updated, is_loss_known = set(), set(), set(), set(), False
    for action in actions:
        place = (action.chunk, action.microbatch)
        if action.kind.is_forward:
            assert action.chunk == 0 or (action.chunk - 1, action.microbatch) in forward
            assert (place in forward) == (action.kind is Kind.RECOMPUTE)
            forward.add(place)
            if action.kind.keeps_graph:
                graphs.add(place)
        elif action.kind.is_backward:
            graphs.remove(place)
            assert action.chunk == shape.last or (action.chunk + 1, action.microbatch) in gradients
            assert action.kind is shape.backward_kind(action.chunk)
            gradients.add(place)
        elif action.kind is Kind.LOSS:
            is_loss_known = all((shape.last, number) in forward for number in range(4))
        else:
            assert action.kind is Kind.UPDATE and is_loss_known and action.chunk not in updated
            assert all((action.chunk, number) in gradients for number in range(4))
            updated.add(action.chunk)
    trainable = range(shape.first_trainable, shape.num_chunks)
    assert forward == {(chunk, number) for chunk in range(shape.num_chunks) for number in range(4)}
    assert gradients == {(chunk, number) for chunk in trainable for number in range(4)}
    assert updated == {chunk for chunk in trainable if shape.updated[chunk]} and not graphs
    assert peak_graphs(actions) == 1, "activations of one microbatch at a time"


def test_what_is_trained() -> None:
    """Bug: the backward pass goes too deep, ends too early, or a piece with an active layer is not updated."""
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
        has_stateless_updates=True, embedding_update="factored", always_active=frozenset({"norms", "biases", "head"})
    )
    shape = breadth_first_shape(head_only, 2, virtual_pieces(head_only, 1), num_microbatches=1)
    assert shape.updated == (True, True, True, True, False, True), "the head, although its layer is the active block"


def test_each_microbatch_is_read_by_every_piece() -> None:
    """Bug: an evaluation builds a graph, or leaves a piece out."""
    [actions] = build_plan(
        evaluation_shape(num_stages=1, num_chunks=3, num_microbatches=2, is_breadth_first=True)
    ).stages
    assert [(action.kind, action.chunk, action.microbatch) for action in actions] == [
        (Kind.FORWARD_ONLY, chunk, microbatch) for chunk in range(3) for microbatch in range(2)
    ]


def test_simulated_time() -> None:
    """Bug: repeated forward passes take no time, or updates count as passes."""
    shape = _shape("factored", 1)
    costs = ActionCosts(forward=[1.0] * 6, backward=[2.0] * 6, backward_input=[1.0] * 6)
    timeline = simulate(build_plan(shape), costs)
    assert timeline.iteration_time == 4 * (6 + 5 + 12) and timeline.bubble == 0
