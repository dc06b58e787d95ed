"""Small CIFAR folders in the format of the published ones."""

from __future__ import annotations

import io
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np

Split = tuple[np.ndarray, list[int]]


class _Python2Pickler(pickle._Pickler):
    """Writes text and bytes as Python 2's strings."""

    def _save_string(self, value: str | bytes) -> None:
        data = value.encode("latin1") if isinstance(value, str) else value
        is_short = len(data) < 256
        self.write((b"U" + bytes([len(data)]) if is_short else b"T" + struct.pack("<i", len(data))) + data)
        self.memoize(value)

    dispatch = pickle._Pickler.dispatch | {str: _save_string, bytes: _save_string}


def python2_pickle(content: Any) -> bytes:
    """Pickle like Python 2, as the published files are: protocol 2, strings, and numpy's module by its old name."""
    file = io.BytesIO()
    _Python2Pickler(file, protocol=2).dump(content)
    return file.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def write_cifar(folder: Path, dataset: str, *, num_train: int, num_test: int) -> dict[str, Split]:
    """Write random images whose brightness follows their label, so that they can be learned; return them."""
    generator = np.random.default_rng(5)
    classes, labels_key = (10, b"labels") if dataset == "cifar10" else (100, b"fine_labels")

    def images(count: int) -> Split:
        labels = [int(label) for label in np.arange(count) * 7 % classes]
        noise = generator.integers(0, 40, (count, 3072))
        return (noise + 200 * np.array(labels)[:, None] // classes).astype(np.uint8), labels

    def write(name: str, pixels: np.ndarray, labels: list[int]) -> None:
        extra = {b"coarse_labels": [0] * len(labels)} if dataset == "cifar100" else {}
        (folder / name).write_bytes(
            python2_pickle({b"data": pixels, labels_key: labels, b"batch_label": b"x", **extra})
        )

    folder.mkdir(exist_ok=True)
    written = {"train": images(num_train), "test": images(num_test)}
    pixels, labels = written["train"]
    if dataset == "cifar10":
        half = num_train // 2
        write("data_batch_1", pixels[:half], labels[:half])
        write("data_batch_2", pixels[half:], labels[half:])
    else:
        write("train", pixels, labels)
    write("test_batch" if dataset == "cifar10" else "test", *written["test"])
    return written
