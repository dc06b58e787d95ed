"""Schema of what a run reports: one dataclass per kind."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One log step of training, already reduced over all ranks."""

    iteration: int
    """Optimizer steps done, including this one."""
    consumed_samples: int
    cycle: int
    phase: int
    block: int
    loss: float
    """Mean over the log interval, as Megatron logs it."""
    learning_rate: float
    """Of the next step, as Megatron logs it; of the last step with a phase warm-up or factors of blocks."""
    grad_norm: float | None
    """Norm of the active block's gradient before clipping; None if not computed."""
    step_time_ms: float
    """Mean milliseconds per iteration over the log interval."""
    tokens_per_second: float
    """Over all ranks."""
    model_state_bytes: tuple[int, ...]
    """Live bytes of weights + gradients + optimizer state, by rank."""
    peak_memory_bytes: tuple[int, ...]
    """By rank."""
    reserved_memory_bytes: tuple[int, ...] = ()
    """By rank: peak of what PyTorch's allocator holds on the GPU, unused parts included; 0 on a CPU."""
    gradient_bytes: tuple[int, ...] = ()
    """By rank: gradient buffers, part of the model state."""
    optimizer_state_bytes: tuple[int, ...] = ()
    """By rank: moments and main parameters, part of the model state."""
    host_state_bytes: tuple[int, ...] = ()
    """By rank: optimizer state in host memory (frozen blocks, offload), not part of the model state."""
    saved_activation_bytes: tuple[int, ...] = ()
    """By rank: peak of what autograd saves for the backward pass, measured in the phase's first iteration."""
    backward_messages: tuple[int, ...] = ()
    """By rank: gradient messages sent and received in the last iteration."""
    loss_scale: float | None = None
    """fp16 only."""
    skipped_iterations: int = 0
    """Steps skipped by an fp16 overflow since the last log step."""
    global_batch_size: int = 0
    params_norm: float | None = None
    """--log-params-norm: of all weights."""
    num_zeros: int | None = None
    """--log-num-zeros-in-grad: in the last step's gradient."""
    tflops_per_gpu: float | None = None
    """--log-throughput: 10^12 floating-point operations per second and rank, of what the phase computes."""
    timers_ms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """--timing-log-level: milliseconds of a step, by timer and rank; 0 where a rank has no such timer."""
    straggler_ms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """--log-straggler: milliseconds by rank: `forward`, the forward passes of a step; `batch`, the longest wait for
    one."""
    exchanged_bytes: tuple[int, ...] = ()
    """By rank: sent to other replica groups since the last log step; empty without them."""
    exchange_ms: int | None = None
    """Milliseconds of waiting for exchanges with them since the last log step, of the rank that waited longest."""
    data_seen: float = 0.0
    """Share of one epoch of the training split that the run has trained on, 0 to 1."""
    prefix_cache_hits: int = 0
    """Samples since the last log step whose prefix was read from the cache, over all ranks."""
    prefix_cache_bytes: int = 0
    """Size of all caches below --bcd-prefix-cache."""


@dataclass(frozen=True, kw_only=True)
class EvalMetrics:
    """One evaluation; `split` is "validation" or "test"."""

    iteration: int
    consumed_samples: int
    split: str
    loss: float
    is_final: bool = False
    """The evaluation after the last training step, on the next samples; it may follow an interval's evaluation."""
    accuracy: float | None = None
    """Of a classifier, 0 to 1."""

    def __post_init__(self) -> None:
        assert self.split in ("validation", "test"), self.split

    @property
    def perplexity(self) -> float:
        """exp(min(20, loss)) as Megatron prints it, but NaN stays NaN."""
        return math.nan if math.isnan(self.loss) else math.exp(min(20.0, self.loss))


@dataclass(frozen=True, kw_only=True)
class ExchangeMetrics:
    """One exchange with other replica groups. Groups whose lines have the same `lineage` were in the same one: but for
    `group`, these lines are equal."""

    iteration: int
    consumed_samples: int
    group: int
    """Number of this group among `groups`, until the next exchange."""
    groups: int
    lineage: int
    """Of all exchanges of this group up to this one."""
    values: int
    """Digest of the values that the groups have reached of what the phase trains, on all ranks of this group."""


@dataclass(frozen=True, kw_only=True)
class BlockSummary:
    """One block in the run summary."""

    index: int
    layers: str
    """Global layer indices, such as "0, 3" or "0-3, 6-9"."""
    share: float
    """Of the model's parameters, 0 to 1."""
    extras: str = ""
    """Other parameters of the block: "embedding", "final norm, head"."""
    model_state_bytes: tuple[int, ...]
    """By rank, while this block is active; an estimate."""

    @property
    def contents(self) -> str:
        """ "layers 0, 3 and embedding"."""
        layers = f"layer{'' if self.layers.isdigit() else 's'} {self.layers}" if self.layers else ""
        return " and ".join(part for part in (layers, self.extras) if part)


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What is printed before the first step."""

    model: str
    parallel: str
    parameters_per_stage: tuple[int, ...]
    total_parameters: int
    """A tied head counted once."""
    blocks: tuple[BlockSummary, ...]
    layout: str
    phases: str
    """Order and length of the phases."""
    full_model_state_bytes: tuple[int, ...]
    """By rank, in full-parameter training by stock Megatron-LM: Adam with fp32 moments, or SGD."""
    training: str
    notes: tuple[str, ...] = ()
    """For example the implementation of attention, norm and optimizer."""
    warnings: tuple[str, ...] = ()
    """What the user should act on."""
