"""tools/plan.py: what it prints, refuses, and what its command line means to the training script."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import plan
import pytest

STAGES = ("--pipeline-model-parallel-size", "2")
CHUNKS = ("--num-virtual-stages-per-pipeline-rank", "2")
PAPER = ("--method", "bcd", "--precision", "fp32")
EXAMPLE = ("--model", "G-5.4B", "--gpu", "rtx4090", "--num-gpus", "4")


def output(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert plan.main(flags) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def planned(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    return json.loads(output(capsys, *flags, "--json"))


@pytest.mark.parametrize(
    "flags, first",
    [
        ((*EXAMPLE, "--method", "full", "--precision", "fp32"), "--method offload"),
        (("--model", "LLaMA-7B", "--gpu", "4090", "--num-gpus", "4", *PAPER), "--recompute auto"),
        (("--model", "L-11B", "--gpu", "4090", "--num-gpus", "4", "--recompute", *PAPER), "--bcd-num-blocks 4"),
        (
            ("--model", "G-1.6B", "--gpu", "rtx4090", "--num-gpus", "1", "--micro-batch-size", "16", *PAPER),
            "--micro-batch-size 2",
        ),
        ((*EXAMPLE, "--pipeline-model-parallel-size", "1", *PAPER), "--pipeline-model-parallel-size 4"),
        ((*EXAMPLE[:5], "1", "--search", *PAPER), "--num-gpus 4"),
    ],
)
def test_what_does_not_fit_says_what_does(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], first: str
) -> None:
    """A plan that does not fit exits with 1 and offers a command that fits."""
    assert plan.main(flags) == 1
    text = capsys.readouterr().out
    assert "torchrun" not in text
    command = shlex.split(text.splitlines()[-1])
    assert command[:2] == ["python", "tools/plan.py"]
    assert f"\n{first} " in text
    assert plan.main([*flags, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data.get("command") is None and data["what_fits"][0]["command"] == shlex.join(command)
    assert "torchrun" in output(capsys, *command[2:])


def test_what_people_write(capsys: pytest.CaptureFixture[str]) -> None:
    """A card with blanks or hyphens and a number of tokens with a unit are read."""
    words = ("--model", "llama 7b", "--gpu", "RTX-4090", "--num-gpus", "6", "--global-batch-size", "66", "--bf16")
    data = planned(capsys, *words, "--tokens", "2.5t")
    assert (data["model"]["name"], data["cluster"]["name"]) == ("LLaMA-7B", "rtx4090")
    assert data["bill"]["tokens"] == 2.5e12


def test_nothing_fits_anywhere(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Where nothing fits, the search for a remedy ends and offers no command."""
    table = (plan.ROOT + "/examples/clusters.csv", tmp_path / "clusters.csv")
    table[1].write_text(Path(table[0]).read_text().replace("RTX 4090,23.6", "RTX 4090,1.1"))
    assert plan.main(["--model", "G-1.6B", *EXAMPLE[2:5], "1", "--clusters", str(table[1])]) == 1
    assert "torchrun" not in capsys.readouterr().out


BLOCKS = ("--bcd-inactive-update", "none")


