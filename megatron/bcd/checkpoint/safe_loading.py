"""Reads checkpoints as data: nothing in a file is executed, whoever made it.

PyTorch's distributed checkpoints unpickle ``.metadata`` with ``pickle.load`` and single items with
``torch.load(weights_only=False)``; both run what the file says. `only_data` replaces the two for the time of a load.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException

from megatron.bcd.runtime.compat.checkpoint_reading import DATA_CLASSES, DTYPES, FUNCTIONS, Replacement, replace_readers


class UnsafeFileError(ValueError):
    """A file holds more than a checkpoint's data. One line: the file, and the class or function that it names."""


_ALLOWED: dict[tuple[str, str], Any] = {
    (thing.__module__, thing.__qualname__): thing for thing in DATA_CLASSES + FUNCTIONS
} | {("torch", name): getattr(torch, name) for name in DTYPES}
_OPCODES = """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT SHORT_BINUNICODE BINUNICODE
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS
    MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET GLOBAL STACK_GLOBAL INST NEWOBJ REDUCE BUILD
"""
"""Of a .metadata. INST is none of them, but names what it would make."""
_UnpicklerInPython: Any = pickle._Unpickler  # type: ignore[attr-defined]


class _Here(threading.local):
    """Of this thread: the file that is open, and what `only_data` refused; None outside of it."""

    file: str = "a file of the checkpoint"
    refused: list[UnsafeFileError] | None = None


_here = _Here()


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
    with _safe_readers():
        outer, _here.refused = _here.refused, []
        try:
            yield
            if _here.refused:
                raise _here.refused[0]
        except (Exception, CheckpointException) as error:
            unsafe = _refusal_behind(error)
            if unsafe is None or unsafe is error:
                raise
            raise UnsafeFileError(str(unsafe)) from error
        finally:
            _here.refused = outer


def _refusal_behind(error: BaseException) -> UnsafeFileError | None:
    """The refusal that made a reader raise `error`: this rank's, or another's that came through a collective."""
    causes = (cause for cause, _ in error.failures.values()) if isinstance(error, CheckpointException) else ()
    return next((each for each in (error, *(_here.refused or ()), *causes) if isinstance(each, UnsafeFileError)), None)


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


_safe_readers = Replacement(
    lambda undo: replace_readers(undo, load=_as_weights_only, pickle=_SafePickle(), create_stream=_remembering)
)


class _MetadataUnpickler(_UnpicklerInPython):
    """Makes the objects of `_ALLOWED` and no others, and changes nothing but what it made.

    An allow-list of names alone is not enough: with allowed classes a pickle can still call them, set attributes of
    classes and enumerations, which live as long as the process, and name functions by an extension's number. So the
    opcodes that call, change or look up are checked; the unpickler written in C has no place for that.
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
            name = getattr(place, "relative_path", None)
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
        if arguments != () or kind not in DATA_CLASSES:
            raise self.refusal(f"a new object of {_kind(kind)}")
        self.append(object.__new__(kind))

    def load_reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if type(arguments) is not tuple or function not in FUNCTIONS:
            raise self.refusal(f"a call of {_kind(function)}")
        self.append(function(*arguments))

    def load_build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if type(made) is metadata.TensorProperties and type(state) is tuple:
            made.__setstate__(state)
        elif type(made) in DATA_CLASSES and type(state) is dict and all(type(name) is str for name in state):
            made.__dict__.update(state)
        else:
            raise self.refusal(f"a change of {_kind(made)}")

    def load_append(self) -> None:
        self._check_changed(list, self.stack[-2])
        super().load_append()

    def load_appends(self) -> None:
        self._check_changed(list, self.metastack[-1][-1])
        super().load_appends()

    def load_setitem(self) -> None:
        self._check_changed(dict, self.stack[-3])
        super().load_setitem()

    def load_setitems(self) -> None:
        self._check_changed(dict, self.metastack[-1][-1])
        super().load_setitems()

    def _check_changed(self, kind: type, changed: Any) -> None:
        if type(changed) is not kind:
            raise self.refusal(f"a change of {_kind(changed)}")

    @classmethod
    def opcodes(cls) -> _Opcodes:
        """`_OPCODES` with the methods above where there is one, else with the standard library's."""
        table = _Opcodes()
        for name in _OPCODES.split():
            opcode = getattr(pickle, name)[0]
            table[opcode] = vars(cls).get(f"load_{name.lower()}") or _UnpicklerInPython.dispatch[opcode]
        return table


class _Opcodes(dict[int, Callable[[Any], None]]):
    """What is done for each opcode of a pickle; the unpickler looks up one that is not there: refused."""

    def __missing__(self, opcode: int) -> Callable[[Any], None]:
        def refuse(unpickler: _MetadataUnpickler) -> None:
            raise unpickler.refusal(f"the opcode {opcode} of a pickle")

        return refuse


def _kind(thing: Any) -> str:
    """A name for a message; a repr may be long, or fail."""
    return f"the class {thing.__qualname__}" if isinstance(thing, type) else f"a {type(thing).__qualname__}"


_MetadataUnpickler.dispatch = _MetadataUnpickler.opcodes()
