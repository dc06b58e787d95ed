"""The architecture in a config.json: its sizes, and the flags of the training scripts for it. Pure."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

CONFIG = "config.json"
TRANSFORMERS = "transformers"
"""The family of all decoders that transformers' own layers compute, and the --transformer-impl that chooses them."""

FAMILIES = {
    "GPT2LMHeadModel": "gpt2",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
"""Families, which are also the ``model_type``, by transformers' class."""

LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants of Megatron Core's RoPE scaling. Only the factor can be set."""

_DIFFERENCES = {
    "gpt_oss": "its attention has sinks",
    "smollm3": "some of its layers have no positions",
    "phi3": "its queries, keys and values are one matrix",
    "olmoe": "its norms of queries and keys span all heads",
    "num_experts num_local_experts n_routed_experts": "its layers have experts",
    "kv_lora_rank": "its attention is multi-latent",
    "linear_num_value_heads mamba_d_state state_size": "its layers are not all attention",
    "vision_config audio_config": "it reads more than text",
    "is_encoder_decoder": "it has an encoder",
    "gemma gemma2 gemma3_text": "it scales its embedding",
    "olmo2 olmo3 exaone4": "its norms come behind attention and MLP",
    "granite": "it multiplies embedding, residuals and logits by constants",
    "glm glm4": "it rotates half of each head, in pairs",
    "cohere cohere2": "its attention and MLP run side by side",
    "use_parallel_residual parallel_attn": "its attention and MLP run side by side",
}
"""Keys of a config.json or model types, and how such an architecture differs. The first match is reported."""

MISTRAL_WINDOW = 4096
"""transformers' default of a Mistral's sliding window."""


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
    """Folder of the model, or its name on the hub, if transformers' layers compute it (family `TRANSFORMERS`)."""

    @property
    def plain_positions(self) -> int:
        """Maximum number of positions for which attention needs no sliding window."""
        return min(self.max_positions, self.sliding_window or self.max_positions)


def read_architecture(path: str, *, is_quantised: bool = False) -> Architecture:
    """Return the architecture in a ``config.json``, or in a folder that contains one.

    With `is_quantised` the weights may be quantised: they will not be read.

    Raises:
        ValueError: the file is missing or not a JSON object, or as `architecture_from_config`.
    """
    file = os.path.join(path, CONFIG) if os.path.isdir(path) else path
    folder = os.path.dirname(file)
    config = read_json(file, absent=f"{folder}: has no {CONFIG}. Give the folder of a model in Hugging Face's format.")
    return architecture_from_config(config | {"quantization_config": None} if is_quantised else config, source=file)


def read_json(path: str, *, absent: str) -> dict[str, Any]:
    """Return the JSON object in a file. `absent` is the message if the file is missing. Raises ValueError."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except FileNotFoundError:
        raise ValueError(absent) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: can't be read ({' '.join(str(error).split())[:200]})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds no JSON object")
    return content


def architecture_from_config(config: Mapping[str, Any], *, source: str) -> Architecture:
    """Return the architecture in a config.json. `source` is its path, for messages.

    Raises:
        NotInCore: the family is not supported, or Megatron Core's layers lack a feature.
        ValueError: the weights are quantised, or a value is not valid.
    """
    if config.get("quantization_config"):
        raise ValueError(
            f"{source}: quantization_config: quantised weights are not supported. Give the original ones, or a copy in "
            "bf16."
        )
    family = _family(config, source)
    read = _Reader(config, source)
    return _gpt2(read) if family == "gpt2" else _llama(read, family)


def _family(config: Mapping[str, Any], source: str) -> str:
    classes, kind = config.get("architectures") or [], config.get("model_type")
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise ValueError(f"{source}: architectures is {_shown(classes)}, but must be a list of names")
    family = FAMILIES.get(classes[0]) if classes else kind
    if family not in FAMILIES.values() or kind not in (None, family):
        name = classes[0] if classes else kind
        reasons = ((key, why) for keys, why in _DIFFERENCES.items() for key in keys.split())
        reason = next((f" ({key}: {why})" for key, why in reasons if key == kind or config.get(key)), "")
        raise _unsupported(source, f"architecture {name} is not supported{reason}. Supported are {', '.join(FAMILIES)}")
    return str(family)


class NotInCore(ValueError):
    """Megatron Core's layers cannot express an architecture."""


def _unsupported(source: str, what: str) -> NotInCore:
    return NotInCore(f"{source}: {what}. --transformer-impl transformers trains it (docs/huggingface.md)")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)  # JSON may have NaN


