"""Which modules and kernels this machine offers, and so which the model is built from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.bcd.config import RunConfig
from megatron.bcd.runtime import packages

SCALED_DOT_PRODUCT = "scaled_dot_product_attention"


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """Which modules and kernels this machine offers, and so which the model is made of."""

    layers: str  # "transformer_engine" or "local"
    attention: str
    norm: str
    optimizer: str

    def describe(self) -> str:
        return f"layers {self.layers}, attention {self.attention}, norm {self.norm}, optimizer {self.optimizer}"


def choose_implementation(
    transformer_impl: str,
    *,
    attention_backend: str = "auto",
    normalization: str = "LayerNorm",
    precision: str = "bf16",
    transformer_engine: bool,
    apex: bool,
    optimizer: str,
) -> Implementation:
    """The fast path where it exists, else Megatron Core's local modules.

    Transformer Engine's fused attention is for 16-bit values: in fp32 it would keep the S x S scores of every head, so
    its layers get PyTorch's.

    Raises:
        ValueError: Transformer Engine is asked for by name and can't be used here.
    """
    if transformer_impl == "transformer_engine" and not transformer_engine:
        raise ValueError(
            "--transformer-impl transformer_engine needs Transformer Engine and a GPU; install it, or use auto or local"
        )
    if transformer_engine and transformer_impl != "local":
        takes_ours = precision == "fp32" and attention_backend != "unfused"
        return Implementation(
            layers="transformer_engine",
            attention=SCALED_DOT_PRODUCT if takes_ours else "Transformer Engine",
            norm="Transformer Engine",
            optimizer=optimizer,
        )
    attention = "Megatron Core unfused" if attention_backend == "unfused" else SCALED_DOT_PRODUCT
    norm = f"Apex fused {normalization}" if apex and normalization == "LayerNorm" else f"PyTorch {normalization}"
    return Implementation(layers="local", attention=attention, norm=norm, optimizer=optimizer)


def implementation_here(config: RunConfig) -> Implementation:
    """`choose_implementation` for this run on this machine."""
    return choose_implementation(
        config.model.transformer_impl,
        attention_backend=str(config.transformer.get("attention_backend", "auto")),
        normalization=str(config.transformer.get("normalization", "LayerNorm")),
        precision=config.precision,
        transformer_engine=packages.has_transformer_engine(),
        apex=packages.has_apex(),
        optimizer=packages.optimizer_implementation(),
    )
