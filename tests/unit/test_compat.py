"""The internals of Megatron Core 0.16.1 and 0.19.2 and PyTorch 2.13 and 2.14 that this project uses, in `compat` only.

When a pin moves: read each failing line's source again, then the file above it in tests/data/private_apis.txt. Sources
are parsed, not imported, because an earlier test may have replaced the functions in this process.
"""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

TABLE = Path(__file__).parents[1] / "data" / "private_apis.txt"
CORE = version("megatron-core")
PRIVATE_APIS = [
    line.removeprefix(f"{CORE[:4]} ")
    for line in TABLE.read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#") and (line[0] != "0" or line.startswith(f"{CORE[:4]} "))
]


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
    arguments = function.args
    names = [item.arg for item in [*arguments.posonlyargs, *arguments.args]]
    names += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    names += [kwonlyarg.arg for kwonlyarg in arguments.kwonlyargs]
    names += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    return ", ".join(names)


@pytest.mark.parametrize("line", PRIVATE_APIS)
def test_private_api(line: str) -> None:
    """Each private API has the signature and the source text that the table lists."""
    api, *markers = line.split(" | ")
    module, _, name = api.partition(":")
    name, has_parameters, parameters = name.partition("(")
    text, node = source_of(module)
    if name:
        result: ast.AST = node
        for part in name.split("."):  # the last definition of that name: overloads come before it
            kinds = (item for item in ast.walk(result) if isinstance(item, ast.FunctionDef | ast.ClassDef))
            result = [kind for kind in kinds if kind.name == part][-1]
        text = ast.get_source_segment(text, result) or ""
        if has_parameters:
            assert parameters_of(result) == parameters.removesuffix(")")
    for marker in markers:
        assert marker in text


def test_the_table_is_of_the_pinned_versions() -> None:
    """The installed versions are those of the table. Before changing them, check each of its lines and
    docs/megatron_core_notes.md."""
    assert CORE in ("0.16.1", "0.19.2")
    assert version("torch")[:5] in ("2.13.", "2.14.")
