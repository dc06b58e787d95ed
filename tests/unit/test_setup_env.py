"""examples/setup_env.sh: what it installs, when it installs again, and which Python it refuses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

OF_THE_USER = ("BCD_PYTHON", "BCD_TESTS", "PYTHON3", "VIRTUAL_ENV", "CONDA_PREFIX")


class FakeRepository:
    """A repository with setup_env.sh and a ``python3.14`` that only logs its calls."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = folder / "repository"
        self.bin = folder / "bin"
        self.log = folder / "log"
        (self.root / "examples").mkdir(parents=True)
        self.bin.mkdir()
        shutil.copy(root / "examples" / "setup_env.sh", self.root / "examples")
        (self.root / "requirements.txt").write_text("torch==2.13.0\nrich==15.0.0\n")
        fake = self.bin / "python3.14"
        # "-m venv DIR" copies itself there; "-m pip install" fails while the file no-network exists.
        fake.write_text(
            textwrap.dedent(f"""\
            #!/usr/bin/env bash
            case "$*" in
              *"-m venv"*) echo venv >> {self.log}; dir="${{@: -1}}"; rm -rf "$dir"; mkdir -p "$dir/bin"
                           cp "$0" "$dir/bin/python" ;;
              *"-m pip install"*) echo "pip ${{@: -1}}" >> {self.log}; [ ! -e {folder}/no-network ] ;;
              *"-m pip --version"*) ;;
              *) exec {sys.executable} "$@" ;;
            esac
            """)
        )
        fake.chmod(0o755)

    def setup(self, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run setup_env.sh from another folder; ``calls`` then holds its calls of Python."""
        self.log.write_text("")
        clean = {name: value for name, value in os.environ.items() if name not in OF_THE_USER}
        clean["PATH"] = f"{self.bin}:{clean['PATH']}"
        return subprocess.run(
            ["bash", self.root / "examples" / "setup_env.sh"],
            cwd=self.bin,
            text=True,
            capture_output=True,
            env=clean | environment,
        )

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def repository(repo_root: Path, tmp_path: Path) -> FakeRepository:
    return FakeRepository(repo_root, tmp_path)


def test_setup_repairs_what_was_cut_short(repository: FakeRepository, tmp_path: Path) -> None:
    """An environment that a killed pip or a moved Python leaves behind is made afresh."""
    (tmp_path / "no-network").touch()
    failed = repository.setup()
    assert failed.returncode == 1
    assert "torch==2.13.0" in failed.stderr
    (tmp_path / "no-network").unlink()
    assert repository.setup().returncode == 0
    assert repository.calls[0] == "venv", "starts afresh instead of trusting a half-made environment"
    (repository.root / ".venv" / "bin" / "python").unlink()
    assert repository.setup().returncode == 0 and repository.calls[0] == "venv"


def test_uv_makes_the_environment(repository: FakeRepository) -> None:
    """uv, if it is there, makes the environment, with its arguments in the order that it wants."""
    uv = repository.bin / "uv"
    uv.write_text(f'#!/bin/sh\necho "$1 $5" >> {repository.log}\nexec "$6" -m venv "$7"\n')
    uv.chmod(0o755)
    assert repository.setup().returncode == 0
    assert repository.calls[:2] == ["venv --python", "venv"]


def test_setup_uses_the_users_python_and_installs_nothing(repository: FakeRepository) -> None:
    """With BCD_PYTHON nothing is installed, and missing or other packages for running are refused by name."""
    (repository.root / "requirements.txt").write_text("pytest==1.0\n# tests/run.sh\nno-such-package==1.0\n")
    done = repository.setup(BCD_PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    assert repository.calls == [] and not (repository.root / ".venv").exists()
    (repository.root / "requirements.txt").write_text("no-such-package==1.0\nmegatron-core==0.15.0\n")
    done = repository.setup(BCD_PYTHON=sys.executable)
    assert done.returncode == 1
    assert "no-such-package==1.0" in done.stderr and "megatron-core==0.15.0" in done.stderr


def active_environment(folder: Path, **versions: str) -> str:
    """An environment with these packages, whose interpreter is this test's without its packages."""
    site = folder / "site"
    for name, version in versions.items():
        about = site / f"{name}-{version}.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    return str(folder)


@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_an_active_environment_with_all_pins_is_used(repository: FakeRepository, tmp_path: Path, variable: str) -> None:
    """An active environment with all pins is used, and nothing is installed."""
    folder = active_environment(tmp_path / "own", torch="2.13.0+cu129", rich="15.0.0")
    done = repository.setup(**{variable: folder})
    assert (done.returncode, repository.calls) == (0, []), done.stderr
    assert f"{folder}/bin/python" in done.stdout
    assert not (repository.root / ".venv").exists()


def test_an_active_environment_without_all_pins(repository: FakeRepository, tmp_path: Path) -> None:
    """An active environment without all pins is not used, and the setup says which pin is missing."""
    folder = active_environment(tmp_path / "own", torch="2.4.0", rich="15.0.0")
    done = repository.setup(VIRTUAL_ENV=folder)
    assert done.returncode == 0 and repository.calls[0] == "venv"
    assert "torch==2.13.0" in done.stderr
    active_env = repository.setup(VIRTUAL_ENV=str(repository.root / ".venv"))
    assert (active_env.returncode, repository.calls, active_env.stderr) == (0, [], "")
