"""Checkpoints that try to run code when they are read: nothing runs, and the error names what the file requested."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from support.unsafe_pickles import TRICKS, text
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint import FileSystemReader, filesystem
from torch.distributed.checkpoint.api import CheckpointException

from megatron.bcd.checkpoint.safe_loading import only_data

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
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set variables that a user may have set for other programs."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A process group of this process only; Megatron Core's loader needs its rank."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def state_dict(extra: object = None) -> dict[str, Any]:
    """Return weights as Megatron Core's layers name them (one with two layers), and another object."""
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
    """A checkpoint of plain data, shared by all tests."""
    return save(tmp_path_factory.mktemp("checkpoints") / "saved", [None, torch.ones(2), {"a": 1.5}])


@pytest.fixture
def good(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "good"))


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """The file that appears when a checkpoint has run code."""
    return tmp_path / "executed"


REFUSED = (Exception, CheckpointException)  # the readers raise many types

READERS: dict[str, Callable[[str], object]] = {
    "reader": lambda folder: FileSystemReader(folder).read_metadata(),
    "cached_reader": lambda folder: CachedMetadataFileSystemReader(folder).read_metadata(),
    "strategy": lambda folder: TorchDistLoadShardedStrategy().load(state_dict(), Path(folder)),
    "load": lambda folder: dist_checkpointing.load(state_dict(), folder),
    "torch": lambda folder: torch_checkpoint.load({"weight": torch.zeros(2, 3)}, checkpoint_id=folder),
}


@pytest.mark.parametrize("reader", READERS)
def test_metadata_that_runs_code(good: Path, marker: Path, reader: str) -> None:
    """Each way to read .metadata refuses to run its code."""
    content = FileSystemReader(str(good)).read_metadata()
    content.planner_data = Touch(marker)
    (good / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(REFUSED), only_data():
        READERS[reader](str(good))
    assert not marker.exists()
    READERS["reader"](str(good))
    assert marker.exists(), "the file was harmless, and this test shows nothing"


@pytest.mark.parametrize("where", ["extra", "common"])
def test_object_that_runs_code(one_rank: None, tmp_path: Path, marker: Path, where: str) -> None:
    """Code in an item of a .distcp file or in common.pt is not run, whatever the environment variable says."""
    folder = save(tmp_path / "bad", **{where: Touch(marker)})
    with pytest.raises(REFUSED), only_data():
        READERS["load"](str(folder))
    assert not marker.exists()
    READERS["load"](str(folder))
    assert marker.exists()


@pytest.mark.parametrize("trick", TRICKS)
def test_trick(tmp_path: Path, marker: Path, trick: str) -> None:
    """Each way around the list of names is refused: another spelling, another opcode, an allowed class turned into
    something else."""
    content = TRICKS[trick].replace(text("touch MARKER"), text(f"touch {marker}")) + b"."
    (tmp_path / ".metadata").write_bytes(content if content.startswith(b"\x80") else b"\x80\x04" + content)
    with pytest.raises(REFUSED), only_data():
        READERS["reader"](str(tmp_path))
    assert not marker.exists()


@pytest.mark.parametrize("name", ["../good/__0_0.distcp", "/dev/zero", "..", "", None, 7])
def test_data_outside_of_the_folder(good: Path, name: Any) -> None:
    """A checkpoint that names data outside of its folder is refused."""
    content = FileSystemReader(str(good)).read_metadata()
    for place in content.storage_data.values():
        place.relative_path = name
    (good / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(REFUSED), only_data():
        READERS["load"](str(good))


@pytest.mark.parametrize("is_zip", [False, True])
@pytest.mark.parametrize(
    ("content", "is_data"),
    [(numpy.ones(2), False), (functools.partial(print), False), ([1, {"a": torch.ones(2)}], True)],
    ids=["numpy", "partial", "plain_data"],
)
def test_torch_load(tmp_path: Path, content: object, is_data: bool, is_zip: bool) -> None:
    """torch.load reads plain data only, though the caller asks for more, and is as before afterwards."""
    torch.save(content, tmp_path / "file", _use_new_zipfile_serialization=is_zip)
    before = set(map(id, torch.serialization.get_safe_globals())), torch.load, filesystem.pickle
    with contextlib.nullcontext() if is_data else pytest.raises(pickle.UnpicklingError), only_data():
        torch.load(tmp_path / "file", weights_only=False)
    assert before == (set(map(id, torch.serialization.get_safe_globals())), torch.load, filesystem.pickle)
