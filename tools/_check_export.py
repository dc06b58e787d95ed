"""Compares an exported model with the checkpoint that it was made of, by one batch's logits."""

from __future__ import annotations

import glob
import os

MOST_BYTES = 10**9
"""Of weights: two models of this size are loaded one after the other, in fp32."""
_TOLERANCE = 0.02
"""Of the logits' standard deviation. Orders of sums and kernels of GELU differ; a row in the wrong place is above 1."""


def difference(checkpoint: str, folder: str) -> str | None:
    """How far the logits of `folder` in transformers are from the checkpoint's, or why that was not looked at, as a
    part of one line; None if they are equal within rounding.

    Raises:
        ValueError: the checkpoint can't be read.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        return "its logits were not compared: transformers is not installed"
    if sum(map(os.path.getsize, glob.glob(os.path.join(folder, "*.safetensors")))) > MOST_BYTES:
        return f"its logits were not compared: more than {MOST_BYTES:,} bytes of weights"
    import torch

    from megatron.bcd.generation import load
    from megatron.bcd.generation.cached_model import whole_logits
    from megatron.bcd.runtime import distributed

    load.start()
    try:
        loaded = load.open_model(
            checkpoint, precision="fp32", tokenizer=load.TokenizerFlags(tokenizer_type="ByteLevelTokenizer")
        )
        length, generator = min(loaded.max_length, 64), torch.Generator().manual_seed(1)
        rows = load.folder.read_architecture(folder).vocab_size
        tokens = torch.randint(0, rows, (2, length), generator=generator)
        with torch.no_grad():
            ours = whole_logits(loaded.model, tokens.to(loaded.device))[..., :rows].float().cpu()
        del loaded
    finally:
        distributed.leave()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    with torch.no_grad():
        theirs = model(tokens).logits
    distance = float((ours - theirs).abs().max() / theirs.std())
    if distance <= _TOLERANCE:
        return None
    return f"its logits in transformers are up to {distance:.2g} standard deviations from the checkpoint's"
