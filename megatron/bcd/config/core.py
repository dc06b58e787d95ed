"""Fields of Megatron Core's configuration classes that flags set, under Megatron Core's names.

Megatron Core is not imported here. Types and defaults of the flags come from its own classes (``arguments.flags``), so
the fields have no defaults here, except that None leaves a field to Megatron Core.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Keyword arguments of Megatron Core's ``OptimizerConfig``."""

    fp16: bool
    bf16: bool
    lr: float | None = None
    min_lr: float | None = None
    decoupled_lr: float | None = None
    decoupled_min_lr: float | None = None
    weight_decay: float
    apply_wd_to_qk_layernorm: bool
    optimizer: str
    """``adam``, ``sgd`` or ``muon``."""
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    decoupled_weight_decay: bool
    sgd_momentum: float
    muon_momentum: float = 0.95
    muon_use_nesterov: bool = False
    muon_split_qkv: bool = True
    muon_scale_mode: str = "spectral"
    muon_num_ns_steps: int = 5
    muon_tp_mode: str = "distributed"
    muon_extra_scale_factor: float = 1.0
    clip_grad: float
    optimizer_cpu_offload: bool
    optimizer_offload_fraction: float
    overlap_cpu_optimizer_d2h_h2d: bool
    pin_cpu_grads: bool
    loss_scale: float | None = None
    initial_loss_scale: float
    min_loss_scale: float
    loss_scale_window: float
    hysteresis: int
    overlap_param_gather: bool
    use_distributed_optimizer: bool
    use_precision_aware_optimizer: bool


@dataclass(frozen=True, kw_only=True)
class DdpSettings:
    """Keyword arguments of Megatron Core's ``DistributedDataParallelConfig``."""

    grad_reduce_in_fp32: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    bucket_size: int | None = None
    """Parameters of one bucket."""
    pad_buckets_for_high_nccl_busbw: bool
    average_in_collective: bool
    use_distributed_optimizer: bool
    check_for_nan_in_grad: bool


def core_keywords(settings: OptimizerSettings | DdpSettings) -> dict[str, Any]:
    """The keyword arguments for Megatron Core's class: every field but those that are None."""
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    return {name: value for name, value in values.items() if value is not None}
