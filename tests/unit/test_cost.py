"""Parameters, bytes of model state and compute of a model, in closed form."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.planned import active_parameters, shape_of, stage_parameters

from megatron.bcd.blocks.partition import Partition, partition
from megatron.bcd.config import LAYOUTS
from megatron.bcd.planner.cost import (
    compute_ratio,
    layer_work,
    newton_schulz_flops,
    state_budget,
    total_compute_ratio,
)

GIB = 2**30


def gpt2(layers: int, hidden: int) -> int:
    return shape_of(layers=layers, hidden=hidden).num_parameters


def llama(layers: int, hidden: int, ffn: int, **sizes: int) -> int:
    return shape_of("llama", layers=layers, hidden=hidden, ffn=ffn, **{"vocabulary": 32000, **sizes}).num_parameters


# Published memory in GiB, full (table 8) and BCD with a third active (table 4), of arXiv 2506.12037. L-1.5B's full
# memory does not follow from its settings, which give 23.325.
TABLE_8: dict[str, tuple[int, int, float, float]] = {
    "G-1.6B": (gpt2(30, 2048), 1_615_775_744, 24.077, 12.038),
    "G-5.4B": (gpt2(28, 3968), 5_495_263_360, 81.881, 40.942),
    "G-10B": (gpt2(56, 3968), 10_787_035_776, 160.738, 80.370),
    "G-20B": (gpt2(110, 3968), 20_992_596_864, 312.805, 156.402),
    "L-1.5B": (llama(30, 2048, 5050), 1_565_329_408, 23.325, 11.662),
    "L-6.0B": (llama(32, 4096, 9200), 6_027_481_088, 89.815, 44.908),
    "L-11B": (llama(64, 4096, 9200), 11_792_814_080, 175.714, 87.858),
    "L-23B": (llama(128, 4096, 9200), 23_323_480_064, 347.539, 173.769),
}


@pytest.mark.parametrize("model", TABLE_8)
def test_the_papers_models(model: str) -> None:
    """A forgotten bias, norm, position table or head; a budget other than 16 bytes per parameter in full training, 8
    with a third active."""
    found, parameters, published_full, published_bcd = TABLE_8[model]
    assert found == parameters
    budget = state_budget(precision="fp32")
    full = (budget.weight + budget.gradient + budget.optimizer) * found / GIB
    bcd = (budget.weight + (budget.gradient + budget.optimizer) / 3) * found / GIB
    assert (full, bcd) == (pytest.approx(published_full, rel=75e-6), pytest.approx(published_bcd, rel=75e-6))


def test_parameters_of_well_known_models() -> None:
    """A formula fitted to the paper's tables alone: GPT-2 small, LLaMA 7B, LLaMA 2 70B and LLaMA 3 8B (these two with 8
    key-value heads of 128) are public counts."""
    assert gpt2(12, 768) == 124_439_808
    assert llama(32, 4096, 11008) == 6_738_415_616
    assert llama(80, 8192, 28672, heads=64, groups=8) == 68_976_648_192
    assert llama(32, 4096, 14336, heads=32, groups=8, vocabulary=128256) == 8_030_261_248


@pytest.mark.parametrize(
    ("precision", "moments", "expected"),
    [
        ("fp32", 2, (4, 4, 8)),
        ("bf16", 2, (2, 4, 12)),
        ("fp16", 2, (2, 4, 12)),
        ("fp32", 1, (4, 4, 4)),
        ("bf16", 1, (2, 4, 8)),
    ],
)
def test_budget_per_parameter(precision: str, moments: int, expected: tuple[int, ...]) -> None:
    """A forgotten fp32 main parameter or a 16-bit main gradient: full is 16 in fp32, 18 in bf16."""
    budget = state_budget(precision=precision, moments=("fp32",) * moments)
    assert (budget.weight, budget.gradient, budget.optimizer) == expected
    if precision == "fp16":  # without --accumulate-allreduce-grads-in-fp32
        assert state_budget(precision=precision, gradients_in_fp32=False).gradient == 2


@pytest.mark.parametrize(("dtype", "moments"), [("fp32", 8), ("bf16", 4), ("int8", 2.03125)])
def test_budget_with_moments_in_fewer_bits(dtype: str, moments: float) -> None:
    """A main parameter that is charged as a moment, scales that are forgotten."""
    assert state_budget(precision="bf16", moments=(dtype, dtype)).optimizer == moments + 4
    assert state_budget(precision="bf16", moments=(dtype, "bf16")).optimizer == moments / 2 + 2 + 4
    assert state_budget(precision="bf16", moments=(dtype, dtype), precision_aware=True).optimizer == moments + 2


def cut_of(*, layers: int, stages: int = 1, blocks: int | None = 3, layout: str = "spread") -> Partition:
    return partition(num_layers=layers, num_stages=stages, num_blocks=blocks, layout=layout, tied=True)


@given(layout=st.sampled_from(LAYOUTS), stages=st.integers(1, 4), extra=st.integers(0, 7), padding=st.integers(0, 127))
def test_stage_parameters_sum_to_the_model(layout: str, stages: int, extra: int, padding: int) -> None:
    """A head's copy or a padding row counted wrong; an active part of a stage that has none."""
    cut = cut_of(layers=3 * stages + extra, stages=stages, blocks=None, layout=layout)
    shape = shape_of(layers=cut.num_layers, hidden=8, vocabulary=257, positions=16)
    held, copies = stage_parameters(shape, cut, padded=257 + padding), int(stages > 1)
    assert sum(held) == shape.num_parameters + copies * 257 * 8 + (1 + copies) * padding * 8
    for block in range(cut.num_blocks):
        active = active_parameters(shape, cut, block, padded=257 + padding)
        assert [count > 0 for count in active] == [
            any(cut.virtual_stage_active(block, virtual) for virtual in range(stage, cut.num_virtual_stages, stages))
            for stage in range(stages)
        ]


