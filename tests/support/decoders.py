"""Small random models of transformers' decoders, by the name of their class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY, LAYERS = 259, 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
_HYBRID: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 1}
_WINDOW = {"sliding_window": 8}
FULL_SIZES = (
    SIZES
    | {"num_key_value_heads": 4, "head_dim": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    | {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "n_shared_experts": 1}
    | {"n_group": 1, "topk_group": 1}
)
"""Sizes for a model of any type."""
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": _WINDOW,
    "gemma2": {"head_dim": 16} | _WINDOW,
    "gemma3_text": {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"] * 2} | _WINDOW,
    "olmo2": {},
    "olmo3": _WINDOW,
    "glm4": {"head_dim": 16},
    "glm4_moe": _EXPERTS | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "granite": {"logits_scaling": 2.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
    "cohere2": _WINDOW,
    "deepseek_v3": {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
    | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
    | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
    "qwen3_next": _HYBRID | _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 24},
    "qwen3_5_text": _HYBRID,
    "nemotron": {},
    "phi3": {},
    "smollm3": {},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2} | _WINDOW,
    "starcoder2": {},
    "llama4_text": {"head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 40},
    "qwen3_moe": _EXPERTS | {"num_experts": 4},
    "exaone4": _WINDOW,
    "gemma4_text": {"head_dim": 16, "hidden_size_per_layer_input": 0} | _WINDOW,
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "granitemoehybrid": _MAMBA
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24}
    | {"layer_types": ["linear_attention", "full_attention"] * 2},
}
"""Settings that differ from `SIZES` and transformers' defaults, by model type."""
UNPACKED = frozenset(("qwen3_next", "qwen3_5_text", "gpt_oss", "bamba", "granitemoehybrid"))
"""Models whose layers carry one text into the next: gpt-oss by a mask that ignores positions, others by a state."""


_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_VISION |= {"image_size": 28, "patch_size": 14}
MULTIMODAL: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", _VISION),
    "qwen3_5": ("qwen3_5_text", {"depth": 2, "num_heads": 4, "out_hidden_size": 32, "num_position_embeddings": 16}),
    "mistral3": ("mistral", _VISION | {"head_dim": 8}),
    "llava": ("llama", _VISION),
    "llama4": ("llama4_text", _VISION | {"vision_output_dim": 32}),
}
"""Models of images and text: the type of the text part, and the sizes of the other one."""


def config_of(name: str, **settings: Any) -> Any:
    """Return transformers' configuration of the model of this type, with these settings instead of its own."""
    if name in MULTIMODAL:
        text, vision = MULTIMODAL[name]
        sizes = {"hidden_size": 32, "intermediate_size": 48} | vision
        return transformers.AutoConfig.for_model(name, text_config=config_of(text).to_dict(), vision_config=sizes)
    return transformers.AutoConfig.for_model(name, **SIZES | SETTINGS[name] | settings)


def model_of(name: str) -> Any:
    """Build the model of this type. No weight is 0 or 1, so that each one matters."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        kind = transformers.AutoModelForImageTextToText if name in MULTIMODAL else transformers.AutoModelForCausalLM
        model = kind.from_config(config_of(name), dtype=torch.float32).eval()
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return model


def write_model(name: str, folder: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """Save the model of this type in `folder`."""
    transformers.utils.logging.disable_progress_bar()
    model_of(name).to(dtype).save_pretrained(folder, max_shard_size="60KB")
    return folder
