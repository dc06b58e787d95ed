"""Values that --bcd-preset sets where the command line does not, and the defaults of the training scripts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_INACTIVE: dict[str, Any] = {
    "bcd_inactive_update": "orthogonal",
    "bcd_inactive_grad_dtype": "bf16",
}
_MUON: dict[str, Any] = {
    "optimizer": "muon",
    "muon_momentum": 0.95,
    "muon_use_nesterov": True,
    "muon_scale_mode": "spectral",
    "muon_extra_scale_factor": 0.2,
    "muon_momentum_dtype": "bf16",
    "muon_grad_dtype": "bf16",
}
PRESETS: dict[str, dict[str, Any]] = {
    # Algorithm 1 of arXiv 2506.12037
    "paper": {
        "bcd_layout": "spread",
        "bcd_order": "ascending",
        "bcd_optimizer_state": "reset",
        "bcd_always_active": "none",
        "bcd_inactive_update": "none",
        "optimizer": "adam",
    },
    # docs/fine_tuning.md; one layer a block, and no active head where it is frozen: arguments/derive.py
    "finetune": {
        "bcd_layout": "spread",
        "bcd_order": "random",
        "bcd_optimizer_state": "reset",
        "bcd_always_active": "head",
        "bcd_frozen": "embedding",
        "bcd_inactive_update": "none",
        "optimizer": "adam",
    },
    # docs/learning.md
    "pretrain": {
        "bcd_layout": "strided",
        "bcd_order": "ascending",
        "bcd_optimizer_state": "host",
        **_INACTIVE,
        **_MUON,
    },
}
"""By preset, values by field name."""


def preset_values(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What the preset sets beside the values `given` on the command line, by field name.

    With one block no layer is inactive; with another optimizer there is no Muon to set.
    """
    values = dict(PRESETS[name])
    if given.get("bcd_num_blocks") == 1 or given.get("bcd_inactive_update") == "none":
        values = {field: value for field, value in values.items() if field not in _INACTIVE}
    if given.get("optimizer", "muon") != "muon":
        values = {field: value for field, value in values.items() if field not in _MUON}
    return {field: value for field, value in values.items() if field not in given}


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