def test_stage_parameters_example() -> None:
    """An embedding, head or final norm on the wrong stage."""
    shape = shape_of(layers=6, hidden=4, vocabulary=10, positions=2)
    layer = 12 * 16 + 13 * 4
    cut = cut_of(layers=6, stages=2)
    assert stage_parameters(shape, cut, padded=16) == (3 * layer + 18 * 4, 3 * layer + 16 * 4 + 8)
    assert active_parameters(shape, cut, 0, padded=16) == (layer + 18 * 4, layer + 16 * 4)
    assert active_parameters(shape, cut, 2, padded=16) == (layer, layer + 8)


@pytest.mark.parametrize(
    ("prefix_cached", "ninths"), [(False, (7, 6, 5)), (True, (7, 5, 3))], ids=["computed", "cached"]
)
def test_compute_bound_on_one_stage(prefix_cached: bool, ninths: tuple[int, ...]) -> None:
    """A benchmark bound that is not that of docs/concepts.md: bottom, middle and top third."""
    cut = cut_of(layers=12)
    for block, expected in enumerate(ninths):
        assert compute_ratio(cut, block, prefix_cached=prefix_cached) == pytest.approx(expected / 9)
        assert total_compute_ratio(cut, block, prefix_cached=prefix_cached) == pytest.approx(expected / 9)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_compute_bound_of_spread_over_stages(stages: int) -> None:
    """A bound that forgets the slowest stage: 7/9 for it, a mean of (7 - 1/S)/9 for the sum."""
    cut = cut_of(layers=6 * stages, stages=stages)
    assert [compute_ratio(cut, block) for block in range(3)] == pytest.approx([7 / 9] * 3)
    mean = sum(total_compute_ratio(cut, block) for block in range(3)) / 3
    assert mean == pytest.approx((7 - 1 / stages) / 9)
    whole = cut_of(layers=6 * stages, stages=stages, blocks=1)
    assert compute_ratio(whole, 0) == total_compute_ratio(whole, 0) == 1.0


def test_work_of_layout_stage_by_stage() -> None:
    """Prefix stages charged for D, or suffix stages for W."""
    cut = cut_of(layers=8, stages=4, blocks=None, layout="stage")
    works = [layer_work(cut, 1, stage=stage) for stage in range(4)]
    assert [sum(work) for work in works] == [2, 6, 4, 4] and sum(layer_work(cut, 1)) == 16
    assert works[0] == (2, 0, 0)
    assert layer_work(cut, 1, stage=0, prefix_cached=True) == (0, 0, 0)
    assert compute_ratio(cut, 1) == 1.0


@pytest.mark.parametrize(("stateless", "weights"), [("all", [6, 6, 6]), ("suffix", [6, 5, 4])])
def test_stateless_updates_compute_weight_gradients(stateless: str, weights: list[int]) -> None:
    """A W that is not counted for them, or a prefix that --bcd-resting-layers suffix keeps."""
    cut = partition(num_layers=6, num_stages=2, num_blocks=3, layout="strided", tied=True, stateless=stateless)
    assert [layer_work(cut, block)[2] for block in range(3)] == weights


def test_always_active_biases() -> None:
    """Biases of frozen layers that are counted for no block."""
    shape = shape_of(layers=4, hidden=8, vocabulary=16, positions=4)
    parts = frozenset({"norms", "biases", "embedding", "head"})
    cut = replace(cut_of(layers=4, blocks=2, layout="strided"), always_active=parts)
    vectors = 4 * (72 + 32) + 16  # biases of 24 + 8 + 32 + 8, two norms of 2 x 8 per layer
    assert active_parameters(shape, cut, 0, padded=16) == (20 * 8 + vectors + 2 * 12 * 64,)
    assert active_parameters(shape, replace(cut, has_active_block=False), 0, padded=16) == (20 * 8 + vectors,)


@pytest.mark.parametrize("frozen", ["embedding", "head", "norms"])
def test_frozen_parts_are_active_in_no_phase(frozen: str) -> None:
    """A frozen part that a phase counts, or one that the model lost."""
    shape = shape_of(layers=4, hidden=8, vocabulary=16, positions=4, tied=False)
    cut = partition(num_layers=4, num_stages=2, num_blocks=2, layout="spread", tied=False)
    parts = {"embedding": 20 * 8, "head": 16 * 8, "norms": (2 * 4 + 1) * 16}
    some = replace(cut, frozen=frozenset({frozen}))
    active = sum(sum(active_parameters(shape, some, block, padded=16)) for block in range(2))
    assert active == shape.num_parameters - parts[frozen]
    assert stage_parameters(shape, some, padded=16) == stage_parameters(shape, cut, padded=16)


def test_operations_of_an_orthogonalisation() -> None:
    """A product that is left out, or the larger dimension taken for the smaller; by hand for 3 x 5: X X^T 90, its
    square 54, their sum times X 90, five times."""
    assert newton_schulz_flops(3, 5) == newton_schulz_flops(5, 3) == 5 * (90 + 54 + 90)
