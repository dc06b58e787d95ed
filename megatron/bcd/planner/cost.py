"""Parameters, bytes of model state and compute of a phase, by closed formulas (docs/concepts.md).

Model state is weights + gradients + optimizer state, without activations. What a run reports is counted from live
storages instead (`optim.state_bytes`). Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megatron.bcd.blocks.partition import Partition

PRECISIONS = ("fp32", "bf16", "fp16")
_OPTIMIZER_BYTES = {"adam": 8, "sgd": 4, "muon": 8}
"""Of moments per active parameter; with muon those of the parameters that Adam steps."""
OPTIMIZERS = tuple(_OPTIMIZER_BYTES)
DTYPE_BYTES = {"fp32": 4, "bf16": 2}
OFFLOADED_BYTES = 16
"""Per parameter in host memory with --optimizer-cpu-offload: weight, gradient and Adam's two moments, all in fp32."""
_ADAM_MOMENT_SHARES = {"fp32": 1, "bf16": 1 / 2, "fp16": 1 / 2, "int8": (1 + 4 / 256) / 4}
"""Size of a moment to that in fp32, by how it is stored; int8 has an fp32 scale per 256 elements."""


@dataclass(frozen=True, kw_only=True)
class StateBudget:
    """Bytes of model state per parameter, before any sharding."""

    weight: int
    """Every parameter, active or frozen."""
    gradient: int
    """Active parameters: Megatron's main gradient."""
    optimizer: float
    """Active parameters: moments, and the fp32 main parameter of 16-bit weights."""

    @property
    def full(self) -> float:
        """Bytes per parameter while everything is active: 16 in fp32 with Adam, 18 in mixed precision."""
        return self.weight + self.gradient + self.optimizer


