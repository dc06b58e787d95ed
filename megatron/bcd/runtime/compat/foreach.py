"""One kernel for a list of tensors: operations that PyTorch's own optimizers use, and keeps private."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Write each source into its target, of the same shape and dtype."""
    torch._foreach_copy_(list(targets), list(sources))


def scale_each(tensors: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply in place."""
    if tensors:  # on a CPU a number would be rounded to 16 bits where the tensors are
        torch._foreach_mul_(list(tensors), torch.full((), factor, device=tensors[0].device))
