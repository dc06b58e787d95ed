"""tools/benchmark.py as a user starts it, on a tiny model. What it times is not asserted."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.forked_runs import ForkedRuns
from support.planned import active_parameters, shape_of, stage_parameters

from megatron.bcd.blocks.partition import partition
from megatron.bcd.planner import cost

LAYERS, HIDDEN, SEQUENCE, VOCABULARY = 6, 64, 16, 128
SIZES = (f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads 2 --seq-length {SEQUENCE} "
         f"--vocab-size {VOCABULARY - 1} --rounds 2 --steps 2").split()  # fmt: skip


def measured(root: Path, folder: Path, *flags: str) -> tuple[dict[str, Any], str]:
    command = [sys.executable, "tools/benchmark.py", *SIZES, *flags, "--json", str(folder / "figures.json")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return written(folder), done.stdout


def written(folder: Path) -> dict[str, Any]:
    assert [path.name for path in folder.iterdir()] == ["figures.json"], "nothing else may be left behind"
    figures: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    return figures


def expected_state(num_stages: int, layout: str) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """Model state by block and by rank, and that of full training, from the formula for fp32 with Adam."""
    shape = shape_of(layers=LAYERS, hidden=HIDDEN, vocabulary=VOCABULARY, positions=SEQUENCE)
    cut = partition(num_layers=LAYERS, num_stages=num_stages, num_blocks=3, layout=layout, tied=True)
    held = stage_parameters(shape, cut, padded=VOCABULARY)
    blocks = [
        tuple(
            cost.model_state_bytes(num_parameters=parameters, num_active=active)
            for parameters, active in zip(
                held, active_parameters(shape, cut, block.index, padded=VOCABULARY), strict=True
            )
        )
        for block in cut.blocks
    ]
    return blocks, tuple(cost.model_state_bytes(num_parameters=count, num_active=count) for count in held)


def check_state(figures: dict[str, Any], *, num_stages: int) -> None:
    blocks, full = expected_state(num_stages, figures["layout"])
    for row, expected in zip(figures["blocks"], blocks, strict=True):
        assert row["full_model_state_bytes"] == pytest.approx(full, rel=0.03)
        assert row["model_state_bytes"] == pytest.approx(expected, rel=0.03)


def test_one_process(repo_root: Path, tmp_path: Path) -> None:
    """A wrong bound or pairing, or weights that still count in full training's buffer while a block is active."""
    figures, text = measured(repo_root, tmp_path)
    assert [row["bound"] for row in figures["blocks"]] == pytest.approx([7 / 9, 6 / 9, 5 / 9])
    assert figures["mean_bound"] == pytest.approx(2 / 3)
    assert [row["layers"] for row in figures["blocks"]] == ["0-1", "2-3", "4-5"]
    assert [row["extras"] for row in figures["blocks"]] == [["embedding"], [], ["final norm"]]
    assert set(figures["turns"]) == {"full", "block 0", "block 1", "block 2"}
    for turns in figures["turns"].values():
        assert [(len(turn["warm_up_ms"]), len(turn["step_ms"])) for turn in turns] == [(1, 2), (1, 2)]
        assert all(time > 0 for turn in turns for time in (turn["build_ms"], *turn["step_ms"]))
    ratios = [row["ratio"] for row in figures["blocks"]]
    assert figures["mean_ratio"] == pytest.approx(sum(ratios) / 3)
    assert figures["mean_ratio_with_switches"] > figures["mean_ratio"]
    check_state(figures, num_stages=1)
    assert "\x1b" not in text, "no control characters in a pipe"
    assert f"--hidden-size {HIDDEN}" in figures["command"]


@pytest.mark.parametrize("layout", ["spread", "submodel"])
def test_two_stages(runs: ForkedRuns, tmp_path: Path, layout: str) -> None:
    """A stage without anything active that does not take part in a switch would hang; two ranks that write would
    tear the file."""
    flags = ["--pipeline-model-parallel-size", "2", "--bcd-layout", layout, "--json", "figures.json"]
    ranks = runs.run([*SIZES, *flags], folder=tmp_path, num_ranks=2, script="benchmark")
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].stderr
    figures, text = written(tmp_path), "".join(rank.stdout for rank in ranks)
    assert figures["world_size"] == 2
    bounds = {"spread": [7 / 9, 7 / 9, 7 / 9], "submodel": [7 / 9, 6 / 9, 6 / 9, 7 / 9, 6 / 9, 5 / 9]}[layout]
    assert [row["bound"] for row in figures["blocks"]] == pytest.approx(bounds)
    assert all(len(row["model_state_bytes"]) == 2 for row in figures["blocks"])
    check_state(figures, num_stages=2)
    assert text.count("wrote ") == 1, "one rank speaks"