def state_budget(
    *,
    precision: str,
    optimizer: str = "adam",
    sgd_momentum: bool = True,
    adam_moments_dtype: str | tuple[str, str] = "fp32",
    gradients_in_fp32: bool = True,
    precision_aware: bool = False,
) -> StateBudget:
    """Bytes per parameter with Adam or SGD; SGD without momentum has no state.

    ``gradients_in_fp32`` (--accumulate-allreduce-grads-in-fp32) applies to 16-bit precision: without it gradients
    have 2 bytes. ``precision_aware``: the optimizer holds 2 bytes of a main parameter, beside those of the weight.
    Raises ValueError for a precision or optimizer that is not in PRECISIONS or OPTIMIZERS.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision}: must be one of {', '.join(PRECISIONS)}")
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"--optimizer {optimizer}: must be one of {', '.join(OPTIMIZERS)}")
    moments = moment_bytes(optimizer, sgd_momentum=sgd_momentum, adam_moments_dtype=adam_moments_dtype)
    if precision == "fp32":
        return StateBudget(weight=4, gradient=4, optimizer=moments)
    main_param = 2 if precision_aware else 4
    return StateBudget(weight=2, gradient=4 if gradients_in_fp32 else 2, optimizer=moments + main_param)


def moment_bytes(
    optimizer: str, *, sgd_momentum: bool = True, adam_moments_dtype: str | tuple[str, str] = "fp32"
) -> float:
    """Bytes of moments per active parameter: two of Adam's, stored alike or as the two say, or SGD's momentum."""
    if optimizer == "sgd":
        return _OPTIMIZER_BYTES[optimizer] if sgd_momentum else 0
    stored = (adam_moments_dtype,) * 2 if isinstance(adam_moments_dtype, str) else adam_moments_dtype
    return _OPTIMIZER_BYTES[optimizer] / 2 * sum(_ADAM_MOMENT_SHARES[dtype] for dtype in stored)


def host_state_bytes(
    *,
    num_kept: int,
    precision: str,
    moments: float,
    main_params: bool = True,
    data_parallel_size: int = 1,
    distributed_optimizer: bool = False,
) -> int:
    """Host memory in bytes of a rank that keeps state of ``num_kept`` parameters between their phases.

    ``moments`` is the bytes per parameter that --bcd-optimizer-state keeps, 0 with reset; ``main_params`` whether
    --bcd-main-params is host. In bf16, 2 bytes restore the
    main parameter; in fp16 it is kept whole. The one bf16 main parameter in some 100,000 that is stored in full is not
    counted.
    """
    kept = moments + main_params * {"fp32": 0, "bf16": 2, "fp16": 4}[precision]
    return math.ceil(kept * num_kept / (data_parallel_size if distributed_optimizer else 1))


def model_state_bytes(
    *,
    num_parameters: int,
    num_active: int,
    precision: str = "fp32",
    optimizer: str = "adam",
    sgd_momentum: bool = True,
    adam_moments_dtype: str | tuple[str, str] = "fp32",
    gradients_in_fp32: bool = True,
    precision_aware: bool = False,
    data_parallel_size: int = 1,
    distributed_optimizer: bool = False,
    offload_fraction: float = 0.0,
) -> int:
    """Model state in bytes of a rank that holds ``num_parameters``, of which ``num_active`` are active.

    The distributed optimizer shards optimizer state, main parameters included, over the replicas; weights
    and gradients are replicated. Buffer padding is not counted. ``offload_fraction`` of the optimizer state is in
    host memory (--optimizer-cpu-offload). Raises ValueError if ``num_active`` is not between 0 and
    ``num_parameters``, or ``data_parallel_size`` < 1.
    """
    if not 0 <= num_active <= num_parameters:
        raise ValueError(f"{num_active} active of {num_parameters} parameters: must be 0 to {num_parameters}")
    if data_parallel_size < 1:
        raise ValueError(f"data-parallel size {data_parallel_size}: must be at least 1")
    budget = state_budget(
        precision=precision,
        optimizer=optimizer,
        sgd_momentum=sgd_momentum,
        adam_moments_dtype=adam_moments_dtype,
        gradients_in_fp32=gradients_in_fp32,
        precision_aware=precision_aware,
    )
    shards = data_parallel_size if distributed_optimizer else 1
    optimizer_bytes = math.ceil((1 - offload_fraction) * budget.optimizer * num_active / shards)
    return budget.weight * num_parameters + budget.gradient * num_active + optimizer_bytes


def matrix_state_bytes(
    *,
    num_matrix: int,
    num_stepped: int,
    grad_dtype: str,
    momentum_dtype: str | None = None,
    precision: str = "fp32",
    data_parallel_size: int = 1,
) -> int:
    """Bytes on a rank beside the weights of matrices that the matrix optimizer steps (`optim.matrix_optimizer`).

    Gradients of the ``num_stepped`` parameters on every rank; momentum (None: none) of these, and in bf16 two bytes of
    all ``num_matrix`` parameters that it holds, divided over the data-parallel ranks as even as matrices allow.
    """
    momentum = 0 if momentum_dtype is None else DTYPE_BYTES[momentum_dtype]
    low_bits = 2 if precision == "bf16" else 0
    owned = momentum * num_stepped + low_bits * num_matrix
    return DTYPE_BYTES[grad_dtype] * num_stepped + -(-owned // data_parallel_size)


def newton_schulz_flops(rows: int, columns: int, *, num_steps: int = 5) -> int:
    """Operations of the orthogonalisation of a matrix: 20 m^2 n + 10 m^3 with 5 steps, m the smaller dimension.

    Each step has three products (`optim.update_rules`): X X^T, its square, and their sum times X.
    """
    smaller, larger = sorted((rows, columns))
    return num_steps * (4 * smaller**2 * larger + 2 * smaller**3)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a dense decoder that determine its number of parameters; made by ``gpt2`` or ``llama``.

    Lengths in elements.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    vocab_size: int
    """Unpadded."""
    num_positions: int
    """Rows of the learned position table; 0 without one."""
    tied: bool
    """Whether the output head is the embedding."""
    biases: bool
    """Whether linear layers have a bias."""
    gated: bool
    """Whether the MLP has a gate, a third matrix (SwiGLU)."""
    query_size: int
    """Width of all query heads; differs from ``hidden_size`` with --kv-channels."""
    key_value_size: int
    """Width of all key heads, and of all value heads: less than ``query_size`` with grouped-query attention."""
    shifted_norms: bool
    """Whether norms have a shift beside their scale (LayerNorm)."""
    qkv_bias: bool = False
    """Whether queries, keys and values have a bias; with ``biases`` they have."""
    qk_norm_size: int = 0
    """Width of a head where queries and keys are normalised; else 0."""

    @property
    def layer_parameters(self) -> int:
        """One transformer layer: attention, MLP and two norms."""
        projections = 2 * self.query_size + 2 * self.key_value_size
        matrices = self.hidden_size * (projections + (self._up_projections + 1) * self.ffn_hidden_size)
        return matrices + self.layer_biases + self.layer_norms

    @property
    def layer_biases(self) -> int:
        """Biases of one layer's linear layers."""
        attention = self.query_size + 2 * self.key_value_size
        others = 2 * self.hidden_size + self._up_projections * self.ffn_hidden_size
        return attention * (self.biases or self.qkv_bias) + others * self.biases

    @property
    def layer_norms(self) -> int:
        """Norms of one layer."""
        return 2 * self.norm_parameters + 2 * (1 + self.shifted_norms) * self.qk_norm_size

    @property
    def _up_projections(self) -> int:
        return 2 if self.gated else 1

    @property
    def norm_parameters(self) -> int:
        """One norm, also the final one."""
        return (1 + self.shifted_norms) * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """The whole model, with the unpadded vocabulary and a tied head counted once."""
        layers = self.num_layers * self.layer_parameters
        tables = self.embedding_parameters() + (0 if self.tied else self.head_parameters())
        return layers + tables + self.norm_parameters

    def embedding_parameters(self, vocab_size: int | None = None) -> int:
        """Word and position tables; pass ``vocab_size`` for a padded vocabulary."""
        return (_or_default(vocab_size, self.vocab_size) + self.num_positions) * self.hidden_size

    def head_parameters(self, vocab_size: int | None = None) -> int:
        """The output head: a separate matrix, or the tied copy."""
        return _or_default(vocab_size, self.vocab_size) * self.hidden_size


