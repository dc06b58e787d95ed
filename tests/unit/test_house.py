"""The house itself: packaging, pins, import rules that no linter states, and the shell that sets it up."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PURE_PACKAGES = ("blocks", "config", "planner")
PURE_MODULES = (
    "megatron.bcd.tokenizer",
    *(f"megatron.bcd.pipeline.{name}" for name in ("actions", "build", "validate", "simulate", "render")),
)
SHELL_SCRIPTS = (
    ".ci/run",
    "tests/run.sh",
    "examples/setup_env.sh",
    "examples/quickstart.sh",
    "examples/pretrain.sh",
    "examples/slurm.sh",
)


def pins(root: Path) -> dict[str, str]:
    """Package to version, of requirements.txt; a line that pins nothing fails the test that asks."""
    lines = (line.split("#")[0].strip() for line in (root / "requirements.txt").read_text().splitlines())
    requirements = [Requirement(line) for line in lines if line]
    for requirement in requirements:
        assert re.fullmatch(r"==[\w.]+", str(requirement.specifier)), f"{requirement} is not pinned"
    return {requirement.name: str(requirement.specifier)[2:] for requirement in requirements}


def project_files(root: Path) -> Iterator[Path]:
    """Text files that git would commit."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=root, capture_output=True, text=True
    )
    if listed.returncode != 0:
        pytest.skip("needs git and a clone, to know which files are the project's")
    for name in listed.stdout.splitlines():
        path = root / name
        if path.is_file() and path.suffix not in (".png", ".jpg", ".bin", ".idx", ".gz"):
            yield path


def test_megatron_is_a_namespace(repo_root: Path) -> None:
    """A megatron/__init__.py would hide the megatron.core of the wheel from every program run here."""
    assert not (repo_root / "megatron" / "__init__.py").exists()
    import megatron.core

    import megatron.bcd

    assert Path(megatron.bcd.__file__).parent == repo_root / "megatron" / "bcd"
    assert Path(megatron.core.__file__).is_relative_to(repo_root / "megatron") is False


def test_pins(repo_root: Path) -> None:
    """An unpinned line, or a wrong "apex" from PyPI, would break fresh machines, some day."""
    found = pins(repo_root)
    assert found["torch"] == "2.13.0"
    assert found["megatron-core"] == "0.16.1"
    assert next(iter(found)) == "torch", "torch comes first, so that no other line decides its build"
    assert not {"apex", "transformer-engine", "transformer_engine", "flash-attn"} & set(found)


