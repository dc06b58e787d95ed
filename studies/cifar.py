"""Read CIFAR-10 and CIFAR-100 from the published folders of pickles, without letting a file run code."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

NUM_CLASSES = {"cifar10": 10, "cifar100": 100}
_LABELS = {"cifar10": b"labels", "cifar100": b"fine_labels"}
_TRAIN_FILES = {"cifar10": "data_batch_*", "cifar100": "train"}
_TEST_FILES = {"cifar10": "test_batch", "cifar100": "test"}
_PADDING = 4


@dataclass(frozen=True, kw_only=True)
class Images:
    """Shapes: N images, C = 3 channels, H = height, W = width."""

    pixels_NCHW: torch.Tensor
    """uint8."""
    labels_N: torch.Tensor
    """int64, starting at 0."""

    def __len__(self) -> int:
        return len(self.labels_N)

    def slice(self, start: int, stop: int | None) -> Images:
        return Images(pixels_NCHW=self.pixels_NCHW[start:stop], labels_N=self.labels_N[start:stop])


def read_split(folder: str, dataset: str, split: str) -> Images:
    """Return all images of `split` ("train" or "test"), in the files' order. Raises ValueError naming a bad folder or
    file."""
    pattern = (_TRAIN_FILES if split == "train" else _TEST_FILES)[dataset]
    files = sorted(Path(folder).glob(pattern))
    if not files:
        raise ValueError(f"--data {folder}: has no {pattern}: give the folder of {dataset}'s python version")
    parts = [_read_file(file, dataset) for file in files]
    return Images(
        pixels_NCHW=torch.cat([part.pixels_NCHW for part in parts]),
        labels_N=torch.cat([part.labels_N for part in parts]),
    )


def _read_file(path: Path, dataset: str) -> Images:
    try:
        with open(path, "rb") as file:
            content = _Unpickler(file, encoding="bytes").load()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except Exception as error:  # a damaged pickle raises nearly anything
        raise ValueError(f"{path}: not read: {' '.join(str(error).split()) or type(error).__name__}") from error
    if not isinstance(content, dict) or not {b"data", _LABELS[dataset]} <= set(content):
        raise ValueError(f"{path}: must be a dict with data and {_LABELS[dataset].decode()}: a batch of {dataset}")
    pixels, labels = _array(content[b"data"], path), content[_LABELS[dataset]]
    are_integers = isinstance(labels, list) and all(type(label) is int for label in labels)
    if not are_integers or len(labels) != len(pixels) or not all(0 <= label < NUM_CLASSES[dataset] for label in labels):
        raise ValueError(f"{path}: labels must be {len(pixels)} whole numbers from 0 to {NUM_CLASSES[dataset] - 1}")
    return Images(pixels_NCHW=torch.from_numpy(pixels.reshape(-1, 3, 32, 32).copy()), labels_N=torch.tensor(labels))


def _array(value: Any, path: Path) -> np.ndarray:
    """Return the pixels [N, 3072] that `value`, an unpickled array, describes."""
    try:
        _, shape, dtype, is_fortran_order, content = value.state
        kind = dtype.arguments[0]
    except (AttributeError, TypeError, ValueError, IndexError):
        raise ValueError(f"{path}: data is not an array") from None
    fits = isinstance(shape, tuple) and len(shape) == 2 and shape[1] == 3072 and kind in ("u1", b"u1")
    if not fits or is_fortran_order or not isinstance(content, bytes) or len(content) != shape[0] * 3072 or not content:
        raise ValueError(f"{path}: data must be uint8 [images, 3072], rows in order, at least one")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


class _Described:
    """Replaces a numpy array or dtype: stores what the pickle says about it, and creates nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _encode_latin1(text: str, encoding: bytes | str) -> bytes:
    """Replace codecs.encode, with which Python 3 writes bytes for Python 2."""
    if encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError(f"encoding {encoding!r}")
    return text.encode("latin1")


class _Unpickler(pickle.Unpickler):
    """Creates dicts, lists, numbers, text and `_Described`, and refuses any other class or function."""

    _allowed = {
        **{(f"{package}.multiarray", "_reconstruct"): _Described for package in ("numpy.core", "numpy._core")},
        ("numpy", "ndarray"): "ndarray",
        ("numpy", "dtype"): _Described,
        ("_codecs", "encode"): _encode_latin1,
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._allowed[module, name]
        except KeyError:
            shown = ascii(f"{module}.{name}")[1:-1][:100]
            raise pickle.UnpicklingError(f"{shown} is refused: CIFAR does not use it, and it could run code") from None


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Mean and standard deviation of each channel of the training images, and the factor by which images shrink."""

    mean_C11: torch.Tensor
    deviation_C11: torch.Tensor
    shrink: int
    """Side of the squares of pixels that are averaged into one pixel."""

    @classmethod
    def of(cls, images: Images, *, shrink: int) -> Scale:
        pixels = images.pixels_NCHW.float()
        mean, deviation = (f(dim=(0, 2, 3)).view(3, 1, 1) for f in (pixels.mean, pixels.std))
        return cls(mean_C11=mean, deviation_C11=deviation, shrink=shrink)

    def __call__(self, pixels_NCHW: torch.Tensor) -> torch.Tensor:
        """Return fp32 [N, C, H / shrink, W / shrink], channels last."""
        scaled = (pixels_NCHW.float() - self.mean_C11) / self.deviation_C11
        if self.shrink > 1:
            scaled = torch.nn.functional.avg_pool2d(scaled, self.shrink)
        return scaled.contiguous(memory_format=torch.channels_last)


def training_batches(
    images: Images, scale: Scale, *, batch_size: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches [B, C, H, W] and labels [B] forever. Every epoch has a new order and drops its incomplete last
    batch.

    Each image is shifted by up to 4 pixels and mirrored at random (He et al., arXiv 1512.03385, 4.2).
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(images), generator=generator)
        for indices in order[: len(images) // batch_size * batch_size].split(batch_size):
            yield scale(_augmented(images.pixels_NCHW[indices], generator)), images.labels_N[indices]


def _augmented(pixels_NCHW: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    num, _, height, width = pixels_NCHW.shape
    padded = torch.nn.functional.pad(pixels_NCHW, (_PADDING,) * 4)
    top_N11, left_N11 = torch.randint(2 * _PADDING + 1, (2, num, 1, 1), generator=generator)
    mirrored_N1 = torch.rand(num, 1, generator=generator) < 0.5
    columns_NW = torch.arange(width).expand(num, width)
    columns_NW = torch.where(mirrored_N1, columns_NW.flip(1), columns_NW)
    rows_NH1 = top_N11 + torch.arange(height).view(1, -1, 1)
    # indices [N, H, W] combined with the slice of channels give [N, H, W, C]
    return padded[torch.arange(num).view(-1, 1, 1), :, rows_NH1, left_N11 + columns_NW.unsqueeze(1)].permute(0, 3, 1, 2)
