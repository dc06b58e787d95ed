"""tools/plan.py: what it prints, refuses, and what its command line means to the training script."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import plan
import pytest

EXAMPLE = ("--model", "G-5.4B", "--gpu", "rtx4090", "--num-gpus", "4")


def output(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert plan.main(flags) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def planned(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    return json.loads(output(capsys, *flags, "--json"))


def test_command_as_typed_without_torch(repo_root: Path, tmp_path: Path) -> None:
    """A tool that runs from the repository only, or that needs torch, or seconds, to print a table."""
    program = "import os, runpy, sys; sys.argv = sys.argv[1:]; sys.path[0] = os.path.dirname(sys.argv[0])\n"
    program += "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    program += "finally: assert not {'torch', 'megatron.core', 'numpy', 'rich'} & sys.modules.keys()"
    tool = repo_root / "tools" / "plan.py"
    command = [sys.executable, "-c", program, tool, *EXAMPLE, "--method", "bcd", "--bcd-num-blocks", "3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "fits: " in done.stdout and "torchrun --nproc-per-node 4 pretrain_gpt_bcd.py" in done.stdout


def test_plan_for_people_and_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    """A table that says otherwise than the JSON beside it; lines that a terminal or the README would wrap."""
    text = output(capsys, *EXAMPLE)
    data = planned(capsys, *EXAMPLE)
    assert max(map(len, text.splitlines())) <= 120
    assert text.startswith("G-5.4B: 5,495,263,360 parameters, bcd, on 4 x RTX 4090 (1 node of 4)\npipeline 4 x data 1")
    peak = data["memory"]["peak_bytes"] / 2**30
    assert f"fits: {peak:.1f} GiB" in text and data["memory"]["fits"]
    assert len(data["memory"]["ranks"]) == 4 * 3
    assert max(rank["total"] for rank in data["memory"]["ranks"]) == data["memory"]["peak_bytes"]
    assert f"{data['time']['tokens_per_second']:,.0f} tokens/s" in text
    assert f"${data['bill']['dollars']:,.0f}" in text
    assert data["command"] in text


def test_what_does_not_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """A plan that leaves the user to compare two numbers, or that fails where it should answer."""
    full = (*EXAMPLE, "--method", "full")
    assert re.search(r"does NOT fit: \d+\.\d GiB on stage \d", output(capsys, *full))
    assert not planned(capsys, *full)["memory"]["fits"]
    text = output(capsys, "--model", "G-1.6B", "--gpu", "rtx4090", "--num-gpus", "1", "--micro-batch-size", "16")
    assert re.search(r"does NOT fit: .* micro-batch \d+ would fit", text)


def test_many_ranks_are_shown_in_short(capsys: pytest.CaptureFixture[str]) -> None:
    """Ninety-six lines of memory."""
    flags = ("--model", "G-20B", "--gpu", "rtx4090", "--num-gpus", "32", "--pipeline-model-parallel-size", "32")
    assert len(output(capsys, *flags).splitlines()) < 40
    assert len(planned(capsys, *flags)["memory"]["ranks"]) == 32 * 3


def test_search(capsys: pytest.CaptureFixture[str]) -> None:
    """A best layout that is not the one whose command is printed."""
    text = output(capsys, *EXAMPLE, "--search")
    found = planned(capsys, *EXAMPLE, "--search")
    best = found["best"][0]
    assert f"{found['tried']} layouts tried, {found['fitting']} fit" in text
    assert best["command"] in text and best["memory"]["fits"]
    again = planned(capsys, *EXAMPLE, "--bcd-num-blocks", str(best["recipe"]["num_blocks"]), "--search")
    assert again["best"][0]["recipe"] == best["recipe"]


def test_methods_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    """A method that is shown on GPUs on which it does not fit, without a word; an assumed multiplier that looks like a
    measured one; a ratio to other GPUs' prices."""
    text = output(capsys, *EXAMPLE, "--compare", "--bf-multiplier", "0.5")
    rows = {row["recipe"]["method"]: row for row in json.loads(output(capsys, *EXAMPLE, "--compare", "--json"))}
    assert list(rows) == ["full", "offload", "bcd", "pretrain"]
    assert all(row["memory"]["fits"] for row in rows.values())
    assert rows["full"]["recipe"]["num_gpus"] == 8 and rows["full"]["cost_ratio"] == 1
    assert "full: no layout fits on 4 GPUs, with recomputation either; shown on 8, the fewest that fit" in text
    assert (
        "multiplier of paper: 2.44, the paper's two GPT-2 runs\nmultiplier of pretrain: 0.50, --bf-multiplier" in text
    )
    for row in rows.values():
        dollars = row["bill"]["dollars"]
        assert row["cost_ratio"] == pytest.approx(dollars / rows["full"]["bill"]["dollars"])
        assert f"{dollars:,.0f}" in text or row is rows["pretrain"]
    full, pretrain = rows["full"]["state_per_parameter"], rows["pretrain"]["state_per_parameter"]
    assert 16 < full < 17 and 6 < pretrain < 8