@pytest.mark.parametrize(
    ("model", "num_gpus", "more", "num_blocks"),
    [
        ("llama-7b", 1, BLOCKS, 32),
        ("llama-7b", 4, BLOCKS, 11),
        ("L-1.5B", 1, BLOCKS, 2),
        ("L-1.5B", 1, ("--seq-length", "4096", *BLOCKS), 3),
        ("L-1.5B", 1, ("--recompute", *BLOCKS), 2),
        ("L-1.5B", 1, ("--bcd-num-blocks", "30"), 30),
        ("llama-7b", 2, ("--pipeline-model-parallel-size", "2", *BLOCKS), 6),
        ("L-1.5B", 2, ("--pipeline-model-parallel-size", "2", "--bcd-layout", "stage"), 2),
    ],
)
def test_number_of_blocks_for_fine_tuning(
    capsys: pytest.CaptureFixture[str], model: str, num_gpus: int, more: tuple[str, ...], num_blocks: int
) -> None:
    """Fine-tuning takes the expected or the given number of blocks, and fits the card."""
    words = ("--task", "sft", "--model", model, "--gpu", "rtx4090", "--num-gpus", str(num_gpus), *more)
    found = planned(capsys, *words)
    assert found["recipe"]["num_blocks"] == num_blocks
    assert f"--bcd-num-blocks {num_blocks} " in found["command"] or "--bcd-layout stage" in found["command"]
    peak = max(rank["total"] for rank in found["memory"]["ranks"])
    assert peak <= 0.95 * 23.6 * 2**30
    assert found["recipe"]["precision"] == "bf16" and found["bill"]["tokens"] < 1e8
    assert "--sft" in found["command"] and "--bcd-preset finetune --bcd-inactive-update none" in found["command"]
    if num_blocks >= 30:  # one layer a block: a quarter of full training's 18 bytes, or less
        state = max(rank["model_state"] for rank in found["memory"]["ranks"])
        assert state <= 0.25 * 18 * found["model"]["parameters"]


@pytest.mark.parametrize(
    ("model", "num_gpus", "more", "reason"),
    [
        ("L-1.5B", 1, (), "by the factored update: no blocks"),
        ("llama-7b", 4, ("--bcd-inactive-update", "factored"), " update: no blocks"),
        ("llama-7b", 1, (), " update: no blocks"),
        ("L-1.5B", 1, ("--bcd-num-blocks", "6"), "blocks: flags ask"),
        ("L-1.5B", 1, ("--precision", "fp16"), "blocks: flags ask"),
    ],
)
def test_every_layer_where_it_fits(
    capsys: pytest.CaptureFixture[str], model: str, num_gpus: int, more: tuple[str, ...], reason: str
) -> None:
    """A plan trains every layer where that fits, and says why; a factored update stores 6 bytes per parameter."""
    words = ("--task", "sft", "--model", model, "--gpu", "rtx4090", "--num-gpus", str(num_gpus), *more)
    text = output(capsys, *words)
    assert reason in text
    rule = "none" if reason.startswith("blocks") else "factored --bcd-num-blocks 0"
    assert f"--bcd-preset finetune --bcd-inactive-update {rule}" in text.replace("\\\n    ", "")
    if num_gpus == 1 and "factored" in reason and reason.endswith("no blocks"):
        found = json.loads(output(capsys, *words, "--json"))
        [rank] = found["memory"]["ranks"]
        assert rank["model_state"] == pytest.approx(6 * found["model"]["parameters"], rel=0.01)
        assert plan.main([*words, "--bcd-num-blocks", "2", "--bcd-inactive-update", "factored"]) == 2


def test_methods_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    """Each method is shown on GPUs on which it fits, with its cost relative to full training's."""
    flags = ("--model", "G-1.6B", "--gpu", "rtx4090", "--num-gpus", "1", "--precision", "fp32")
    found = json.loads(output(capsys, *flags, "--compare", "--json"))
    streamed = [row for row in found if row["recipe"]["name"].endswith(", streamed")]
    assert {row["recipe"]["method"] for row in streamed} == {"full", "muon"}
    assert all(row["memory"]["host_bytes"] > 0 for row in streamed)
    found = [row for row in found if row not in streamed]
    rows = {(row["recipe"]["method"], row["recipe"]["num_gpus"]): row for row in found}
    assert len(rows) == len(found) and {method for method, _ in rows} == {"full", "muon", "offload", "bcd", "pretrain"}
    order = [(row["recipe"]["num_gpus"] != 1, row["bill"]["days"]) for row in found]
    assert order == sorted(order)
    assert all(row["memory"]["fits"] for row in found)
    assert rows["full", 2]["cost_ratio"] == 1
    for row in rows.values():
        dollars = row["bill"]["dollars"]
        assert row["cost_ratio"] == pytest.approx(dollars / rows["full", 2]["bill"]["dollars"])


