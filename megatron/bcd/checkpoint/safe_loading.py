"""Read checkpoints as data only: no file can run code, whoever wrote it.

torch.distributed.checkpoint reads ``.metadata`` with ``pickle.load`` and single items with
``torch.load(weights_only=False)``. Both run code from the file, and neither has a switch. `only_data` replaces them.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

_NAMES = {
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
}
"""Names that a ``.metadata`` of this project or of stock Megatron-LM may contain, by module."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"{ascii(f'{module}.{name}')} is not data of a checkpoint and could run code")
        return super().find_class(module, name)


def _load_metadata(file: Any) -> Metadata:
    result = _Unpickler(file).load()
    if not isinstance(result, Metadata):
        raise pickle.UnpicklingError("it is no index of a checkpoint")
    for place in (result.storage_data or {}).values():
        if place.relative_path in ("", ".", "..") or os.path.basename(place.relative_path) != place.relative_path:
            raise pickle.UnpicklingError(f"it names data outside of its folder, {ascii(place.relative_path)}")
    return result


def unreadable(source: str, error: BaseException) -> ValueError:
    """Turn any error of the readers into a ValueError with one line; `source` names the checkpoint."""
    if isinstance(error, CheckpointException) and error.failures:  # its text has every rank's traceback
        error = next(iter(error.failures.values()))[0]
    reason = " ".join([type(error).__name__, *str(error).split()])[:200]
    return ValueError(f"{source} can't be read ({reason}); give a checkpoint that is complete")


@contextlib.contextmanager
def only_data() -> Iterator[None]:
    """Inside, PyTorch's and Megatron Core's readers and every ``torch.load`` read data only, or raise an error.

    Only one thread may use it at a time.
    """
    load, allowed_by_others = torch.load, torch.serialization.get_safe_globals()

    def load_weights_only(f: Any, map_location: Any = None, **options: Any) -> Any:
        return load(f, map_location, **(options | {"weights_only": True}))

    torch.serialization.clear_safe_globals()  # Megatron Core allows numpy's arrays, whose dtypes could hold pointers
    try:
        with (
            mock.patch.object(torch, "load", load_weights_only),
            mock.patch.object(filesystem, "pickle", types.SimpleNamespace(load=_load_metadata)),
        ):
            yield
    finally:
        torch.serialization.add_safe_globals(allowed_by_others)