def test_paper_is_a_list_of_cells(capsys: pytest.CaptureFixture[str]) -> None:
    """Anything beside the list on stdout; a cell without one of its fields; a difference of the wrong sign."""
    cells = json.loads(output(capsys, "--paper", "--json"))
    assert isinstance(cells, list) and len(cells) > 200
    for cell in cells:
        assert list(cell) == ["table", "row", "column", "published", "recomputed", "difference", "note"]
        if cell["recomputed"] is not None:
            assert cell["difference"] == pytest.approx(cell["published"] - cell["recomputed"], abs=1e-6)
    text = output(capsys, "--paper")
    assert re.search(r"Mean absolute error of the times that no fit has seen: table 4 1\d\.\d %", text)
    assert "L-1.5B" in text and "inconsistency" in text


@pytest.mark.parametrize(
    "flags, message",
    [
        ((), "--model is required"),
        (("--model", "G-5B", *EXAMPLE[2:]), "--model G-5B: must be one of G-0.15B, G-1.6B"),
        ((*EXAMPLE[:3], "h100", *EXAMPLE[4:]), "--gpu h100: must be one of rtx4090, a100, a800"),
        ((*EXAMPLE[:5], "four"), "--num-gpus: invalid int value: 'four'"),
        ((*EXAMPLE[:5], "0"), "--num-gpus 0: must be 1 to"),
        ((*EXAMPLE, "--micro-batch"), "unrecognized arguments: --micro-batch"),
        ((*EXAMPLE, "--bcd-num-blocks", "0"), "--bcd-num-blocks 0 needs --bcd-preset pretrain"),
        (
            (*EXAMPLE, "--method", "full", "--bcd-preset", "paper"),
            "--bcd-preset paper cannot be combined with --method",
        ),
        ((*EXAMPLE, "--compare", "--method", "bcd"), "--compare shows all methods"),
        ((*EXAMPLE, "--tokens", "nan"), "--tokens nan: must be more than 0"),
        ((*EXAMPLE, "--bf-multiplier", "-1"), "--bf-multiplier -1: must be more than 0"),
        ((*EXAMPLE, "--models", "nowhere.csv"), "nowhere.csv: cannot be read"),
        ((*EXAMPLE, "--search", "--paper"), "--search and --paper are both given"),
        (
            (*EXAMPLE[:5], "1", "--search"),
            "--num-gpus 1: no layout of G-5.4B with --method bcd fits on this many RTX 4090",
        ),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str) -> None:
    """A traceback, a usage text, or exit code 0."""
    assert plan.main(flags) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"tools/plan.py: error: {message}") and captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "flags",
    [
        ("--model", "G-5.4B", "--num-gpus", "4"),
        ("--model", "L-6.0B", "--num-gpus", "8", "--recompute", "--precision", "bf16", "--bcd-layout", "submodel"),
        ("--model", "LLaMA-7B", "--num-gpus", "16", "--method", "full"),
        ("--model", "G-0.15B", "--num-gpus", "2", "--bcd-layout", "stage", "--pipeline-model-parallel-size", "2"),
        ("--model", "G-5.4B", "--num-gpus", "4", "--bcd-preset", "pretrain"),
        (
            "--model",
            "L-6.0B",
            "--num-gpus",
            "8",
            "--method",
            "pretrain",
            "--bcd-num-blocks",
            "0",
            "--precision",
            "bf16",
        ),
    ],
)
def test_the_training_script_takes_the_command(capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]) -> None:
    """A flag that the script does not know, or that means another layout than the one that was planned."""
    from megatron.bcd.arguments import FAMILY_DEFAULTS, parse_run_config

    data = planned(capsys, "--gpu", "rtx4090", *flags)
    assert max(map(len, data["command"].splitlines())) <= 120
    words = shlex.split(data["command"].replace("\\\n", ""))
    recipe, model = data["recipe"], data["model"]
    start = words.index(f"pretrain_{model['form']}_bcd.py")
    config = parse_run_config(
        words[start + 1 :], prog="test", defaults=FAMILY_DEFAULTS[model["form"]], world_size=recipe["num_gpus"]
    )
    nodes = int(words[words.index("--nnodes") + 1]) if "--nnodes" in words else 1
    assert nodes * int(words[words.index("--nproc-per-node") + 1]) == recipe["num_gpus"]
    assert (config.num_layers, config.hidden_size) == (model["layers"], model["hidden"])
    assert config.transformer["ffn_hidden_size"] == model["ffn"]
    assert config.tied == (model["form"] == "gpt") and config.model.swiglu == (model["form"] == "llama")
    assert config.pipeline_size == recipe["pipeline_size"] and config.precision == recipe["precision"]
    assert config.training.micro_batch_size == recipe["micro_batch_size"]
    assert config.training.global_batch_size == recipe["global_batch_size"]
    assert config.training.train_iters == data["bill"]["iterations"]
    assert (config.transformer.get("recompute_granularity") == "full") == (recipe["recompute"] == "full")
    assert config.bcd.bcd_layout == recipe["layout"]
    assert config.bcd.bcd_preset == ("pretrain" if recipe["method"] == "pretrain" else None)
    if recipe["method"] == "full":
        assert (config.bcd.bcd_num_blocks, config.bcd.bcd_schedule) == (1, "stock")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("flags", [("--model", "G-0.15B", "--bcd-layout", "submodel"), ("--model", "L-6.0B")])
