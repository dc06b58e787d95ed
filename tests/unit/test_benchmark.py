"""The statistics and the flags of tools/benchmark.py; nothing is timed here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import benchmark
import pytest
from _benchmark_figures import Turn, block_figures, mean_ratio, paired_ratio, rotated, slowest, typical_step_ms
from _benchmark_messages import awaited_message_ms, message_ends
from _benchmark_schedule_figures import (
    ActionTimes,
    RankTimes,
    ScheduleTurn,
    merged,
    schedule_figures,
    steady_shape,
)

from megatron.bcd.blocks.partition import Partition, partition
from megatron.bcd.pipeline.actions import Action, Kind
from megatron.bcd.pipeline.build import bcd_shape, stock_shape
from megatron.bcd.pipeline.chunk_shape import ChunkShape
from megatron.bcd.pipeline.iteration import TimedAction


def turn(*step_ms: float, first: float = 0.0, build: float = 0.0, dispose: float = 0.0, state: int = 1) -> Turn:
    """A turn whose first step after the switch took ``first``."""
    return Turn(build_ms=build, warm_up_ms=(first,), step_ms=step_ms, dispose_ms=dispose, model_state_bytes=(state,))


def figures(blocks: list[Turn], full: list[Turn]):
    return block_figures(blocks, full, block=0, layers="0", extras=(), bound=0.5)


def test_every_variant_has_every_place_equally_often() -> None:
    """Without rotation the variant that always comes last is measured on the warmest machine."""
    orders = [rotated("abc", index) for index in range(6)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    for variant in "abc":
        assert sorted(order.index(variant) for order in orders) == [0, 0, 1, 1, 2, 2]


def test_ratio_is_paired_by_round() -> None:
    """A ratio of overall medians follows a machine that slows down in the middle; a paired one does not."""
    slowdown = (1.0, 1.0, 5.0, 3.0, 1.0)
    full = [turn(10 * factor, 10 * factor) for factor in slowdown]
    block = [turn(6 * factor) for factor in slowdown]
    assert paired_ratio(block, full) == pytest.approx(0.6)


def test_one_disturbed_step_and_one_disturbed_round_change_nothing() -> None:
    """A mean instead of a median would let one hiccup of the machine decide the ratio."""
    full = [turn(10, 10, 10), turn(10, 10, 10), turn(90, 90, 90)]
    block = [turn(6, 600, 6), turn(6, 6, 6), turn(6, 6, 6)]
    assert paired_ratio(block, full) == pytest.approx(0.6)
    assert typical_step_ms(block) == 6


def test_slowest_rank_decides_times_and_bytes_stay_by_rank() -> None:
    """The first rank's own times would hide that another stage is what the step waits for."""
    merged = slowest([turn(1, 5, first=2, build=9, state=10), turn(3, 4, first=1, dispose=7, state=20)])
    assert merged.step_ms == (3, 5)
    assert (merged.warm_up_ms, merged.build_ms, merged.dispose_ms) == ((2,), 9, 7)
    assert merged.model_state_bytes == (10, 20)


def test_switch_counts_what_the_first_step_costs_more() -> None:
    """Adam's state and the first pages of its buffers are made in the first step: build alone would hide them."""
    row = figures([turn(10, 10, first=14, build=5, dispose=1)] * 3, [turn(20)] * 3)
    assert row.switch_ms == pytest.approx(10)
    assert row.switch_steps == pytest.approx(1)
    quicker = figures([turn(10, first=8, build=5, dispose=1)], [turn(20)])
    assert quicker.switch_ms == pytest.approx(6), "a quick first step must not pay for the build"


def test_mean_over_blocks_with_and_without_switches() -> None:
    """The gain shown must be the one of a whole cycle, and a switch is shared by the steps of its phase only."""
    full = [turn(20)] * 3
    rows = [
        figures([turn(10, first=10, build=40)] * 3, full),
        figures([turn(14, first=14, build=20)] * 3, full),
    ]
    assert mean_ratio(rows) == pytest.approx(0.6)
    assert mean_ratio(rows, steps_per_block=10) == pytest.approx(0.6 + (0.2 + 0.1) / 2)


