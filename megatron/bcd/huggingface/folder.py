"""A model folder in Hugging Face's format: config.json, safetensors files, and what lies beside them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.bcd.huggingface import tensors
from megatron.bcd.huggingface.architecture import CONFIG, read_architecture, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
GENERATION = "generation_config.json"
RUN = ".bcd-run"
"""In a folder of --save-hf: the name of the run that writes there."""
COMPANIONS = (
    GENERATION,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files that go with a model, carried along as they are."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_FILES = ("*.safetensors", INDEX, CONFIG, *COMPANIONS)


def locate(name: str, *, flag: str, weights: bool = True) -> str:
    """The folder of a model: `name` itself, or where huggingface_hub stores the model of that name.

    Args:
        name: a folder, or a name such as ``openai-community/gpt2``.
        flag: for messages.
        weights: whether the weights are wanted too.

    Raises:
        ValueError: it is neither, or the hub can't be reached.
    """
    if os.path.isdir(name):
        return name
    if os.path.exists(name) or not _HUB_NAME.fullmatch(name):
        raise ValueError(f"{flag} {name}: no such folder; give one that holds {CONFIG} and safetensors files")
    from huggingface_hub import snapshot_download

    patterns = list(_HUB_FILES if weights else (CONFIG, *COMPANIONS))
    try:
        return str(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the library and its HTTP client raise many types
        raise ValueError(
            f"{flag} {name}: no such folder, and the hub does not give a model of that name ({type(error).__name__})"
        ) from None


def companions(folder: str) -> list[str]:
    """Names of the folder's files that go with a model, without ``config.json`` and weights."""
    return [name for name in COMPANIONS if os.path.isfile(os.path.join(folder, name))]


def has_tokenizer(folder: str) -> bool:
    """Whether it holds a tokenizer's files."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in TOKENIZERS)


@dataclass(frozen=True, kw_only=True)
class _Entry:
    file: str
    name: str
    """In the file."""
    shape: tuple[int, ...]
    dtype: torch.dtype


class ModelFolder:
    """A folder whose tensors are all there, and of the shapes that its config.json says. Only headers are kept."""

    def __init__(self, folder: str) -> None:
        """Check the folder.

        Raises:
            ValueError: a file or tensor is missing, damaged, extra or misshapen, or the network is not supported; one
                line.
        """
        self.folder = folder
        self.network = read_architecture(folder)
        self.rows = tensors.rows_of(self.network)
        self._entries = self._headers()
        self._check()

    def dtype(self, row: tensors.Row, layer: int = 0) -> torch.dtype:
        """Of the tensors of `row`."""
        return self._entries[row.names_of(layer)[0]].dtype

    def read(self, row: tensors.Row, layer: int = 0) -> Tensor:
        """Megatron Core's tensor of `row`, without padding and without the axis of layers.

        Raises:
            ValueError: a file can't be read.
        """
        return row.join([self._read(name) for name in row.names_of(layer)])

    def read_rows(self, row: tensors.Row, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of a vocabulary's tensor; those beyond its end are zeros."""
        entry = self._entries[row.names[0]]
        held = min(stop, entry.shape[0])
        with _opened(entry.file) as file:
            rows: Tensor = file.get_slice(entry.name)[min(start, held) : held]
        missing = stop - start - rows.size(0)
        return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows

    def _read(self, name: str) -> Tensor:
        # the file is opened for each tensor: pages of a mapping count as this process's memory until it is gone
        entry = self._entries[name]
        with _opened(entry.file) as file:
            tensor: Tensor = file.get_tensor(entry.name)
        return tensor

    def _headers(self) -> dict[str, _Entry]:
        entries: dict[str, _Entry] = {}
        for path in _weight_files(self.folder):
            for entry in _entries_of(path):
                ours = tensors.canonical(entry.name, self.network)
                if ours in entries:
                    raise ValueError(f"{path}: {entry.name} is also in {entries[ours].file}")
                entries[ours] = entry
        return entries

    def _check(self) -> None:
        """Compare names, shapes and dtypes with the table. Raises ValueError."""
        self._check_tied()
        expected: dict[str, tuple[int, ...]] = {}
        for row in self.rows:
            for layer in range(self.network.num_layers if row.is_stacked else 1):
                names = row.names_of(layer)
                expected |= dict(zip(names, row.shapes, strict=True))
                kinds = {self._entries[name].dtype for name in names if name in self._entries}
                if len(kinds) > 1:
                    raise ValueError(f"{self.folder}: {', '.join(names)} must have one dtype, and have {len(kinds)}")
        check_tensors(expected, {name: entry.shape for name, entry in self._entries.items()}, source=self.folder)

    def _check_tied(self) -> None:
        """A head beside a tied embedding must be its copy; it is left out then."""
        if not self.network.tied or "lm_head.weight" not in self._entries:
            return
        head = "lm_head.weight"
        embedding = next(row.names[0] for row in self.rows if row.is_vocabulary)
        if embedding in self._entries and not torch.equal(self._read(head), self._read(embedding)):
            raise ValueError(
                f"{self.folder}: {CONFIG} says that the head is tied to the embedding (tie_word_embeddings), and "
                f"{head} differs from {embedding}"
            )
        del self._entries[head]