@pytest.mark.parametrize(
    ("model", "more", "method"),
    [
        ("L-1.5B", (), "muon"),
        ("G-5.4B", (), "pretrain"),
        ("LLaMA-7B", ("--bcd-layers-on", "host", "--host-memory-gb", "128"), "muon"),
        ("L-1.5B", ("--bcd-num-blocks", "4"), "pretrain"),
        ("L-1.5B", ("--fp16",), "bcd"),
    ],
)
def test_the_method_that_the_readme_recommends(
    capsys: pytest.CaptureFixture[str], model: str, more: tuple[str, ...], method: str
) -> None:
    """Without --method a plan is full Muon if that fits, else preset pretrain, in bf16."""
    found = planned(capsys, "--model", model, *EXAMPLE[2:5], "1", *more)
    assert (found["recipe"]["method"], found["memory"]["fits"]) == (method, True)
    assert found["recipe"]["precision"] == ("fp16" if "--fp16" in more else "bf16")
    assert ("--bf16" in found["command"]) == ("--fp16" not in more)


def test_muon_costs_full_trainings_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """Muon and preset pretrain cost as many steps as full training, and the plan promises nothing of their loss."""
    flags = ("--model", "G-0.15B", "--gpu", "rtx4090", "--num-gpus", "1", "--compare")
    rows = json.loads(output(capsys, *flags, "--json"))
    steps = {row["recipe"]["method"]: row["bill"]["iterations"] for row in rows}
    assert steps["muon"] == steps["pretrain"] == steps["full"] < steps["bcd"]
    methods = plan.plan_view(plan.parse_arguments(flags[:-1]))["methods"]
    said = {quality[0] for each, _, quality, _ in methods if each.recipe.method == "muon"}
    assert said == {"full training's steps"}, "no promise of its loss"


def test_comparisons_end_with_what_to_take(capsys: pytest.CaptureFixture[str]) -> None:
    """A comparison ends with a row for each purpose: full Muon, the smaller of it and preset pretrain, the paper."""
    flags = ("--model", "L-1.5B", *EXAMPLE[2:5], "2")
    text, rows = output(capsys, *flags, "--compare"), planned(capsys, *flags, "--compare")
    given = [row for row in rows if row["recipe"]["num_gpus"] == 2]
    money, memory = (lambda row: row["bill"]["dollars"]), (lambda row: row["memory"]["peak_bytes"])
    lines = text.splitlines()[-3:]
    for line, methods, figure in zip(
        lines, (("muon",), ("muon", "pretrain"), ("bcd",)), (money, memory, money), strict=True
    ):
        best = min((row for row in given if row["recipe"]["method"] in methods), key=figure)
        shown = f"${money(best):,.0f}, {memory(best) / 2**30:.1f} GiB"
        assert "--num-gpus 2, " in line and shown in line, (line, shown)
    assert lines[0].startswith("for the lowest loss for the money, from scratch: --method muon ")
    assert lines[0].endswith("--muon-momentum-dtype int8") and "--bcd-preset paper" in lines[2]
    assert "what to take" not in output(capsys, *flags, "--search")


def test_search_keeps_the_pipeline_that_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    """A search keeps the pipeline size that is given, and remedies offer it. It proposes no layout by itself, because
    another layout changes the loss."""
    flags = ("--model", "G-1.6B", "--gpu", "rtx4090", "--num-gpus", "4", "--global-batch-size", "16")
    one = (*flags, "--search", "--method", "bcd")
    assert {plan["recipe"]["pipeline_size"] for plan in planned(capsys, *one)["methods"]} != {2}
    given = planned(capsys, *one, *STAGES)["methods"]
    assert {(plan["recipe"]["pipeline_size"], plan["recipe"]["layout"]) for plan in given} == {(2, "spread")}
    assert plan.main([*EXAMPLE, "--search", "--method", "full", *STAGES, "--json"]) == 1
    offered = [shlex.split(each["command"]) for each in json.loads(capsys.readouterr().out)["what_fits"]]
    assert sum(command[command.index(STAGES[0]) + 1] == "2" for command in offered) > 1


