"""--use-precision-aware-optimizer and its dtypes: when Transformer Engine's Adam is taken, and what it needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.bcd.arguments.rules import Run, flag_name, refuse_unless
from megatron.bcd.runtime import packages

SWITCH = "--use-precision-aware-optimizer"
_MOMENTS = ("exp_avg_dtype", "exp_avg_sq_dtype")


def is_taken(values: Mapping[str, Any]) -> bool:
    """Whether Transformer Engine's Adam holds main parameters and moments itself.

    Without flags of lower precision only memory differs: then it is taken where it is there.
    """
    is_possible = (
        values["use_precision_aware_optimizer"]
        and values["bf16"]
        and values["optimizer"] == "adam"
        and values["adam_moments_dtype"] == "fp32"
        and values["use_distributed_optimizer"]
        and not values["optimizer_cpu_offload"]
    )
    return bool(is_possible) and (_has_lower_moments(values) or packages.has_precision_aware_adam())


def _has_lower_moments(values: Mapping[str, Any]) -> bool:
    return any(values[field] != "fp32" for field in _MOMENTS)


def check(run: Run, given: Mapping[str, Any], *, starts: bool) -> None:
    """`starts`: the run is to start on this machine."""
    lower = [field for field in ("main_grads_dtype", *_MOMENTS) if getattr(run, field) != "fp32"]
    if not lower:
        return
    flag = f"{flag_name(lower[0])} {getattr(run, lower[0])}"
    instead = "--grad-reduce-in-bf16" if lower[0] == "main_grads_dtype" else "--adam-moments-dtype bf16 or int8"
    refuse_unless(given.get("use_precision_aware_optimizer"), f"{flag} needs {SWITCH}; or give {instead}")
    refuse_unless(run.bf16, f"{flag} needs --bf16")
    if "main_grads_dtype" in lower:
        refuse_unless(
            not given.get("grad_reduce_in_fp32"),
            f"{flag} and --accumulate-allreduce-grads-in-fp32 are both given: give one of them",
        )
    lower_moments = [field for field in lower if field in _MOMENTS]
    if not lower_moments:
        return
    flag = f"{flag_name(lower_moments[0])} {getattr(run, lower_moments[0])}"
    refuse_unless(
        all(getattr(run, field) != "fp8" for field in lower_moments),
        f"{' and '.join(flag_name(field) for field in lower_moments if getattr(run, field) == 'fp8')} fp8: "
        "Transformer Engine's 8-bit tensors are not kept between phases; give bf16, or --adam-moments-dtype int8",
    )
    for other, is_right in (
        (f"--optimizer {run.optimizer}", run.optimizer == "adam"),
        ("--no-use-distributed-optimizer", run.use_distributed_optimizer),
        (f"--adam-moments-dtype {run.adam_moments_dtype}", run.adam_moments_dtype == "fp32"),
        ("--optimizer-cpu-offload", not run.optimizer_cpu_offload),
    ):
        refuse_unless(is_right, f"{flag} does not go with {other}: leave one of them out")
    refuse_unless(
        not starts or packages.has_precision_aware_adam(),
        f"{flag} needs Transformer Engine 2.1 or later and a GPU; without them give --adam-moments-dtype bf16 or int8",
    )
