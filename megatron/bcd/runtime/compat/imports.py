"""Skip imports of Megatron Core that a run does not need: torch's compiler and TensorBoard."""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

_WITHOUT_TRAINING = {"--dry-run", "--dry-run-world-size", "--help", "-h"}


def skip_unused_imports(words: Sequence[str]) -> None:
    """Shorten the import of Megatron Core, which has not begun yet.

    During its import, Megatron Core calls torch.compile for its fused functions, which imports the compiler: now the
    first call of such a function does. It also imports TensorBoard, unless the flags in `words` do not train. With
    Transformer Engine, which imports the compiler itself, nothing is skipped.
    """
    if importlib.util.find_spec("transformer_engine") is not None:
        return
    import torch

    torch.compile = functools.partial(_compile_when_called, torch.compile)
    if _WITHOUT_TRAINING & {word.split("=")[0] for word in words}:
        sys.modules.setdefault("torch.utils.tensorboard", None)  # type: ignore[arg-type]


def _compile_when_called(
    compile_now: Callable[..., Any], function: Callable[..., Any] | None = None, **options: Any
) -> Any:
    import torch

    if function is None:
        return functools.partial(_compile_when_called, compile_now, **options)
    if not isinstance(function, types.FunctionType):
        return compile_now(function, **options)
    compiled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # it is a part of another function
            return function(*args, **kwargs)
        if not compiled:
            compiled.append(compile_now(function, **options))
        return compiled[0](*args, **kwargs)

    return call
