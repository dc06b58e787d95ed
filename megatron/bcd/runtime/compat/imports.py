"""Skip imports of Megatron Core that a dry run does not need: torch's compiler and TensorBoard."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_WITHOUT_TRAINING = {"--dry-run", "--dry-run-world-size", "--help", "-h"}


def skip_unused_imports(words: Sequence[str]) -> None:
    """Shorten the import of Megatron Core, which has not begun yet, if the flags in `words` do not train.

    It imports TensorBoard, and calls torch.compile for its fused functions, which imports the compiler.
    """
    if _WITHOUT_TRAINING & {word.split("=")[0] for word in words}:
        import torch

        torch.compile = lambda function=None, **_: function or (lambda decorated: decorated)
        sys.modules.setdefault("torch.utils.tensorboard", None)  # type: ignore[arg-type]