def gpt2(
    *,
    num_layers: int,
    hidden_size: int,
    vocab_size: int = 50257,
    num_positions: int = 1024,
    ffn_hidden_size: int | None = None,
    tied: bool = True,
) -> ModelShape:
    """GPT-2: learned positions, LayerNorm, biases; FFN of 4 x hidden by default.

    Tied, with an FFN of 4 x hidden: L (12 H^2 + 13 H) + (V + S) H + 2 H parameters, as in table 8 of the paper
    (arXiv 2506.12037).
    """
    return ModelShape(
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=_or_default(ffn_hidden_size, 4 * hidden_size),
        vocab_size=vocab_size,
        num_positions=num_positions,
        tied=tied,
        biases=True,
        gated=False,
        query_size=hidden_size,
        key_value_size=hidden_size,
        shifted_norms=True,
    )


def llama(
    *,
    num_layers: int,
    hidden_size: int,
    ffn_hidden_size: int,
    vocab_size: int = 32000,
    tied: bool = False,
    query_size: int | None = None,
    key_value_size: int | None = None,
) -> ModelShape:
    """LLaMA: no position table, RMSNorm, SwiGLU, no biases; by default all heads together are as wide as the model.

    Untied, with that width: L (4 H^2 + 3 H F + 2 H) + H + 2 V H parameters, as in table 8 of the paper
    (arXiv 2506.12037).
    """
    return ModelShape(
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=ffn_hidden_size,
        vocab_size=vocab_size,
        num_positions=0,
        tied=tied,
        biases=False,
        gated=True,
        query_size=_or_default(query_size, hidden_size),
        key_value_size=_or_default(key_value_size, _or_default(query_size, hidden_size)),
        shifted_norms=False,
    )


def pass_products(shape: ModelShape, *, sequence: int) -> tuple[int, int]:
    """Products per token in one pass of a layer: of its matrices, and of the core of attention."""
    projections = 2 * shape.query_size + 2 * shape.key_value_size
    matrices = shape.hidden_size * (projections + (3 if shape.gated else 2) * shape.ffn_hidden_size)
    return matrices, 2 * sequence * shape.query_size


def head_passes(shape: ModelShape, *, sequence: int, padded_vocabulary: int) -> float:
    """Passes of a layer that have as much arithmetic as one pass of the output head."""
    return shape.hidden_size * padded_vocabulary / sum(pass_products(shape, sequence=sequence))


