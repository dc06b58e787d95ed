"""A model folder in Hugging Face's format: config.json, safetensors files and their companions."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.bcd.huggingface import tensors
from megatron.bcd.huggingface.architecture import CONFIG, TRANSFORMERS, Architecture, NotInCore, architecture_of
from megatron.bcd.model.skeleton import TRUSTED, read_config

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
GENERATION = "generation_config.json"
RUN = ".bcd-run"
"""A file in a folder of --save-hf with the name of the run that writes there."""
OF_THE_MODEL = (GENERATION, "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
COMPANIONS = (
    *OF_THE_MODEL,
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
"""Files that belong to a model and are copied unchanged."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")

_BUFFERS = (".rotary_emb.inv_freq", ".attn.masked_bias", ".attn.bias")
"""Masks and frequencies, which older versions of transformers saved, too."""
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def locate(name: str, *, flag: str, weights: bool = True) -> str:
    """Return the folder of a model: `name` itself, or the folder to which huggingface_hub downloads it.

    Args:
        name: a folder, or a name such as ``openai-community/gpt2``.
        flag: the flag to name in messages.
        weights: whether to download the weights too.

    Raises:
        ValueError: `name` is neither, the folder has no config.json, or the hub can't be reached.
    """
    if os.path.isdir(name):
        if not os.path.isfile(os.path.join(name, CONFIG)):
            raise ValueError(f"{flag} {name}: the folder has no {CONFIG}. Give a model in Hugging Face's format.")
        return name
    if os.path.isfile(name):
        raise ValueError(f"{flag} {name}: is a file. Give the folder that holds it.")
    from huggingface_hub import snapshot_download

    patterns = [CONFIG, *COMPANIONS, *["*.safetensors", INDEX] * weights, *["*.py"] * (name in TRUSTED)]
    try:
        return str(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the library and its HTTP client can raise many types
        raise ValueError(
            f"{flag} {name}: no such folder, and the hub returned no model of that name ({type(error).__name__}). Give "
            f"a folder with {CONFIG} and safetensors files."
        ) from None


def read_architecture(path: str, *, transformer_impl: str = "auto", is_quantised: bool = False) -> Architecture:
    """Return the architecture of a model, given its folder, its config.json or its name on the hub.

    With `transformer_impl` auto, transformers' layers compute what Megatron Core's cannot. With `is_quantised` the
    weights may be quantised: they will not be read.

    Raises:
        NotInCore: another `transformer_impl` cannot express the model.
        ValueError: as `read_config`.
    """
    config, reason = read_config(path, is_quantised=is_quantised), ""
    try:
        if transformer_impl != TRANSFORMERS:
            return architecture_of(config)
    except NotInCore as error:
        if transformer_impl != "auto":
            raise NotInCore(f"{path}: {error}. --transformer-impl transformers trains it.") from None
        reason = str(error)
    return replace(architecture_of(config.get_text_config(), family=TRANSFORMERS), not_in_core=reason)


def companions(folder: str) -> dict[str, bytes]:
    """Return the folder's companion files by name: everything but ``config.json`` and weights."""
    files = [Path(folder, name) for name in COMPANIONS]
    return {file.name: file.read_bytes() for file in (*files, *Path(folder).glob("*.py")) if file.is_file()}


def has_tokenizer(folder: str) -> bool:
    """Return whether the folder contains a tokenizer's files."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in TOKENIZERS)


@dataclass(frozen=True, kw_only=True)
class _Entry:
    file: str
    name: str
    """The name in the file."""
    shape: tuple[int, ...]
    dtype: torch.dtype


class ModelFolder:
    """A folder with all the tensors, in the right shapes, of the model in its config.json. Caches only headers."""

    def __init__(self, folder: str, *, transformer_impl: str = "auto") -> None:
        """Check the folder.

        Raises:
            ValueError: a file or tensor is missing, damaged, extra or misshapen, or the architecture is not supported.
                One line.
        """
        self.folder = folder
        self.network = read_architecture(folder, transformer_impl=transformer_impl)
        self.rows = tensors.build_rows(self.network)
        self._entries = self._headers()
        self.others = tuple[tensors.Row, ...]()
        """Tensors of other parts than the decoder, such as a vision tower, by their own names."""
        self._check()

    def read(self, row: tensors.Row) -> Tensor:
        """Return the checkpoint's tensor of `row`, without padding and without the axis of layers.

        Raises:
            ValueError: a file can't be read.
        """
        return row.join([self._read(name) for name in row.names])

    def file_name(self, name: str) -> str:
        """Return a tensor's name in the files."""
        return self._entries[name].name

    def read_rows(self, row: tensors.Row, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop` of a vocabulary's tensor. Rows beyond its end are zero."""
        entry = self._entries[row.names[0]]
        end = min(stop, entry.shape[0])
        with _open_safetensors(entry.file) as file:
            rows: Tensor = file.get_slice(entry.name)[min(start, end) : end]
        missing = stop - start - rows.size(0)
        return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows

    def _read(self, name: str) -> Tensor:
        # open the file for each tensor: mapped pages count as this process's memory until the mapping is closed
        entry = self._entries[name]
        with _open_safetensors(entry.file) as file:
            tensor: Tensor = file.get_tensor(entry.name)
        return tensor

    def _headers(self) -> dict[str, _Entry]:
        """Return the weights in the headers of the files, by canonical name. Raises ValueError."""
        entries: dict[str, _Entry] = {}
        for path in _weight_files(self.folder):
            with _open_safetensors(path) as file:
                for name in sorted(file.keys()):
                    if name.endswith(_BUFFERS):
                        continue
                    header, ours = file.get_slice(name), tensors.canonical_name(name, self.network)
                    if (kind := header.get_dtype()) not in _DTYPES:
                        raise ValueError(
                            f"{path}: {name} is of type {kind}, but only {', '.join(_DTYPES)} can be converted"
                        )
                    if ours in entries:
                        raise ValueError(f"{path}: {name} is also in {entries[ours].file}")
                    shape = tuple(header.get_shape())
                    entries[ours] = _Entry(file=path, name=name, shape=shape, dtype=_DTYPES[kind])
        return entries

    def _check(self) -> None:
        """Compare names, shapes and dtypes with the table of tensors. Raises ValueError."""
        self._check_tied()
        expected: dict[str, tuple[int, ...]] = {}
        for row in self.rows:
            expected |= dict(zip(row.names, row.shapes, strict=True))
            kinds = {self._entries[name].dtype for name in row.names if name in self._entries}
            if len(kinds) > 1:
                raise ValueError(f"{self.folder}: {', '.join(row.names)} must have one dtype, but have {len(kinds)}")
        actual = {name: entry.shape for name, entry in self._entries.items()}
        if self.network.family == TRANSFORMERS and any(entry.name != name for name, entry in self._entries.items()):
            others = sorted(actual.keys() - expected.keys())
            self.others = tuple(tensors.Row(key=name, names=(name,), shapes=(actual.pop(name),)) for name in others)
        check_tensors(expected, actual, source=self.folder)

    def _check_tied(self) -> None:
        """Check that a separate head is a copy of the tied embedding, and ignore it then. Raises ValueError."""
        if not self.network.config.tie_word_embeddings or "lm_head.weight" not in self._entries:
            return
        head = "lm_head.weight"
        embedding = next(row.names[0] for row in self.rows if row.is_vocabulary)
        if embedding in self._entries and not torch.equal(self._read(head), self._read(embedding)):
            raise ValueError(
                f"{self.folder}: {CONFIG} says that the head is tied to the embedding (tie_word_embeddings), but "
                f"{head} differs from {embedding}"
            )
        del self._entries[head]


def check_tensors(
    expected: Mapping[str, tuple[int, ...]], actual: Mapping[str, tuple[int, ...]], *, source: str
) -> None:
    """Compare names and shapes of tensors.

    Raises:
        ValueError: a tensor is missing, extra or of another shape. The message names the first one.
    """
    faults = (
        ("is missing", sorted(expected.keys() - actual.keys())),
        (f"is not part of the model that {CONFIG} describes", sorted(actual.keys() - expected.keys())),
    )
    for fault, names in faults:
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise ValueError(f"{source}: tensor {names[0]} {fault}{more}")
    for name, shape in expected.items():
        if actual[name] != shape:
            raise ValueError(
                f"{source}: tensor {name} has the shape {list(actual[name])}, but {CONFIG} implies {list(shape)}"
            )


def _weight_files(folder: str) -> list[str]:
    """Return the paths of the safetensors files in the index, or of the only one. Raises ValueError."""
    index = os.path.join(folder, INDEX)
    if os.path.isfile(index):
        try:
            with open(index, encoding="utf-8") as file:
                names = sorted(set(json.load(file)["weight_map"].values()))
        except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
            raise ValueError(f"{index}: can't be read ({error})") from None
        for name in names:
            if os.path.basename(name) != name or not os.path.isfile(os.path.join(folder, name)):
                raise ValueError(f"{folder}: {name} is missing, but {INDEX} names it")
        return [os.path.join(folder, name) for name in names]
    names = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    if SINGLE in names or len(names) == 1:
        return [os.path.join(folder, SINGLE if SINGLE in names else names[0])]
    raise ValueError(
        f"{folder}: holds {len(names)} safetensors files and no {INDEX}. Give the folder of a model in Hugging Face's "
        "format. Pickles are not read, because they can run code: save such a model as safetensors."
    )


@contextlib.contextmanager
def _open_safetensors(path: str) -> Iterator[Any]:
    """Open a safetensors file. Raises ValueError, also if reading fails inside the context."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: can't be read ({' '.join(str(error).split())[:200]})") from None
