"""``pip install .``: the contents of the wheel, and that it works with megatron-core from another folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


def test_the_wheel(tmp_path: Path, repo_root: Path) -> None:
    """The wheel has all files of the package, and no megatron/__init__.py, which would hide megatron.core. From another
    folder the two halves of the namespace are in two different places."""
    pytest.importorskip("setuptools", reason="needs setuptools to build the wheel without the network")
    source, site = tmp_path / "source", tmp_path / "site"
    package = shutil.copytree(
        repo_root / "megatron", source / "megatron", ignore=shutil.ignore_patterns("__pycache__")
    )  # so that no build folder is left, or found, in the repository
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(repo_root / name, source)
    here = {path.relative_to(source).as_posix() for path in package.rglob("*") if path.is_file()}
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", str(source)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        (license_name,) = [name for name in archive.namelist() if name.endswith("/LICENSE")]
        assert b"Apache License" in archive.read(license_name)
        archive.extractall(site)  # as pip installs it
    assert packed == here and all(name.startswith("megatron/bcd/") for name in packed)

    program = (
        "import importlib.metadata as m, megatron.bcd, megatron.core\n"
        "print(megatron.bcd.__file__, megatron.core.__file__, sep='\\n')\n"
        "print(megatron.bcd.__version__, m.version('megatron-bcd'))"
    )
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=source.parent, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    bcd, core, versions = done.stdout.splitlines()
    assert Path(bcd).is_relative_to(site) and not Path(core).is_relative_to(site)
    assert not Path(core).is_relative_to(repo_root / "megatron") and len(set(versions.split())) == 1
