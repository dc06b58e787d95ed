"""studies/train_resnet.py as a user and the study tool start it, on a small generated CIFAR folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import train_resnet
from support.cifar_folders import write_cifar

STEPS = 12


def command(folder: Path, *more: str) -> list[str]:
    return [
        *("--model", "resnet8", "--dataset", "cifar10", "--data", str(folder), "--optimizer", "adam", "--lr", "0.01"),
        *("--train-iters", str(STEPS), "--global-batch-size", "16", "--shrink", "4", "--num-validation", "20"),
        *("--log-interval", "1", "--seed", "3", "--metrics-file", str(folder / "metrics.jsonl"), *more),
    ]


def test_a_run_from_the_command_line(repo_root: Path, tmp_path: Path) -> None:
    """The script starts from a shell, and its metrics have what the study tool reads."""
    write_cifar(tmp_path, "cifar10", num_train=100, num_test=40)
    words = [sys.executable, "studies/train_resnet.py", *command(tmp_path, "--bcd-steps-per-block", "2")]
    done = subprocess.run(words, cwd=repo_root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "step_time_ms" in line]
    assert [line["iteration"] for line in steps] == list(range(1, STEPS + 1))
    assert [line["block"] for line in steps] == [0, 0, 1, 1, 2, 2] * 2
    assert [(set(line) & {"validation_accuracy", "test_accuracy"}, line["is_final"]) for line in lines[-2:]] == [
        ({"validation_accuracy"}, True),
        ({"test_accuracy"}, True),
    ]


@pytest.mark.parametrize(
    ("name", "parameters", "layers"),
    [("resnet8", 78_042, 3), ("resnet14", 175_258, 6), ("resnet20", 272_474, 9), ("resnet50", 23_520_842, 16)],
)
def test_models_are_those_of_the_paper(name: str, parameters: int, layers: int) -> None:
    """The models have the paper's numbers of parameters and residual blocks: ResNet-14's 175,258 parameters explain the
    paper's table 10."""
    model = train_resnet.build_resnet(name, 10)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert len(train_resnet.residual_blocks(model)) == layers
