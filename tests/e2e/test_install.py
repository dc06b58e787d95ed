"""``pip install .``: what the wheel holds, and that it works beside megatron-core from another folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def wheel(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this repository, built from a copy so that no build folder is left, or found, in it."""
    try:
        metadata.version("setuptools")
    except metadata.PackageNotFoundError:
        pytest.skip("needs setuptools to build the wheel without the network")
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        if (repo_root / name).exists():
            shutil.copy(repo_root / name, source)
    shutil.copytree(repo_root / "megatron", source / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    wheels = tmp_path_factory.mktemp("wheels")
    pip(["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(source)])
    (built,) = wheels.glob("*.whl")
    return built


def pip(arguments: list[str]) -> None:
    """Runs pip, and shows what it said where it fails."""
    command = [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check", "--no-index"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_wheel_holds_megatron_bcd_and_nothing_else(wheel: Path, repo_root: Path) -> None:
    """A megatron/__init__.py in the wheel hides megatron.core; a forgotten room is missed by users only."""
    here = {
        path.relative_to(repo_root).as_posix()
        for path in (repo_root / "megatron").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        (license_name,) = [name for name in archive.namelist() if name.endswith("/LICENSE")]
        assert b"Apache License" in archive.read(license_name)
    assert held == here
    assert all(name.startswith("megatron/bcd/") for name in held)


def test_installed_beside_megatron_core(wheel: Path, tmp_path: Path, repo_root: Path) -> None:
    """From another folder the two halves of the namespace must be found in two different places."""
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip(["install", "--no-deps", "--target", str(site), str(wheel)])
    program = (
        "import importlib.metadata as m, megatron.bcd, megatron.core\n"
        "print(megatron.bcd.__file__, megatron.core.__file__, sep='\\n')\n"
        "print(megatron.bcd.__version__, m.version('megatron-bcd'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=elsewhere,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(site)},
    )
    assert done.returncode == 0, done.stderr
    bcd, core, versions = done.stdout.splitlines()
    assert Path(bcd).is_relative_to(site)
    assert not Path(core).is_relative_to(site) and not Path(core).is_relative_to(repo_root / "megatron")
    assert len(set(versions.split())) == 1
