"""tools/compare.py: its table from made-up numbers, the runs that it would start, and what it refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import compare
import psutil
import pytest
import torch
from _compare_export import local_names, split_qkv
from _compare_figures import Planned, Turn, row_of, turn_of
from _compare_runs import CannotRun, beside_peer, planned, run, variants_of
from support.processes import has_ended

PLANNED = Planned(model_state_bytes=2**20, peak_bytes=None, iteration_ms=None, full_flops=2e9, arithmetic=2 / 3)


def turn(*phases: list[float], state: tuple[int, ...] = (3,), loss: float | None = 1.0) -> Turn:
    return Turn(step_ms=tuple(map(tuple, phases)), loss=loss, model_state_bytes=state, peak_memory_bytes=state)


def line(phase: int, milliseconds: float, **changes: Any) -> dict[str, Any]:
    return {"phase": phase, "step_time_ms": milliseconds, "loss": milliseconds, "model_state_bytes": [1, 2],
            "peak_memory_bytes": [5, 6]} | changes  # fmt: skip


def arguments(*flags: str) -> Any:
    return compare.parse_arguments(["--model", "tiny", *flags])


def test_names_of_transformer_engine() -> None:
    """A KeyError on every machine with Transformer Engine."""
    one = torch.zeros(1)
    local = {f"decoder.layers.0.{name}": one for name in (
        "input_layernorm.weight", "pre_mlp_layernorm.bias", "self_attention.linear_qkv.weight", "mlp.linear_fc1.bias",
    )}  # fmt: skip
    engine = {f"decoder.layers.0.{name}": one for name in (
        "self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_bias",
        "self_attention.linear_qkv.weight", "mlp.linear_fc1.bias",
    )}  # fmt: skip
    assert local_names(engine).keys() == local_names(local).keys() == local.keys()


def test_first_steps_of_a_phase_are_not_counted() -> None:
    """A switch, or the mean of the first two steps that a training's second line is, counted as a step."""
    lines = [line(0, 99), line(0, 50), line(0, 10), line(0, 12), line(0, 11), {"validation_loss": 1}]
    lines += [line(1, 99), line(1, 50), line(1, 20, model_state_bytes=[9, 1])]
    found = turn_of(lines)
    assert found.step_ms == ((10, 12, 11), (20,))
    assert found.iteration_ms == (11 + 20) / 2, "every block has the same weight, whatever its number of steps"
    assert (found.model_state_bytes, found.peak_memory_bytes, found.loss) == ((9, 2), (5, 6), 20)
    with pytest.raises(ValueError, match="2"):
        turn_of(lines[:2])
    with pytest.raises(ValueError, match="2"):
        turn_of([])


def test_row_pairs_the_rounds() -> None:
    """A ratio of medians follows a machine that slows down in the middle; memory of one rank for that of all."""
    full = [turn([time], state=(4, 4)) for time in (100.0, 500.0, 100.0)]
    bcd = [turn([time], state=(3, 2)) for time in (60.0, 300.0, 60.0)]
    row = row_of("bcd", bcd, full, PLANNED, tokens_per_iteration=130, peak_flops_per_s=1e12)
    assert row.ratio_to_full == pytest.approx(0.6) and row.iteration_ms == pytest.approx((60 * 300 * 60) ** (1 / 3))
    assert row.tokens_per_second == pytest.approx(130e3 / row.iteration_ms)
    assert (row.model_state_bytes, row.peak_memory_bytes, row.processes) == (5, 3, 2)
    assert row.mfu == pytest.approx(2e9 / row.iteration_ms * 1e3 / 2 / 1e12)
    alone = row_of("bcd", bcd, None, PLANNED, tokens_per_iteration=130, peak_flops_per_s=None)
    assert alone.ratio_to_full is None and alone.mfu is None


def test_all_take_the_same_steps_of_the_planned_command() -> None:
    """Losses of different numbers of steps side by side, or a run that is not the one that was planned."""
    recipe = compare.recipe_of(arguments("--num-gpus", "2", "--pipeline-model-parallel-size", "2"), num_here=0)
    variants = variants_of(recipe, ["full", "bcd"], peer=True, steps=3)
    assert [one.name for one in variants] == ["full", "bcd", "bcd, 1 process", "badam"]
    assert {(one.num_iterations, one.steps_per_block) for one in variants} == {(15, 5)}
    assert [one.recipe.num_gpus for one in variants] == [2, 2, 1, 1]
    assert beside_peer(recipe, ["full", "bcd"]) == "bcd, 1 process"
    full, bcd, alone, _ = variants
    assert "--bcd-num-blocks 1 --bcd-schedule stock" in full.command()
    assert bcd.command().startswith("torchrun --nproc-per-node 2 pretrain_llama_bcd.py --num-layers 6 ")
    assert "--bcd-num-blocks 3 --bcd-layout spread" in bcd.command()
    assert alone.command().startswith("python pretrain_llama_bcd.py ")
    assert [round(planned(one, has_cluster=False).arithmetic, 3) for one in (full, alone)] == [1, 0.667]
    assert [one.name for one in variants_of(recipe, ["full"], peer=False, steps=1)] == ["full"]
    strided = variants_of(
        compare.recipe_of(arguments("--bcd-layout", "strided"), num_here=0), ["bcd"], peer=True, steps=3
    )
    assert [one.name for one in strided] == ["bcd", "badam"] and strided[0].recipe == strided[1].recipe


