"""What the training scripts differ in: the defaults of flags, by field name."""

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
"""Of pretrain_gpt_bcd.py, Megatron-LM's own, and of pretrain_llama_bcd.py, LLaMA's (arXiv 2302.13971, section 2.2)."""
