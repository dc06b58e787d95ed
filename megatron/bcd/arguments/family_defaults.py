"""Defaults of flags that differ between the training scripts, by field name."""

from __future__ import annotations

from collections.abc import Mapping

FAMILY_DEFAULTS: dict[str, Mapping[str, object]] = {
    "gpt": {},
    "llama": {
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "swiglu": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
}
"""gpt: Megatron-LM's own (pretrain_gpt_bcd.py). llama: arXiv 2302.13971, section 2.2 (pretrain_llama_bcd.py)."""
