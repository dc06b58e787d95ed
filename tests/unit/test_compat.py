"""What this project depends on in the inside of Megatron Core 0.16.1 and PyTorch 2.13, and that only `compat` does.

When a pin moves: read each failing line's source again, then the file above it in tests/data/private_apis.txt. Sources
are parsed, not imported, because a test that ran before may have replaced the functions in this process.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

TABLE = Path(__file__).parents[1] / "data" / "private_apis.txt"
PRIVATE_APIS = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]


@cache
def source_of(module: str) -> tuple[str, ast.Module]:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, f"{module} is gone"
    path = Path(spec.origin)
    if path.suffix != ".py":  # written in C++: what it declares
        path = path.parent / module.rpartition(".")[2] / "__init__.pyi"
    text = path.read_text(encoding="utf-8")
    return text, ast.parse(text)


def parameters_of(function: ast.AST) -> str:
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    names = [one.arg for one in [*given.posonlyargs, *given.args]]
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    names += [one.arg for one in given.kwonlyargs]
    names += [f"**{given.kwarg.arg}"] if given.kwarg else []
    return ", ".join(names)


@pytest.mark.parametrize("line", PRIVATE_APIS)
def test_private_api(line: str) -> None:
    """A changed signature, or an attribute that is gone: in the best case an error in the middle of a run."""
    api, *markers = line.split(" | ")
    module, _, name = api.partition(":")
    name, has_parameters, parameters = name.partition("(")
    text, node = source_of(module)
    if name:
        found: ast.AST = node
        for part in name.split("."):  # the last definition of that name: overloads come before it
            kinds = (one for one in ast.walk(found) if isinstance(one, ast.FunctionDef | ast.ClassDef))
            found = [one for one in kinds if one.name == part][-1]
        text = ast.get_source_segment(text, found) or ""
        if has_parameters:
            assert parameters_of(found) == parameters.removesuffix(")")
    for marker in markers:
        assert marker in text


def test_the_table_is_of_the_pinned_versions() -> None:
    """Look at every line of the table, then at docs/megatron_core_notes.md."""
    assert version("megatron-core") == "0.16.1"
    assert version("torch").startswith("2.13.")


def test_only_compat_knows_the_inside(repo_root: Path) -> None:
    """A private name of Megatron Core or PyTorch that no table lists, so that no test looks at it when a pin moves."""
    package = repo_root / "megatron" / "bcd"
    files = {path.relative_to(package): ast.parse(path.read_text(encoding="utf-8")) for path in package.rglob("*.py")}
    files = {path: tree for path, tree in files.items() if "compat" not in path.parts}
    own = {name for tree in files.values() for name in defined(tree)} | {*dir(argparse.ArgumentParser())}
    assert [f"{path}: {use}" for path, tree in files.items() for use in private_names(tree, own)] == []


def defined(tree: ast.Module) -> Iterator[str]:
    """Names of a file's functions and classes, and of the attributes that it gives them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"):
            yield from [node.attr] * isinstance(node.ctx, ast.Store)


def imported(tree: ast.Module) -> dict[str, str]:
    """The names that a file imports, and from which top-level package or, for megatron.core, `core`."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(each.asname or each.name).split(".")[0]: origin(each.name) for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            whole = {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
            names |= {name: origin(module) for name, module in whole.items()}
    return names


def origin(module: str) -> str:
    return "core" if module.startswith("megatron.core") else module.split(".")[0]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """Underscore names of others: imported, or attributes that this project does not define."""
    names = imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and origin(node.module or "") in ("torch", "core"):
            yield from (f"imports {each.name}" for each in node.names if is_private(each.name))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            root: ast.AST = node
            while isinstance(root, ast.Attribute):
                root = root.value
            package = names.get(root.id, "") if isinstance(root, ast.Name) else ""
            if package in ("torch", "core") or not (package in sys.stdlib_module_names or node.attr in own):
                yield ast.unparse(node)
