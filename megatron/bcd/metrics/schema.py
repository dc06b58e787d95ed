"""The facts of a run that are told: one dataclass per kind."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One log step of training, already reduced over all ranks."""

    iteration: int
    """Optimizer steps done, this one included."""
    consumed_samples: int
    cycle: int
    phase: int
    block: int
    loss: float
    """Mean over the log interval, as Megatron logs it."""
    learning_rate: float
    grad_norm: float | None
    """Norm of the active block's gradient before clipping; None if it was not computed."""
    step_time_ms: float
    """Mean milliseconds per iteration over the log interval."""
    tokens_per_second: float
    """Over all ranks."""
    model_state_bytes: tuple[int, ...]
    """Live bytes of weights + gradients + optimizer state, by rank."""
    peak_memory_bytes: tuple[int, ...]
    """By rank."""
    gradient_bytes: tuple[int, ...] = ()
    """By rank: of the model state, the gradient buffers."""
    optimizer_state_bytes: tuple[int, ...] = ()
    """By rank: of the model state, moments and main parameters."""
    host_state_bytes: tuple[int, ...] = ()
    """By rank: optimizer state in host memory, of frozen blocks and with offload; no part of the model state."""
    saved_activation_bytes: tuple[int, ...] = ()
    """By rank: highest that autograd kept for the backward pass at once, measured in the phase's first iteration."""
    backward_messages: tuple[int, ...] = ()
    """By rank: gradients sent to and received from other pipeline stages in the last iteration."""
    loss_scale: float | None = None
    """fp16 only."""
    skipped_iterations: int = 0
    """Steps that an fp16 overflow skipped since the last record."""
    global_batch_size: int = 0
    data_seen: float = 0.0
    """Share of one epoch of the training split that the run has trained on, 0 to 1."""
    prefix_cache_hits: int = 0
    """Samples since the last record whose prefix was read and not computed, over all ranks."""
    prefix_cache_bytes: int = 0
    """Of all caches below --bcd-prefix-cache."""


@dataclass(frozen=True, kw_only=True)
class EvalMetrics:
    """One evaluation; `split` is "validation" or "test"."""

    iteration: int
    consumed_samples: int
    split: str
    loss: float
    is_final: bool = False
    """After the last training step: on samples of its own, also where an interval's evaluation came just before."""

    def __post_init__(self) -> None:
        assert self.split in ("validation", "test"), self.split

    @property
    def perplexity(self) -> float:
        """exp(min(20, loss)) as Megatron prints it, but NaN stays NaN."""
        return math.nan if math.isnan(self.loss) else math.exp(min(20.0, self.loss))


@dataclass(frozen=True, kw_only=True)
class BlockSummary:
    """One block, as the banner shows it."""

    index: int
    layers: str
    """Global layer indices, such as "0, 3" or "0-3, 6-9"."""
    share: float
    """Of the model's parameters, 0 to 1."""
    extras: str = ""
    """What else the block owns: "embedding", "final norm, head"."""
    model_state_bytes: tuple[int, ...]
    """By rank, while this block is active; estimated before the run."""

    @property
    def contents(self) -> str:
        """ "layers 0, 3 and embedding"."""
        layers = f"layer{'' if self.layers.isdigit() else 's'} {self.layers}" if self.layers else ""
        return " and ".join(part for part in (layers, self.extras) if part)


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What the start banner shows."""

    model: str
    parallel: str
    parameters_per_stage: tuple[int, ...]
    total_parameters: int
    """The tied copy counted once."""
    blocks: tuple[BlockSummary, ...]
    layout: str
    phases: str
    """Order and length of the phases."""
    full_model_state_bytes: tuple[int, ...]
    """By rank: what full-parameter training would need."""
    training: str
    notes: tuple[str, ...] = ()
    """Such as the implementation chosen for attention, norm and optimizer."""