def test_heads_are_taken_apart_group_by_group() -> None:
    """With grouped queries: a split into thirds, or heads in another order, is another model of the same size."""
    weight = torch.arange(2 * 4 * 3).view(24, 1)  # 2 groups, each 2 query heads, a key and a value, of size 3
    query, key, value = split_qkv(weight, groups=2, head_size=3)
    assert query.flatten().tolist() == [*range(6), *range(12, 18)]
    assert (key.flatten().tolist(), value.flatten().tolist()) == ([6, 7, 8, 18, 19, 20], [9, 10, 11, 21, 22, 23])


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--methods full,sgd", "--methods"),
        ("--methods offload", "--methods"),
        ("--model huge", "--model"),
        ("--round 3", "--round"),
        ("--gpu rtx4090", "--gpu"),
        ("--peer badam --precision bf16", "--precision"),
        ("--methods full --bcd-num-blocks 2", "--bcd-num-blocks"),
        ("--bcd-num-blocks 7", "7 layers"),
        ("--num-gpus 3 --pipeline-model-parallel-size 2", "--num-gpus"),
        ("--global-batch-size 5", "--global-batch-size"),
    ],
)
def test_bad_flags(capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: str, message: str) -> None:
    """A traceback, or hours of measuring something else than was asked for."""
    output = tmp_path / "new"
    assert compare.main(["--model", "tiny", *flags.split(), "--output", str(output)]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert not output.exists()


def test_output_that_cannot_be_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Found out at the end, it would cost the whole measurement."""
    (tmp_path / "file").write_text("as it was")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        assert compare.main(["--model", "tiny", "--output", str(path)]) == 2
        assert f"--output {path}: " in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "as it was"


def test_more_gpus_than_are_here() -> None:
    with pytest.raises(ValueError, match="--num-gpus 4"):
        compare.recipe_of(arguments("--num-gpus", "4"), num_here=2)
    assert compare.recipe_of(arguments(), num_here=2).num_gpus == 2


@pytest.mark.parametrize(
    "program, message, memory",
    [
        ("raise MemoryError('CUDA out of memory. Tried to')", "out of memory", True),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "out of memory", True),
        ("import sys; sys.stderr.write('x.py: error: --lr is bad\\n'); sys.exit(2)", "--lr is bad", False),
        ("1 / 0", "ZeroDivisionError", False),
    ],
)
def test_why_a_run_has_no_figures(tmp_path: Path, program: str, message: str, memory: bool) -> None:
    """Whatever goes wrong called out of memory, or hardware that is too small called a failure."""
    with pytest.raises(CannotRun, match=message) as caught:
        run([sys.executable, "-c", program], tmp_path / "log", threads=1)
    assert caught.value.for_want_of_memory == memory


def test_method_that_does_not_fit_leaves_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One method without memory would cost the figures of all."""

    def measure(variant: Any, folder: Path, *, threads: int) -> Turn:
        if variant.name == "full":
            raise CannotRun("out of memory", for_want_of_memory=True)
        return turn([1.0])

    monkeypatch.setattr(compare, "measure", measure)
    recipe = compare.recipe_of(arguments(), num_here=0)
    comparison = compare.Comparison(variants_of(recipe, ["full", "bcd"], peer=False, steps=1), threads=1)
    comparison.run(2, tmp_path)
    assert comparison.not_run == {"full": "out of memory"} and not comparison.has_failed
    assert len(comparison.turns["bcd"]) == 2
    (row,) = compare.rows_of(comparison, has_cluster=False, peak_tflops=None)
    assert (row.name, row.ratio_to_full) == ("bcd", None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_interrupted(repo_root: Path, tmp_path: Path, number: signal.Signals) -> None:
    """A run that goes on without the tool, with a GPU's memory in its hands, or half a file of figures."""
    output = tmp_path / "out"
    command = [sys.executable, "tools/compare.py", "--model", "tiny", "--methods", "bcd", "--output", str(output)]
    tool = subprocess.Popen(
        command,
        cwd=repo_root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # what a shell starts in the background ignores an interrupt, and so would this
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        started: list[psutil.Process] = []
        while not started and tool.poll() is None:
            time.sleep(0.1)
            started = psutil.Process(tool.pid).children(recursive=True)
        tool.send_signal(number)
        assert tool.wait(timeout=60) == 128 + number
        assert all(has_ended(one) for one in started)
        assert not output.exists()
    finally:
        tool.kill()
        tool.communicate()


def test_files_are_whole_or_as_they_were(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A chart that can't be drawn would leave new figures beside an old picture."""
    import _compare_chart

    for name in ("compare.json", "compare.png"):
        (tmp_path / name).write_text("as it was")

    def draw(*_: Any) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(_compare_chart, "draw", draw)
    row = row_of("full", [turn([10.0])], None, PLANNED, tokens_per_iteration=1, peak_flops_per_s=None)
    with pytest.raises(RuntimeError):
        compare.write(str(tmp_path), {"machine": {}}, [row])
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(
        ("compare.json", "compare.png"), "as it was"
    )
    compare.write(str(tmp_path), {"not_run": {}}, [])
    assert json.loads((tmp_path / "compare.json").read_text()) == {"not_run": {}}
