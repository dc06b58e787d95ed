"""Choose the modules and kernels of the model: Transformer Engine, Apex or local."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.bcd.config import RunConfig
from megatron.bcd.runtime import packages

TRANSFORMERS = "transformers"
SCALED_DOT_PRODUCT, UNFUSED = "scaled_dot_product_attention", "Megatron Core unfused"


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """The modules and kernels of the model."""

    layers: str
    """`transformer_engine`, `local` or `transformers`."""
    attention: str
    norm: str
    optimizer: str

    def describe(self) -> str:
        if self.layers == TRANSFORMERS:
            return (
                f"layers {self.layers}, with their attention and norms, optimizer {self.optimizer}; not available: "
                "tensor, context and expert parallelism"
            )
        return f"layers {self.layers}, attention {self.attention}, norm {self.norm}, optimizer {self.optimizer}"


def choose_implementation(
    transformer_impl: str,
    *,
    attention_backend: str = "auto",
    normalization: str = "LayerNorm",
    precision: str = "bf16",
    has_attention_mask: bool = False,
    is_unfused: bool = False,
    transformer_engine: bool,
    apex: bool,
    optimizer: str,
) -> Implementation:
    """Return Transformer Engine's layers if available, else Megatron Core's local ones.

    Its layers use PyTorch's attention in fp32, because its own would materialise the S x S scores of every head. They
    also use it with `has_attention_mask` (--reset-attention-mask): its fused attention is causal and takes no mask.
    With `is_unfused` (sinks, windows) attention is Megatron Core's unfused one in all layers.

    Raises:
        ValueError: `transformer_impl` is `transformer_engine`, but that is not available.
    """
    if transformer_impl == "transformer_engine" and not transformer_engine:
        raise ValueError(
            "--transformer-impl transformer_engine: Transformer Engine or a GPU is missing. Install it, or use auto or "
            "local."
        )
    if transformer_impl == TRANSFORMERS:
        return Implementation(layers=TRANSFORMERS, attention=SCALED_DOT_PRODUCT, norm=TRANSFORMERS, optimizer=optimizer)
    if transformer_engine and transformer_impl != "local":
        uses_sdpa = has_attention_mask or precision == "fp32" and attention_backend != "unfused"
        return Implementation(
            layers="transformer_engine",
            attention=UNFUSED if is_unfused else SCALED_DOT_PRODUCT if uses_sdpa else "Transformer Engine",
            norm="Transformer Engine",
            optimizer=optimizer,
        )
    attention = UNFUSED if is_unfused or attention_backend == "unfused" else SCALED_DOT_PRODUCT
    norm = f"Apex fused {normalization}" if apex and normalization == "LayerNorm" else f"PyTorch {normalization}"
    return Implementation(layers="local", attention=attention, norm=norm, optimizer=optimizer)


def available_implementation(config: RunConfig) -> Implementation:
    """Return the implementation for this run, given the packages that can be imported.

    Raises:
        ValueError: as `choose_implementation`.
    """
    return choose_implementation(
        config.model.transformer_impl,
        attention_backend=str(config.transformer.get("attention_backend", "auto")),
        normalization=str(config.transformer.get("normalization", "LayerNorm")),
        precision=config.precision,
        has_attention_mask=config.data.reset_attention_mask,
        is_unfused=config.has_unfused_attention,
        transformer_engine=packages.has_transformer_engine(),
        apex=packages.has_apex(),
        optimizer=packages.optimizer_implementation(),
    )
