"""The architecture of a model: its sizes, and the flags of the training scripts for it. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CONFIG = "config.json"
TRANSFORMERS = "transformers"
"""The family of all decoders that transformers' own layers compute, and the --transformer-impl that chooses them."""

FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
"""The families that Megatron Core's layers can compute, by their ``model_type``."""

LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants of Megatron Core's RoPE scaling. Only the factor can be set."""

_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu", "gelu_pytorch_tanh"),
    "hidden_act": ("silu",),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "router_jitter_noise": (0.0,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
}
"""Values of configurations that Megatron Core's layers can express."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Architecture:
    """A decoder's configuration, and what follows from it."""

    family: str
    config: Any
    """transformers' configuration of the decoder."""
    max_positions: int
    not_in_core: str = ""
    """Why transformers' layers compute it, if no flag asked for them."""
    flags: Mapping[str, Any]
    """The training flags, by field name, that determine the weights or their meaning."""
    defaults: Mapping[str, Any]
    """The flags that a run takes from the model unless its command line sets them."""


class NotInCore(ValueError):
    """Megatron Core's layers cannot express an architecture."""


def architecture_of(config: Any, *, family: str | None = None) -> Architecture:
    """Return the architecture of a configuration of transformers.

    Args:
        config: the configuration.
        family: TRANSFORMERS, or the default for its family in Megatron Core.

    Raises:
        NotInCore: Megatron Core's layers lack a feature.
    """

    def value(*names: str, default: Any) -> Any:
        for name in names:
            with contextlib.suppress(AttributeError, RuntimeError):  # absent, or another value in each layer
                if isinstance(found := getattr(config, name), int | float) and found:
                    return found
        return default

    if family != TRANSFORMERS:
        _check_core(config)
    heads, positions = value("num_attention_heads", default=1), value("max_position_embeddings", default=10**6)
    groups = value("num_key_value_heads", default=heads)
    flags: dict[str, Any] = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": value("intermediate_size", "ffn_hidden_size", "n_inner", default=4 * config.hidden_size),
        "num_attention_heads": heads,
        "kv_channels": value("head_dim", default=max(1, config.hidden_size // heads)),
        "group_query_attention": groups != heads,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
    } | ({"num_query_groups": groups} if groups != heads else {})
    defaults = {
        "hidden_dropout": value("resid_pdrop", "hidden_dropout", "residual_dropout", "dropout", default=0.0),
        "attention_dropout": value("attention_dropout", "attn_pdrop", default=0.0),
        "make_vocab_size_divisible_by": 1,  # the softmax would include padding rows
    }
    if family == TRANSFORMERS:
        flags |= defaults | {  # neutral values of the flags that choose among Megatron Core's layers
            "transformer_impl": TRANSFORMERS,
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "swiglu": True,
            "position_embedding_type": "none",
        }
        defaults = {"max_position_embeddings": positions}
    else:
        _add_core_flags(config, flags, defaults, max_positions=positions)
    family = family or config.model_type
    return Architecture(family=family, config=config, max_positions=positions, flags=flags, defaults=defaults)


def _check_core(config: Any) -> None:
    """Raise NotInCore if Megatron Core's layers cannot express a configuration."""
    family, rope = config.model_type, getattr(config, "rope_parameters", None) or {}
    if getattr(config, "auto_map", None):  # `read_config` leaves it where this code computes the model
        raise NotInCore("its code comes with the model")
    if family not in FAMILIES:
        raise NotInCore(f"architecture {family} is not one of {', '.join(FAMILIES)}")
    for name, supported in _SUPPORTED.items():
        if (value := getattr(config, name, supported[0])) not in supported:
            raise NotInCore(f"{name} {value!r} is not supported, only {' or '.join(map(repr, supported))}")
    bias = getattr(config, "attention_bias", False)
    if bias != getattr(config, "mlp_bias", False):
        raise NotInCore(
            f"attention_bias {bias} without the same mlp_bias is not supported: Megatron Core's layers have biases "
            "everywhere, nowhere, or only in queries, keys and values"
        )
    kind, base = rope.get("rope_type", "default"), rope.get("rope_theta") or 0
    if kind not in ("default", "llama3") or base != int(base):
        raise NotInCore(f"RoPE type {kind} with base {base} is not supported, only whole bases of default and llama3")
    for name, value in ({"partial_rotary_factor": 1.0} | (LLAMA3_ROPE if kind == "llama3" else {})).items():
        if rope.get(name, value) != value:
            raise NotInCore(f"{name} {rope[name]!r} of RoPE is not supported: Megatron Core has {value} built in")


def _add_core_flags(config: Any, flags: dict[str, Any], defaults: dict[str, Any], *, max_positions: int) -> None:
    """Add the flags and defaults that choose among Megatron Core's layers."""
    family, has_bias = config.model_type, getattr(config, "attention_bias", False)
    is_gpt2, window = family == "gpt2", getattr(config, "sliding_window", None)
    flags |= {
        "normalization": "LayerNorm" if is_gpt2 else "RMSNorm",
        "layernorm_epsilon": config.layer_norm_epsilon if is_gpt2 else config.rms_norm_eps,
        "add_bias_linear": has_bias or is_gpt2,
        "add_qkv_bias": has_bias or family in ("gpt2", "qwen2"),
        "qk_layernorm": family in ("qwen3", "qwen3_moe"),
        "swiglu": not is_gpt2,
        "layernorm_zero_centered_gamma": False,
        "apply_residual_connection_post_layernorm": False,
        "squared_relu": False,
        "openai_gelu": is_gpt2 and config.activation_function != "gelu",
        "num_moe_experts": None,
        "position_embedding_type": "learned_absolute" if is_gpt2 else "rope",
    }
    if is_gpt2:
        flags["max_position_embeddings"] = max_positions
        if config.activation_function == "gelu":
            flags["bias_gelu_fusion"] = False  # Megatron Core's fused kernel computes only the tanh form
    else:
        rope = config.rope_parameters
        flags |= {"rotary_base": int(rope["rope_theta"]), "rotary_percent": 1.0, "rotary_interleaved": False}
        flags["use_rope_scaling"] = rope.get("rope_type") == "llama3"
        if flags["use_rope_scaling"]:
            flags["rope_scaling_factor"] = float(rope["factor"])
        defaults["max_position_embeddings"] = min(max_positions, window or max_positions)
    if family in ("mixtral", "qwen3_moe"):
        flags |= {
            "num_moe_experts": config.num_experts,
            "moe_router_topk": config.num_experts_per_tok,
            "moe_ffn_hidden_size": getattr(config, "moe_intermediate_size", config.intermediate_size),
            "moe_router_pre_softmax": not getattr(config, "norm_topk_prob", True),
            "moe_router_score_function": "softmax",
            "moe_router_topk_scaling_factor": None,
            "moe_router_num_groups": None,
            "moe_shared_expert_intermediate_size": None,
            "moe_layer_freq": 1,
        }
        defaults |= {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": config.router_aux_loss_coef}
