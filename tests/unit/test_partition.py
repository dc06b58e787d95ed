"""The partition of a model into stages, submodels and blocks."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron.bcd.blocks.layers import divide
from megatron.bcd.blocks.partition import Partition, partition
from megatron.bcd.config import LAYOUTS


def _make(*, layers: int, stages: int, blocks: int | None = 3, layout: str = "spread", tied: bool = True) -> Partition:
    return partition(num_layers=layers, num_stages=stages, num_blocks=blocks, layout=layout, tied=tied)


@st.composite
def partitions(draw: st.DrawFn) -> Partition:
    """Any valid partition, evenly cut or with a pipeline cut of its own."""
    layout = draw(st.sampled_from(LAYOUTS))
    stages = draw(st.integers(1, 5))
    parts = 1 if layout == "stage" else draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(parts, parts + 6), min_size=stages, max_size=stages))
    is_own_cut = draw(st.booleans())
    return partition(
        num_layers=sum(sizes),
        num_stages=stages,
        num_blocks=draw(st.sampled_from([None, stages])) if layout == "stage" else parts,
        layout=layout,
        tied=draw(st.booleans()),
        layers_per_stage=sizes if is_own_cut and layout != "interleaved" else None,
    )


@given(total=st.integers(0, 200), parts=st.integers(1, 40))
def test_divide_is_contiguous_and_even(total: int, parts: int) -> None:
    """Exposes a lost or doubled layer at a cut, and a remainder that lands on the wrong parts."""
    ranges = divide(total, parts)
    assert list(chain.from_iterable(ranges)) == list(range(total))
    sizes = [len(layers) for layers in ranges]
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(partitions())
def test_every_layer_is_in_exactly_one_block(cut: Partition) -> None:
    """Exposes a layer that no phase ever trains, or that two blocks train."""
    assert sorted(chain.from_iterable(block.layers for block in cut.blocks)) == list(range(cut.num_layers))
    assert sorted(submodel.index for block in cut.blocks for submodel in block.submodels) == list(
        range(len(cut.submodels))
    )


@given(partitions())
def test_submodels_are_whole_runs_inside_one_stage(cut: Partition) -> None:
    """Exposes a submodel that crosses a pipeline cut, is empty, or is out of depth order."""
    in_order = chain.from_iterable(submodel.layers for submodel in cut.submodels)
    assert list(in_order) == list(range(cut.num_layers))
    for index, submodel in enumerate(cut.submodels):
        held = cut.stage_layers(submodel.stage)
        assert submodel.index == index
        assert submodel.layers
        assert set(submodel.layers) <= set(held)


@given(partitions())
def test_submodels_of_a_stage_differ_by_at_most_one_layer(cut: Partition) -> None:
    """Exposes an uneven cut, which makes one phase pay more state than the budget."""
    for stage in range(cut.num_stages):
        sizes = [len(submodel.layers) for submodel in cut.submodels if submodel.stage == stage]
        assert max(sizes) - min(sizes) <= 1


@given(partitions())
def test_embedding_norm_and_head_have_one_owner(cut: Partition) -> None:
    """Exposes an embedding or head that is never trained, trained twice, or a tied copy trained alone."""
    numbers = range(cut.num_blocks)
    assert [block for block in numbers if cut.embedding_active(block)] == [0]
    last = next(block.index for block in cut.blocks if cut.num_layers - 1 in block.layers)
    assert [block for block in numbers if cut.final_norm_active(block)] == [last]
    assert [block for block in numbers if cut.head_active(block)] == [0 if cut.tied else last]
    assert [submodel.index for submodel in cut.submodels if submodel.first] == [0]
    assert [submodel.index for submodel in cut.submodels if submodel.last] == [len(cut.submodels) - 1]


@given(partitions())
def test_the_prefix_is_what_lies_before_the_first_active_layer(cut: Partition) -> None:
    """Exposes a prefix with active layers, or one that is not before the first trainable stage."""
    for block in cut.blocks:
        prefix = cut.prefix_layers(block.index)
        assert list(prefix) == list(range(min(block.layers)))
        assert block.first_layer in cut.stage_layers(block.first_trainable_stage)
        if cut.embedding_active(block.index):
            assert not prefix


@given(partitions())
def test_stage_questions_agree_with_layers(cut: Partition) -> None:
    """Exposes a stage that builds an optimizer for nothing, or a forward-only stage with something active."""
    for block in cut.blocks:
        on_stages = [cut.active_layers(block.index, stage) for stage in range(cut.num_stages)]
        assert tuple(chain.from_iterable(on_stages)) == block.layers
        for stage, active in enumerate(on_stages):
            assert block.on_stage(stage) == bool(active)
            has_copy = cut.tied and block.owns_embedding and stage == cut.num_stages - 1
            assert cut.stage_active(block.index, stage) == (bool(active) or has_copy)
            assert cut.forward_only(block.index, stage) == (cut.stage_layers(stage)[-1] < block.first_layer)
            assert not (cut.forward_only(block.index, stage) and cut.stage_active(block.index, stage))


@given(partitions())
def test_number_of_blocks_by_layout(cut: Partition) -> None:
    """Exposes a layout that is another layout: spread is on every stage, the others on one."""
    stages_of = [{submodel.stage for submodel in block.submodels} for block in cut.blocks]
    if cut.layout == "spread":
        assert cut.num_blocks * cut.num_stages == len(cut.submodels)
        assert all(stages == set(range(cut.num_stages)) for stages in stages_of)
    elif cut.layout == "strided":
        assert len(cut.submodels) == cut.num_layers
        for stage in range(cut.num_stages):
            held = cut.stage_layers(stage)
            assert [cut.active_layers(block.index, stage) for block in cut.blocks] == [
                tuple(held[first :: cut.num_blocks]) for first in range(cut.num_blocks)
            ]
    elif cut.layout == "interleaved":
        assert all(stages == set(range(cut.num_stages)) for stages in stages_of)
    else:
        assert cut.num_blocks == len(cut.submodels)
        assert all(len(stages) == 1 for stages in stages_of)
    if cut.layout == "stage":
        assert [block.layers for block in cut.blocks] == [
            tuple(cut.stage_layers(stage)) for stage in range(cut.num_stages)
        ]
    assert [block.index for block in cut.blocks] == list(range(cut.num_blocks))


@given(layers=st.integers(4, 60), blocks=st.integers(1, 4))
def test_with_one_stage_spread_is_submodel(layers: int, blocks: int) -> None:
    """Exposes a difference between the two layouts where there is nothing to spread over."""
    spread = _make(layers=layers, stages=1, blocks=blocks)
    submodel = _make(layers=layers, stages=1, blocks=blocks, layout="submodel")
    assert spread.blocks == submodel.blocks
    assert [block.layers for block in spread.blocks] == [tuple(part) for part in divide(layers, blocks)]


@given(layers=st.integers(1, 60), stages=st.integers(1, 6), tied=st.booleans())
def test_one_spread_block_is_everything(layers: int, stages: int, tied: bool) -> None:
    """Exposes a one-block run that is not full-parameter training (invariant 1)."""
    if layers < stages:
        layers = stages
    cut = _make(layers=layers, stages=stages, blocks=1, tied=tied)
    assert cut.num_blocks == 1
    assert cut.blocks[0].layers == tuple(range(layers))
    assert cut.embedding_active(0) and cut.final_norm_active(0) and cut.head_active(0)
    assert not cut.prefix_layers(0)
    assert all(cut.stage_active(0, stage) for stage in range(stages))


def test_spread_example() -> None:
    """Exposes a spread block that is a contiguous part of the model instead of a part of every stage."""
    cut = _make(layers=10, stages=2)
    assert cut.layers_per_stage == (5, 5)
    assert [cut.describe_layers(block) for block in range(3)] == ["0-1, 5-6", "2-3, 7-8", "4, 9"]
    assert [cut.describe_extras(block) for block in range(3)] == [("embedding",), (), ("final norm",)]


def test_tied_copy_makes_the_last_stage_active_in_stage_layout() -> None:
    """Exposes an all-reduce of the embedding's gradient that waits for ever on the last stage."""
    cut = _make(layers=4, stages=4, blocks=None, layout="stage")
    assert [cut.stage_active(0, stage) for stage in range(4)] == [True, False, False, True]
    assert [cut.stage_active(3, stage) for stage in range(4)] == [False, False, False, True]
    assert [cut.forward_only(3, stage) for stage in range(4)] == [True, True, True, False]


