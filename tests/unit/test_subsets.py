"""subsets: which samples a phase trains on (paper, section 3.2.3)."""

from __future__ import annotations

import tracemalloc

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.bcd.blocks.subsets import Permutation, PhaseSubset


@st.composite
def subsets(draw: st.DrawFn) -> PhaseSubset:
    """Any subset of a small epoch, from one sample to all of them."""
    num_samples = draw(st.integers(1, 60))
    size = draw(st.integers(1, num_samples))
    return PhaseSubset(num_samples=num_samples, ratio=size / num_samples, seed=draw(st.integers(-3, 3)))


@given(size=st.integers(1, 3000), key=st.text(max_size=4))
def test_permutation_has_every_index_once(size: int, key: str) -> None:
    """Exposes a lost or doubled sample, and a place that is not that of its index."""
    everything = numpy.arange(size)
    values = Permutation(size, key).at(everything)
    assert (numpy.sort(values) == everything).all()
    assert (Permutation(size, key).place_of(values) == everything).all()


@pytest.mark.parametrize("size", [2, 3, 10, 97])
def test_permutation_puts_every_index_at_every_place_alike(size: int) -> None:
    """Exposes an order that is hardly shuffled: chi-squared of indices by place, and of neighbours' distances."""
    num_orders, everything = 2000, numpy.arange(size)
    at_place, distances = numpy.zeros((size, size)), numpy.zeros(size)
    for number in range(num_orders):
        values = Permutation(size, f"order {number}").at(everything)
        at_place[everything, values] += 1
        distances += numpy.bincount((values[1:] - values[:-1]) % size, minlength=size)
    expected = num_orders / size
    assert ((at_place - expected) ** 2 / expected).sum() / (size - 1) ** 2 < 2, "about 1 where places are alike"
    assert distances[0] == 0 and (distances[1:] > 0.8 * num_orders).all()


def test_orders_are_the_same_everywhere() -> None:
    """Exposes an order that depends on the machine or on a library's version: a resumed run would see other samples."""
    assert Permutation(10, "key").at(numpy.arange(10)).tolist() == [2, 1, 4, 9, 7, 0, 8, 3, 5, 6]
    assert PhaseSubset(num_samples=10, ratio=0.4, seed=7).indices(2).tolist() == [9, 5, 2, 0]
    assert [PhaseSubset(num_samples=10, ratio=0.9, seed=7).sample(1, k) for k in range(12)] == [
        9,
        3,
        4,
        5,
        0,
        7,
        1,
        6,
        8,
        9,
        3,
        7,
    ]


@given(subset=subsets())
def test_phases_draw_every_sample_equally_often(subset: PhaseSubset) -> None:
    """Exposes a sample twice in one subset, above all where it crosses into the next order; and one that is never
    drawn, or drawn again before all others have been."""
    drawn = numpy.zeros(subset.num_samples, dtype=int)
    for phase in range(20):
        indices = subset.indices(phase)
        assert len(set(indices.tolist())) == len(indices) == subset.size
        assert indices.min() >= 0 and indices.max() < subset.num_samples
        drawn[indices] += 1
        assert drawn.max() - drawn.min() <= 1
        assert (drawn > 0).mean() == pytest.approx(subset.share_seen(phase))


@given(subset=subsets(), phase=st.integers(0, 30), start=st.integers(0, 80), stop=st.none() | st.integers(0, 80))
def test_indices_in_parts(subset: PhaseSubset, phase: int, start: int, stop: int | None) -> None:
    """Exposes an index that depends on which others are asked for with it."""
    assert subset.indices(phase, start, stop).tolist() == subset.indices(phase).tolist()[start:stop]


