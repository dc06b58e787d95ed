"""The project itself: packaging, pins, imports, sizes of functions, and links of the documents."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PURE_PACKAGES = ("blocks", "config", "planner")
PURE_MODULES = (
    "megatron.bcd.tokenizer",
    "megatron.bcd.metrics.reporter",
    "megatron.bcd.huggingface.architecture",
    *(f"megatron.bcd.pipeline.{name}" for name in ("plan", "build", "cut", "simulate")),
)


def pins(root: Path) -> dict[str, str]:
    """Return the versions in requirements.txt by package; fail if a line pins nothing."""
    lines = (line.split("#")[0].strip() for line in (root / "requirements.txt").read_text().splitlines())
    requirements = [requirement for requirement in map(Requirement, filter(None, lines)) if _is_for_this(requirement)]
    for requirement in requirements:
        assert re.fullmatch(r"==[\w.]+", str(requirement.specifier)), f"{requirement} is not pinned"
    return {requirement.name: str(requirement.specifier)[2:] for requirement in requirements}


def _is_for_this(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate()


@cache
def trees(root: Path) -> dict[str, ast.Module]:
    """Return the parsed files of the package and the tools, by path."""
    files = [path for folder in ("megatron/bcd", "tools") for path in sorted((root / folder).rglob("*.py"))]
    return {path.relative_to(root).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in files}


def project_files(root: Path) -> Iterator[Path]:
    """Return the text files that git would commit."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=root, capture_output=True, text=True
    )
    if listed.returncode != 0:
        pytest.skip("needs git and a clone, to know which files are the project's")
    for name in listed.stdout.splitlines():
        path = root / name
        if path.is_file() and path.suffix not in (".png", ".jpg", ".bin", ".idx", ".gz", ".xz"):
            yield path


