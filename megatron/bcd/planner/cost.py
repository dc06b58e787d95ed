"""Closed formulas for sizes, bytes of model state, and compute of a phase (docs/concepts.md). Pure.

Model state is weights, gradients and optimizer state, without activations. A run reports what it counts from live
storages instead (`optim.state_bytes`).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.bcd.blocks.partition import Partition
from megatron.bcd.config import RunConfig
from megatron.bcd.config.measured import MeasuredModel, Parameters

PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
"""fp8: bf16 with FP8 products (--fp8-recipe tensorwise)."""
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "int8": 1, "uint8": 1}
OFFLOADED_BYTES = 16
"""Bytes of host memory per parameter with --optimizer-cpu-offload: weight, gradient and two moments, all in fp32."""
MOMENT_BYTES = {"fp32": 4, "bf16": 2, "int8": 1 + 4 / 256}
"""Bytes of an element. 8 bits have an fp32 scale per 256 elements."""


@dataclass(frozen=True, kw_only=True)
class StateBudget:
    """Bytes of model state per parameter before sharding. With Adam their sum is 16 in fp32, 18 in mixed precision."""

    weight: int  # every parameter, active or frozen
    gradient: int  # active parameters: Megatron's main gradient
    optimizer: float  # active parameters: moments, and the fp32 main parameter of a 16-bit weight
    moments: float  # of these the moments


def offload_fraction(config: RunConfig) -> float:
    """Return the share of the optimizer state that is in host memory."""
    return config.optimizer.optimizer_offload_fraction if config.optimizer.optimizer_cpu_offload else 0.0


def state_budget(config: RunConfig, *, adam_moments: str | None = None) -> StateBudget:
    """Return the bytes per parameter. `adam_moments` is the dtype of Adam's moments, by default the run's."""
    moments = 2 * MOMENT_BYTES[adam_moments or config.training.adam_moments_dtype]
    if config.precision == "fp32":
        return StateBudget(weight=4, gradient=4, optimizer=moments, moments=moments)
    gradient = 4 if config.ddp.grad_reduce_in_fp32 else 2
    return StateBudget(weight=2, gradient=gradient, optimizer=moments + 4, moments=moments)


def newton_schulz_flops(rows: int, columns: int, *, num_steps: int = 5, is_gram_iterated: bool = False) -> int:
    """Return the operations that orthogonalise a matrix: 20 m^2 n + 10 m^3 with 5 steps, m the smaller dimension.

    Each step has three products (`optim.update_rules`): X X^T, its square, and their sum times X. With
    `is_gram_iterated` X X^T and the product with X are computed once for up to 3 steps: 8 m^2 n + 28 m^3.
    """
    smaller, larger = sorted((rows, columns))
    if is_gram_iterated and larger >= 2 * smaller:
        num_restarts = -(-num_steps // 3)
        return num_restarts * (4 * smaller**2 * larger - 6 * smaller**3) + num_steps * 8 * smaller**3
    return num_steps * (4 * smaller**2 * larger + 2 * smaller**3)


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """The sizes of the experts."""

    number: int  # in a layer
    per_token: int  # experts that a token reaches, beside the shared one
    ffn_hidden_size: int
    shared: int = 0  # inner width of the expert that every token passes through; 0 without one
    is_gated: bool = False  # whether a gate scales the shared expert's output
    layers: tuple[bool, ...]  # whether each layer has experts
    is_grouped: bool = False  # whether one product computes all of them


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder that determine its number of parameters. Lengths are in elements."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    vocab_size: int  # unpadded
    num_positions: int  # rows of the learned position table; 0 without one
    tied: bool  # whether the output head is the embedding
    biases: bool  # whether all linear layers have a bias
    gated: bool  # whether the MLP has a gate, a third matrix (SwiGLU)
    query_size: int  # width of all query heads; differs from hidden_size with --kv-channels
    key_value_size: int  # width of all key heads, and of all value heads: less with grouped-query attention
    shifted_norms: bool  # whether norms have a shift beside their scale (LayerNorm)
    qkv_bias: bool = False  # whether queries, keys and values have a bias; with `biases` they always do
    qk_norm_size: int = 0  # width of a head where queries and keys are normalised; else 0
    experts: ExpertShape | None = None
    measured: MeasuredModel | None = None
    """Layers of a model of transformers; then the sizes of layers above do not count."""
    parameters: Parameters = ()
    """Names and shapes of all parameters if transformers' layers compute the model; layers have their whole numbers."""

    @property
    def active_ffn(self) -> int:
        """The inner width of the feed-forward part that a token passes through, on average over the layers."""
        if self.experts is None:
            return self.ffn_hidden_size
        experts = self.experts
        number, width = sum(experts.layers), experts.per_token * experts.ffn_hidden_size + experts.shared
        return (number * width + (self.num_layers - number) * self.ffn_hidden_size) // self.num_layers