def check_tensors(
    expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], *, source: str
) -> None:
    """Compare names and shapes.

    Raises:
        ValueError: a tensor is missing, extra or of another shape; names the first.
    """
    faults = (
        ("is missing", sorted(expected.keys() - found.keys())),
        (f"is no part of the model that {CONFIG} describes", sorted(found.keys() - expected.keys())),
    )
    for fault, names in faults:
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise ValueError(f"{source}: tensor {names[0]} {fault}{more}")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ValueError(
                f"{source}: tensor {name} has the shape {list(found[name])}, and {CONFIG} says {list(shape)}"
            )


def _weight_files(folder: str) -> list[str]:
    """Paths of the safetensors files: those of the index, or the only one. Raises ValueError."""
    index = os.path.join(folder, INDEX)
    if os.path.isfile(index):
        table = read_json(index, absent="").get("weight_map")
        if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
            raise ValueError(f"{index} has no weight_map")
        names = sorted(set(table.values()))
        for name in names:
            if os.path.basename(name) != name or not os.path.isfile(os.path.join(folder, name)):
                raise ValueError(f"{folder}: {name}, which {INDEX} names, is missing")
        return [os.path.join(folder, name) for name in names]
    found = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    if SINGLE in found:
        return [os.path.join(folder, SINGLE)]
    if len(found) == 1:
        return [os.path.join(folder, found[0])]
    if found:
        raise ValueError(f"{folder}: {len(found)} safetensors files and no {INDEX} that says which are the model")
    pickles = sorted(name for name in os.listdir(folder) if name.endswith(_PICKLES))
    if pickles:
        raise ValueError(
            f"{folder}: {pickles[0]} is a pickle, which can run code when it is read; save the model as safetensors "
            "(transformers: model.save_pretrained)"
        )
    raise ValueError(f"{folder}: no safetensors file; give the folder of a model in Hugging Face's format")


def _entries_of(path: str) -> Iterator[_Entry]:
    """The weights that a file's header lists. Raises ValueError."""
    with _opened(path) as file:
        names = file.keys()
        for name in sorted(names):
            if tensors.ignored(name):
                continue
            header = file.get_slice(name)
            kind = header.get_dtype()
            if kind not in _DTYPES:
                raise ValueError(f"{path}: {name} is of type {kind}; only {', '.join(_DTYPES)} can be converted")
            yield _Entry(file=path, name=name, shape=tuple(header.get_shape()), dtype=_DTYPES[kind])


@contextlib.contextmanager
def _opened(path: str) -> Iterator[Any]:
    """The opened safetensors file. Raises ValueError, also for what can't be read of it later."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} can't be read ({' '.join(str(error).split())[:200]})") from None
