"""Reads checkpoints as data: nothing in a file is executed, whoever made it.

PyTorch's distributed checkpoints unpickle ``.metadata`` with ``pickle.load`` and single items with
``torch.load(weights_only=False)``; both run what the file says. `only_data` replaces the two for the time of a load.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import os
import pickle
import pickletools
import re
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException

from megatron.bcd.runtime.compat.checkpoint_reading import Replacement, WeightsOnlyUnpickler, replace_readers


class UnsafeFileError(ValueError):
    """A file holds more than a checkpoint's data. One line: the file, and the class or function that it names."""


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
            if not isinstance(error, pickle.UnpicklingError) and "TorchScript archive" not in str(error):
                raise  # the file is damaged
            what = _refused_by_torch(error)
            raise _refusal(str(f) if isinstance(f, str | os.PathLike) else _here.file, what) from error

    return load_weights_only


def _refused_by_torch(error: Exception) -> str:
    """What PyTorch did not accept, out of its long message."""
    message = str(error)
    if "TorchScript archive" in message:
        return "a TorchScript program"
    named = re.search(r"nsupported (?:global: )?GLOBAL (\S+)", message)
    return named[1] if named else message.split("WeightsUnpickler error:")[-1].strip().split("\n")[0]


class _SafePickle:
    """The module ``pickle`` as torch.distributed.checkpoint.filesystem sees it, while one is inside `only_data`."""

    def __init__(self) -> None:
        self._last: tuple[bytes, metadata.Metadata] | None = None

    def load(self, file: Any) -> metadata.Metadata:
        """The Metadata in a ``.metadata``, made by PyTorch's restricted unpickler.

        Raises:
            UnsafeFileError: it holds anything else, or names data outside of its folder.
        """
        content = file.read()
        if self._last is None or self._last[0] != content:  # a load reads it several times
            self._last = content, self._read(content, str(getattr(file, "name", _here.file)))
        return copy.copy(self._last[1])

    def _read(self, content: bytes, name: str) -> metadata.Metadata:
        try:
            result = WeightsOnlyUnpickler(io.BytesIO(_as_protocol_2(content))).load()
        except (pickle.UnpicklingError, TypeError) as error:
            raise _refusal(name, _refused_by_torch(error)) from error
        if type(result) is not metadata.Metadata:
            raise _refusal(name, f"a {type(result).__qualname__} in place of Metadata")
        tensors, places = (vars(result).get(table) for table in ("state_dict_metadata", "storage_data"))
        if type(tensors) is not dict or type(places) is not dict:
            raise _refusal(name, "Metadata without its tables")
        for place in places.values():
            path = getattr(place, "relative_path", None)
            if type(path) is not str or path in ("", ".", "..") or "/" in path or "\0" in path:
                raise _refusal(name, f"data outside of its folder ({path if type(path) is str else type(path)})")
        return result

    def __getattr__(self, name: str) -> Any:
        if name in ("loads", "Unpickler", "_Unpickler"):
            raise AttributeError(f"only_data: pickle.{name} is off")
        return getattr(pickle, name)


_safe_readers = Replacement(
    lambda undo: replace_readers(undo, load=_as_weights_only, pickle=_SafePickle(), create_stream=_remembering)
)


def _as_protocol_2(data: bytes) -> bytes:
    """A pickle of protocol 4 in the opcodes of protocol 2, the only ones that PyTorch's restricted unpickler reads.

    Other opcodes stay, so that it refuses them. Nothing here has to be right for safety: it reads the result only.

    Raises:
        ValueError: `data` is no whole pickle.
        pickle.UnpicklingError: the name of a class or function is no line of text.
    """
    result = [pickle.PROTO + b"\x02"]
    texts: list[str] = []  # pushed, not yet written: STACK_GLOBAL takes two of them, and GLOBAL has its own
    memo: dict[int, str | None] = {}  # texts by their number; None: anything else, which the unpickler remembers
    operations: Iterable[Any] = itertools.chain(pickletools.genops(data), [(None, None, len(data))])
    for (opcode, argument, start), (_, _, end) in itertools.pairwise(operations):
        name = opcode.name
        if name in ("SHORT_BINUNICODE", "BINUNICODE"):
            texts.append(argument)
        elif name in ("BINGET", "LONG_BINGET") and (known := memo.get(argument)) is not None:
            texts.append(known)
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            number = len(memo) if name == "MEMOIZE" else argument
            memo[number] = texts[-1] if texts else None
            if not texts:
                result.append(pickle.LONG_BINPUT + struct.pack("<I", number))
        elif name not in ("PROTO", "FRAME"):
            named = [texts.pop(), texts.pop()][::-1] if name == "STACK_GLOBAL" and len(texts) > 1 else []
            if "\n" in "".join(named):
                raise pickle.UnpicklingError(".".join(named))
            content = (text.encode("utf-8", "surrogatepass") for text in texts)
            result += [pickle.BINUNICODE + struct.pack("<I", len(text)) + text for text in content]
            texts.clear()
            result.append(pickle.GLOBAL + ("\n".join(named) + "\n").encode() if named else data[start:end])
    return b"".join(result)
