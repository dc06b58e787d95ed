"""Parameters, bytes of model state and compute of a phase, by closed formulas (docs/concepts.md).

Model state is weights + gradients + optimizer state, without activations. What a run reports is counted from live
storages instead (`optim.state_bytes`). Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.bcd.blocks.partition import Partition

PRECISIONS = ("fp32", "bf16", "fp16")
ADAMS_MOMENTS = ("fp32", "fp32")
"""Of stock Megatron-LM."""
DTYPE_BYTES = {"fp32": 4, "bf16": 2}
OFFLOADED_BYTES = 16
"""Per parameter in host memory with --optimizer-cpu-offload: weight, gradient and Adam's two moments, all in fp32."""
_MOMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1 + 4 / 256}  # int8 has an fp32 scale per 256 elements


@dataclass(frozen=True, kw_only=True)
class StateBudget:
    """Bytes of model state per parameter, before any sharding: 16 in all in fp32 with Adam, 18 in mixed precision."""

    weight: int  # of every parameter, active or frozen
    gradient: int  # of active ones: Megatron's main gradient
    optimizer: float  # of active ones: moments, and the fp32 main parameter of 16-bit weights


def state_budget(
    *,
    precision: str,
    moments: Sequence[str] = ADAMS_MOMENTS,
    gradients_in_fp32: bool = True,
    precision_aware: bool = False,
) -> StateBudget:
    """``moments`` are the dtypes in which the optimizer stores them: two of Adam's, or SGD's momentum.

    ``gradients_in_fp32`` (--accumulate-allreduce-grads-in-fp32) applies to 16-bit precision: without it gradients have
    2 bytes. ``precision_aware``: the optimizer holds 2 bytes of a main parameter, beside those of the weight.
    """
    stored = sum(_MOMENT_BYTES[dtype] for dtype in moments)
    if precision == "fp32":
        return StateBudget(weight=4, gradient=4, optimizer=stored)
    main_param = 2 if precision_aware else 4
    return StateBudget(weight=2, gradient=4 if gradients_in_fp32 else 2, optimizer=stored + main_param)


def newton_schulz_flops(rows: int, columns: int, *, num_steps: int = 5) -> int:
    """Operations of the orthogonalisation of a matrix: 20 m^2 n + 10 m^3 with 5 steps, m the smaller dimension.

    Each step has three products (`optim.update_rules`): X X^T, its square, and their sum times X.
    """
    smaller, larger = sorted((rows, columns))
    return num_steps * (4 * smaller**2 * larger + 2 * smaller**3)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a dense decoder that determine its number of parameters. Lengths in elements."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    vocab_size: int  # unpadded
    num_positions: int  # rows of the learned position table; 0 without one
    tied: bool  # whether the output head is the embedding
    biases: bool  # of all linear layers
    gated: bool  # whether the MLP has a gate, a third matrix (SwiGLU)
    query_size: int  # width of all query heads; differs from hidden_size with --kv-channels
    key_value_size: int  # of all key heads, and of all value heads: less with grouped-query attention
    shifted_norms: bool  # whether norms have a shift beside their scale (LayerNorm)
    qkv_bias: bool = False  # whether queries, keys and values have a bias; with `biases` they have
    qk_norm_size: int = 0  # width of a head where queries and keys are normalised; else 0
    low_rank: int = 0  # of the adapters beside matrices of layers; 0 without

    @property
    def num_adapter_inputs(self) -> tuple[int, int]:
        """As of the adapters beside query-key-value and the MLP's first matrix: one for each part that is a matrix in
        transformers' models. GPT-2, with a position table, has one for queries, keys and values."""
        return (1 if self.num_positions else 3), 1 + self.gated

    @property
    def num_parameters(self) -> int:
        """The whole model without adapters, with the unpadded vocabulary and a tied head counted once."""
        norm = 1 + self.shifted_norms
        layer = pass_products(self, sequence=0)[0]
        attention, up = self.query_size + 2 * self.key_value_size, 1 + self.gated
        layer += attention * (self.biases or self.qkv_bias)
        layer += (2 * self.hidden_size + up * self.ffn_hidden_size) * self.biases
        layer += 2 * norm * (self.hidden_size + self.qk_norm_size)
        tables = (1 if self.tied else 2) * self.vocab_size + self.num_positions
        return self.num_layers * layer + (tables + norm) * self.hidden_size


def pass_products(shape: ModelShape, *, sequence: int) -> tuple[int, int]:
    """Products per token in one pass of a layer: of its matrices, and of the core of attention."""
    projections = 2 * shape.query_size + 2 * shape.key_value_size
    matrices = shape.hidden_size * (projections + (2 + shape.gated) * shape.ffn_hidden_size)
    return matrices, 2 * sequence * shape.query_size


def adapter_products(shape: ModelShape) -> int:
    """Products per token in one pass of the adapters of a layer."""
    of_qkv, of_fc1 = shape.num_adapter_inputs
    inputs = (of_qkv + of_fc1) * shape.hidden_size + shape.query_size + shape.ffn_hidden_size
    outputs = shape.query_size + 2 * shape.key_value_size + 2 * shape.hidden_size + of_fc1 * shape.ffn_hidden_size
    return shape.low_rank * (inputs + outputs)


def head_passes(shape: ModelShape, *, sequence: int, padded_vocabulary: int) -> float:
    """Cost of one pass of the output head, in passes of a layer."""
    return shape.hidden_size * padded_vocabulary / sum(pass_products(shape, sequence=sequence))


def layer_work(
    partition: Partition, block: int, *, stage: int | None = None, prefix_cached: bool = False
) -> tuple[int, int, int]:
    """Compute of the block's phase on one pipeline stage, or summed over all stages if ``stage`` is None: how many
    layers run forward (F), compute their input gradient (D), and their weight gradients (W; docs/concepts.md).

    Active layers and those updated without state count a W. Every active layer counts a D, also the first one, whose
    input needs none. Embedding, head and optimizer step are not counted. ``prefix_cached`` drops the prefix's F.
    """
    layers = range(partition.num_layers) if stage is None else partition.stage_layers(stage)
    first_active = len(partition.prefix_layers(block))
    after_prefix = sum(layer >= first_active for layer in layers)
    stages = range(partition.num_stages) if stage is None else (stage,)
    stateless = partition.stateless_layers(block)
    active = sum(len(partition.active_layers(block, each)) for each in stages)
    updated = active + sum(layer in stateless for layer in layers)
    return after_prefix if prefix_cached else len(layers), after_prefix, updated


def compute_ratio(partition: Partition, block: int, *, prefix_cached: bool = False) -> float:
    """Step time in the block's phase over full training, by compute of the slowest stage."""
    stages = range(partition.num_stages)
    slowest = max(sum(layer_work(partition, block, stage=stage, prefix_cached=prefix_cached)) for stage in stages)
    return slowest / (3 * max(partition.layers_per_stage))


def total_compute_ratio(partition: Partition, block: int, *, prefix_cached: bool = False) -> float:
    """Compute of the block's phase over full training, summed over all stages."""
    return sum(layer_work(partition, block, prefix_cached=prefix_cached)) / (3 * partition.num_layers)
