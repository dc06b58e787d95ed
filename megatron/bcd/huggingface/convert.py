"""Between a model folder in Hugging Face's format and a checkpoint folder of this program, one tensor at a time."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.bcd.checkpoint import layout
from megatron.bcd.huggingface import core_format, folder, tensors
from megatron.bcd.huggingface.architecture import Architecture
from megatron.bcd.huggingface.core_format import CoreCheckpoint, Piece
from megatron.bcd.huggingface.folder import ModelFolder
from megatron.bcd.runtime import atomic_io
from megatron.bcd.tokenizer import Tokenizer

CARRIED = "huggingface"
"""Folder inside a converted checkpoint with config.json and the files beside it."""
MAX_SHARD_BYTES = 5 * 10**9
_PIECE_BYTES = 16 * 2**20
_ITERATION = 0
LEFTOVER = os.path.basename(layout.incomplete_folder("", _ITERATION))
"""What a conversion to a checkpoint that was killed leaves in its folder; `to_core` deletes it."""


def check_output(path: str, *, flag: str, leftover: str | None = None) -> None:
    """Whether a model may be written to `path`, which may be a link to an empty folder; `leftover` may be in it.

    Raises:
        ValueError: there is something already, or its parent can't be written to.
    """
    if os.path.lexists(path) and not (os.path.isdir(path) and set(os.listdir(path)) <= {leftover}):
        raise ValueError(f"{flag} {path}: there is something already; give a folder that is empty or absent")
    parent = os.path.realpath(path)
    while not os.path.isdir(parent):
        parent = os.path.dirname(parent)
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"{flag} {path}: {parent} can't be written to; give another folder")


# --- from Hugging Face's format


def to_core(source: ModelFolder, root: str, *, padded_vocab_size: int) -> str:
    """Write `source` as the weights of a checkpoint below `root`; the folder of the checkpoint.

    Padding rows of the vocabulary are zeros. On failure nothing is left. What a killed conversion has left is deleted.

    Raises:
        OSError, RuntimeError: a file can't be written.
        ValueError: a file of the model can't be read.
    """
    is_new = not os.path.lexists(root)
    temporary = layout.incomplete_folder(root, _ITERATION)
    shutil.rmtree(temporary, ignore_errors=True)
    os.makedirs(temporary)
    try:
        core_format.write(temporary, _files(source, padded_vocab_size))
        carried = os.path.join(temporary, CARRIED)
        os.mkdir(carried)
        for name in (folder.CONFIG, *folder.companions(source.folder)):
            shutil.copyfile(os.path.join(source.folder, name), os.path.join(carried, name))
        paths = [os.path.join(parent, name) for parent, _, names in os.walk(temporary) for name in names]
        layout.finish(temporary, {os.path.relpath(path, temporary): layout.file_digest(path) for path in paths})
        layout.publish(root, _ITERATION)
    except BaseException:
        shutil.rmtree(root if is_new else temporary, ignore_errors=True)
        raise
    return layout.iteration_folder(root, _ITERATION)


def _files(source: ModelFolder, padded_vocab_size: int) -> list[list[Piece]]:
    """What goes into each file: every layer has one, the embedding and the rest another."""
    num_layers = source.network.num_layers
    outside = [row for row in source.rows if not row.is_stacked]
    files = [[piece for row in outside for piece in _pieces(source, row, padded_vocab_size)]]
    for layer in range(num_layers):
        files.append(
            [
                Piece(
                    key=row.key,
                    whole=(num_layers, *row.shape),
                    offsets=(layer, *[0] * len(row.shape)),
                    shape=(1, *row.shape),
                    dtype=source.dtype(row, layer),
                    read=partial(source.read, row, layer),
                )
                for row in source.rows
                if row.is_stacked
            ]
        )
    return files


def _pieces(source: ModelFolder, row: tensors.Row, padded_vocab_size: int) -> Iterator[Piece]:
    """A tensor outside the layers; one of the vocabulary in parts of `_PIECE_BYTES` or a little less."""
    shape, dtype = row.shape, source.dtype(row)
    if not row.is_vocabulary:
        offsets = (0,) * len(shape)
        yield Piece(key=row.key, whole=shape, offsets=offsets, shape=shape, dtype=dtype, read=partial(source.read, row))
        return
    step = max(1, _PIECE_BYTES // (shape[1] * dtype.itemsize))
    for start in range(0, padded_vocab_size, step):
        stop = min(start + step, padded_vocab_size)
        yield Piece(
            key=row.key,
            whole=(padded_vocab_size, shape[1]),
            offsets=(start, 0),
            shape=(stop - start, shape[1]),
            dtype=dtype,
            read=partial(source.read_rows, row, start, stop),
        )


# --- to Hugging Face's format


@dataclass(frozen=True, kw_only=True)
class Description:
    """What is written beside the weights."""

    network: Architecture
    config: Mapping[str, Any]
    """Content of config.json."""
    companions: Mapping[str, str | bytes]
    """Paths or contents of the other files, by name."""
    tokenizer: Tokenizer | None = None
    """That of the run, where it is known."""


def describe(config_folder: str) -> Description:
    """The description in a folder in Hugging Face's format.

    Raises:
        ValueError: its config.json is absent, damaged or not supported.
    """
    network = folder.read_architecture(config_folder)
    with open(os.path.join(config_folder, folder.CONFIG), encoding="utf-8") as file:
        config = json.load(file)
    paths = {name: os.path.join(config_folder, name) for name in folder.companions(config_folder)}
    return Description(network=network, config=config, companions=paths)


def check_checkpoint(checkpoint: CoreCheckpoint, description: Description) -> None:
    """Check that the checkpoint holds the weights of the network and no others.

    Raises:
        ValueError: a tensor is missing, extra or misshapen.
    """
    network = description.network
    rows = tensors.rows_of(network)
    expected = {row.key: ((network.num_layers,) if row.is_stacked else ()) + row.shape for row in rows}
    found = {key: checkpoint.shape(key) for key in checkpoint.tensors}
    for row in rows:
        if row.is_vocabulary and row.key in found and found[row.key][0] >= row.shape[0]:
            found[row.key] = (row.shape[0], *found[row.key][1:])  # the rest is padding
    folder.check_tensors(expected, found, source=checkpoint.folder)


def to_hugging_face(
    checkpoint: CoreCheckpoint,
    path: str,
    description: Description,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    run: str | None = None,
) -> None:
    """Write the checkpoint's weights as a model folder `path`, with the name of its `run`. On failure nothing is left.

    A model that is there is replaced (the caller has checked that this is meant); other files stay.

    Memory: one safetensors file, at most `max_shard_bytes` unless one tensor has more.

    Raises:
        ValueError: as `check_checkpoint`, or a file of the checkpoint can't be read.
        OSError: a file can't be written.
    """
    check_checkpoint(checkpoint, description)
    with _written(path, run) as temporary:
        dtypes = _write_weights(checkpoint, temporary, description, max_shard_bytes)
        write_description(temporary, description, dtype=dtypes.pop() if len(dtypes) == 1 else None)


@contextlib.contextmanager
def _written(path: str, run: str | None) -> Iterator[str]:
    """A temporary folder, which becomes `path` at the end; on failure nothing is left."""
    path = os.path.realpath(path)  # a folder can't be renamed onto a link, nor to another disk
    temporary = path + ".bcd-incomplete"
    shutil.rmtree(temporary, ignore_errors=True)
    os.makedirs(temporary)
    try:
        yield temporary
        if run is not None:
            atomic_io.write(os.path.join(temporary, folder.RUN), f"{run}\n".encode())
        for name in os.listdir(temporary):
            atomic_io.sync(os.path.join(temporary, name))
        _publish(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_description(path: str, description: Description, *, dtype: torch.dtype | None = None) -> None:
    """Write config.json, which names the `dtype` of the weights, and what belongs beside it."""
    config = dict(description.config)
    if dtype is not None:
        config["dtype" if "dtype" in config else "torch_dtype"] = str(dtype).removeprefix("torch.")
    with open(os.path.join(path, folder.CONFIG), "w", encoding="utf-8") as file:
        file.write(json.dumps(config, indent=2) + "\n")
    for name, companion in description.companions.items():
        target = os.path.join(path, name)
        if isinstance(companion, bytes):
            atomic_io.write(target, companion)
        else:
            shutil.copyfile(companion, target)


def _publish(temporary: str, path: str) -> None:
    """Give the folder its name; where there is one with other contents, replace the model in it, config.json last."""
    try:
        os.rename(temporary, path)  # also onto an empty folder
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        stale = [name for name in os.listdir(path) if name.endswith(".safetensors") or name == folder.INDEX]
        for name in (folder.CONFIG, *stale):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(path, name))
        for name in sorted(os.listdir(temporary), key=lambda name: name == folder.CONFIG):
            os.rename(os.path.join(temporary, name), os.path.join(path, name))
        os.rmdir(temporary)
        atomic_io.sync(path)
    atomic_io.sync(os.path.dirname(path))


Unit = tuple[tensors.Row, int]
"""A row, and a layer."""


def units_of(network: Architecture) -> list[Unit]:
    """Every row of every layer, in the model's order."""
    rows = tensors.rows_of(network)
    first = next(number for number, row in enumerate(rows) if row.is_stacked)
    stacked = [row for row in rows if row.is_stacked]
    layers = [(row, layer) for layer in range(network.num_layers) for row in stacked]
    return [*((row, 0) for row in rows[:first]), *layers, *((row, 0) for row in rows[first + len(stacked) :])]


