"""Convert a checkpoint to a model folder in Hugging Face's format, one tensor at a time."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.bcd.huggingface import folder, tensors
from megatron.bcd.huggingface.architecture import TRANSFORMERS, Architecture
from megatron.bcd.huggingface.core_format import CoreCheckpoint
from megatron.bcd.runtime import atomic_io
from megatron.bcd.tokenizer import Tokenizer

MAX_SHARD_BYTES = 5 * 10**9


def check_output(path: str, *, flag: str) -> None:
    """Check that a model may be written to `path`, which may be a link to an empty folder.

    Raises:
        ValueError: `path` is not empty, or its parent is not writable.
    """
    if os.path.lexists(path) and not (os.path.isdir(path) and not os.listdir(path)):
        raise ValueError(f"{flag} {path}: is not empty. Give an empty or a new folder.")
    parent = os.path.realpath(path)
    while not os.path.isdir(parent):
        parent = os.path.dirname(parent)
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"{flag} {path}: {parent} is not writable. Give another folder.")


@dataclass(frozen=True, kw_only=True)
class Description:
    """The files beside the weights."""

    network: Architecture
    config: Mapping[str, Any]
    """Content of config.json."""
    companions: Mapping[str, bytes]
    """Contents of the other files, by name."""
    tokenizer: Tokenizer | None = None
    """The run's tokenizer, if it is known."""
    source: folder.ModelFolder | None = None
    """The given model, if it has other parts than the decoder."""


def describe(config_folder: str, *, transformer_impl: str = "auto") -> Description:
    """Return the description in a folder in Hugging Face's format.

    Raises:
        ValueError: its config.json is missing, damaged or not supported.
    """
    network = folder.read_architecture(config_folder, transformer_impl=transformer_impl)
    with open(os.path.join(config_folder, folder.CONFIG), encoding="utf-8") as file:
        config = json.load(file)
    has_others = network.family == TRANSFORMERS and "text_config" in config
    source = folder.ModelFolder(config_folder, transformer_impl=transformer_impl) if has_others else None
    return Description(network=network, config=config, companions=folder.companions(config_folder), source=source)


def check_checkpoint(checkpoint: CoreCheckpoint, description: Description) -> None:
    """Check that the checkpoint contains exactly the weights of the network.

    Raises:
        ValueError: a tensor is missing, extra or misshapen.
    """
    rows = tensors.build_rows(description.network)
    expected = {row.key: row.shape if row.layer is None else (row.layer + 1, *row.shape) for row in rows}
    actual = {key: checkpoint.shape(key) for key in checkpoint.tensors}
    for row in rows:
        if row.is_vocabulary and row.key in actual and actual[row.key][0] >= row.shape[0]:
            actual[row.key] = (row.shape[0], *actual[row.key][1:])  # ignore padding
    folder.check_tensors(expected, actual, source=checkpoint.folder)


def to_hugging_face(
    checkpoint: CoreCheckpoint,
    path: str,
    description: Description,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    run: str | None = None,
) -> None:
    """Write the checkpoint's weights as a model folder `path`.

    Replace a model in that folder (the caller has checked that this is intended), and keep other files. A failed
    conversion leaves nothing behind. It needs memory for one safetensors file: `max_shard_bytes`, or one larger tensor.

    `run` is the name of the run to record in the folder.

    Raises:
        ValueError: as `check_checkpoint`, or a file of the checkpoint can't be read.
        OSError: a file can't be written.
    """
    check_checkpoint(checkpoint, description)
    with _temporary_folder(path) as temporary:
        dtypes, config = _write_weights(checkpoint, temporary, description, max_shard_bytes), dict(description.config)
        if len(dtypes) == 1:
            config["dtype" if "dtype" in config else "torch_dtype"] = str(dtypes.pop()).removeprefix("torch.")
        files = {folder.CONFIG: f"{json.dumps(config, indent=2)}\n".encode(), **description.companions}
        if run is not None:
            files[folder.RUN] = f"{run}\n".encode()
        for name, content in files.items():
            atomic_io.write(os.path.join(temporary, name), content)


@contextlib.contextmanager
def _temporary_folder(path: str) -> Iterator[str]:
    """Create a temporary folder. Rename it to `path` at the end of the context, or delete it after an error."""
    path = os.path.realpath(path)  # a folder can't be renamed onto a link or to another disk
    temporary = path + ".bcd-incomplete"
    shutil.rmtree(temporary, ignore_errors=True)
    os.makedirs(temporary)
    try:
        yield temporary
        for name in os.listdir(temporary):
            atomic_io.sync(os.path.join(temporary, name))
        _publish(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _publish(temporary: str, path: str) -> None:
    """Rename the folder. If the target has other contents, replace the model inside it, config.json last."""
    try:
        os.rename(temporary, path)  # succeeds also onto an empty folder
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


def _write_weights(
    checkpoint: CoreCheckpoint, path: str, description: Description, max_shard_bytes: int
) -> set[torch.dtype]:
    """Write the safetensors files and their index. Return the dtypes of the tensors."""
    from huggingface_hub import split_torch_state_dict_into_shards

    source = description.source
    rows = [*tensors.build_rows(description.network), *(source.others if source else ())]
    sizes: dict[str, Tensor] = {}
    for number, row in enumerate(rows):
        # a part that is not trained has at most fp32
        dtype = checkpoint.dtype(row.key) if row.key in checkpoint.tensors else torch.float32
        sizes[str(number)] = torch.empty(row.shape, dtype=dtype, device="meta")
    shards = split_torch_state_dict_into_shards(sizes, max_shard_size=max_shard_bytes)
    weight_map: dict[str, str] = {}
    dtypes: set[torch.dtype] = set()
    total = 0
    for name, numbers in shards.filename_to_tensors.items():
        content = dict(read_tensors(checkpoint, [rows[int(number)] for number in numbers], source))
        _save(content, os.path.join(path, name))
        weight_map |= dict.fromkeys(content, name)
        dtypes |= {tensor.dtype for tensor in content.values()}
        total += sum(tensor.nbytes for tensor in content.values())
        del content
    if shards.is_sharded:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        atomic_io.write(os.path.join(path, folder.INDEX), json.dumps(index, indent=2).encode())
    return dtypes


def _save(content: dict[str, Tensor], path: str) -> None:
    """Write a safetensors file with the permissions of any new file. The library would make it private to its owner.

    Raises:
        OSError: the file can't be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with open(path, "wb") as file:  # umask and the folder determine the permissions
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    try:
        save_file(content, path, metadata={"format": "pt"})
    except SafetensorError as error:  # also for a full disk, although it is no OSError
        raise OSError(f"{path}: can't be written ({' '.join(str(error).split())[:200]})") from None
    os.chmod(path, mode)


def read_tensors(
    checkpoint: CoreCheckpoint, rows: Sequence[tensors.Row], source: folder.ModelFolder | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and values of transformers' tensors. Tensors do not share memory.

    With `source`, names are those of its files, and tensors that the checkpoint lacks come from there.
    """
    for row in rows:
        if source is not None and row in source.others:
            yield row.key, source.read(row)
            continue
        whole = checkpoint.read(row.key, layer=row.layer, num_rows=row.shape[0] if row.is_vocabulary else None)
        for name, part in zip(row.names, row.split(whole), strict=True):
            is_separate = part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes
            part = part if is_separate else part.clone(memory_format=torch.contiguous_format)
            yield source.file_name(name) if source else name, part
