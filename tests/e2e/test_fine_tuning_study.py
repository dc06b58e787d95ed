"""studies/fine_tuning.py --task sft on a tiny model; losses are not checked."""

from __future__ import annotations

import csv
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import small_text

FLAGS = """--sft --load-hf {model} --data-path {data} --data-cache-path {cache} --split 60,20,20
--tokenizer-type ByteLevelTokenizer --seq-length 64 --micro-batch-size 1 --global-batch-size 2 --train-iters 6 --lr 1e-2
--min-lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0 --clip-grad 1 --num-workers 0
--hidden-dropout 0 --attention-dropout 0 --log-interval 1 --eval-interval 3 --full-validation --eval-iters 1
--bcd-num-blocks 1"""


def metrics_of(repo_root: Path, folder: Path, program: list[str], flags: list[str]) -> list[dict[str, Any]]:
    path = folder / f"{len(program)}.jsonl"
    command = [sys.executable, *program, *flags, "--metrics-file", str(path)]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_peers_train_on_the_same(repo_root: Path, tmp_path: Path) -> None:
    """transformers' loop has our losses, validation losses and test loss, from the same samples, masks and means."""
    from support import huggingface_models as models

    model = models.write_model("llama2", tmp_path / "model")
    records = [{"prompt": f"{n} and {n}? ", "completion": f"{2 * n}, of course"} for n in range(40)]
    (tmp_path / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
    flags = FLAGS.format(model=model, data=tmp_path / "records.jsonl", cache=tmp_path / "cache").split()
    ours = metrics_of(repo_root, tmp_path, ["pretrain_llama_bcd.py"], flags)
    theirs = metrics_of(repo_root, tmp_path, ["studies/peer.py", "--peer", "full"], flags)
    for key in ("loss", "validation_loss", "test_loss"):
        expected = {line["iteration"]: line[key] for line in ours if key in line}
        actual = {line["iteration"]: line[key] for line in theirs if key in line}
        assert len(expected) == {"loss": 6, "validation_loss": 2, "test_loss": 1}[key]
        if key == "loss":  # our second line is the mean of two steps, as in stock
            expected[2] = 2 * expected[2] - expected[1]
        assert actual == {step: pytest.approx(loss, abs=1e-4) for step, loss in expected.items()}, key


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft, a pin of requirements.txt")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_tiny_form(repo_root: Path, tmp_path: Path, precision: str) -> None:
    """Each method runs and has a row with its figures, and the next start repeats no run."""
    text, records = small_text.write_text(tmp_path / "text.txt"), small_text.write_questions(tmp_path / "records.jsonl")
    command = [sys.executable, "studies/fine_tuning.py", "--task", "sft", "--size", "tiny"]
    command += ["--output", str(tmp_path / "out"), "--data", str(records)]
    command += ["--pretrain-text", str(text), "--records", "40", "--num-epochs", "1"]
    command += ["--learning-rates", "1e-3", "--seeds", "1", *(["--bf16"] if precision == "bf16" else [])]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with open(tmp_path / "out" / "rows.csv", newline="") as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"full", "bcd", "badam", "lora"} and all(row["test"] for row in rows.values())
    text = (tmp_path / "out" / "table.md").read_text(encoding="utf-8")
    assert "| full Adam | 0.001 |" in text.replace("**", "") and "failed" not in text
    state = {name: float(row["state_bytes_per_parameter"]) * int(row["num_parameters"]) for name, row in rows.items()}
    assert max(state, key=state.__getitem__) == "full"
    share = state["badam"] / state["full"]
    assert (share < 0.3) == (precision == "bf16"), "frozen weights of 2 bytes against 18, or of 4 against 16"
    (metrics,) = (tmp_path / "out").glob("*/runs/*-badam-*/metrics.jsonl")
    blocks = {line.get("block") for line in map(json.loads, metrics.read_text().splitlines()) if "loss" in line}
    assert blocks == {f"model.layers.{layer}." for layer in range(3)}, "step times are means over blocks"
    again = subprocess.run(command, cwd=repo_root, capture_output=True, text=True)
    assert again.returncode == 0 and " start tiny" not in again.stderr and "0 runs can start now" in again.stderr