def test_flags_of_training_are_taken() -> None:
    """A default that wins over a flag would measure another model than the one that was asked for."""
    _, config = benchmark.parse(["--num-layers", "6", "--global-batch-size", "6", "--bf16", "--lr", "1"])
    assert (config.num_layers, config.precision, config.optimizer.lr) == (6, "bf16", 1)
    assert config.training.global_batch_size == 6
    _, config = benchmark.parse(["--data-path", "some", "--tokenizer-type", "ByteLevelTokenizer"])
    assert not config.data.mock_data and config.tokenizer.tokenizer_type == "ByteLevelTokenizer"


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--rounds 0", "--rounds"),
        ("--steps x", "--steps"),
        ("--warm-up-steps 0", "--warm-up-steps"),
        ("--train-iters 5", "--train-iters"),
        ("--save=out", "--save"),
        ("--round 3", "--round"),
        ("--hidden-size 500", "--hidden-size"),
        ("--bcd-num-blocks 13", "13 layers"),
        ("--schedule --rounds 0", "--rounds"),
        ("--schedule --bcd-layout stage", "--bcd-layout"),
        ("--schedule --bcd-schedule=stock", "--bcd-schedule"),
        ("--schedule --pipeline-model-parallel-size 1", "--schedule"),
        ("--schedule --num-layers 5", "6 layers"),
    ],
)
def test_bad_flags(flags: str, message: str) -> None:
    """A flag that is ignored or guessed at would give figures for something else than was asked for."""
    with pytest.raises(ValueError) as caught:
        benchmark.parse(flags.split())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_json_that_cannot_be_written(tmp_path: Path) -> None:
    """Found out at the end, it would cost the whole measurement."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "absent" / "a.json", tmp_path / "file" / "a.json"):
        with pytest.raises(ValueError, match=f"--json {path}: "):
            benchmark.parse(["--json", str(path)])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def two_stages(layout: str) -> Partition:
    return partition(num_layers=6, num_stages=2, num_blocks=None, layout=layout, tied=True)


def rank(stage: int, *, step: float = 0.0, outside: tuple[float, ...] = (0.0,), **kinds: list[float]) -> RankTimes:
    """What a rank measured, actions by the name of their kind."""
    actions = [
        ActionTimes(stage=stage, kind=Kind[name.upper()], milliseconds=tuple(times)) for name, times in kinds.items()
    ]
    return RankTimes(step_ms=step, outside_ms=outside, actions=tuple(actions))


def schedule_turn(step_ms: float, *, iteration_ms: float, outside_ms: float = 0.0) -> ScheduleTurn:
    return ScheduleTurn(step_ms=step_ms, outside_ms=outside_ms, message_ms=0.0, actions=(), iteration_ms=iteration_ms)


def test_prediction_of_one_microbatch_on_two_stages() -> None:
    """A mean that a waiting message or one hiccup enters, or milliseconds taken for seconds."""
    shape = stock_shape(bcd_shape(num_stages=2, num_microbatches=1, first_trainable=0, active=(True, True)))
    first = rank(0, forward=[10, 10, 90], send_forward=[3, 2], receive_backward=[50, 60], backward=[20])
    last = rank(1, forward=[11, 12, 13], receive_forward=[14, 15], backward=[22], send_backward=[4])
    turn = merged([first, last], shape)
    assert turn.message_ms == 2
    assert turn.iteration_ms == pytest.approx(10 + 2 + 12 + 22 + 2 + 20)
    assert [(times.stage, times.kind, times.milliseconds) for times in turn.actions] == [
        (0, Kind.BACKWARD, (20,)),
        (0, Kind.FORWARD, (10, 10, 90)),
        (1, Kind.BACKWARD, (22,)),
        (1, Kind.FORWARD, (11, 12, 13)),
    ]


def test_message_for_which_somebody_waits() -> None:
    """A one-way send returns before the message has moved: as the time of all messages it would make them free."""
    shape = bcd_shape(num_stages=3, num_microbatches=1, first_trainable=1)
    prefix = rank(0, forward_only=[10], send_forward=[0.1])
    first_trainable = rank(1, receive_forward=[0.2], receive_ahead=[0.1], forward=[1], send_forward=[3],
    receive_backward=[9],
                 backward=[1])  # fmt: skip
    last = rank(2, receive_forward=[5], forward=[1], backward_input=[1], send_backward=[4])
    assert merged([prefix, first_trainable, last], shape).message_ms == 3
    shape = bcd_shape(num_stages=2, num_microbatches=1, first_trainable=1)
    last = rank(1, receive_forward=[0.2], forward=[1], backward=[1])
    assert merged([prefix, last], shape).message_ms == 0.1, "there is no other here"


def test_steady_iteration_hides_the_prefix() -> None:
    """A prediction of a phase's first iteration would wait for the prefix, which in all others was run ahead."""
    ranks = [rank(0, forward_only=[10.0], send_forward=[0.0]), rank(1, forward=[10.0], backward=[20.0])]
    for run_ahead, expected in ((None, 120), (0, 130)):
        shape = steady_shape(two_stages("stage"), 1, num_microbatches=4, run_ahead=run_ahead)
        assert merged(ranks, shape).iteration_ms == pytest.approx(expected)