def check_schedule_turns(figures: dict[str, Any]) -> None:
    """Every stage did what its plan says: as many actions of a kind as there are microbatches."""
    num_microbatches, num_layouts_blocks = 4, 3 + 2 + 6 + 3
    assert len(figures["turns"]) == num_layouts_blocks
    for variant, of_variant in figures["turns"].items():
        names = ("bcd",) if variant.startswith("interleaved") else ("stock", "bcd")
        assert [(name, len(turns)) for name, turns in of_variant.items()] == [(name, 2) for name in names], variant
        for turn in (turn for turns in of_variant.values() for turn in turns):
            assert min(turn["step_ms"], turn["outside_ms"], turn["iteration_ms"]) > 0
            assert all(len(times["milliseconds"]) == num_microbatches for times in turn["actions"])
    kinds = {
        name: [(times["stage"], times["kind"]) for times in figures["turns"]["stage 1"][name][0]["actions"]]
        for name in ("stock", "bcd")
    }
    last = [(1, "backward"), (1, "forward")]
    assert kinds["stock"] == [(0, "backward of input gradients"), (0, "forward"), *last]
    assert kinds["bcd"] == [(0, "forward-only"), *last]
    # by virtual stage: two of each chunk
    places = [times["stage"] for times in figures["turns"]["interleaved 1"]["bcd"][0]["actions"]]
    assert places == [0, 1, 2, 2, 3, 3, 4, 4, 5, 5]


@pytest.mark.long
def test_schedule(repo_root: Path, tmp_path: Path) -> None:
    """Without torchrun the tool must start its ranks itself; a phase that was not begun would be timed with another
    block's plan, and what was run ahead with would go into another schedule's turn."""
    figures, text = measured(repo_root, tmp_path, "--schedule", "--steps", "1")
    assert (figures["world_size"], figures["pipeline_size"], figures["num_microbatches"]) == (2, 2, 4)
    rows = figures["blocks"]
    assert [(row["layout"], row["block"], row["first_trainable_stage"]) for row in rows] == (
        [("spread", block, 0) for block in range(3)]
        + [("stage", block, block) for block in range(2)]
        + [("submodel", block, block // 3) for block in range(6)]
    )
    assert [row["layers"] for row in rows[3:]] == ["0-2", "3-5", "0", "1", "2", "3", "4", "5"]
    for row in rows:
        assert row["ratio"] == pytest.approx(
            statistics.median(
                bcd["step_ms"] / stock["step_ms"]
                for stock, bcd in zip(*figures["turns"][f"{row['layout']} {row['block']}"].values(), strict=True)
            )
        )
    check_schedule_turns(figures)
    assert [row["layers"] for row in figures["interleaved"]] == ["0-1", "2-3", "4-5"]
    means = [
        [sum(figures["turns"][f"{layout} {block}"]["bcd"][index]["step_ms"] for block in range(3)) for index in (0, 1)]
        for layout in ("interleaved", "spread")
    ]
    ratios = [one / other for one, other in zip(*means, strict=True)]
    assert figures["interleaved_to_spread"] == pytest.approx(statistics.median(ratios))
    assert text.count("wrote ") == 1, "one rank speaks"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_bad_input(runs: ForkedRuns, tmp_path: Path, num_ranks: int) -> None:
    """A traceback instead of a line, a line from every rank, or a half-written file of figures that were never
    measured."""
    before = tmp_path / "figures.json"
    before.write_text("as it was")
    flags = [*SIZES, "--json", str(before), "--no-such-flag"]
    first, *others = runs.run(flags, folder=tmp_path, num_ranks=num_ranks, script="benchmark")
    assert "--no-such-flag" in first.stderr and first.stderr.count("\n") == 1
    assert [rank.code for rank in (first, *others)] == [2] * num_ranks
    assert [rank.stderr for rank in others] == [""] * (num_ranks - 1)
    assert before.read_text() == "as it was"
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


def test_bad_input_for_the_ranks_that_it_starts(runs: ForkedRuns, tmp_path: Path) -> None:
    """Found out by the ranks only, one wrong flag would end in torchrun's report and another exit code."""
    flags = ["--schedule", "--bcd-layout", "stage"]
    (done,) = runs.run([*SIZES, *flags], folder=tmp_path, num_ranks=1, script="benchmark")
    assert done.code == 2 and "--bcd-layout" in done.stderr and done.stderr.count("\n") == 1
