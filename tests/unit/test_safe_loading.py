"""Checkpoints made to run code when they are read: nothing runs, and the error says what the file wanted."""

from __future__ import annotations

import contextlib
import copyreg
import functools
import io
import os
import pickle
import pickletools
import shutil
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from megatron.core import dist_checkpointing, msc_utils
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.msc_utils import MultiStorageClientFeature
from megatron.core.transformer.enums import AttnBackend
from support.shared_data import shared
from support.unsafe_pickles import TRICKS, text
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata, planner
from torch.distributed.checkpoint.api import CheckpointException

from megatron.bcd.checkpoint.safe_loading import UnsafeFileError, only_data
from megatron.bcd.runtime.compat import checkpoint_reading

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        "`load_state_dict` is deprecated",
        "Please use DTensor instead",
        "Environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD",
        "Detected pickle protocol 4",
        "'torch.load' received a zip file that looks",
    )
]


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user may have set for other programs."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """A patch that stays would change what the rest of the process may load."""

    def attributes(thing: object) -> dict[str, Any]:
        return {name: value for name, value in vars(thing).items() if name != "__slotnames__"}  # that is copyreg's

    def state() -> list[Any]:
        patched = [torch.load, torch.serialization.load, filesystem.pickle, filesystem.FileSystem.create_stream]
        return [
            *map(id, patched),
            MultiStorageClientFeature._enabled,
            set(map(id, torch.serialization.get_safe_globals())),
            *(attributes(kind) for kind in (*checkpoint_reading.DATA_CLASSES, planner.WriteItemType)),
            *(attributes(member) for member in planner.WriteItemType),
        ]

    before = state()
    yield
    assert state() == before


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A process group of this process alone; Megatron Core's loader asks for its rank."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def state_dict(extra: object = None) -> dict[str, Any]:
    """Weights as Megatron Core's layers give them (one of them of two layers), and an object beside them."""
    weight = torch.arange(6.0).view(2, 3)
    return {
        "weight": ShardedTensor.from_rank_offsets("weight", weight),
        "layer": ShardedTensor.from_rank_offsets("layers.weight", weight.bfloat16(), (0, 0, 1), prepend_axis_num=1),
        "extra": ShardedObject("extra", extra, (1,), (0,)),
    }


def save(folder: Path, extra: object = None, common: object = 7) -> Path:
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():  # Megatron Core's writer asks for a GPU all the same
            patch.setattr(torch.cuda, "synchronize", lambda: None)
            patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        dist_checkpointing.save(state_dict(extra) | {"iteration": common}, str(folder))
    return folder


