"""Parameters, bytes of model state and compute of a model, in closed form."""

from __future__ import annotations

import pytest
from benchmark import compute_ratio
from hypothesis import given
from hypothesis import strategies as st
from support.planned import active_parameters, shape_of, stage_parameters

from megatron.bcd.blocks.partition import Partition, partition
from megatron.bcd.config import LAYOUTS
from megatron.bcd.planner.cost import layer_work
from megatron.bcd.planner.tensors import count_parameters


def cut_of(*, layers: int, stages: int = 1, blocks: int | None = 3, layout: str = "spread") -> Partition:
    return partition(num_layers=layers, num_stages=stages, num_blocks=blocks, layout=layout, tied=True)


@given(layout=st.sampled_from(LAYOUTS), stages=st.integers(1, 4), extra=st.integers(0, 7), padding=st.integers(0, 127))
def test_stage_parameters_sum_to_the_model(layout: str, stages: int, extra: int, padding: int) -> None:
    """The stages' parameters add up to the model's, copies and padding, and only stages with active layers have active
    ones."""
    cut = cut_of(layers=3 * stages + extra, stages=stages, blocks=None, layout=layout)
    shape = shape_of(layers=cut.num_layers, hidden=8, vocabulary=257, positions=16)
    held, copies = stage_parameters(shape, cut, padded=257 + padding), int(stages > 1)
    assert sum(held) == count_parameters(shape) + copies * 257 * 8 + (1 + copies) * padding * 8
    for block in range(cut.num_blocks):
        active = active_parameters(shape, cut, block, padded=257 + padding)
        assert [count > 0 for count in active] == [
            any(cut.virtual_stage_active(block, virtual) for virtual in range(stage, cut.num_virtual_stages, stages))
            for stage in range(stages)
        ]


@pytest.mark.parametrize(
    ("prefix_cached", "ninths"), [(False, (7, 6, 5)), (True, (7, 5, 3))], ids=["computed", "cached"]
)
def test_compute_bound_on_one_stage(prefix_cached: bool, ninths: tuple[int, ...]) -> None:
    """The compute bounds of the bottom, middle and top third are those of docs/concepts.md."""
    cut = cut_of(layers=12)
    for block, expected in enumerate(ninths):
        assert compute_ratio(cut, block, prefix_cached=prefix_cached) == pytest.approx(expected / 9)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_compute_bound_of_spread_over_stages(stages: int) -> None:
    """The bound of layout spread is that of the slowest stage: 7/9 for it, a mean of (7 - 1/S)/9 for the sum."""
    cut = cut_of(layers=6 * stages, stages=stages)
    assert [compute_ratio(cut, block) for block in range(3)] == pytest.approx([7 / 9] * 3)
    work = sum(sum(layer_work(cut, block)) for block in range(3))
    assert work / (3 * 3 * cut.num_layers) == pytest.approx((7 - 1 / stages) / 9)
    whole = cut_of(layers=6 * stages, stages=stages, blocks=1)
    assert compute_ratio(whole, 0) == 1.0


def test_work_of_layout_stage_by_stage() -> None:
    """Stages before the active one only run forward, and stages after it compute no weight gradients."""
    cut = cut_of(layers=8, stages=4, blocks=None, layout="stage")
    works = [layer_work(cut, 1, stage=stage) for stage in range(4)]
    assert [sum(work) for work in works] == [2, 6, 4, 4] and sum(layer_work(cut, 1)) == 16
    assert works[0] == (2, 0, 0)
    assert layer_work(cut, 1, stage=0, prefix_cached=True) == (0, 0, 0)
    assert compute_ratio(cut, 1) == 1.0
