"""Skip imports of Megatron Core that a run does not need: torch's compiler and TensorBoard."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_WITHOUT_TRAINING = {"--dry-run", "--dry-run-world-size", "--help", "-h"}


def skip_unused_imports(words: Sequence[str]) -> None:
    """Shorten the import of Megatron Core, which has not begun yet, for the flags in `words`.

    It calls torch.compile for its fused functions, which imports the compiler. A CPU runs none of them. It also imports
    TensorBoard.
    """
    import torch

    names = {word.split("=")[0] for word in words}
    if names & _WITHOUT_TRAINING or not (torch.cuda.is_available() or "--bcd-compile" in names):
        torch.compile = lambda function=None, **_: function or (lambda decorated: decorated)
    if "--tensorboard-dir" not in names:
        sys.modules.setdefault("torch.utils.tensorboard", None)  # type: ignore[arg-type]
