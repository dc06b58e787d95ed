"""How PyTorch and Megatron Core read checkpoints: the names that such files hold, and the functions that are replaced
during a load (checkpoint.safe_loading)."""

from __future__ import annotations

import argparse
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.msc_utils import MultiStorageClientFeature
from megatron.core.transformer.enums import AttnBackend
from torch._weights_only_unpickler import Unpickler as WeightsOnlyUnpickler
from torch.distributed.checkpoint import filesystem, metadata, planner

__all__ = ["ALLOWED", "DATA_CLASSES", "Replacement", "WeightsOnlyUnpickler", "replace_readers"]

DATA_CLASSES: tuple[type, ...] = (
    filesystem._StorageInfo,
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
    planner.SavePlan,
    planner.TensorWriteData,
    planner.WriteItem,
)
"""Of a .metadata, in checkpoints of this project and of stock Megatron-LM."""


def _value_of(kind: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function for an enumeration: named itself, torch.load would let a file change the attributes of its values."""
    return lambda value: kind(value)


ALLOWED: list[Any] = [
    *DATA_CLASSES,
    (_value_of(metadata._MEM_FORMAT_ENCODING), "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING"),
    (_value_of(planner.WriteItemType), "torch.distributed.checkpoint.planner.WriteItemType"),
    argparse.Namespace,
    (_value_of(AttnBackend), "megatron.core.transformer.enums.AttnBackend"),
    (_value_of(ModelType), "megatron.core.enums.ModelType"),
    (_value_of(signal.Signals), "signal.Signals"),
]
"""What a checkpoint may hold beside tensors and plain values: the index of its data, and the arguments in stock
Megatron-LM's common.pt."""


class Replacement:
    """Replaces functions of the process while at least one of its users is inside."""

    def __init__(self, replace: Callable[[contextlib.ExitStack], None]) -> None:
        self._replace = replace
        self._lock = threading.Lock()
        self._num_users = 0
        self._undo = contextlib.ExitStack()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if not self._num_users:
                with contextlib.ExitStack() as undo:  # taken back at once where it fails half way
                    self._replace(undo)
                    self._undo = undo.pop_all()
            self._num_users += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_users -= 1
                if not self._num_users:
                    self._undo.close()


def replace_readers(
    undo: contextlib.ExitStack,
    *,
    load: Callable[[Any], Any],
    pickle: Any,
    create_stream: Callable[[Any], Any],
) -> None:
    """Put in place, until `undo` is closed: `load` around torch.load, `pickle` for the module of that name in
    torch.distributed.checkpoint.filesystem, `create_stream` around the method that opens its files. No storage but
    files. A file may name `ALLOWED` alone: Megatron Core adds numpy's array and dtype, out of which a file could
    build pointers."""

    def replace(owner: Any, name: str, value: Any) -> None:
        undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    safe_load = load(torch.load)
    replace(torch.serialization, "load", safe_load)
    replace(torch, "load", safe_load)
    replace(filesystem, "pickle", pickle)
    replace(filesystem.FileSystem, "create_stream", create_stream(filesystem.FileSystem.create_stream))
    replace(MultiStorageClientFeature, "_enabled", False)
    others = torch.serialization.get_safe_globals()
    undo.callback(torch.serialization.add_safe_globals, others)
    undo.callback(_disallow, ALLOWED)
    _disallow(others)
    torch.serialization.add_safe_globals(ALLOWED)


def _disallow(names: list[Any]) -> None:
    kept = [name for name in torch.serialization.get_safe_globals() if name not in names]
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(kept)
