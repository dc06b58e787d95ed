"""The metrics and summaries that a run reports."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One log step of training, reduced over all ranks."""

    iteration: int
    """Number of optimizer steps, including this one."""
    consumed_samples: int
    cycle: int
    phase: int
    block: int
    loss: float
    """Mean over the log interval, as in Megatron-LM."""
    learning_rate: float
    """Rate of the next step, as in Megatron-LM."""
    step_learning_rate: float | None = None
    """Rate of the last step, which the log line shows."""
    grad_norm: float | None
    """Norm of the active block's gradient before clipping; None if not computed."""
    step_time_ms: float
    """Mean milliseconds per iteration over the log interval."""
    tokens_per_second: float
    """Sum over all ranks."""
    model_state_bytes: tuple[int, ...]
    """Live bytes of weights + gradients + optimizer state, by rank."""
    peak_memory_bytes: tuple[int, ...]
    """By rank: peak of memory allocated on the GPU, or of the resident set size on a CPU."""
    reserved_memory_bytes: tuple[int, ...] = ()
    """By rank: peak of memory that PyTorch's allocator reserves on the GPU; 0 on a CPU."""
    gradient_bytes: tuple[int, ...] = ()
    """By rank: gradient buffers (included in the model state)."""
    optimizer_state_bytes: tuple[int, ...] = ()
    """By rank: moments and main parameters (included in the model state)."""
    host_state_bytes: tuple[int, ...] = ()
    """By rank: optimizer state in host memory (frozen blocks, offload); not included in the model state."""
    loss_scale: float | None = None
    """fp16 only."""
    skipped_iterations: int = 0
    """Number of steps skipped by an fp16 overflow since the last log step."""
    skipped_layers: int = 0
    """Number of layers, in whole chunks, that were left as they were since the last log step, because their gradients
    were not finite (--bcd-schedule breadth-first)."""
    global_batch_size: int = 0
    router_losses: Mapping[str, float] = field(default_factory=dict)
    """Losses of the routers in the last step before their coefficients, by name: the mean over microbatches, replicas
    and layers. Layers without a graph, such as those of a prefix on other stages, have none."""
    params_norm: float | None = None
    """Norm of all weights (--log-params-norm)."""
    num_zeros: int | None = None
    """Number of zeros in the last step's gradient (--log-num-zeros-in-grad)."""
    tflops_per_gpu: float | None = None
    """10^12 floating-point operations per second and rank that the phase requires (--log-throughput)."""
    data_seen: float = 0.0
    """Fraction of one epoch of the training split that the run has trained on, 0 to 1."""
    prefix_cache_hits: int = 0
    """Number of samples since the last log step whose prefix came from the cache, over all ranks."""
    prefix_cache_bytes: int = 0
    """Size of all cache files below --bcd-prefix-cache."""


@dataclass(frozen=True, kw_only=True)
class EvalMetrics:
    """One evaluation. `split` is "validation" or "test"."""

    iteration: int
    consumed_samples: int
    split: str
    loss: float
    is_final: bool = False
    """Whether this is the evaluation after the last training step. It uses the next samples."""
    accuracy: float | None = None
    """Accuracy of a classifier, 0 to 1."""

    @property
    def perplexity(self) -> float:
        """Return exp(min(20, loss)) as Megatron-LM does, but keep NaN."""
        return math.nan if math.isnan(self.loss) else math.exp(min(20.0, self.loss))


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The facts printed before the first step."""

    model: str
    parallel: str
    parameters_per_stage: tuple[int, ...]
    total_parameters: int
    """Number of parameters, with a tied head counted once."""
    blocks: tuple[str, ...]
    """Contents of each block, such as "layers 0, 3 and embedding"."""
    shares: tuple[float, ...]
    """Fraction of the model's parameters that each block trains, 0 to 1."""
    model_state_bytes: tuple[tuple[int, ...], ...]
    """By block and rank: estimate for the time when the block is active."""
    layout: str
    phases: str
    """Order and length of the phases."""
    full_model_state_bytes: tuple[int, ...]
    """By rank: stock Megatron-LM's full training with fp32 moments of Adam."""
    training: str
    notes: tuple[str, ...] = ()
    """Information such as the implementation of attention, norm and optimizer."""
