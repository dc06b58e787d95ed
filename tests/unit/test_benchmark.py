"""The statistics and the flags of tools/benchmark.py; nothing is timed here."""

from __future__ import annotations

from pathlib import Path

import benchmark
import pytest
from _benchmark_figures import Turn, block_figures, mean_ratio, paired_ratio, rotated, slowest, typical_step_ms


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


def test_rounds_must_match() -> None:
    """Pairs of different rounds would compare two states of the machine."""
    with pytest.raises(ValueError):
        paired_ratio([turn(1)], [turn(1), turn(1)])


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


def test_largest_state_of_the_rounds() -> None:
    """A leak that grows from round to round would vanish in a median."""
    row = figures([turn(1, state=7), turn(1, state=9)], [turn(1, state=16), turn(1, state=16)])
    assert (row.model_state_bytes, row.full_model_state_bytes) == ((9,), (16,))


def test_defaults_are_the_published_measurement() -> None:
    """Without flags the tool must measure the model that its figures are quoted for, without dropout."""
    own, config = benchmark.parse([])
    assert (config.num_layers, config.hidden_size, config.model.seq_length) == (12, 512, 256)
    assert (config.training.micro_batch_size, config.training.global_batch_size) == (2, 4)
    assert config.transformer["hidden_dropout"] == config.transformer["attention_dropout"] == 0
    assert config.data.mock_data and config.tokenizer.vocab_size == 1023
    turns = 1 + own.rounds * 4  # full and 3 blocks, and one that is not counted
    assert config.training.train_iters == turns * (own.warm_up_steps + own.steps)


def test_flags_of_training_are_taken() -> None:
    """A default that wins over a flag would measure another model than the one that was asked for."""
    _, config = benchmark.parse(["--num-layers", "6", "--global-batch-size", "6", "--bf16", "--lr", "1"])
    assert (config.num_layers, config.precision, config.optimizer["lr"]) == (6, "bf16", 1)
    assert config.training.global_batch_size == 6
    _, config = benchmark.parse(["--data-path", "some", "--tokenizer-type", "ByteLevelTokenizer"])
    assert not config.data.mock_data and config.tokenizer.tokenizer_type == "ByteLevelTokenizer"


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--rounds 0", "--rounds 0: must be at least 1"),
        ("--steps x", "--steps: invalid int value: 'x'"),
        ("--warm-up-steps 0", "--warm-up-steps 0: must be at least 1"),
        ("--train-iters 5", "--train-iters has no use in a benchmark"),
        ("--save=out", "--save has no use in a benchmark"),
        ("--round 3", "unknown flag --round"),
        ("--hidden-size 500", "--num-attention-heads"),
        ("--bcd-num-blocks 13", "needs at least 13 layers"),
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
