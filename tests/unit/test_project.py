"""The project itself: packaging, pins, imports, sizes of functions, and links of the documents."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PURE_PACKAGES = ("blocks", "config", "planner")
PURE_MODULES = (
    "megatron.bcd.tokenizer",
    "megatron.bcd.metrics.reporter",
    "megatron.bcd.huggingface.architecture",
    *(f"megatron.bcd.pipeline.{name}" for name in ("plan", "build", "validate", "simulate", "render")),
)
SHELL_SCRIPTS = (
    ".ci/run",
    "tests/run.sh",
    "tests/emulated_gpu.sh",
    "examples/setup_env.sh",
    "examples/quickstart.sh",
    "examples/pretrain.sh",
    "examples/slurm.sh",
    "examples/finetune.sh",
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
        if "runtime" in path.parts:
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


MAX_FUNCTION_LINES = 60


def test_functions_are_short(repo_root: Path) -> None:
    """A function that no reader sees whole."""
    too_long = {}
    for folder in (repo_root / "megatron" / "bcd", repo_root / "tools"):
        for path in sorted(folder.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES:
                    too_long[f"{path.relative_to(repo_root)} {node.name}"] = (node.end_lineno or 0) - node.lineno + 1
    assert too_long == {}


def imports_of(module: str, path: Path, modules: set[str]) -> set[str]:
    """Modules of the project that `module` imports, in functions and under TYPE_CHECKING too."""
    found = set()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= names & modules
            if names - modules:
                found.add(base)
    return (found & modules) - {module}


def import_cycles(root: Path) -> list[list[str]]:
    """Groups of modules of megatron.bcd that import each other, directly or not."""
    paths = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (root / "megatron" / "bcd").rglob("*.py")
    }
    graph = {module: imports_of(module, path, set(paths)) for module, path in paths.items()}
    reached = {module: reachable(graph, module) for module in graph}
    groups = {
        tuple(sorted(other for other in graph if other in reached[module] and module in reached[other]))
        for module in graph
    }
    return sorted([*group] for group in groups if group)


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """What `start` imports, and what that imports."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def test_no_cycle_of_imports(repo_root: Path) -> None:
    """Two modules that can only be read, tested and changed together; import-linter sees packages only."""
    assert import_cycles(repo_root) == []


LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def without_code(text: str) -> str:
    """Markdown without code blocks and code spans: what looks like a link or a heading there is none."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def anchors(text: str) -> set[str]:
    """Anchors of the headings of a Markdown text, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+?) *$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.M)
    found: set[str] = set()
    for heading in headings:
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        numbered = (f"{anchor}-{number}" for number in range(1, len(headings) + 1))
        found.add(next(name for name in (anchor, *numbered) if name not in found))
    return found


def broken_links(document: Path) -> list[str]:
    """Relative links of a Markdown file to a file or a heading that is not there."""
    broken = []
    for link in LINK.findall(without_code(document.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        is_there = target.exists()
        if is_there and anchor and target.suffix == ".md":
            is_there = anchor in anchors(target.read_text(encoding="utf-8"))
        if not is_there:
            broken.append(link)
    return broken


def test_links_of_the_documents(repo_root: Path) -> None:
    """A file or a heading that was renamed: a reader who follows the link finds nothing."""
    documents = [repo_root / "README.md", repo_root / "CONTRIBUTING.md", *sorted((repo_root / "docs").glob("*.md"))]
    broken = {path.name: broken_links(path) for path in documents if path.exists()}
    assert {name: links for name, links in broken.items() if links} == {}


NAMES_OF_USERS = {"run.yaml", "rows.csv", "OUTPUT/clusters.csv", "my_program.py", "megatron/__init__.py"}
"""File names in the documents that are not the project's: the last one may not exist (`megatron` is a namespace)."""


def missing_files(text: str, files: Sequence[str]) -> set[str]:
    """Names of programs, scripts and tables in the code spans of a Markdown text that are the end of no file's path."""
    spans = " ".join(re.findall(r"`([^`\n]+)`", text))
    names = re.findall(r"(?<!\S)[\w./*-]+\.(?:py|sh|csv|yaml)(?![\w/])", spans)
    patterns = {name: f"*/{name.removeprefix('./')}" for name in names}
    return {name for name, end in patterns.items() if not any(fnmatch(f"/{file}", end) for file in files)}


def test_files_named_in_the_documents(repo_root: Path) -> None:
    """A test or a tool that was renamed: the page sends its reader to a file that is not there."""
    files = [path.relative_to(repo_root).as_posix() for path in project_files(repo_root)]
    documents = [repo_root / "README.md", repo_root / "CONTRIBUTING.md", *sorted((repo_root / "docs").glob("*.md"))]
    missing = {path.name: missing_files(path.read_text(encoding="utf-8"), files) - NAMES_OF_USERS for path in documents}
    assert {name: names for name, names in missing.items() if names} == {}