def test_setup_py_agrees_with_the_pins(repo_root: Path) -> None:
    """`pip install .` and requirements.txt would otherwise drift apart, and only one of them is tested."""
    call = next(
        node
        for node in ast.walk(ast.parse((repo_root / "setup.py").read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setup"
    )
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    extras = ast.literal_eval(given["extras_require"])
    wanted = ast.literal_eval(given["install_requires"]) + extras["figures"] + extras["huggingface"]
    found = pins(repo_root)
    for requirement in map(Requirement, wanted):
        assert found[requirement.name] in requirement.specifier, f"setup.py refuses {requirement.name}"


def pure_modules(root: Path) -> list[str]:
    """Every module that must import neither torch nor Megatron Core."""
    folders = (root / "megatron" / "bcd" / name for name in PURE_PACKAGES)
    inside = (path.relative_to(root).with_suffix("") for folder in folders for path in sorted(folder.glob("*.py")))
    return [*PURE_MODULES, *(".".join(path.parts).removesuffix(".__init__") for path in inside)]


def test_pure_modules_need_neither_torch_nor_megatron_core(repo_root: Path) -> None:
    """One import in a pure module would make planning need an installed torch, and its tests take seconds."""
    program = textwrap.dedent("""
        import importlib, sys
        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] == "torch" or name.startswith("megatron.core"):
                    raise AssertionError(f"imports {name}")
        sys.meta_path.insert(0, Refuse())
        for module in sys.argv[1:]:
            importlib.import_module(module)
    """)
    command = [sys.executable, "-c", program, *pure_modules(repo_root)]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_only_runtime_says_cuda(repo_root: Path) -> None:
    """A torch.cuda call or a device="cuda" elsewhere works on the author's GPU and fails on every CPU."""
    offenders = []
    for path in sorted((repo_root / "megatron" / "bcd").rglob("*.py")):
        if path.parent.name == "runtime":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = getattr(node, "attr", None) == "cuda" or getattr(node, "id", None) == "cuda"
            literal = isinstance(node, ast.Constant) and re.fullmatch(r"cuda(:\d+)?", str(node.value))
            if named or literal:
                offenders.append(f"{path.relative_to(repo_root)}:{node.lineno}")
    assert offenders == []


def test_no_path_of_a_machine(repo_root: Path) -> None:
    """A path of the author's machine in a recipe or a document fails on everybody else's."""
    private = re.compile("|".join(("/ro" + r"ot\b", "/ho" + r"me/\w", "/wo" + r"rk/", "/Us" + r"ers/\w")))
    offenders = []
    for path in project_files(repo_root):
        text = path.read_text(encoding="utf-8", errors="ignore")
        offenders += [f"{path.relative_to(repo_root)}: {found[0]}" for found in private.finditer(text)]
    assert offenders == []


@pytest.mark.parametrize("script", SHELL_SCRIPTS)
def test_shell_scripts_parse_and_are_executable(repo_root: Path, script: str) -> None:
    """A lost executable bit or a syntax error shows up only on the machine that runs the command first."""
    path = repo_root / script
    assert os.access(path, os.X_OK)
    assert subprocess.run(["bash", "-n", path]).returncode == 0


def test_stdlib_text_is_the_same_each_time(repo_root: Path, tmp_path: Path) -> None:
    """A folder order or a time in the text would make the quickstart train on other data each time."""
    for name in ("a.jsonl", "b.jsonl"):
        command = [sys.executable, repo_root / "examples" / "stdlib_text.py", "--output", tmp_path / name]
        subprocess.run([*command, "--megabytes", "0.5"], check=True, stdout=subprocess.DEVNULL)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    texts = [json.loads(line)["text"] for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert len(texts) > 10 and all(text.strip() for text in texts)
    assert 300_000 < sum(len(text.encode()) for text in texts) <= 500_000


class FakeHouse:
    """A repository with setup_env.sh and a ``python3`` that only notes what it is asked."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = folder / "house"
        self.bin = folder / "bin"
        self.log = folder / "log"
        (self.root / "examples").mkdir(parents=True)
        self.bin.mkdir()
        shutil.copy(root / "examples" / "setup_env.sh", self.root / "examples")
        (self.root / "requirements.txt").write_text("torch==2.13.0\nrich==15.0.0\n")
        fake = self.bin / "python3"
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
        """Runs setup_env.sh from another folder; ``calls`` then holds what it asked of Python."""
        self.log.write_text("")
        clean = {name: value for name, value in os.environ.items() if name not in ("BCD_PYTHON", "PYTHON3")}
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
def house(repo_root: Path, tmp_path: Path) -> FakeHouse:
    return FakeHouse(repo_root, tmp_path)


def test_setup_installs_torch_first_then_does_nothing(house: FakeHouse) -> None:
    """torch after the other pins may come as another build; a setup that never ends is slow."""
    assert house.setup().returncode == 0
    assert house.calls == ["venv", "pip torch==2.13.0", f"pip {house.root / 'requirements.txt'}"]
    again = house.setup()
    assert (again.returncode, house.calls, again.stdout) == (0, [], "")


def test_setup_follows_requirements(house: FakeHouse) -> None:
    """A stamp that ignores the pins would leave old packages after a pull."""
    house.setup()
    with (house.root / "requirements.txt").open("a") as requirements:
        requirements.write("numpy==2.4.6\n")
    assert house.setup().returncode == 0
    assert house.calls == ["pip torch==2.13.0", f"pip {house.root / 'requirements.txt'}"]


def test_setup_repairs_what_was_cut_short(house: FakeHouse, tmp_path: Path) -> None:
    """A pip that was killed leaves packages that look installed; trusting them fails later, in an import."""
    (tmp_path / "no-network").touch()
    failed = house.setup()
    assert failed.returncode == 1
    assert "could not install torch==2.13.0" in failed.stderr
    (tmp_path / "no-network").unlink()
    assert house.setup().returncode == 0
    assert house.calls[0] == "venv", "starts afresh instead of trusting a half-made environment"
    assert house.setup().returncode == 0 and house.calls == []


def test_setup_repairs_a_venv_without_python(house: FakeHouse) -> None:
    """A moved or upgraded system Python leaves a .venv whose interpreter is gone."""
    house.setup()
    (house.root / ".venv" / "bin" / "python").unlink()
    assert house.setup().returncode == 0
    assert house.calls[0] == "venv"


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"PYTHON3": "/bin/false"}, "no Python 3.11 to 3.13 among: /bin/false"),
        ({"BCD_PYTHON": "/nowhere/python"}, "BCD_PYTHON=/nowhere/python is not a Python 3.11 to 3.13 that runs"),
    ],
)
def test_setup_says_which_python_is_wrong(house: FakeHouse, environment: dict[str, str], message: str) -> None:
    """A wrong interpreter must be one line, and must not leave half an environment behind."""
    done = house.setup(**environment)
    assert done.returncode == 1
    assert message in done.stderr and done.stderr.count("\n") == 1
    assert not (house.root / ".venv").exists()


def test_setup_uses_the_users_python_and_installs_nothing(house: FakeHouse) -> None:
    """BCD_PYTHON is somebody's GPU environment: changing its torch would destroy it."""
    (house.root / "requirements.txt").write_text("pytest==1.0\n# tests/run.sh\nno-such-package==1.0\n")
    done = house.setup(BCD_PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    assert house.calls == [] and not (house.root / ".venv").exists()
    (house.root / "requirements.txt").write_text("no-such-package==1.0\nmegatron-core==0.15.0\n")
    done = house.setup(BCD_PYTHON=sys.executable)
    assert done.returncode == 1
    assert "lacks no-such-package==1.0 megatron-core==0.15.0;" in done.stderr
