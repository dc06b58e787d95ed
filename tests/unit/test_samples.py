"""The samples that a rank trains on: one epoch of a blend, and the subsets of phases (paper, section 3.2.3)."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command_line import parse

from megatron.bcd.blocks.subsets import PhaseSubset
from megatron.bcd.data import BatchSharding, GroupShare, subset_indices
from megatron.bcd.data.batches import TrainingSamples, consecutive_indices
from megatron.bcd.data.sft.permutation import Permutation
from megatron.bcd.data.splits import _epoch_samples
from megatron.bcd.training.state import StepResult, TrainState

NO_STEP: dict[str, Any] = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 0.1, "milliseconds": 1.0}


@pytest.mark.parametrize(
    ("num_tokens", "weights", "expected"),
    [
        ([1001], None, 100),
        ([1000], None, 99),
        ([1001, 501], None, 150),
        ([1001, 1001], [1.0, 1.0], 200),
        ([1001, 1001], [3.0, 1.0], 400),
        ([10001, 11], [0.5, 0.5], 2000),
        ([1001], [7.0], 100),
    ],
)
def test_an_epoch_reads_every_dataset_of_the_blend_once(
    num_tokens: list[int], weights: list[float] | None, expected: int
) -> None:
    """An epoch is as long as it takes to draw every dataset of the blend whole."""
    config = parse("--seq-length", "10", without=("--seq-length",))
    blend = (["prefix"] * len(num_tokens), weights)
    dataset_config: Any = SimpleNamespace(blend=blend, blend_per_split=None)
    assert _epoch_samples(config, dataset_config, num_tokens) == expected


def samples(*flags: str, epoch_samples: int = 100) -> TrainingSamples:
    return TrainingSamples(parse(*flags), dataset=None, epoch_samples=epoch_samples)


def test_share_of_the_data_that_was_seen() -> None:
    """The share that was seen counts a sample of a phase once, and only those that the phase reached."""
    subsets, state, result = samples("--bcd-sample-ratio", "0.3"), TrainState(), StepResult.from_dict(NO_STEP)
    shares = []
    for steps in (10, 2, 40):
        for _ in range(steps):
            state.after_step(result, num_samples=8)
        shares.append(subsets.share_seen(in_phase=state.samples_in_phase, seen_before=state.samples_seen_before))
        state.after_phase(num_distinct_samples=subsets.num_distinct(state.samples_in_phase))
    assert shares == pytest.approx([0.3, 0.3 + 0.16, 0.76])
    assert state.samples_in_phase == 0 and state.samples_seen_before == 76
    assert samples().share_seen(in_phase=64, seen_before=64) == 1.0
    assert samples("--skip-train", "--bcd-sample-ratio", "0.3").subset is None


@pytest.mark.parametrize("micro_batch_size, ratio", [(2, None), (1, None), (2, 0.5)])
def test_replica_groups_take_turns(micro_batch_size: int, ratio: float | None) -> None:
    """Replica groups take turns, so each sample is read once, and a new reader continues at its group's place."""
    subset = None if ratio is None else PhaseSubset(num_samples=96, ratio=ratio, seed=1)

    def read(group: int, num_groups: int, start: int, number: int) -> list[int]:
        share = GroupShare(group=group, num_groups=num_groups, batch_size=4)
        sharding = BatchSharding(micro_batch_size=micro_batch_size, rank=0, num_ranks=1, share=share)
        if subset is not None:
            order = subset_indices(sharding, subset=subset, phase=0, position=start)
        else:
            order = consecutive_indices(sharding, total_samples=96, consumed_samples=start)
        return [index for batch in itertools.islice(order, number // micro_batch_size) for index in batch]

    alone = read(0, 1, 0, 48)
    groups = [read(group, 3, 12, 12) for group in range(3)]
    assert [index for turn in range(3) for group in groups for index in group[4 * turn : 4 * turn + 4]] == alone[12:]
    assert groups[1][4:] == read(1, 3, 24, 8)


@st.composite
def subsets(draw: st.DrawFn) -> PhaseSubset:
    """Draw any subset of a small epoch, from one sample to all of them."""
    num_samples = draw(st.integers(1, 60))
    size = draw(st.integers(1, num_samples))
    return PhaseSubset(num_samples=num_samples, ratio=size / num_samples, seed=draw(st.integers(-3, 3)))


def test_orders_are_the_same_everywhere() -> None:
    """The orders and the size of a subset are the same on every machine."""
    assert PhaseSubset(num_samples=10, ratio=0.4, seed=7).indices(2).tolist() == [7, 1, 5, 4]
    two_passes = PhaseSubset(num_samples=10, ratio=0.9, seed=7).samples(1, numpy.arange(12)).tolist()
    assert two_passes == [7, 3, 5, 9, 2, 6, 4, 8, 1, 3, 1, 5]
    assert PhaseSubset(num_samples=100, ratio=0.29, seed=0).size == 29, "0.29 x 100 is not quite 29"


@settings(max_examples=25)
@given(subset=subsets())
def test_no_sample_is_drawn_twice_before_the_epoch_is_shuffled_anew(subset: PhaseSubset) -> None:
    """No sample is drawn twice before the epoch is shuffled anew."""
    per_epoch = subset.num_samples // subset.size
    for epoch in range(3):
        drawn = numpy.concatenate([subset.indices(epoch * per_epoch + number) for number in range(per_epoch)])
        assert len(numpy.unique(drawn)) == len(drawn) == per_epoch * subset.size
        assert drawn.min() >= 0 and drawn.max() < subset.num_samples


@settings(max_examples=25)
@given(subset=subsets(), phase=st.integers(0, 30))
def test_each_pass_takes_the_whole_subset(subset: PhaseSubset, phase: int) -> None:
    """Each pass takes the whole subset of its phase, and a sample does not depend on which others are asked for."""
    samples = subset.samples(phase, numpy.arange(3 * subset.size))
    for one_pass in samples.reshape(3, subset.size):
        assert sorted(one_pass) == sorted(subset.indices(phase))
    alone = [int(subset.samples(phase, numpy.array([at]))[0]) for at in range(0, len(samples), 9)]
    assert alone == samples[::9].tolist()


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9, 1.0])
def test_each_pass_and_each_phase_has_its_own_order(ratio: float) -> None:
    """Each pass, phase and seed has its own order, and the next epoch is cut anew."""
    subset = PhaseSubset(num_samples=400, ratio=ratio, seed=1)
    first, second = subset.samples(0, numpy.arange(2 * subset.size)).reshape(2, subset.size)
    other_phase = subset.samples(1, numpy.arange(subset.size))
    other_seed = PhaseSubset(num_samples=400, ratio=ratio, seed=2).samples(0, numpy.arange(subset.size))
    for other in (second, other_phase, other_seed, subset.indices(0), numpy.sort(first)):
        assert (first == other).mean() < 0.2
    next_epoch = subset.indices(400 // subset.size)
    assert numpy.isin(next_epoch, first).mean() == pytest.approx(ratio, abs=0.15)


@pytest.mark.parametrize("size", [1, 2, 3, 10, 97, 3000])
def test_an_order_of_fine_tuning_has_every_index_once(size: int) -> None:
    """An order of fine-tuning has every index once, and is shuffled."""
    values = Permutation(size, "key").at(numpy.arange(size))
    assert (numpy.sort(values) == numpy.arange(size)).all()
    assert size < 10 or (values == numpy.arange(size)).mean() < 0.2


def test_orders_of_fine_tuning_never_change() -> None:
    """An order of fine-tuning never changes, so a resumed run keeps its splits."""
    assert Permutation(10, "key").at(numpy.arange(10)).tolist() == [2, 1, 4, 9, 7, 0, 8, 3, 5, 6]
