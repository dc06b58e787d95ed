"""Skip imports of Megatron Core that only training needs: torch's compiler and TensorBoard."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any

_WITHOUT_TRAINING = {"--dry-run", "--dry-run-world-size", "--print-config", "--help", "-h"}


def skip_unused_imports(words: Sequence[str]) -> None:
    """Halve the import time of Megatron Core if the flags in `words` do not train.

    During its import, Megatron Core calls torch.compile for its fused functions, which imports the compiler, and it
    tries to import TensorBoard. Both are skipped. With Transformer Engine, which imports the compiler itself, nothing
    is skipped.
    """
    if not _WITHOUT_TRAINING & {word.split("=")[0] for word in words}:
        return
    if importlib.util.find_spec("transformer_engine") is not None:
        return
    import torch

    torch.compile = _uncompiled
    sys.modules.setdefault("torch.utils.tensorboard", None)  # type: ignore[arg-type]


def _uncompiled(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    return function if function is not None else lambda decorated: decorated
