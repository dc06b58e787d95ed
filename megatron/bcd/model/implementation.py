"""Choose the modules and kernels of the model: Transformer Engine, Apex or local."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.bcd.config import RunConfig
from megatron.bcd.runtime import device, packages

TRANSFORMERS = "transformers"
SCALED_DOT_PRODUCT, UNFUSED = "scaled_dot_product_attention", "Megatron Core unfused"


def attends_by_text(config: RunConfig) -> bool:
    """Return whether the layers take the bounds of packed texts and no mask; transformers' make masks of their own."""
    can = config.can_attend_by_text and device.has_variable_length_attention()
    return can or config.model.transformer_impl == TRANSFORMERS


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """The modules and kernels of the model."""

    layers: str
    """`transformer_engine`, `local` or `transformers`."""
    attention: str
    norm: str
    optimizer: str
    by_text: bool = False
    """Whether variable-length attention replaces it for packed texts."""

    def describe(self) -> str:
        if self.layers == TRANSFORMERS:
            return (
                f"layers {self.layers}, with their attention and norms, optimizer {self.optimizer}; not available: "
                "tensor, context and expert parallelism"
            )
        attention = f"{self.attention}{', of each text varlen_attn' * self.by_text}"
        return f"layers {self.layers}, attention {attention}, norm {self.norm}, optimizer {self.optimizer}"


def available_implementation(config: RunConfig) -> Implementation:
    """Return Transformer Engine's layers if available, else Megatron Core's local ones.

    Its layers use PyTorch's attention in fp32, because its own would materialise the S x S scores of every head. They
    also use it with --reset-attention-mask: its fused attention is causal, and here it is given no texts.

    Raises:
        ValueError: --transformer-impl transformer_engine, but that is not available.
    """
    wanted, has_engine = config.model.transformer_impl, packages.has_transformer_engine()
    if wanted == "transformer_engine" and not has_engine:
        raise ValueError(
            "--transformer-impl transformer_engine: Transformer Engine or a GPU is missing. Install it, or use auto or "
            "local."
        )
    by_text = attends_by_text(config)
    asks_unfused = config.transformer.get("attention_backend") == "unfused"
    optimizer = packages.optimizer_implementation()
    if wanted == TRANSFORMERS:
        return Implementation(layers=TRANSFORMERS, attention=SCALED_DOT_PRODUCT, norm=TRANSFORMERS, optimizer=optimizer)
    if has_engine and wanted != "local" and not config.fp8_products:
        name, uses_sdpa = "Transformer Engine", config.precision == "fp32" and not asks_unfused
        attention = SCALED_DOT_PRODUCT if uses_sdpa or config.data.reset_attention_mask else name
        return Implementation(
            layers="transformer_engine", attention=attention, norm=name, optimizer=optimizer, by_text=by_text
        )
    attention = UNFUSED if asks_unfused else SCALED_DOT_PRODUCT
    normalization = config.transformer.get("normalization", "LayerNorm")
    is_apex = normalization == "LayerNorm" and packages.has_apex()
    norm = f"Apex fused {normalization}" if is_apex else f"PyTorch {normalization}"
    return Implementation(layers="local", attention=attention, norm=norm, optimizer=optimizer, by_text=by_text)