def test_own_pipeline_cut_is_used() -> None:
    """Exposes a partition that assumes an even pipeline while Megatron cut it otherwise."""
    cut = partition(num_layers=9, num_stages=2, num_blocks=3, layout="spread", tied=True, layers_per_stage=[3, 6])
    assert [block.layers for block in cut.blocks] == [(0, 3, 4), (1, 5, 6), (2, 7, 8)]


@pytest.mark.parametrize(
    ("layout", "stages", "given_blocks", "expected"),
    [("spread", 2, None, 3), ("submodel", 2, None, 6), ("stage", 4, None, 4), ("stage", 4, 4, 4)],
)
def test_default_number_of_blocks(layout: str, stages: int, given_blocks: int | None, expected: int) -> None:
    """Exposes a default of 3 blocks in layout stage, where the number of stages rules."""
    cut = _make(layers=12, stages=stages, blocks=given_blocks, layout=layout)
    assert cut.num_blocks == expected


@pytest.mark.parametrize(
    ("given_values", "flag"),
    [
        ({"num_layers": 4}, "--num-layers 4"),
        ({"num_layers": 5, "layout": "submodel"}, "--num-layers 5"),
        ({"num_layers": 3, "num_stages": 4, "num_blocks": None, "layout": "stage"}, "--num-layers 3"),
        ({"num_blocks": 3, "layout": "stage"}, "--bcd-num-blocks 3"),
        ({"num_blocks": -1}, "--bcd-num-blocks -1"),
        ({"num_blocks": 0}, "--bcd-num-blocks 0"),
        ({"layout": "striped"}, "--bcd-layout striped"),
        ({"num_stages": 0}, "--pipeline-model-parallel-size 0"),
        ({"layers_per_stage": [10, 2]}, "stage 1"),
        ({"layers_per_stage": [10, 1]}, "12"),
        ({"num_parts": 4, "layout": "interleaved"}, "blocks"),
        ({"num_layers": 5, "layout": "interleaved"}, "6 layers"),
        ({"layers_per_stage": [6, 6], "layout": "interleaved"}, "6 numbers"),
        ({"num_blocks": 0, "resting": "all", "always_active": frozenset({"head"}), "layout": "interleaved"}, "layout"),
    ],
)
def test_bad_input_is_one_line_that_names_the_flag(given_values: dict[str, Any], flag: str) -> None:
    """A wrong partition, or an error that leaves the user without the flag."""
    usual = {"num_layers": 12, "num_stages": 2, "num_blocks": 3, "layout": "spread", "tied": True}
    with pytest.raises(ValueError, match=flag) as caught:
        partition(**{**usual, **given_values})
    assert "\n" not in str(caught.value)


