"""studies/train_resnet.py, and the CIFAR folders that it reads: other files are refused, and none can run code."""

from __future__ import annotations

import json
from pathlib import Path

import cifar
import pytest
import torch
import train_resnet
from support.cifar_folders import write_cifar
from support.unsafe_pickles import TRICKS


@pytest.mark.parametrize(("dataset", "classes"), [("cifar10", 10), ("cifar100", 100)])
def test_images_and_labels(tmp_path: Path, dataset: str, classes: int) -> None:
    """Images keep their colour planes, labels are the fine ones, and all batches are read."""
    written = write_cifar(tmp_path, dataset, num_train=30, num_test=20)
    for split, count in (("train", 30), ("test", 20)):
        images = cifar.read_split(str(tmp_path), dataset, split)
        pixels, labels = written[split]
        assert images.pixels_NCHW.shape == (count, 3, 32, 32) and images.pixels_NCHW.dtype == torch.uint8
        assert images.labels_N.tolist() == labels and max(labels) > classes // 2
        assert images.pixels_NCHW[3, 1, 2, 5].item() == pixels[3, 1024 + 2 * 32 + 5]


@pytest.mark.parametrize("trick", TRICKS)
def test_a_file_that_could_run_code_is_refused(tmp_path: Path, trick: str) -> None:
    """A file that could run code is refused in one line, and its code does not run."""
    marker = tmp_path / "MARKER"
    body = TRICKS[trick]
    text = f"touch {marker}".encode()
    body = body.replace(b"\x0c\x00\x00\x00touch MARKER", len(text).to_bytes(4, "little") + text)
    (tmp_path / "test_batch").write_bytes(b"\x80\x04" * (body[:1] != b"\x80") + body + b".")
    with pytest.raises(ValueError, match="test_batch: ") as caught:
        cifar.read_split(str(tmp_path), "cifar10", "test")
    assert not marker.exists()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


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


def test_a_run(tmp_path: Path) -> None:
    """A run trains every block, evaluates, and its metrics have what the study tool reads."""
    write_cifar(tmp_path, "cifar10", num_train=100, num_test=40)
    flags = f"--model resnet8 --dataset cifar10 --data {tmp_path} --optimizer adam --lr 0.01 --train-iters 6"
    flags += " --global-batch-size 16 --shrink 4 --num-validation 20 --log-interval 1 --bcd-steps-per-block 2"
    assert train_resnet.main([*flags.split(), "--metrics-file", str(tmp_path / "metrics.jsonl")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["block"] for line in lines if "step_time_ms" in line] == [0, 0, 1, 1, 2, 2]
    assert [set(line) & {"validation_accuracy", "test_accuracy"} for line in lines if line.get("is_final")] == [
        {"validation_accuracy"},
        {"test_accuracy"},
    ]
