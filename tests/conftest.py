"""Fixtures and hooks for all tests: a quiet environment, markers by folder, and small data."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest
from support import small_text

# Set before torch is imported: one thread per core in every rank would overload two cores.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", WANDB_MODE="offline", MPLBACKEND="Agg")
for _name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(_name, None)  # with a scheduler's values, one-process tests would wait for other ranks

ROOT = Path(__file__).resolve().parents[1]
SESSION = "BCD_TEST_SESSION"
"""Variable that marks the processes of this session."""

# Use the same examples each time, and no deadline, because no test may depend on time.
hypothesis.settings.register_profile("project", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("project")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests marked long, too: all combinations, for hours")
    parser.addoption(
        "--backend",
        choices=("gloo", "nccl"),
        default="gloo",
        help="of the ranks of distributed tests",
    )


def pytest_configure(config: pytest.Config) -> None:
    os.environ["BCD_TEST_BACKEND"] = config.getoption("--backend")
    if not hasattr(config, "workerinput"):  # workers and all that they start inherit it
        os.environ[SESSION] = str(uuid.uuid4())
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the processes that an interrupted session has left: killed workers run no fixture teardown."""
    if not hasattr(config, "workerinput"):
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(SESSION) == os.environ[SESSION]:
                    process.kill()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with its folder's name (unit, distributed, e2e); deselect long tests without --long."""
    if not config.getoption("--long"):
        left_out = [item for item in items if item.get_closest_marker("long")]
        items[:] = [item for item in items if not item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
    items[:] = _mixed(items)
    for item in items:
        folder = item.path.parent.name
        if folder in ("unit", "distributed", "e2e", "gpu"):
            item.add_marker(folder)


def _mixed(items: list[pytest.Item]) -> list[pytest.Item]:
    """Interleave the files of e2e and distributed. The order within a file and within a folder stays.

    Tests of e2e mostly wait for processes, so one of two workers should have something to compute.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    folders: dict[Path, list[Path]] = {}
    for path in files:
        folders.setdefault(path.parent, []).append(path)
    place = {
        path: (number + 0.5) / len(paths) if folder.name in ("distributed", "e2e") else 1.0
        for folder, paths in folders.items()
        for number, path in enumerate(paths)
    }
    return [item for path in sorted(files, key=place.__getitem__) for item in files[path]]


@pytest.fixture(autouse=True)
def _much_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan for a machine with 10^15 bytes of memory, so that no plan depends on this one."""
    if plan := sys.modules.get("plan"):
        monkeypatch.setattr(plan, "memory_here", lambda: 10**15)


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The folder that contains setup.py."""
    return ROOT


@pytest.fixture(scope="session")
def bpe_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of a small GPT-2 vocabulary, by the name of their flag."""
    return small_text.write_vocabulary(tmp_path_factory.mktemp("bpe"))


@pytest.fixture(scope="session")
def reference() -> dict[str, Any]:
    """Return the curves of stock Megatron-LM: tests/data/README.md."""
    return json.loads((ROOT / "tests" / "data" / "stock_megatron_cpu.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def text_data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of a small indexed dataset: Python source by bytes, one paragraph per document."""
    import preprocess_data

    folder = tmp_path_factory.mktemp("text")
    text = "\n".join(line for line in inspect.getsource(argparse).splitlines() if line.strip())
    (folder / "text.txt").write_text(text, encoding="utf-8")
    arguments = ["--input", str(folder / "text.txt"), "--output-prefix", str(folder / "text")]
    arguments += ["--tokenizer-type", "ByteLevelTokenizer", "--append-eod", "--workers", "1"]
    assert preprocess_data.main(arguments) == 0
    return str(folder / "text_text_document")


@pytest.fixture(scope="session")
def gpus() -> Iterator[Any]:
    """Worlds whose ranks have one GPU each, under NCCL. Skips the test without a GPU."""
    import torch
    from support.gpu_worlds import Worlds

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    worlds = Worlds("nccl")
    yield worlds
    worlds.close()


@pytest.fixture(scope="session")
def cpus() -> Iterator[Any]:
    """Worlds whose ranks see no GPU, under gloo."""
    from support.gpu_worlds import Worlds

    worlds = Worlds("gloo", CUDA_VISIBLE_DEVICES="")
    yield worlds
    worlds.close()