@given(
    layers=st.integers(1, 24),
    stages=st.integers(1, 5),
    blocks=st.integers(1, 5),
    layout=st.sampled_from(LAYOUTS),
)
def test_the_number_of_layers_asked_for_is_exact(layers: int, stages: int, blocks: int, layout: str) -> None:
    """Exposes an error message whose "needs at least" is refused too, or a limit that is too strict."""
    needed = stages * (1 if layout == "stage" else blocks)
    asked = None if layout == "stage" else blocks
    if layers >= needed:
        assert _make(layers=layers, stages=stages, blocks=asked, layout=layout).num_layers == layers
        return
    with pytest.raises(ValueError, match=f"needs at least {needed} layers"):
        _make(layers=layers, stages=stages, blocks=asked, layout=layout)


@given(layers=st.integers(4, 40), stages=st.integers(1, 4), blocks=st.integers(1, 4), data=st.data())
def test_resting_layers_are_the_others(layers: int, stages: int, blocks: int, data: st.DataObject) -> None:
    """A layer that is neither active nor resting, both, or resting in front of a stage that gets no gradient."""
    assume(layers >= stages * blocks)
    layout = data.draw(st.sampled_from(["spread", "strided", "submodel"]))
    for resting in ("none", "all", "suffix"):
        cut = partition(
            num_layers=layers, num_stages=stages, num_blocks=blocks, layout=layout, tied=True, resting=resting
        )
        for block in cut.blocks:
            found, others = set(cut.resting_layers(block.index)), set(range(layers)) - set(block.layers)
            expected = {"none": set(), "all": others, "suffix": {one for one in others if one > block.first_layer}}
            assert found == expected[resting]
            assert found.isdisjoint(cut.prefix_layers(block.index))
            for stage in range(stages):
                if found & set(cut.stage_layers(stage)):
                    assert cut.stage_active(block.index, stage)
                    assert not cut.forward_only(block.index, stage)