def _write_weights(
    checkpoint: CoreCheckpoint, path: str, description: Description, max_shard_bytes: int
) -> set[torch.dtype]:
    """Write the safetensors files and their index; the dtypes of the tensors."""
    shards = _shards(checkpoint, units_of(description.network), max_shard_bytes)
    weight_map: dict[str, str] = {}
    dtypes: set[torch.dtype] = set()
    total = 0
    for number, units in enumerate(shards, start=1):
        name = folder.SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        content = dict(tensors_of(checkpoint, units, description))
        _save(content, os.path.join(path, name))
        weight_map |= dict.fromkeys(content, name)
        dtypes |= {tensor.dtype for tensor in content.values()}
        total += sum(tensor.nbytes for tensor in content.values())
        del content
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        atomic_io.write(os.path.join(path, folder.INDEX), json.dumps(index, indent=2).encode())
    return dtypes


def _save(content: dict[str, Tensor], path: str) -> None:
    """Write a safetensors file with the permissions of any new file: the library lets only its owner read it.

    Raises:
        OSError: it can't be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with open(path, "wb") as file:  # what umask and the folder make of it
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    try:
        save_file(content, path, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, too; it is no OSError
        raise OSError(f"{path} can't be written ({' '.join(str(error).split())[:200]})") from None
    os.chmod(path, mode)


def _shards(checkpoint: CoreCheckpoint, units: Sequence[Unit], max_bytes: int) -> list[list[Unit]]:
    """The units by file; a file's tensors have at most `max_bytes`, or are one unit's."""
    shards: list[list[Unit]] = [[]]
    held = 0
    for row, layer in units:
        size = torch.Size(row.shape).numel() * checkpoint.dtype(row.key).itemsize
        if shards[-1] and held + size > max_bytes:
            shards.append([])
            held = 0
        shards[-1].append((row, layer))
        held += size
    return shards


def tensors_of(
    checkpoint: CoreCheckpoint, units: Sequence[Unit], description: Description
) -> Iterator[tuple[str, Tensor]]:
    """Yield transformers' tensors by name, each with memory of its own."""
    for row, layer in units:
        whole = checkpoint.read(
            row.key,
            layer=layer if row.is_stacked else None,
            num_rows=row.shape[0] if row.is_vocabulary else None,
        )
        for name, part in zip(row.names_of(layer), row.split(whole), strict=True):
            is_own = part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes
            yield name, part if is_own else part.clone(memory_format=torch.contiguous_format)
