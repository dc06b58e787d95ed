"""Reads checkpoints as data: nothing in a file is executed, whoever made it.

PyTorch's distributed checkpoints unpickle ``.metadata`` with ``pickle.load`` and single items with
``torch.load(weights_only=False)``; both run what the file says. `only_data` replaces the two, and what Megatron Core
adds to PyTorch's own list of harmless classes, for the time of a load. Other patches of Megatron Core are for good and
stand in `platform`; these are not, so they stand here.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
import re
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.msc_utils import MultiStorageClientFeature
from megatron.core.transformer.enums import AttnBackend
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.api import CheckpointException


class UnsafeFileError(ValueError):
    """A file holds more than a checkpoint's data. One line: the file, and the class or function that it names."""


# What a .metadata names, found in our checkpoints and in stock Megatron-LM's (all else is refused). Classes of data
# only: an object is made empty and its attributes are set. Functions: called with the file's arguments.
_DATA_CLASSES: tuple[type, ...] = (
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
_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    torch.Size,
    torch.serialization._get_layout,
    metadata._MEM_FORMAT_ENCODING,
    planner.WriteItemType,
)
_DTYPES = ("bfloat16", "bool", "float16", "float32", "float64", "int32", "int64", "uint8")
_ALLOWED: dict[tuple[str, str], Any] = {
    (thing.__module__, thing.__qualname__): thing for thing in _DATA_CLASSES + _FUNCTIONS
} | {("torch", name): getattr(torch, name) for name in _DTYPES}