@pytest.mark.parametrize("block, run_ahead, expected", [(0, None, 0), (0, 3, 0), (1, None, 1), (1, 0, 0), (1, 9, 4)])
def test_how_far_a_steady_step_is_ahead(block: int, run_ahead: int | None, expected: int) -> None:
    """A plan that runs ahead otherwise than the schedule would be predicted, and not the one that was timed."""
    shape = steady_shape(two_stages("stage"), block, num_microbatches=4, run_ahead=run_ahead)
    assert (shape.done_ahead, shape.run_ahead, shape.first_trainable) == (expected, expected, block)
    assert shape.active == ((True, True) if block == 0 else (False, True)), "the tied head's copy is on the last stage"


def test_slowest_rank_steps_and_the_one_that_waits_least_is_outside() -> None:
    """A rank's wait for the others in the loss reduction counted as the optimizer's time, on top of the iteration."""
    shape = bcd_shape(num_stages=2, num_microbatches=1, first_trainable=1)
    prefix = rank(0, step=30, outside=(25, 7, 26), forward_only=[1], send_forward=[0])
    last = rank(1, step=31, outside=(5, 24, 6), forward=[10], backward=[15])
    turn = merged([prefix, last], shape)
    assert (turn.step_ms, turn.outside_ms) == (31, 6)
    assert turn.predicted_ms == pytest.approx(turn.iteration_ms + 6)


def test_schedule_figures_are_paired_by_round() -> None:
    """Ratios of overall medians follow a machine that slows down in the middle; paired ones do not."""
    slowdown = (1.0, 1.0, 5.0, 3.0, 1.0)
    ratios = (0.8, 0.8, 0.8, 0.7, 0.9)
    stock = [schedule_turn(100 * factor, iteration_ms=80 * factor, outside_ms=10 * factor) for factor in slowdown]
    bcd = [
        schedule_turn(100 * factor * ratio, iteration_ms=80 * factor * ratio, outside_ms=4 * factor * ratio)
        for factor, ratio in zip(slowdown, ratios, strict=True)
    ]
    row = schedule_figures(stock, bcd, partition=two_stages("stage"), block=1)
    assert (row.layout, row.block, row.first_trainable_stage) == ("stage", 1, 1)
    assert (row.layers, row.extras) == ("3-5", ("final norm",))
    assert (row.stock_ms, row.bcd_ms) == pytest.approx((100, 90))
    assert row.ratio == pytest.approx(0.8)
    assert (row.predicted_stock_ms, row.predicted_bcd_ms) == pytest.approx((90, 75.6))
    assert row.predicted_ratio == pytest.approx(0.8 * 84 / 90)
    assert (row.stock_deviation, row.bcd_deviation) == pytest.approx((-0.1, -0.16))


def trace(*actions: tuple[Kind, int, float, float]) -> list[TimedAction]:
    """Kind, microbatch, start and end."""
    return [TimedAction(action=Action(kind, number), start=start, end=end) for kind, number, start, end in actions]


def test_message_of_an_interleaved_plan_for_which_a_pass_waits() -> None:
    """A message that came while its receiver computed, taken to be as slow as that pass."""
    shape = ChunkShape(num_stages=2, num_chunks=1, num_microbatches=3, first_trainable=0, active=(True, True))
    forward, send, receive = Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD
    first = trace(
        *((forward, 0, 0.0, 1.0), (send, 0, 1.0, 1.0)),
        *((forward, 1, 1.0, 2.0), (send, 1, 2.0, 2.0)),
        *((forward, 2, 2.0, 3.0), (send, 2, 3.0, 3.0)),
    )
    last = trace(
        *((receive, 0, 0.5, 0.5), (forward, 0, 1.25, 4.0)),  # a quarter of a second after it was sent
        *((receive, 1, 4.0, 4.0), (receive, 2, 4.0, 4.0), (forward, 1, 4.5, 6.0)),  # half a second after both began
        (forward, 2, 6.0, 7.0),  # it was there
    )
    ends = [*message_ends(first, shape, 0), *message_ends(last, shape, 1)]
    assert awaited_message_ms(ends) == 375
    assert awaited_message_ms([*message_ends(first, shape, 0)]) == 0
    ranks = [
        replace(rank(stage, forward=[1.0], backward=[1.0]), message_ends=(message_ends(done, shape, stage),))
        for stage, done in enumerate((first, last))
    ]
    turn = merged(ranks, shape)
    assert turn.message_ms == 375
    assert turn.iteration_ms > 2 * 375
