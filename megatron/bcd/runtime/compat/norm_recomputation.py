"""A workaround for Megatron Core 0.16.1: --recompute-modules layernorm."""

from __future__ import annotations

import functools


@functools.cache
def patch_norm_recomputation() -> None:
    """Make --recompute-modules layernorm work without Transformer Engine. Permanent; once per process.

    CheckpointWithoutOutput takes its own default, False, for a wish for fp8, and calls Transformer Engine.
    """
    from megatron.core.tensor_parallel import random

    if not hasattr(random, "FP8GlobalStateManager"):
        random.CheckpointWithoutOutput.__init__.__defaults__ = (None,)