@given(
    stages=st.integers(1, 6),
    blocks=st.integers(1, 4),
    times=st.integers(1, 2),
    more=st.integers(0, 9),
    tied=st.booleans(),
)
def test_interleaved(stages: int, blocks: int, times: int, more: int, tied: bool) -> None:
    """A block of other layers than on one stage, a chunk on the wrong stage, or a stage with far more layers."""
    parts = blocks * times
    arguments = {"num_layers": parts * stages + more, "num_blocks": blocks, "tied": tied, "num_parts": parts}
    cut = partition(num_stages=stages, layout="interleaved", **arguments)
    alone = partition(num_stages=1, layout="interleaved", **arguments)
    assert [block.layers for block in cut.blocks] == [block.layers for block in alone.blocks]
    if times == 1:
        assert [block.layers for block in cut.blocks] == [tuple(one) for one in divide(cut.num_layers, blocks)]
    assert max(cut.layers_per_stage) - min(cut.layers_per_stage) <= 1
    assert cut.num_chunks == (parts if stages > 1 else 1) and alone.num_chunks == 1
    for stage in range(stages if stages > 1 else 0):
        pieces = [cut.chunk_layers(stage, chunk) for chunk in range(parts)]
        assert list(chain.from_iterable(pieces)) == list(cut.stage_layers(stage))
        for block in cut.blocks:
            of_block = [pieces[chunk] for chunk in range(block.index, parts, blocks)]
            assert tuple(chain.from_iterable(of_block)) == cut.active_layers(block.index, stage)
    for block in cut.blocks if stages > 1 else ():
        first = cut.first_trainable_virtual_stage(block.index)
        assert first == block.index * stages
        active = [cut.virtual_stage_active(block.index, virtual) for virtual in range(cut.num_virtual_stages)]
        expected = [virtual // stages % blocks == block.index for virtual in range(cut.num_virtual_stages)]
        expected[-1] |= tied and block.index == 0  # the embedding's copy
        assert active == expected


def test_without_an_active_block_all_layers_rest() -> None:
    """--bcd-num-blocks 0 that leaves layers, or the head, without any update."""
    cut = partition(
        num_layers=5,
        num_stages=2,
        num_blocks=0,
        layout="spread",
        tied=False,
        resting="all",
        always_active=frozenset(("norms", "biases", "embedding", "head")),
    )
    assert cut.num_blocks == 1 and cut.resting_layers(0) == (0, 1, 2, 3, 4)
    assert cut.active_layers(0, 0) == cut.active_layers(0, 1) == ()
    assert cut.embedding_active(0) and cut.head_active(0) and cut.final_norm_active(0) and not cut.has_prefix