def test_verify(capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]) -> None:
    """A planned parameter that no model has, or in another block: compared with Megatron Core's own model."""
    cut = ("--gpu", "rtx4090", "--num-gpus", "6", "--pipeline-model-parallel-size", "3", "--global-batch-size", "60")
    rows = json.loads(output(capsys, *flags, *cut, "--verify", "--json"))
    assert [row["stage"] for row in rows] == [0, 1, 2]
    assert all(row["built"] == row["formula"] and row["equal"] for row in rows)
    assert all(row["built_by_block"] == row["formula_by_block"] for row in rows)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["gpt", "llama"])
def test_verify_grouped_queries(capsys: pytest.CaptureFixture[str], tmp_path: Path, form: str) -> None:
    """Keys and values of every head counted where groups share them, or a command that leaves the groups out."""
    table = "name,form,layers,hidden,heads,groups,ffn,vocabulary,sequence,source\n"
    (tmp_path / "models.csv").write_text(table + f"grouped,{form},6,64,8,2,100,500,64,made up\n")
    flags = ("--models", str(tmp_path / "models.csv"), "--model", "grouped", "--gpu", "rtx4090", "--num-gpus", "1")
    (row,) = json.loads(output(capsys, *flags, "--verify", "--json"))
    assert row["equal"] and row["built_by_block"] == row["formula_by_block"]
    assert "--num-query-groups 2" in planned(capsys, *flags)["command"]


@pytest.mark.filterwarnings("ignore")
def test_verify_finds_a_difference(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A check that always agrees."""
    import _plan_verify

    original = _plan_verify.stage_tensors
    monkeypatch.setattr(_plan_verify, "stage_tensors", lambda *args, **kwargs: original(*args, **kwargs)[:-1])
    flags = ("--model", "G-0.15B", "--gpu", "rtx4090", "--num-gpus", "1", "--verify")
    assert plan.main(flags) == 2
    assert "--verify: stages [0] hold other parameters" in capsys.readouterr().err