def test_setup_py_agrees_with_the_pins(repo_root: Path) -> None:
    """setup.py accepts the versions that requirements.txt pins."""
    call = next(
        node
        for node in ast.walk(ast.parse((repo_root / "setup.py").read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setup"
    )
    arguments = {keyword.arg: keyword.value for keyword in call.keywords}
    extras = ast.literal_eval(arguments["extras_require"])
    wanted = ast.literal_eval(arguments["install_requires"]) + extras["figures"]
    result = pins(repo_root)
    for requirement in filter(_is_for_this, map(Requirement, wanted)):
        assert result[requirement.name] in requirement.specifier, f"setup.py refuses {requirement.name}"


def test_torchft_is_imported_where_it_is_asked_for(repo_root: Path) -> None:
    """No module of the package or the tools imports torchft at its top."""
    for path, tree in trees(repo_root).items():
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not any("torchft" in ast.unparse(node) for node in imports), path


def test_packages_of_the_image(repo_root: Path) -> None:
    """The image gets all packages for running except torch, and the pinned Megatron Core, and does not run as root."""
    text = (repo_root / "docker" / "Dockerfile").read_text(encoding="utf-8")
    [command] = re.findall(r"sed -E '.*' requirements\.txt", text)
    done = subprocess.run(["bash", "-c", command], cwd=repo_root, capture_output=True, text=True, check=True)
    installed = done.stdout.splitlines()
    for_running = (repo_root / "requirements.txt").read_text().split("# tests/run.sh")[0].splitlines()
    needed = [line for line in for_running if "==" in line and line[0] != "#" and not line.startswith("torch==")]
    assert [line.split("==")[0] for line in installed] == [line.split("==")[0] for line in needed]
    assert [line for line in installed if "==" in line] == [
        line for line in needed if line.startswith("megatron-core==")
    ]
    user = re.findall(r"^USER (\d+):\d+$", text, re.MULTILINE)
    assert user and user != ["0"], "runs as root"
    [script] = re.findall(r'^ENTRYPOINT \["/usr/bin/python", "(.+)"\]$', text, re.MULTILINE)
    assert (repo_root / script).is_file()


def pure_modules(root: Path) -> list[str]:
    """Return every module that must import neither torch nor Megatron Core."""
    folders = (root / "megatron" / "bcd" / name for name in PURE_PACKAGES)
    inside = (path.relative_to(root).with_suffix("") for folder in folders for path in sorted(folder.glob("*.py")))
    return [*PURE_MODULES, *(".".join(path.parts).removesuffix(".__init__") for path in inside)]


def test_pure_modules_need_neither_torch_nor_megatron_core(repo_root: Path) -> None:
    """Pure modules import neither torch nor Megatron Core."""
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


def test_tools_and_studies_import_in_one_direction(repo_root: Path) -> None:
    """No tool or study imports a module that imports it, also inside functions."""
    paths = {path.stem: path for folder in ("tools", "studies") for path in (repo_root / folder).glob("*.py")}
    imports: dict[str, set[str]] = {name: set() for name in paths}
    for name, path in paths.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} if isinstance(node, ast.Import) else {node.module}
                imports[name] |= names & paths.keys()
    TopologicalSorter(imports).prepare()


def test_only_runtime_says_cuda(repo_root: Path) -> None:
    """No module of the package outside of runtime/ says cuda."""
    offenders = []
    for path, tree in trees(repo_root).items():
        if not path.startswith("megatron") or "/runtime/" in path:
            continue
        for node in ast.walk(tree):
            named = getattr(node, "attr", None) == "cuda" or getattr(node, "id", None) == "cuda"
            literal = isinstance(node, ast.Constant) and re.fullmatch(r"cuda(:\d+)?", str(node.value))
            if named or literal:
                offenders.append(f"{path}:{node.lineno}")
    assert offenders == []


def test_no_path_of_a_machine(repo_root: Path) -> None:
    """No file of the project has a path of one machine."""
    private = re.compile("|".join(("/ro" + r"ot\b", "/ho" + r"me/\w", "/wo" + r"rk/", "/Us" + r"ers/\w")))
    offenders = []
    for path in project_files(repo_root):
        text = path.read_text(encoding="utf-8", errors="ignore")
        offenders += [f"{path.relative_to(repo_root)}: {item[0]}" for item in private.finditer(text)]
    assert offenders == []


def test_tests_read_only_the_repository(repo_root: Path) -> None:
    """No test reads a file beside the repository."""
    outside = re.compile(r"\.\./" + "shared|" + r"parents\[3\]|skip\(.*beside")
    files = [path for path in project_files(repo_root) if path.is_relative_to(repo_root / "tests")]
    found = [path for path in files if path.suffix == ".py" and outside.search(path.read_text(encoding="utf-8"))]
    assert len(files) > 100 and found == []


def test_the_readme_names_the_commands(repo_root: Path) -> None:
    """The README names the commands to begin with, in at most 100 lines."""
    lines = (repo_root / "README.md").read_text(encoding="utf-8").splitlines()
    for command in ("bash examples/quickstart.sh", "bash tests/run.sh", "python tools/check_machine.py"):
        assert any(line.startswith(command) for line in lines), command
    assert len(lines) <= 100


LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def without_code(text: str) -> str:
    """Remove code blocks and code spans from Markdown, which may look like links or headings."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def anchors(text: str) -> set[str]:
    """Return the anchors of the headings of a Markdown text, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+?) *$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.M)
    result: set[str] = set()
    for heading in headings:
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        numbered = (f"{anchor}-{number}" for number in range(1, len(headings) + 1))
        result.add(next(name for name in (anchor, *numbered) if name not in result))
    return result


def broken_links(document: Path) -> list[str]:
    """Return relative links of a Markdown file to missing files or headings."""
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
    """Every link of the documents leads to a file and a heading that exist."""
    documents = [repo_root / "README.md", repo_root / "CONTRIBUTING.md", *sorted((repo_root / "docs").glob("*.md"))]
    broken = {path.name: broken_links(path) for path in documents if path.exists()}
    assert {name: links for name, links in broken.items() if links} == {}


NAMES_OF_USERS = {"rows.csv", "OUTPUT/clusters.csv", "my_program.py", "megatron/__init__.py"}
"""File names in the documents that are not the project's; the last one must not exist (`megatron` is a namespace)."""


def missing_files(text: str, files: Sequence[str]) -> set[str]:
    """Return file names in the code spans of a Markdown text that match the end of no file's path."""
    spans = " ".join(re.findall(r"`([^`\n]+)`", text))
    names = re.findall(r"(?<!\S)[\w./*-]+\.(?:py|sh|csv|yaml)(?![\w/])", spans)
    patterns = {name: f"*/{name.removeprefix('./')}" for name in names}
    return {name for name, end in patterns.items() if not any(fnmatch(f"/{file}", end) for file in files)}


def test_files_named_in_the_documents(repo_root: Path) -> None:
    """Every file that the documents name exists."""
    files = [path.relative_to(repo_root).as_posix() for path in project_files(repo_root)]
    documents = [repo_root / "README.md", repo_root / "CONTRIBUTING.md", *sorted((repo_root / "docs").glob("*.md"))]
    missing = {path.name: missing_files(path.read_text(encoding="utf-8"), files) - NAMES_OF_USERS for path in documents}
    assert {name: names for name, names in missing.items() if names} == {}
