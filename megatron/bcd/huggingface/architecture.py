"""The architecture of a model: its sizes, and the flags of the training scripts for it. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

CONFIG = "config.json"
TRANSFORMERS = "transformers"
"""The family of all decoders that transformers' own layers compute, and the --transformer-impl that chooses them."""

FAMILIES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""transformers' classes by families, which are also the ``model_type``."""

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


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes and variants of a decoder."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_size: int
    vocab_size: int
    """Rows of the embedding, without padding."""
    max_positions: int
    tied: bool
    linear_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    """Experts of a layer; 0 if the model is dense."""
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    sliding_window: int | None = None
    """Number of tokens that a token attends to; None for all."""
    embedding_dropout: float | None = None
    """Dropout of the embedding's output, if it has its own. Megatron Core applies --hidden-dropout there too."""
    source: str = ""
    """Folder of the model, or its name on the hub."""
    not_in_core: str = ""
    """Why transformers' layers compute it, if no flag asked for them."""
    flags: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The training flags, by field name, that determine the weights or their meaning."""
    defaults: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The flags that a run takes from the model unless its command line sets them."""

    @property
    def plain_positions(self) -> int:
        """Maximum number of positions for which attention needs no sliding window."""
        return min(self.max_positions, self.sliding_window or self.max_positions)


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
    hidden, heads = config.hidden_size, value("num_attention_heads", default=1)
    network = Architecture(
        family=family or config.model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=hidden,
        ffn_hidden_size=value("intermediate_size", "ffn_hidden_size", "n_inner", default=4 * hidden),
        num_attention_heads=heads,
        num_query_groups=value("num_key_value_heads", default=heads),
        head_size=value("head_dim", default=max(1, hidden // heads)),
        vocab_size=config.vocab_size,
        max_positions=value("max_position_embeddings", default=10**6),
        tied=bool(config.tie_word_embeddings),
    )
    is_grouped = network.num_query_groups != heads
    flags: dict[str, Any] = {
        "num_layers": network.num_layers,
        "hidden_size": hidden,
        "ffn_hidden_size": network.ffn_hidden_size,
        "num_attention_heads": heads,
        "kv_channels": network.head_size,
        "group_query_attention": is_grouped,
        "untie_embeddings_and_output_weights": not network.tied,
    } | ({"num_query_groups": network.num_query_groups} if is_grouped else {})
    defaults = {
        "hidden_dropout": value("resid_pdrop", "hidden_dropout", "residual_dropout", "dropout", default=0.0),
        "attention_dropout": value("attention_dropout", "attn_pdrop", default=0.0),
        "make_vocab_size_divisible_by": 1,  # the softmax would include padding rows
    }
    if family != TRANSFORMERS:
        return _core_architecture(replace(network, flags=flags, defaults=defaults), config)
    flags |= defaults | {  # neutral values of the flags that choose among Megatron Core's layers
        "transformer_impl": TRANSFORMERS,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "swiglu": True,
        "position_embedding_type": "none",
    }
    return replace(network, flags=flags, defaults={"max_position_embeddings": network.max_positions})


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


def _core_architecture(network: Architecture, config: Any) -> Architecture:
    """Return `network` with the variants, flags and defaults of Megatron Core's layers."""
    family, bias = network.family, getattr(config, "attention_bias", False)
    is_gpt2 = family == "gpt2"
    network = replace(
        network,
        linear_bias=bias or is_gpt2,
        qkv_bias=bias or family in ("gpt2", "qwen2"),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        sliding_window=getattr(config, "sliding_window", None),
        embedding_dropout=config.embd_pdrop if is_gpt2 else None,
    )
    flags = dict(network.flags) | {
        "normalization": "LayerNorm" if is_gpt2 else "RMSNorm",
        "layernorm_epsilon": config.layer_norm_epsilon if is_gpt2 else config.rms_norm_eps,
        "add_bias_linear": network.linear_bias,
        "add_qkv_bias": network.qkv_bias,
        "qk_layernorm": network.qk_norm,
        "swiglu": not is_gpt2,
        "layernorm_zero_centered_gamma": False,
        "apply_residual_connection_post_layernorm": False,
        "squared_relu": False,
        "openai_gelu": is_gpt2 and config.activation_function != "gelu",
        "num_moe_experts": None,
        "position_embedding_type": "learned_absolute" if is_gpt2 else "rope",
    }
    defaults = dict(network.defaults)
    if is_gpt2:
        flags["max_position_embeddings"] = network.max_positions
        if config.activation_function == "gelu":
            flags["bias_gelu_fusion"] = False  # Megatron Core's fused kernel computes only the tanh form
    else:
        rope = config.rope_parameters
        flags |= {"rotary_base": int(rope["rope_theta"]), "rotary_percent": 1.0, "rotary_interleaved": False}
        flags["use_rope_scaling"] = rope.get("rope_type") == "llama3"
        if flags["use_rope_scaling"]:
            flags["rope_scaling_factor"] = float(rope["factor"])
        defaults["max_position_embeddings"] = network.plain_positions
    if family in ("mixtral", "qwen3_moe"):
        network = replace(
            network,
            num_experts=config.num_experts,
            experts_per_token=config.num_experts_per_tok,
            expert_ffn_size=getattr(config, "moe_intermediate_size", config.intermediate_size),
        )
        flags |= {
            "num_moe_experts": network.num_experts,
            "moe_router_topk": network.experts_per_token,
            "moe_ffn_hidden_size": network.expert_ffn_size,
            "moe_router_pre_softmax": not getattr(config, "norm_topk_prob", True),
            "moe_router_score_function": "softmax",
            "moe_router_topk_scaling_factor": None,
            "moe_router_num_groups": None,
            "moe_shared_expert_intermediate_size": None,
            "moe_layer_freq": 1,
        }
        defaults |= {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": config.router_aux_loss_coef}
    return replace(network, flags=flags, defaults=defaults)
