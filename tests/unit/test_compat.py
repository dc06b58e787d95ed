"""The inside of Megatron Core 0.16.1 and PyTorch 2.13 is what this project depends on.

When a pin moves: read each failing entry's source again, then the module in `used_in`. Sources are parsed, not
imported, because a test that ran before may have replaced the functions in this process.
"""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest
from torch.distributed import ProcessGroupGloo

from megatron.bcd.runtime.compat.private_apis import PRIVATE_APIS, PrivateApi


@cache
def source_of(module: str) -> tuple[str, ast.Module]:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, f"{module} is gone"
    text = Path(spec.origin).read_text(encoding="utf-8")
    return text, ast.parse(text)


def definition(api: PrivateApi) -> ast.AST:
    """The last definition of that name: overloads come before it."""
    _, node = source_of(api.module)
    found: ast.AST = node
    for part in api.name.split("."):
        nodes = (one for one in ast.walk(found) if isinstance(one, ast.FunctionDef | ast.ClassDef))
        matches = [one for one in nodes if one.name == part]
        assert matches, f"{api.module} has no {api.name}; {api.used_in}: {api.use}"
        found = matches[-1]
    return found


def parameters_of(function: ast.AST) -> str:
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    names = [one.arg for one in [*given.posonlyargs, *given.args]]
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    names += [one.arg for one in given.kwonlyargs]
    names += [f"**{given.kwarg.arg}"] if given.kwarg else []
    return ", ".join(names)


@pytest.mark.parametrize("api", PRIVATE_APIS, ids=lambda api: f"{api.module}:{api.name}")
def test_private_api(api: PrivateApi, repo_root: Path) -> None:
    """A changed signature, or an attribute that is gone: in the best case an error in the middle of a run."""
    text, _ = source_of(api.module)
    if api.name:
        node = definition(api)
        text = ast.get_source_segment(text, node) or ""
        if api.parameters is not None:
            assert parameters_of(node) == api.parameters, f"{api.used_in}: {api.use}"
    for marker in api.source:
        assert marker in text, f"{api.used_in}: {api.use}"
    user = repo_root / "megatron" / "bcd" / Path(*api.used_in.split("."))
    assert user.with_suffix(".py").exists(), f"{api.used_in} has moved: correct the entry"


def test_the_table_is_of_the_pinned_versions() -> None:
    """Look at every entry of PRIVATE_APIS, then at docs/megatron_core_notes.md."""
    assert version("megatron-core") == "0.16.1"
    assert version("torch").startswith("2.13.")


def test_gloo_options() -> None:
    """`share_gloo_device`; in C++: torch/csrc/distributed/c10d/init.cpp, ProcessGroupGloo."""
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_default_device()]
    assert options._timeout is not None and options._threads > 0
    assert hasattr(ProcessGroupGloo, "create_device")
