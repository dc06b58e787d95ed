"""tools/benchmark.py: its figures from made-up metrics, the runs that it would start, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import benchmark
import pytest
from _processes import CannotRun
from benchmark import Turn, methods_of, rows_of, turn_of

SMALL = ["--num-layers", "6", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "16"]


def methods(*words: str) -> list[benchmark.Method]:
    arguments, given = benchmark.parse_arguments([*SMALL, *words])
    return methods_of(arguments, given)


def line(phase: int, block: int, ms: float, **others: Any) -> dict[str, Any]:
    return {"phase": phase, "block": block, "step_time_ms": ms, "loss": 2.0, "tokens_per_second": 1e3 * 100 / ms,
            "model_state_bytes": [10 + block, 5], "peak_memory_bytes": [7, 9], **others}  # fmt: skip


def turn(*blocks: float) -> Turn:
    return turn_of([line(block, block, ms) for block, ms in enumerate(blocks) for _ in range(3)])


def test_first_steps_do_not_count() -> None:
    """A step that loads kernels, or pays for the switch; the state of one phase in place of the largest."""
    lines = [line(0, 0, ms) for ms in (900, 800, 10, 12, 11)]
    lines += [line(1, 1, ms, switch_time_ms=5.0) for ms in (70, 60, 20)]
    found = turn_of([*lines, {"validation_loss": 3.0}])
    assert found.step_ms == {"0": (10, 12, 11), "1": (20,)} and found.switch_ms == {"1": 5.0}
    assert found.iteration_ms == (11 + 20) / 2
    assert (found.model_state_bytes, found.peak_memory_bytes, found.tokens_per_second) == ((11, 5), (7, 9), 1e5)
    with pytest.raises(CannotRun):
        turn_of(lines[:2])


def test_ratios_are_those_within_the_rounds() -> None:
    """A machine that is slower for a round moves a ratio of overall means, or of another round's."""
    full, bcd = methods("--bcd-num-blocks", "2")
    slow = (1.0, 5.0, 3.0)
    turns = {"full": [turn(100 * f) for f in slow], "bcd": [turn(80 * f, 40 * f) for f in slow]}
    rows = rows_of([full, bcd], turns)
    assert [row["ratio"] for row in rows] == pytest.approx([1, 0.6])
    assert [row["arithmetic"] for row in rows] == pytest.approx([1, 0.75])
    assert [block["ratio"] for block in rows[1]["blocks"]] == pytest.approx([0.8, 0.4]) and not rows[0]["blocks"]
    assert [block["layers"] for block in rows[1]["blocks"]] == ["0-2, embedding", "3-5, final norm"]
    assert rows[1]["model_state_bytes"] == 16 and rows[1]["peak_memory_bytes"] == 9
    assert rows_of([full, bcd], {"bcd": turns["bcd"]})[0]["ratio"] is None, "full training could not be run"


def flags_of(method: benchmark.Method) -> str:
    return " ".join(method.flags)


def test_methods_train_the_same() -> None:
    """Other sizes, samples or lengths, so that a row compares nothing."""
    full, bcd, badam = methods("--methods", "full,bcd,badam", "--steps", "4")
    assert all("--train-iters 18 --bcd-steps-per-block 6" in flags_of(method) for method in (full, bcd, badam))
    assert "--bcd-num-blocks 1" in flags_of(full) and "--bcd-num-blocks" not in flags_of(bcd)
    assert badam.argv(Path("m"), Path("f"))[1:5] == ["studies/peer.py", "--peer", "badam", "--family"]
    assert {method.against for method in (full, bcd, badam)} == {"full"}
    other = methods("--variant", "two=--bcd-num-blocks 2", "--methods", "bcd")[1]
    assert other.against == "bcd" and other.partition.num_blocks == 2
    model = methods("--model", "tiny")[0]
    assert model.script == "pretrain_llama_bcd.py" and "--vocab-size 1023" in flags_of(model)


def test_schedules_and_prefix_cache() -> None:
    """A schedule that is compared with another layout's; a cache whose samples are used once."""
    found = {method.name: method for method in methods("--schedule", "--pipeline-model-parallel-size", "2")}
    assert list(found) == ["spread, stock", "stage, stock", "submodel, stock", "spread", "stage", "submodel",
                           "interleaved"]  # fmt: skip
    assert [found[name].against for name in ("stage", "interleaved")] == ["stage, stock", "spread"]
    assert {method.num_processes for method in found.values()} == {2}
    computed, cached = methods("--prefix-cache", "--steps", "6")
    assert "--bcd-sample-ratio 0.0833333" in flags_of(computed) and computed.flags == cached.flags
    assert [method.arithmetic(2) for method in (computed, cached)] == pytest.approx([5 / 9, 3 / 9])
    assert "--bcd-prefix-cache" in cached.argv(Path("m"), Path("f"))
    assert "--bcd-prefix-cache" not in computed.argv(Path("m"), Path("f"))


@pytest.mark.parametrize(
    "words, flag",
    [
        (["--steps", "0"], "--steps"),
        (["--methods", "full,lomo"], "--methods"),
        (["--variant", "x"], "--variant"),
        (["--train-iters", "5"], "--train-iters"),
        (["--metrics-file=x"], "--metrics-file"),
        (["--json", "/dev/null/x"], "--json"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--bcd-num-blocks", "7"], "--bcd-num-blocks"),
        (["--prefix-cache", "--bcd-num-blocks", "1"], "--prefix-cache"),
        (["--model", "no-model"], "--model"),
        (["--pipeline-model-parallel-size", "two"], "--pipeline-model-parallel-size"),
    ],
)
def test_bad_flags(words: Sequence[str], flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Minutes of timing that mean nothing, or a traceback."""
    assert benchmark.main([*SMALL, *words]) == 2
    error = capsys.readouterr().err
    assert flag in error and error.count("\n") == 1