@given(subset=subsets(), phase=st.integers(0, 30))
def test_each_pass_takes_the_whole_subset(subset: PhaseSubset, phase: int) -> None:
    """Exposes a pass that leaves samples out, or takes some from another phase's subset."""
    positions = numpy.arange(3 * subset.size)
    samples = subset.samples(phase, positions)
    assert samples[::9].tolist() == [subset.sample(phase, position) for position in positions[::9].tolist()]
    for one_pass in samples.reshape(3, subset.size):
        assert sorted(one_pass) == sorted(subset.indices(phase))


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9, 1.0])
def test_each_pass_and_each_phase_has_its_own_order(ratio: float) -> None:
    """Exposes the same order in every pass, in every phase (ratio 1), or for every seed."""
    subset = PhaseSubset(num_samples=400, ratio=ratio, seed=1)
    first, second = subset.samples(0, numpy.arange(2 * subset.size)).reshape(2, subset.size)
    other_phase = subset.samples(1, numpy.arange(subset.size))
    other_seed = PhaseSubset(num_samples=400, ratio=ratio, seed=2).samples(0, numpy.arange(subset.size))
    for other in (second, other_phase, other_seed, subset.indices(0), numpy.sort(first)):
        assert (first == other).mean() < 0.2


@pytest.mark.parametrize(("ratio", "overlap"), [(0.25, 0.25), (0.9, 0.9)])
def test_each_epoch_cuts_other_subsets(ratio: float, overlap: float) -> None:
    """Exposes one permutation used again and again: the same samples would always be trained on together."""
    subset = PhaseSubset(num_samples=1000, ratio=ratio, seed=5)
    period = round(1 / ratio) if ratio < 0.5 else 10
    first, later = set(subset.indices(0).tolist()), set(subset.indices(period).tolist())
    assert len(first & later) / subset.size == pytest.approx(overlap, abs=0.1)


@pytest.mark.parametrize("ratio", [0.3, 0.9])
def test_a_large_epoch_takes_no_memory(ratio: float) -> None:
    """Exposes an order that is stored: 10^8 indices are 800 MB, on every rank."""
    tracemalloc.start()
    try:
        subset = PhaseSubset(num_samples=10**8 + 7, ratio=ratio, seed=1)
        for phase in (0, 3, 9, 10**6):
            samples = subset.samples(phase, numpy.arange(0, 3 * 10**8, 10**6))
            assert len(set(samples[: int(100 * ratio)].tolist())) == int(100 * ratio), "one pass"
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_large_subset_is_computed_in_parts() -> None:
    """Exposes a cut between two parts that loses or doubles an index."""
    subset = PhaseSubset(num_samples=10**6, ratio=0.7, seed=1)
    assert len(numpy.unique(subset.indices(1))) == subset.size == 700_000


def test_size_and_use() -> None:
    """Exposes a size that is one less because 0.29 x 100 is not quite 29, and shares counted per subset."""
    subset = PhaseSubset(num_samples=100, ratio=0.29, seed=0)
    assert subset.size == 29
    assert [subset.share_seen(phase) for phase in range(5)] == [0.29, 0.58, 0.87, 1.0, 1.0]
    assert subset.times_used(58) == 2.0


@pytest.mark.parametrize(
    ("num_samples", "ratio", "message"),
    [
        (10, 0.0, "--bcd-sample-ratio 0.0: must be above 0 and at most 1"),
        (10, 1.5, "--bcd-sample-ratio 1.5: must be above 0 and at most 1"),
        (10, float("nan"), "--bcd-sample-ratio nan: must be above 0 and at most 1"),
        (0, 0.5, "--bcd-sample-ratio 0.5: the train split has no samples"),
        (10, 0.01, "--bcd-sample-ratio 0.01: less than one of the 10 samples of an epoch; give at least 0.1"),
    ],
)
def test_bad_ratio_names_the_flag(num_samples: int, ratio: float, message: str) -> None:
    """Exposes a division by zero, or an empty subset, in place of one line that names the flag."""
    with pytest.raises(ValueError, match=message):
        PhaseSubset(num_samples=num_samples, ratio=ratio, seed=0)


def test_positions_before_the_phase_are_a_bug() -> None:
    """Exposes a negative position that is read from another pass without a word."""
    with pytest.raises(AssertionError):
        PhaseSubset(num_samples=10, ratio=0.5, seed=0).sample(0, -1)