def shape_of(config: RunConfig, *, vocab_size: int, parameters: Parameters = ()) -> ModelShape:
    """Return the sizes of the model. `parameters` are those of `ModelShape`, if they are not measured."""
    fields = config.transformer
    hidden, heads = config.hidden_size, int(fields["num_attention_heads"])
    channels = fields.get("kv_channels") or hidden // heads
    has_positions = config.model.position_embedding_type == "learned_absolute"
    return ModelShape(
        num_layers=config.num_layers,
        hidden_size=hidden,
        ffn_hidden_size=fields.get("ffn_hidden_size") or 4 * hidden,
        vocab_size=vocab_size,
        num_positions=config.model.max_position_embeddings if has_positions else 0,
        tied=config.tied,
        biases=bool(fields["add_bias_linear"]),
        gated=config.model.swiglu,
        query_size=heads * channels,
        key_value_size=(fields.get("num_query_groups") or heads) * channels,
        shifted_norms=fields.get("normalization", "LayerNorm") == "LayerNorm",
        qkv_bias=bool(fields.get("add_qkv_bias")),
        qk_norm_size=channels if fields.get("qk_layernorm") else 0,
        experts=_experts_of(config),
        measured=config.measured,
        parameters=config.measured.parameters if config.measured else parameters,
    )


def _experts_of(config: RunConfig) -> ExpertShape | None:
    """Return the sizes of the experts; None for a dense model."""
    fields = config.transformer
    if not config.num_experts:
        return None
    pattern = fields["moe_layer_freq"]
    return ExpertShape(
        number=config.num_experts,
        per_token=fields["moe_router_topk"],
        ffn_hidden_size=fields["moe_ffn_hidden_size"],
        shared=fields.get("moe_shared_expert_intermediate_size") or 0,
        is_gated=bool(fields.get("moe_shared_expert_intermediate_size") and fields["moe_shared_expert_gate"]),
        layers=tuple(map(bool, pattern)) if isinstance(pattern, list) else (True,) * config.num_layers,
        is_grouped=bool(fields.get("moe_grouped_gemm")),
    )


def pass_products(shape: ModelShape, *, sequence: int) -> tuple[int, int]:
    """Return the products per token in one pass of a layer: those of its matrices, and those of attention's core."""
    if shape.measured is not None:
        return round(shape.measured.mean("matrices")), round(shape.measured.mean("core"))
    projections = 2 * shape.query_size + 2 * shape.key_value_size
    matrices = shape.hidden_size * (projections + (2 + shape.gated) * shape.active_ffn)
    return matrices, 2 * sequence * shape.query_size


def fp8_matrices(shape: ModelShape) -> list[tuple[int, int]]:
    """Return outputs and inputs of the matrices of a layer that multiply in FP8: multiples of 16, and no experts."""
    hidden, query = shape.hidden_size, shape.query_size
    matrices = [(query + 2 * shape.key_value_size, hidden), (hidden, query)]
    if shape.measured is not None:
        layer = [size for name, size in shape.parameters if ".layers.0." in name and len(size) == 2]
        matrices = [(rows, columns) for rows, columns in layer]
    elif shape.experts is None:
        matrices += [((1 + shape.gated) * shape.ffn_hidden_size, hidden), (hidden, shape.ffn_hidden_size)]
    return [each for each in matrices if not any(size % 16 for size in each)]


def layer_work(
    partition: Partition, block: int, *, stage: int | None = None, prefix_cached: bool = False
) -> tuple[int, int, int]:
    """Return the number of layers that run forward (F), compute input gradients (D), and compute weight gradients (W).

    The numbers are those of the block's phase on one stage, or on all stages if ``stage`` is None (docs/concepts.md).
    Active layers count a W, and so do layers with an inactive update. Every active layer counts a D, even the first
    one, whose input needs none. Embedding, head and optimizer step do not count. ``prefix_cached`` drops the prefix's
    F.
    """
    stages = slice(None) if stage is None else slice(stage, None, partition.num_stages)
    behind_prefix = [updated[block] for updated in partition.behind_prefix[stages]]
    num_forward, num_backward = (sum(map(len, layers)) for layers in (partition.virtual_stages[stages], behind_prefix))
    return num_backward if prefix_cached else num_forward, num_backward, sum(map(sum, behind_prefix))