def stage_parameters(shape: ModelShape, partition: Partition, *, padded_vocab_size: int) -> tuple[int, ...]:
    """Parameters that each pipeline stage holds at tensor-parallel size 1, the tied head's copy included."""
    alone = replace(partition, always_active=frozenset(), frozen=frozenset(), has_active_block=True)
    per_block = [
        active_parameters(shape, alone, block, padded_vocab_size=padded_vocab_size)
        for block in range(partition.num_blocks)
    ]
    return tuple(sum(by_stage) for by_stage in zip(*per_block, strict=True))


def active_parameters(
    shape: ModelShape, partition: Partition, block: int, *, padded_vocab_size: int
) -> tuple[int, ...]:
    """Parameters of each pipeline stage that are active in the block's phase, at tensor-parallel size 1.

    Resting layers are not active: their matrices are updated without state. Nor is what --bcd-frozen names.
    """
    assert (shape.num_layers, shape.tied) == (partition.num_layers, partition.tied)
    last = partition.num_stages - 1
    of_layer = shape.layer_parameters - shape.layer_norms * ("norms" in partition.frozen)
    counts = [len(partition.active_layers(block, stage)) * of_layer for stage in range(partition.num_stages)]
    of_other_layers = shape.layer_norms * partition.norms_always_active
    of_other_layers += shape.layer_biases * ("biases" in partition.always_active)
    for stage in range(partition.num_stages):
        others = len(partition.stage_layers(stage)) - len(partition.active_layers(block, stage))
        counts[stage] += others * of_other_layers
    if partition.embedding_active(block):
        counts[0] += shape.embedding_parameters(padded_vocab_size)
    if partition.final_norm_active(block):
        counts[last] += shape.norm_parameters
    # on a single stage a tied head is the embedding itself, not a copy
    if partition.head_active(block) and not (partition.tied and last == 0):
        counts[last] += shape.head_parameters(padded_vocab_size)
    return tuple(counts)


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """Compute of one step, in units of one layer's forward pass (docs/concepts.md)."""

    forward: int
    """Layers that run forward (F)."""
    input_gradient: int
    """Layers that compute their input gradient (D)."""
    weight_gradient: int
    """Layers that compute their weight gradients (W)."""

    @property
    def total(self) -> int:
        """F + D + W, each counted as 1."""
        return self.forward + self.input_gradient + self.weight_gradient


def layer_work(partition: Partition, block: int, *, stage: int | None = None, prefix_cached: bool = False) -> LayerWork:
    """Compute of the block's phase on one pipeline stage, or summed over all stages if ``stage`` is None.

    Active and resting layers count a W. Every active layer counts a D, also the first one, whose input needs none.
    Embedding, head and optimizer step are not counted. ``prefix_cached`` drops the prefix's F.
    """
    layers = range(partition.num_layers) if stage is None else partition.stage_layers(stage)
    first_active = len(partition.prefix_layers(block))
    after_prefix = sum(layer >= first_active for layer in layers)
    stages = range(partition.num_stages) if stage is None else (stage,)
    resting = partition.resting_layers(block)
    return LayerWork(
        forward=after_prefix if prefix_cached else len(layers),
        input_gradient=after_prefix,
        weight_gradient=sum(len(partition.active_layers(block, each)) for each in stages)
        + sum(layer in resting for layer in layers),
    )


def compute_ratio(partition: Partition, block: int, *, prefix_cached: bool = False) -> float:
    """Step time in the block's phase over full training, by compute of the slowest stage."""
    stages = range(partition.num_stages)
    slowest = max(layer_work(partition, block, stage=stage, prefix_cached=prefix_cached).total for stage in stages)
    return slowest / (3 * max(partition.layers_per_stage))


def total_compute_ratio(partition: Partition, block: int, *, prefix_cached: bool = False) -> float:
    """Compute of the block's phase over full training, summed over all stages."""
    return layer_work(partition, block, prefix_cached=prefix_cached).total / (3 * partition.num_layers)


def _or_default(value: int | None, default: int) -> int:
    return default if value is None else value