def _value_of(kind: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function for an enumeration: named itself, torch.load would let a file change the attributes of its values."""
    return lambda value: kind(value)


# What torch.load may take beside tensors and plain values: the arguments in stock Megatron-LM's common.pt.
_ALLOWED_BY_TORCH_LOAD: list[Any] = [
    argparse.Namespace,
    (_value_of(AttnBackend), "megatron.core.transformer.enums.AttnBackend"),
    (_value_of(ModelType), "megatron.core.enums.ModelType"),
    (_value_of(signal.Signals), "signal.Signals"),
]

# The opcodes of a pickle that such a file consists of. INST is none of them, but tells what it would make.
_OPCODES = """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT SHORT_BINUNICODE BINUNICODE
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS
    MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET GLOBAL STACK_GLOBAL INST NEWOBJ REDUCE BUILD
"""


_UnpicklerInPython: Any = pickle._Unpickler  # type: ignore[attr-defined]


class _Here(threading.local):
    """Of this thread: the file that is open, and what `only_data` refused; None outside of it."""

    file: str = "a file of the checkpoint"
    refused: list[UnsafeFileError] | None = None


_here = _Here()
_lock = threading.Lock()
_depth = 0
_undo = contextlib.ExitStack()


@contextlib.contextmanager
def only_data() -> Iterator[None]:
    """Inside, checkpoints are read as data, by PyTorch's reader, by Megatron Core and by every ``torch.load``.

    Holds for all threads of the process while one is inside, and nothing is left behind after the last. Objects of
    Megatron Core that read inside keep only what passed; one that was filled outside (a
    ``CachedMetadataFileSystemReader``) has read before, so make it inside. Storage other than files (``msc://``) is
    off. No collectives.

    Raises:
        UnsafeFileError: at the end, where a file was refused on this rank or in a collective with it, also where the
            reader went on or raised something else about it. A file that is only damaged raises what the reader does.
    """
    _enter()
    outer, _here.refused = _here.refused, []
    try:
        try:
            yield
        except (Exception, CheckpointException) as error:
            unsafe = _refusal_behind(error)
            if unsafe is None or unsafe is error:
                raise
            raise UnsafeFileError(str(unsafe)) from error
        if _here.refused:
            raise _here.refused[0]
    finally:
        _here.refused = outer
        _leave()


def _enter() -> None:
    global _depth
    with _lock:
        if not _depth:
            try:
                _patch()
            except BaseException:
                _undo.close()
                raise
        _depth += 1


def _leave() -> None:
    global _depth
    with _lock:
        _depth -= 1
        if not _depth:
            _undo.close()


def _patch() -> None:
    """Every replacement, each with its way back in `_undo`."""

    def replace(owner: Any, name: str, value: Any) -> None:
        _undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    load = _as_weights_only(torch.load)
    replace(torch.serialization, "load", load)
    replace(torch, "load", load)
    replace(filesystem, "pickle", _SafePickle())
    replace(filesystem.FileSystem, "create_stream", _remembering(filesystem.FileSystem.create_stream))
    replace(MultiStorageClientFeature, "_enabled", False)
    # Megatron Core adds numpy's array and dtype, out of which a file could build pointers
    others = torch.serialization.get_safe_globals()
    _undo.callback(torch.serialization.add_safe_globals, others)
    _undo.callback(_disallow_in_torch_load, _ALLOWED_BY_TORCH_LOAD)
    _disallow_in_torch_load(others)
    torch.serialization.add_safe_globals(_ALLOWED_BY_TORCH_LOAD)


def _disallow_in_torch_load(names: list[Any]) -> None:
    kept = [name for name in torch.serialization.get_safe_globals() if name not in names]
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(kept)


def _refusal_behind(error: BaseException) -> UnsafeFileError | None:
    """The refusal that made a reader raise `error`: this rank's, or another's that came through a collective."""
    if isinstance(error, UnsafeFileError):
        return error
    if _here.refused:
        return _here.refused[0]
    causes = (cause for cause, _ in error.failures.values()) if isinstance(error, CheckpointException) else ()
    return next((cause for cause in causes if isinstance(cause, UnsafeFileError)), None)


def _refusal(file: str, what: str) -> UnsafeFileError:
    error = UnsafeFileError(
        f"{file}: {ascii(what)[1:-1][:100]} is refused: it is no data of a checkpoint and could run code (nothing "
        "did); give an undamaged checkpoint whose origin you trust"
    )
    if _here.refused is not None:
        _here.refused.append(error)
    return error


def _remembering(create_stream: Callable[..., Any]) -> Callable[..., Any]:
    """FileSystem.create_stream that keeps the file's name: what is loaded later is an unnamed part of it."""

    @contextlib.contextmanager
    def remembering(self: Any, path: Any, mode: str) -> Iterator[Any]:
        outer, _here.file = _here.file, str(path)
        try:
            with create_stream(self, path, mode) as stream:
                yield stream
        finally:
            _here.file = outer

    return remembering


def _as_weights_only(load: Callable[..., Any]) -> Callable[..., Any]:
    """torch.load with weights_only=True, whatever the caller or the environment says."""

    def load_weights_only(f: Any, map_location: Any = None, pickle_module: Any = None, **options: Any) -> Any:
        try:
            return load(f, map_location, **(options | {"weights_only": True}))
        except (pickle.UnpicklingError, RuntimeError) as error:
            what = _refused_by_torch(error)
            if what is None:
                raise
            raise _refusal(str(f) if isinstance(f, str | os.PathLike) else _here.file, what) from error

    return load_weights_only


def _refused_by_torch(error: Exception) -> str | None:
    """What torch.load did not accept, out of its long message; None where the file is only damaged."""
    message = str(error)
    if not isinstance(error, pickle.UnpicklingError):
        return "a TorchScript program" if "TorchScript archive" in message else None
    named = re.search(r"nsupported (?:global: )?GLOBAL (\S+)", message)
    return named[1] if named else message.split("WeightsUnpickler error:")[-1].strip().split("\n")[0]


class _SafePickle:
    """The module ``pickle`` as torch.distributed.checkpoint.filesystem sees it."""

    def load(self, file: Any) -> metadata.Metadata:
        return _MetadataUnpickler(file).load()

    def __getattr__(self, name: str) -> Any:
        if name in ("loads", "Unpickler", "_Unpickler"):
            raise AttributeError(f"only_data: pickle.{name} is off")
        return getattr(pickle, name)


class _Dispatch(dict[int, Callable[[Any], None]]):
    """What is done for each opcode of a pickle; the unpickler asks for one that is not there: refused."""

    def __missing__(self, opcode: int) -> Callable[[Any], None]:
        def refuse(unpickler: _MetadataUnpickler) -> None:
            raise unpickler.refusal(f"the opcode {opcode} of a pickle")

        return refuse


class _MetadataUnpickler(_UnpicklerInPython):
    """Makes the objects of `_ALLOWED` and no others, and changes nothing but what it made.

    The one written in Python: the one in C sets attributes of classes and enumerations, too, if the file says so.
    """

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._file_name = str(getattr(file, "name", _here.file))

    def refusal(self, what: str) -> UnsafeFileError:
        return _refusal(self._file_name, what)

    def load(self) -> metadata.Metadata:
        """The file's Metadata.

        Raises:
            UnsafeFileError: it names anything else, or is none.
        """
        result = super().load()
        if type(result) is not metadata.Metadata:
            raise self.refusal(f"{_kind(result)} in place of Metadata")
        tensors, places = (vars(result).get(name) for name in ("state_dict_metadata", "storage_data"))
        if type(tensors) is not dict or type(places) is not dict:
            raise self.refusal("Metadata without its tables")
        for place in places.values():
            name = vars(place).get("relative_path") if type(place) is filesystem._StorageInfo else None
            if type(name) is not str or name in ("", ".", "..") or "/" in name or "\0" in name:
                raise self.refusal(f"data outside of its folder ({name if type(name) is str else _kind(name)})")
        return result

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise self.refusal(f"{module}.{name}") from None

    def load_inst(self) -> None:
        module, name = (self.readline()[:-1].decode("utf-8", "backslashreplace") for _ in range(2))
        raise self.refusal(f"{module}.{name}")

    def load_newobj(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        if arguments != () or kind not in _DATA_CLASSES:
            raise self.refusal(f"a new object of {_kind(kind)}")
        self.append(object.__new__(kind))

    def load_reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if type(arguments) is not tuple or function not in _FUNCTIONS:
            raise self.refusal(f"a call of {_kind(function)}")
        self.append(function(*arguments))

    def load_build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if type(made) is metadata.TensorProperties and type(state) is tuple:
            made.__setstate__(state)
        elif type(made) in _DATA_CLASSES and type(state) is dict and all(type(name) is str for name in state):
            made.__dict__.update(state)
        else:
            raise self.refusal(f"a change of {_kind(made)}")

    def load_append(self) -> None:
        value = self.stack.pop()
        self._last(list).append(value)

    def load_appends(self) -> None:
        values = self.pop_mark()
        self._last(list).extend(values)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._last(dict)[key] = value

    def load_setitems(self) -> None:
        values = self.pop_mark()
        self._last(dict).update(zip(values[::2], values[1::2], strict=True))

    def _last(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise self.refusal(f"a change of {_kind(self.stack[-1])}")
        return self.stack[-1]


def _kind(thing: Any) -> str:
    """A name for a message; a repr may be long, or fail."""
    return f"the class {thing.__qualname__}" if isinstance(thing, type) else f"a {type(thing).__qualname__}"


def _dispatch() -> _Dispatch:
    """`_OPCODES` with the methods above where there is one, else with the standard library's."""
    table = _Dispatch()
    for name in _OPCODES.split():
        opcode = getattr(pickle, name)[0]
        own = vars(_MetadataUnpickler).get(f"load_{name.lower()}")
        table[opcode] = own or _UnpicklerInPython.dispatch[opcode]
    return table


_MetadataUnpickler.dispatch = _dispatch()
