"""Properties of all tools: examples in their help run, bad flags give one line, Ctrl-C leaves no traceback."""

from __future__ import annotations

import argparse
import importlib
import json
import runpy
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.command_line import read_flags

ROOT = Path(__file__).resolve().parents[2]
PATHS = {
    path.stem: path for path in sorted((ROOT / "tools").glob("[a-z]*.py")) if "run_main" in path.read_text("utf-8")
}
PATHS["soak"] = ROOT / "studies" / "soak.py"
TOOLS = [*PATHS]
RUN_AS_TYPED = ("plan", "preprocess_data", "recipe", "report", "show_schedule")
"""Tools whose examples take seconds. The others train, or take minutes."""


def examples(tool: str) -> list[list[str]]:
    """Return the words after the tool's name, for each example in its help."""
    text = str(importlib.import_module(tool).__doc__).replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.startswith("    ") and f"/{tool}.py" in line]
    commands = [shlex.split(line, comments=True) for line in lines]
    path = str(PATHS[tool].relative_to(ROOT))
    return [words[words.index(path) + 1 :] for words in commands]


@pytest.mark.parametrize("tool", [tool for tool in TOOLS if tool not in RUN_AS_TYPED])
def test_examples_have_flags_of_today(tool: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The flags of every example exist."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    monkeypatch.setenv("WORLD_SIZE", "2")
    for words in examples(tool):
        read_flags(tool, words)


PLAN = "--model G-5.4B --gpu rtx4090 --num-gpus 4 --host-memory-gb 256"
PIPELINE = "--stages 4 --microbatches 8 --pivot 2"


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ("plan", f"{PLAN} --method bcd --bcd-num-blocks 3"),
        ("show_schedule", PIPELINE),
        ("report", "out/bcd.jsonl out/full.jsonl"),
    ],
)
def test_as_typed_without_torch(tool: str, words: str, tmp_path: Path) -> None:
    """A tool runs from any folder, and prints a table without importing torch."""
    prepare(tmp_path)
    program = "import os, runpy, sys; sys.argv = sys.argv[1:]; sys.path[0] = os.path.dirname(sys.argv[0])\n"
    program += "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    program += "finally: assert not {'torch', 'megatron.core', 'numpy', 'matplotlib', 'rich'} & sys.modules.keys()"
    command = [sys.executable, "-c", program, ROOT / "tools" / f"{tool}.py", *words.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def prepare(folder: Path) -> None:
    """Write the files that the examples read."""
    (folder / "corpus.jsonl").write_text('{"text": "a few words"}\n' * 3)
    step = {"phase": 0, "block": 0, "loss": 1.0, "step_time_ms": 1.0, "tokens_per_second": 1.0}
    step |= {"model_state_bytes": [1]}
    (folder / "out").mkdir()
    for name in ("bcd", "full"):
        lines = [json.dumps(step | {"iteration": iteration}) for iteration in (1, 2)]
        (folder / "out" / f"{name}.jsonl").write_text("\n".join(lines))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tool", RUN_AS_TYPED)
def test_examples_run(
    tool: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    bpe_files: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every example ends without an error."""
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path)
    for path in bpe_files.values():
        (tmp_path / path.name).symlink_to(path)
    main: Any = importlib.import_module(tool).main
    for words in examples(tool):
        serial = ["1" if word == "8" and tool == "preprocess_data" else word for word in words]
        assert main(serial) == 0, (words, capsys.readouterr().err)


@pytest.mark.parametrize("tool", TOOLS)
def test_ctrl_c(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends a tool with code 130 and no traceback."""

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", interrupted)
    monkeypatch.setattr(sys, "argv", [tool, "whole"])  # recipe.py wants that word first
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(PATHS[tool]), run_name="__main__")
    assert left.value.code == 128 + signal.SIGINT


MODEL = "--num-layers 6 --hidden-size 32 --num-attention-heads 2 --seq-length 16"
RUN = "--run a=out/bcd.jsonl"
BAD_FLAGS = [
    ("benchmark", f"{MODEL} --steps 0", "--steps"),
    ("benchmark", f"{MODEL} --variant x", "--variant"),
    ("benchmark", f"{MODEL} --train-iters 5", "--train-iters"),
    ("benchmark", f"{MODEL} --prefix-cache --bcd-num-blocks 1", "--prefix-cache"),
    ("check_machine", "--num-ranks 3", "--num-ranks"),
    ("check_machine", "--json /dev/null/file", "--json /dev/null/file"),
    ("compare_runs", "", "--before"),
    ("compare_runs", "--before HEAD --only gird", "--only"),
    ("compare_runs", "--before out", "pretrain_gpt_bcd.py"),
    ("compare_runs", "--before HEAD --output out", "--output"),
    ("fine_tuning", "--peers full,bread", "--peers"),
    ("fine_tuning", "--variant a=--x --variant a=--y", "--variant"),
    ("plan", "", "--model"),
    ("plan", f"{PLAN} --tokens many", "--tokens"),
    ("plan", f"{PLAN} --pipeline-model-parallel-size 3", "--pipeline-model-parallel-size"),
    ("plan", f"{PLAN} --micro-batch", "--micro-batch"),
    ("plan", f"{PLAN} --method bcd --bcd-num-blocks 0", "--bcd-num-blocks"),
    ("plan", f"{PLAN} --method full --bcd-preset paper", "--bcd-preset"),
    ("plan", f"{PLAN} --method offload --adam-moments-dtype int8", "--adam-moments-dtype"),
    ("plan", f"{PLAN} --pipeline-model-parallel-size 2 --gpu a100 --adam-moments-dtype int8", "int8"),
    ("plan", f"{PLAN} --compare --method bcd", "--compare"),
    ("plan", f"{PLAN} --models nowhere.csv", "nowhere.csv"),
    ("plan", f"{PLAN} --search --compare", "--search"),
    ("report", "--run no-name", "--run"),
    ("report", f"{RUN} --figure p.gif", "--figure"),
    ("report", f"{RUN} --json /dev/null/t.json", "--json"),
    ("soak", "--output new --replica-groups 1", "--replica-groups"),
    ("soak", "--output out", "--output"),
    ("show_schedule", f"{PIPELINE} --stages 0", "--pipeline-model-parallel-size"),
    ("show_schedule", f"{PIPELINE} --pivot 4", "--pivot"),
    ("show_schedule", f"{PIPELINE} --active 1 2", "--active"),
    ("show_schedule", f"{PIPELINE} --layout interleaved --num-blocks 3 --block 1", "--pivot"),
]


@pytest.mark.parametrize(("tool", "words", "flag"), BAD_FLAGS)
def test_bad_flags(
    tool: str,
    words: str,
    flag: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A bad flag ends with code 2 and one line that names it, and writes nothing."""
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert importlib.import_module(tool).main(words.split()) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and flag in said.err
    assert sorted(tmp_path.rglob("*")) == before