class _Reader:
    """Reads values of a config.json and checks their types."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config, self.source = config, source

    def size(self, name: str, default: int | None = None) -> int:
        value = self.config.get(name)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            problem = "is missing" if value is None else f"is {_shown(value)}"
            raise ValueError(f"{self.source}: {name} {problem}, but must be a whole number above 0")
        return value

    def optional_size(self, name: str, default: int | None) -> int | None:
        """Return the value of `name`; `default` if the key is missing, None if it is null."""
        return None if self.config.get(name, default) is None else self.size(name, default)

    def number(self, name: str, default: float) -> float:
        value = self.config.get(name, default)
        if not _is_number(value):
            raise ValueError(f"{self.source}: {name} is {_shown(value)}, but must be a number")
        return float(value)

    def switch(self, name: str, default: bool) -> bool:
        value = self.config.get(name, default)
        return default if value is None else bool(value)

    def require(self, name: str, default: Any, *supported: Any) -> Any:
        """Return the value of `name`, which must be one of `supported`."""
        value = self.config.get(name, default)
        if value not in supported:
            options = " or ".join(map(repr, supported))
            raise _unsupported(self.source, f"{name} {value!r} is not supported, only {options}")
        return value

    def heads(self, name: str, hidden_size: int, *, explicit: int | None = None) -> tuple[int, int]:
        """Return the number of attention heads, and their width."""
        heads = self.size(name)
        if explicit is None and hidden_size % heads:
            raise ValueError(f"{self.source}: {name} {heads} does not divide the hidden size {hidden_size}")
        return heads, explicit or hidden_size // heads


def _gpt2(read: _Reader) -> Architecture:
    read.require("scale_attn_weights", True, True)
    read.require("scale_attn_by_inverse_layer_idx", False, False)
    read.require("add_cross_attention", False, False)
    activation = read.require("activation_function", "gelu_new", "gelu_new", "gelu", "gelu_pytorch_tanh")
    hidden_size = read.size("n_embd")
    heads, head_size = read.heads("n_head", hidden_size)
    return Architecture(
        family="gpt2",
        num_layers=read.size("n_layer"),
        hidden_size=hidden_size,
        ffn_hidden_size=read.size("n_inner", 4 * hidden_size),
        num_attention_heads=heads,
        num_query_groups=heads,
        head_size=head_size,
        vocab_size=read.size("vocab_size"),
        max_positions=read.size("n_positions", read.config.get("n_ctx")),
        norm_epsilon=read.number("layer_norm_epsilon", 1e-5),
        tied=read.switch("tie_word_embeddings", True),
        linear_bias=True,
        qkv_bias=True,
        gelu="exact" if activation == "gelu" else "tanh",
        hidden_dropout=read.number("resid_pdrop", 0.1),
        embedding_dropout=read.number("embd_pdrop", 0.1),
        attention_dropout=read.number("attn_pdrop", 0.1),
    )


def _llama(read: _Reader, family: str) -> Architecture:
    read.require("hidden_act", "silu", "silu")
    read.require("partial_rotary_factor", 1.0, 1.0)
    hidden_size = read.size("hidden_size")
    own_width = read.optional_size("head_dim", 128 if family == "qwen3" else None)
    heads, head_size = read.heads("num_attention_heads", hidden_size, explicit=own_width)
    base, factor = _rope(read)
    bias = read.switch("attention_bias", False)
    if bias != read.switch("mlp_bias", False):
        raise _unsupported(
            read.source,
            f"attention_bias {bias} without the same mlp_bias is not supported: Megatron Core's layers have biases "
            "everywhere, nowhere, or only in queries, keys and values",
        )
    has_window = read.switch("use_sliding_window", family in ("mistral", "mixtral"))
    # a Mistral without the key has transformers' default window; one with null has none
    window = (
        read.optional_size("sliding_window", MISTRAL_WINDOW if family == "mistral" else None) if has_window else None
    )
    return Architecture(
        family=family,
        num_layers=read.size("num_hidden_layers"),
        hidden_size=hidden_size,
        ffn_hidden_size=read.size("intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=read.size("num_key_value_heads", heads),
        head_size=head_size,
        vocab_size=read.size("vocab_size"),
        max_positions=read.size("max_position_embeddings"),
        norm_epsilon=read.number("rms_norm_eps", 1e-6),
        tied=read.switch("tie_word_embeddings", False),
        rotary_base=base,
        rope_scaling_factor=factor,
        linear_bias=bias,
        qkv_bias=bias or family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        sliding_window=window,
        attention_dropout=read.number("attention_dropout", 0.0),
        **(_experts(read, family) if family in ("mixtral", "qwen3_moe") else {}),
    )


def _experts(read: _Reader, family: str) -> dict[str, Any]:
    """Return the fields of `Architecture` that a dense model lacks."""
    read.require("router_jitter_noise", 0.0, 0.0)
    read.require("decoder_sparse_step", 1, 1)
    read.require("mlp_only_layers", [], [], None)
    count = "num_experts" if "num_experts" in read.config else "num_local_experts"  # transformers 5 writes the latter
    return {
        "num_experts": read.size(count),
        "experts_per_token": read.size("num_experts_per_tok"),
        "expert_ffn_size": read.size("moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"),
        "normalizes_probabilities": family != "qwen3_moe" or read.switch("norm_topk_prob", False),
        "router_loss": read.number("router_aux_loss_coef", 0.001),
    }


def _rope(read: _Reader) -> tuple[int, float | None]:
    """Return the base and LLaMA 3's factor. transformers 5 writes ``rope_parameters``, older versions two entries."""
    rope = read.config.get("rope_parameters") or read.config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{read.source}: rope_parameters or rope_scaling is {rope!r}, but must be an object")
    base = rope.get("rope_theta", read.config.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not _is_number(base) or base != int(base):
        raise ValueError(f"{read.source}: rope_theta {_shown(base)} is not an integer, as --rotary-base must be")
    if rope.get("partial_rotary_factor", 1.0) != 1.0 or kind not in ("default", "llama3"):
        shown = kind if kind not in ("default", "llama3") else "with a partial_rotary_factor"
        raise _unsupported(read.source, f"RoPE type {shown} is not supported, only default and llama3")
    if kind == "default":
        return int(base), None
    for name, value in LLAMA3_ROPE.items():
        if rope.get(name) != value:
            raise _unsupported(
                read.source,
                f"{name} {rope.get(name)!r} of the llama3 RoPE is not supported: Megatron Core has {value} built in",
            )
    if not _is_number(rope.get("factor")):
        raise ValueError(f"{read.source}: the llama3 RoPE has no factor")
    return int(base), float(rope["factor"])


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
        return values | _transformers_flags(network)
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


def _transformers_flags(network: Architecture) -> dict[str, Any]:
    """Return neutral values of the flags that choose among Megatron Core's layers, and dropout."""
    return {
        "transformer_impl": TRANSFORMERS,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "swiglu": True,
        "position_embedding_type": "none",
        "hidden_dropout": network.hidden_dropout,
        "attention_dropout": network.attention_dropout,
        "make_vocab_size_divisible_by": 1,
    }


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


def make_config(network: Architecture, *, dtype: str) -> dict[str, Any]:
    """Return a config.json for an architecture. `dtype` is ``float32``, ``bfloat16`` or ``float16``."""
    names = {family: name for name, family in FAMILIES.items()}
    common: dict[str, Any] = {
        "architectures": [names[network.family]],
        "model_type": network.family,
        "torch_dtype": dtype,
        "vocab_size": network.vocab_size,
        "tie_word_embeddings": network.tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    make: Callable[[Architecture], dict[str, Any]] = _gpt2_config if network.family == "gpt2" else _llama_config
    return common | make(network)


def _gpt2_config(network: Architecture) -> dict[str, Any]:
    return {
        "n_layer": network.num_layers,
        "n_embd": network.hidden_size,
        "n_head": network.num_attention_heads,
        "n_inner": network.ffn_hidden_size,
        "n_positions": network.max_positions,
        "layer_norm_epsilon": network.norm_epsilon,
        "activation_function": "gelu" if network.gelu == "exact" else "gelu_new",
        "resid_pdrop": network.hidden_dropout,
        "embd_pdrop": network.embedding_dropout,
        "attn_pdrop": network.attention_dropout,
    }


def _llama_config(network: Architecture) -> dict[str, Any]:
    is_sparse = network.family == "mixtral"
    values: dict[str, Any] = {
        "num_hidden_layers": network.num_layers,
        "hidden_size": network.hidden_size,
        "intermediate_size": network.expert_ffn_size if is_sparse else network.ffn_hidden_size,
        "num_attention_heads": network.num_attention_heads,
        "num_key_value_heads": network.num_query_groups,
        "head_dim": network.head_size,
        "max_position_embeddings": network.max_positions,
        "rms_norm_eps": network.norm_epsilon,
        "rope_theta": float(network.rotary_base or 0),
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_dropout": network.attention_dropout,
    }
    if network.rope_scaling_factor is not None:
        values["rope_scaling"] = {"rope_type": "llama3", "factor": network.rope_scaling_factor, **LLAMA3_ROPE}
    if network.family == "llama":  # the other families have biases or not
        values |= {"attention_bias": network.linear_bias, "mlp_bias": network.linear_bias}
    if network.num_experts:
        values |= {"num_experts_per_tok": network.experts_per_token, "router_aux_loss_coef": network.router_loss}
        count = "num_local_experts" if is_sparse else "num_experts"
        values[count] = network.num_experts
    if network.family == "qwen3_moe":
        values |= {"moe_intermediate_size": network.expert_ffn_size, "mlp_only_layers": [], "decoder_sparse_step": 1}
        values["norm_topk_prob"] = network.normalizes_probabilities
    return values