def test_flags_of_blocks_leave_full_training_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Flags of blocks do not change the times of full training."""
    flags = ("--model", "G-0.15B", "--gpu", "rtx4090", "--num-gpus", "2", "--compare", "--json")
    ours = ("--bcd-layout", "interleaved", *CHUNKS, "--bcd-frozen", "head", "--bcd-num-blocks", "2")

    def full(*more: str) -> list[dict[str, Any]]:
        rows = json.loads(output(capsys, *flags, *more))
        return [row["time"] for row in rows if row["recipe"]["method"] in ("full", "offload")]

    plain = full()
    assert full(*ours) == plain != []


def test_a_gpu_without_a_price(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A GPU without a price has the order and ratios of one with a price, and no $ is shown."""
    text = Path(plan.ROOT, "examples", "clusters.csv").read_text(encoding="utf-8")
    priced, free = tmp_path / "priced.csv", tmp_path / "free.csv"
    priced.write_text(text)
    free.write_text(text.replace("8,0.29,", "8,0,"))
    flags = ("--model", "G-0.15B", *EXAMPLE[2:5], "1", "--clusters")
    rows = [json.loads(output(capsys, *flags, str(path), "--compare", "--json")) for path in (priced, free)]
    one, other = ([(row["recipe"], row["cost_ratio"]) for row in each] for each in rows)
    assert one == other, "the same order and ratios"
    for more in (("--search",), ("--search", "--method", "bcd")):
        assert "$" not in output(capsys, *flags, str(free), *more)


def test_the_command_is_the_recipes(capsys: pytest.CaptureFixture[str], repo_root: Path) -> None:
    """The command has the learning rate schedule and the checkpoints of the recipe."""
    recipe = subprocess.run(
        ["bash", "examples/pretrain.sh", "G-5.4B", "paper", "rtx4090"],
        cwd=repo_root,
        env=os.environ | {"DRY_RUN": "1", "MOCK_DATA": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    theirs = shlex.split(recipe.partition("command\n")[2].partition("\n\n")[0].replace("\\\n", ""))
    ours = shlex.split(planned(capsys, *EXAMPLE, "--method", "bcd")["command"].replace("\\\n", ""))
    for flag in ("--train-iters", "--lr", "--lr-decay-style", "--lr-warmup-fraction", "--weight-decay", "--clip-grad",
                 "--save", "--load", "--save-interval", "--keep-last-checkpoints"):  # fmt: skip
        assert ours[ours.index(flag) + 1] == theirs[theirs.index(flag) + 1], flag
    assert "--bcd-steps-per-block" not in (*ours, *theirs), "a short run would not reach every block"


def test_fp8(capsys: pytest.CaptureFixture[str]) -> None:
    """A plan in FP8 is faster than in bf16, within what twice the rate allows, and prints the flags; in breadth-first
    order copies of weights take memory. A card without FP8 is one line of error."""
    flags = ("--model", "LLaMA-7B", "--num-gpus", "1", "--host-memory-gb", "64", "--method", "finetune")
    flags += ("--bcd-layers-on", "host", "--bcd-layers-per-pass", "4", "--micro-batch-size", "4")
    flags += ("--bcd-saved-activations", "recompute", "--gpu")
    flags += ("h200", "--cross-entropy-fusion-impl", "linear", "--precision")
    wide, narrow = (planned(capsys, *flags, precision) for precision in ("bf16", "fp8"))
    assert "--bf16 --fp8-format hybrid --fp8-recipe tensorwise" in " ".join(narrow["command"].split())
    times = [each["time"]["phases"][0]["pipeline"] for each in (wide, narrow)]
    peaks = [each["memory"]["peak_bytes"] for each in (wide, narrow)]
    assert 1.2 < times[0] / times[1] < 1.84
    copies = 2 * 4 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert 0.8 * copies < peaks[1] - peaks[0] < 1.3 * copies
    assert plan.main([*flags[:-4], "a100", *flags[-3:], "fp8"]) == 2
    assert "error: --precision fp8: A100 80GB has no FP8 rate" in capsys.readouterr().err
