"""The architecture of a model: its sizes, and the flags of the training scripts for it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    norm_epsilon: float
    tied: bool
    rotary_base: int | None = None
    """None if positions are learned."""
    rope_scaling_factor: float | None = None
    """Factor of LLaMA 3's scaling; None without it."""
    linear_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    """Experts of a layer; 0 if the model is dense."""
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    normalizes_probabilities: bool = True
    """Whether the probabilities of a token's experts sum to 1."""
    router_loss: float = 0.0
    """Coefficient of the load-balancing loss."""
    gelu: str | None = None
    """``tanh`` or ``exact``; None for SwiGLU."""
    sliding_window: int | None = None
    """Number of tokens that a token attends to; None for all."""
    hidden_dropout: float = 0.0
    embedding_dropout: float = 0.0
    """Dropout of the embedding's output. Megatron Core applies `hidden_dropout` there too."""
    attention_dropout: float = 0.0
    source: str = ""
    """Folder of the model, or its name on the hub."""
    not_in_core: str = ""
    """Why transformers' layers compute it, if nobody asked for them."""

    @property
    def plain_positions(self) -> int:
        """Maximum number of positions for which attention needs no sliding window."""
        return min(self.max_positions, self.sliding_window or self.max_positions)


class NotInCore(ValueError):
    """Megatron Core's layers cannot express an architecture."""


def architecture_of(config: Any, *, source: str = "", family: str | None = None) -> Architecture:
    """Return the architecture of a configuration of transformers.

    Args:
        config: the configuration.
        source: the folder of its model, or its name on the hub.
        family: TRANSFORMERS, or the default for its family in Megatron Core.

    Raises:
        NotInCore: Megatron Core's layers lack a feature.
    """

    def value(*names: str, default: Any) -> Any:
        found = (getattr(config, name, None) for name in names)
        return next((each for each in found if isinstance(each, int | float) and each), default)

    variants = {} if family == TRANSFORMERS else _variants(config)
    hidden, heads = config.hidden_size, value("num_attention_heads", default=1)
    network = Architecture(
        family=family or config.model_type,
        source=source,
        num_layers=config.num_hidden_layers,
        hidden_size=hidden,
        ffn_hidden_size=value("intermediate_size", "ffn_hidden_size", "n_inner", default=4 * hidden),
        num_attention_heads=heads,
        num_query_groups=value("num_key_value_heads", default=heads),
        head_size=value("head_dim", default=max(1, hidden // heads)),
        vocab_size=config.vocab_size,
        max_positions=value("max_position_embeddings", default=10**6),
        norm_epsilon=value("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon", default=1e-5),
        tied=bool(config.tie_word_embeddings),
        hidden_dropout=value("resid_pdrop", "hidden_dropout", "residual_dropout", "dropout", default=0.0),
        attention_dropout=value("attention_dropout", "attn_pdrop", default=0.0),
    )
    return replace(network, **variants)


def _variants(config: Any) -> dict[str, Any]:
    """Return the fields of `Architecture` for Megatron Core's layers alone. Raises NotInCore."""
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
    fields: dict[str, Any] = {
        "rotary_base": int(base) or None,
        "rope_scaling_factor": float(rope["factor"]) if kind == "llama3" else None,
        "linear_bias": bias or family == "gpt2",
        "qkv_bias": bias or family in ("gpt2", "qwen2"),
        "qk_norm": family in ("qwen3", "qwen3_moe"),
        "sliding_window": getattr(config, "sliding_window", None),
    }
    if family == "gpt2":
        fields["gelu"] = "exact" if config.activation_function == "gelu" else "tanh"
        fields["embedding_dropout"] = config.embd_pdrop
    if family in ("mixtral", "qwen3_moe"):
        fields |= {
            "num_experts": config.num_experts,
            "experts_per_token": config.num_experts_per_tok,
            "expert_ffn_size": getattr(config, "moe_intermediate_size", config.intermediate_size),
            "normalizes_probabilities": getattr(config, "norm_topk_prob", True),
            "router_loss": config.router_aux_loss_coef,
        }
    return fields


def architecture_flags(network: Architecture) -> dict[str, Any]:
    """Return the training flags, by field name, that determine the weights or their meaning."""
    values: dict[str, Any] = {
        "num_layers": network.num_layers,
        "hidden_size": network.hidden_size,
        "ffn_hidden_size": network.ffn_hidden_size,
        "num_attention_heads": network.num_attention_heads,
        "kv_channels": network.head_size,
        "group_query_attention": network.num_query_groups != network.num_attention_heads,
        "untie_embeddings_and_output_weights": not network.tied,
    }
    if values["group_query_attention"]:
        values["num_query_groups"] = network.num_query_groups
    if network.family == TRANSFORMERS:
        return values | {  # neutral values of the flags that choose among Megatron Core's layers, and dropout
            "transformer_impl": TRANSFORMERS,
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "swiglu": True,
            "position_embedding_type": "none",
            "hidden_dropout": network.hidden_dropout,
            "attention_dropout": network.attention_dropout,
            "make_vocab_size_divisible_by": 1,
        }
    values |= {
        "normalization": "LayerNorm" if network.family == "gpt2" else "RMSNorm",
        "layernorm_epsilon": network.norm_epsilon,
        "add_bias_linear": network.linear_bias,
        "add_qkv_bias": network.qkv_bias,
        "qk_layernorm": network.qk_norm,
        "swiglu": network.gelu is None,
        "layernorm_zero_centered_gamma": False,
        "apply_residual_connection_post_layernorm": False,
        "squared_relu": False,
        "openai_gelu": network.gelu == "tanh",
        "num_moe_experts": network.num_experts or None,
        "position_embedding_type": "learned_absolute" if network.rotary_base is None else "rope",
    }
    if network.num_experts:
        values |= {
            "moe_router_topk": network.experts_per_token,
            "moe_ffn_hidden_size": network.expert_ffn_size,
            "moe_router_pre_softmax": not network.normalizes_probabilities,
            "moe_router_score_function": "softmax",
            "moe_router_topk_scaling_factor": None,
            "moe_router_num_groups": None,
            "moe_shared_expert_intermediate_size": None,
            "moe_layer_freq": 1,
        }
    if network.gelu == "exact":
        values["bias_gelu_fusion"] = False  # Megatron Core's fused kernel computes only the tanh form
    if network.rotary_base is None:
        values["max_position_embeddings"] = network.max_positions
    else:
        values |= {"rotary_base": network.rotary_base, "rotary_percent": 1.0, "rotary_interleaved": False}
        values["use_rope_scaling"] = network.rope_scaling_factor is not None
    if network.rope_scaling_factor is not None:
        values["rope_scaling_factor"] = network.rope_scaling_factor
    return values


def default_flags(network: Architecture) -> dict[str, Any]:
    """Return the flags that a run takes from the model unless its command line sets them."""
    if network.family == TRANSFORMERS:
        return {"max_position_embeddings": network.max_positions}
    values: dict[str, Any] = {
        "hidden_dropout": network.hidden_dropout,
        "attention_dropout": network.attention_dropout,
        "make_vocab_size_divisible_by": 1,  # the softmax would include padding rows
    }
    if network.rotary_base is not None:
        values["max_position_embeddings"] = network.plain_positions
    if network.num_experts:
        values |= {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": network.router_loss}
    return values
