"""Cuts of the pipeline by work, and the least recomputation that fits."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.bcd.blocks.partition import Partition, divide, divide_into_chunks, partition
from megatron.bcd.pipeline.cut import balanced_cut
from megatron.bcd.planner.activations import Recomputed, least_recomputation


def even_cut(**changes: Any) -> Partition:
    sizes = {"num_layers": 28, "num_stages": 4, "num_blocks": 3, "layout": "spread", "tied": False}
    return partition(**sizes | changes)


def slowest(one: Partition, sizes: tuple[int, ...], head: float) -> float:
    """Work of the slowest stage of layout spread, summed over the phases, counted layer by layer."""
    total = 0.0
    for block in range(one.num_blocks):
        work = []
        for stage, size in enumerate(sizes):
            parts = [len(part) for part in divide(size, one.num_layer_blocks)]
            is_head = block == len(parts)
            backward = [part for place, part in enumerate(parts) if not is_head and (stage or place >= block)]
            is_last = stage == len(sizes) - 1
            is_active = block == (0 if one.tied else one.num_blocks - 1)
            active = 0 if is_head else parts[block]
            work.append(size + sum(backward) + active + is_last * head * (2 + is_active))
        total += max(work)
    return total


@pytest.mark.parametrize(("tied", "head_phase"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize(("layers", "stages", "head"), [(28, 4, 1.0), (13, 4, 3.0), (64, 8, 0.5), (12, 4, 40.0)])
def test_no_slower_than_an_even_cut(layers: int, stages: int, head: float, tied: bool, head_phase: bool) -> None:
    """A balanced cut is no slower than an even one, and faster where a layer can move away from the head."""
    one = even_cut(num_layers=layers, num_stages=stages, tied=tied, head_phase=head_phase)
    sizes = balanced_cut(one, head=head)
    even = tuple(len(part) for part in divide(layers, stages))
    assert sum(sizes) == layers and len(sizes) == stages and min(sizes) >= one.num_layer_blocks
    assert slowest(one, sizes, head) <= slowest(one, even, head)
    if layers > stages * one.num_layer_blocks + 1:
        assert sizes[-1] < sizes[0] and slowest(one, sizes, head) < slowest(one, even, head)


@pytest.mark.parametrize("head", [0.0, 1.0, 5.0, 20.0])
def test_two_stages_are_cut_as_well_as_they_can_be(head: float) -> None:
    """The cut of two stages is the fastest of all cuts."""
    one = even_cut(num_layers=24, num_stages=2)
    best = min(slowest(one, (24 - last, last), head) for last in range(one.num_blocks, 24 - one.num_blocks + 1))
    assert slowest(one, balanced_cut(one, head=head), head) == best


def test_costly_layers_count_more() -> None:
    """A stage of layers that cost three times as much gets fewer of them."""
    one = even_cut(num_layers=12, num_stages=2, num_blocks=1)
    assert balanced_cut(one, head=0, layers=[1.5] * 6 + [0.5] * 6) == (4, 8)


@pytest.mark.parametrize("head_phase", [False, True])
@pytest.mark.parametrize("num_chunks", [3, 6])
def test_chunks_keep_their_layers(num_chunks: int, head_phase: bool) -> None:
    """A cut keeps the layers of each chunk, and the last stage has the fewest."""
    sizes = balanced_cut(even_cut(layout="interleaved", num_parts=num_chunks, head_phase=head_phase), head=1.0)
    even = divide_into_chunks(28, parts=num_chunks, stages=4)
    for first in range(0, len(sizes), 4):
        mine, chunks = sizes[first : first + 4], even[first : first + 4]
        assert sum(mine) == sum(map(len, chunks)) and min(mine) >= 1
    held = [sum(sizes[stage::4]) for stage in range(4)]
    assert held[-1] == min(held)


@pytest.mark.parametrize("needed", range(8))
def test_least_recomputation(needed: int) -> None:
    """Recomputation takes the least number of layers that fits, from the first chunks on."""
    numbers = (0, 2, 3)

    def fits(choice: Recomputed) -> bool:
        return sum(choice.layers) >= needed

    choice = least_recomputation(numbers, fits, core_share=0.1)
    expected = {0: (), 1: (0, 1, 0), 2: (0, 2, 0), 3: (0, 2, 1), 4: (0, 2, 2)}.get(needed, numbers)
    assert choice.layers == expected
    assert choice.granularity == ("full" if needed else "none")


@pytest.mark.parametrize(("core_share", "expected"), [(0.1, "selective"), (0.3, "full")])
def test_the_core_of_attention_is_cheaper_or_not(core_share: float, expected: str) -> None:
    """Attention alone is recomputed only if that is less work than whole layers."""
    choice = least_recomputation((5,), lambda one: one != Recomputed(), core_share=core_share)
    assert choice.granularity == expected