@pytest.fixture(scope="module")
def saved(one_rank: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of plain data, for all tests."""
    return save(tmp_path_factory.mktemp("checkpoints") / "saved", [None, torch.ones(2), {"a": 1.5}])


@pytest.fixture
def good(saved: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(saved, tmp_path / "good"))


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """The file that appears when a checkpoint has run code."""
    return tmp_path / "executed"


READERS: dict[str, Callable[[str], object]] = {
    "reader": lambda folder: FileSystemReader(folder).read_metadata(),
    "cached_reader": lambda folder: CachedMetadataFileSystemReader(folder).read_metadata(),
    "strategy_metadata": lambda folder: TorchDistLoadShardedStrategy().load_tensors_metadata(Path(folder)),
    "tensors_metadata": dist_checkpointing.load_tensors_metadata,
    "sharded_metadata": lambda folder: dist_checkpointing.serialization.load_sharded_metadata(folder),
    "strategy": lambda folder: TorchDistLoadShardedStrategy().load(state_dict(), Path(folder)),
    "load": lambda folder: dist_checkpointing.load(state_dict(), folder),
    "torch": lambda folder: torch_checkpoint.load({"weight": torch.zeros(2, 3)}, checkpoint_id=folder),
}


@pytest.mark.parametrize("reader", READERS)
def test_good(good: Path, reader: str) -> None:
    """A checkpoint of ours that can't be read any more, or is read differently."""
    with only_data():
        result: Any = READERS[reader](str(good))
    if reader in ("load", "strategy"):
        expected = state_dict()
        assert torch.equal(result["weight"], expected["weight"].data)
        assert torch.equal(result["layer"], expected["layer"].data)
        assert result["extra"][2] == {"a": 1.5} and torch.equal(result["extra"][1], torch.ones(2))
    if reader.endswith("reader"):
        plain = FileSystemReader(str(good)).read_metadata()
        assert plain.storage_meta is not None and result.storage_meta is not None
        plain.storage_meta.load_id = result.storage_meta.load_id
        assert vars(result) == vars(plain)


def globals_of(path: Path) -> set[tuple[str, str]]:
    """Modules and names in a pickle of protocol 4: the two strings before each STACK_GLOBAL, memoized or not."""
    found: set[tuple[str, str]] = set()
    pushed: list[Any] = []
    memo: list[Any] = []
    for opcode, argument, _ in pickletools.genops(path.read_bytes()):
        if opcode.name == "MEMOIZE":
            memo.append(pushed[-1])
        elif opcode.name == "STACK_GLOBAL":
            found.add((pushed[-2], pushed[-1]))
            pushed.append(None)
        else:
            pushed.append(memo[argument] if opcode.name in ("BINGET", "LONG_BINGET") else argument)
    return found


def test_no_more_is_allowed_than_needed(good: Path) -> None:
    """A name that no checkpoint has is a way in that nobody needs. (PyTorch's own, of module torch, are allowed.)"""
    allowed = {(kind.__module__, kind.__qualname__) for kind in checkpoint_reading.DATA_CLASSES}
    named = {name for name in globals_of(good / ".metadata") if name[0].startswith("torch.distributed")}
    assert allowed < named and {name for _, name in named - allowed} == {"_MEM_FORMAT_ENCODING", "WriteItemType"}


def test_stock_checkpoint(one_rank: None) -> None:
    """Stock Megatron-LM's checkpoints would be refused: its common.pt holds its flags, with enumerations among them."""
    folder = shared("reference", "stock_checkpoint", "iter_0000010")
    with only_data():
        names = dist_checkpointing.load_tensors_metadata(str(folder))
        common = dist_checkpointing.load_common_state_dict(str(folder))
        objects = dist_checkpointing.serialization.load_sharded_metadata(str(folder))
        wanted = {key: value for key, value in objects.items() if "_extra_state" in key}
        wanted["final"] = names["decoder.final_layernorm.weight"]
        loaded = dist_checkpointing.load(wanted, str(folder), validate_access_integrity=False)
    assert names["embedding.word_embeddings.weight"].global_shape == (50304, 32)
    assert common["iteration"] == 10 and common["args"].num_layers == 4
    assert common["args"].attention_backend in AttnBackend
    assert loaded["final"].shape == (32,)


@pytest.mark.parametrize("reader", READERS)
def test_metadata_that_runs_code(good: Path, marker: Path, reader: str) -> None:
    """Would run what somebody put into .metadata; and one way to read it would have been forgotten."""
    content = FileSystemReader(str(good)).read_metadata()
    content.planner_data = Touch(marker)
    (good / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(UnsafeFileError) as caught, only_data():
        READERS[reader](str(good))
    assert f"{good}/.metadata: posix.system" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not marker.exists()
    READERS["reader"](str(good))
    assert marker.exists(), "the file was harmless, and this test shows nothing"


@pytest.mark.parametrize("reader", ["strategy", "load"])
def test_object_that_runs_code(one_rank: None, tmp_path: Path, marker: Path, reader: str) -> None:
    """Would run what is in an item of a .distcp file: PyTorch's reader loads those with weights_only=False."""
    folder = save(tmp_path / "bad", Touch(marker))
    with pytest.raises(UnsafeFileError, match=rf"^{folder}/__0_\d.distcp: posix.system"), only_data():
        READERS[reader](str(folder))
    assert not marker.exists()
    READERS[reader](str(folder))
    assert marker.exists()


def test_common_that_runs_code(one_rank: None, tmp_path: Path, marker: Path) -> None:
    """Would run what is in common.pt, at the mercy of an environment variable."""
    folder = save(tmp_path / "bad", common=Touch(marker))
    with pytest.raises(UnsafeFileError, match=rf"^{folder}/common.pt: posix.system"), only_data():
        READERS["load"](str(folder))
    assert not marker.exists()
    READERS["load"](str(folder))
    assert marker.exists()


def test_refusal_that_was_swallowed(good: Path, marker: Path) -> None:
    """PyTorch's reader goes on with a rank's own metadata where the common one fails: with half of a bad checkpoint."""
    (good / "__0.metadata").write_bytes((good / ".metadata").read_bytes())
    (good / ".metadata").write_bytes(pickle.dumps(Touch(marker)))
    target = {"weight": torch.zeros(2, 3)}
    with pytest.raises(UnsafeFileError, match="posix.system"), only_data():
        torch_checkpoint.load(target, storage_reader=FileSystemReader(str(good)))
    (good / "__0.metadata").write_bytes(pickle.dumps(Touch(marker)))
    with pytest.raises(UnsafeFileError, match="posix.system"), only_data():
        torch_checkpoint.load(target, storage_reader=FileSystemReader(str(good)))
    assert not marker.exists()


def test_refusal_of_another_rank() -> None:
    """A rank whose own files are good would report a damaged checkpoint, and the next older one would be tried."""
    other = pickle.loads(pickle.dumps(UnsafeFileError("x/__1_0.distcp: posix.system")))
    failures = {0: (AssertionError("metadata is None"), None), 1: (other, None)}
    with pytest.raises(UnsafeFileError, match=r"x/__1_0.distcp: posix.system"), only_data():
        raise CheckpointException("read", failures)  # type: ignore[arg-type]


def test_damage_is_not_called_unsafe(good: Path) -> None:
    """A truncated file would be reported as an attack; or an error of the caller as one of the file."""
    for name in (".metadata", "common.pt"):
        os.truncate(good / name, 100)
    for load in (READERS["reader"], lambda folder: torch.load(folder + "/common.pt")):
        with pytest.raises(Exception) as caught, only_data():
            load(str(good))
        assert not isinstance(caught.value, UnsafeFileError)
    with pytest.raises(KeyboardInterrupt), only_data():
        raise KeyboardInterrupt
    with pytest.raises(KeyError), only_data():
        raise KeyError("mine")


@pytest.mark.parametrize("trick", TRICKS)
def test_trick(tmp_path: Path, marker: Path, trick: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A way around the list of names: another spelling, another opcode, an allowed class turned into something else."""
    copyreg.add_extension("posix", "system", 0xF0)
    monkeypatch.setitem(copyreg._extension_cache, 0xF0, os.system)  # type: ignore[attr-defined]
    try:
        content, expected = TRICKS[trick]
        content = content.replace(text("touch MARKER"), text(f"touch {marker}")) + b"."
        (tmp_path / ".metadata").write_bytes(content if content.startswith(b"\x80") else b"\x80\x04" + content)
        with pytest.raises(UnsafeFileError) as caught, only_data():
            READERS["reader"](str(tmp_path))
    finally:
        copyreg.remove_extension("posix", "system", 0xF0)
    assert str(caught.value).startswith(f"{tmp_path}/.metadata: ") and expected in str(caught.value)
    assert str(caught.value).isprintable() and len(str(caught.value)) < len(str(tmp_path)) + 300
    assert not marker.exists()


@pytest.mark.parametrize("name", ["../good/__0_0.distcp", "/dev/zero", "..", "", None, 7])
def test_data_outside_of_the_folder(good: Path, name: Any) -> None:
    """Would open any file or device of the machine that a checkpoint names."""
    content = FileSystemReader(str(good)).read_metadata()
    for place in content.storage_data.values():
        place.relative_path = name
    (good / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(UnsafeFileError, match="data outside of its folder"), only_data():
        READERS["load"](str(good))


def torchscript(path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Identity()), path)


def legacy(content: object, path: Path) -> None:
    torch.save(content, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize(
    ("save_to", "expected"),
    [
        (functools.partial(torch.save, numpy.ones(2)), "numpy"),  # Megatron Core would let it through
        (functools.partial(torch.save, functools.partial(print)), "functools.partial"),
        (functools.partial(torch.save, print), "print"),
        (functools.partial(legacy, print), "print"),
        (functools.partial(torch.save, [1, {"a": torch.ones(2)}]), None),
        (lambda path: torch.save(metadata.BytesStorageMetadata(), path, pickle_protocol=4), "Unsupported operand 149"),
        (torchscript, "a TorchScript program"),
    ],
    ids=["numpy", "partial", "builtin", "legacy", "plain_data", "protocol_4", "torchscript"],
)
def test_torch_load(tmp_path: Path, save_to: Callable[[Path], None], expected: str | None) -> None:
    """A caller's weights_only=False, or a list of harmless classes that is not, would decide what a file may do."""
    path = tmp_path / "file"
    save_to(path)
    for name, load in {
        path: lambda: torch.load(path),
        str(path): lambda: torch.serialization.load(str(path), "cpu", pickle, weights_only=False),
        "a file of the checkpoint": lambda: torch.load(io.BytesIO(path.read_bytes()), weights_only=False),
    }.items():
        with only_data() if expected is None else pytest.raises(UnsafeFileError) as caught, only_data():
            load()
        if caught is not None:
            assert str(caught.value).startswith(f"{name}: ") and str(expected) in str(caught.value)


def test_nested_and_in_threads(tmp_path: Path) -> None:
    """Would end the protection of one user when another leaves, or keep it for ever."""
    path = tmp_path / "file"
    torch.save(print, path)
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with only_data():
            inside.set()
            leave.wait()

    def is_refused() -> bool:
        try:
            torch.load(path, weights_only=False)
        except UnsafeFileError:
            return True
        return False

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait()
    try:
        assert is_refused()
        with only_data():
            for _ in range(2):
                with contextlib.suppress(UnsafeFileError), only_data():
                    assert is_refused()
        assert is_refused()
    finally:
        leave.set()
        thread.join()
    assert not is_refused()


def test_no_other_storage(good: Path) -> None:
    """Where NVIDIA's storage client is installed, Megatron Core reads through it, past everything that is replaced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(msc_utils, "msc", types.ModuleType("multistorageclient"))
        patch.setattr(MultiStorageClientFeature, "_enabled", True)
        with only_data():
            READERS["load"](str(good))
        assert MultiStorageClientFeature.is_enabled()


def test_what_others_allow_meanwhile_stays() -> None:
    """A library imported during a load would lose what it told PyTorch about its classes."""
    before = torch.serialization.get_safe_globals()
    with only_data():
        torch.serialization.add_safe_globals([Touch])
    assert set(torch.serialization.get_safe_globals()) == {*before, Touch}
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(before)
