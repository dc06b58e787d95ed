"""Arithmetic of a training step relative to full training with Adam, by the planner's formulas."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import PurePath

from _study_plan import Point
from _study_runs import Commands

FORMS = {"pretrain_gpt_bcd.py": "gpt", "pretrain_llama_bcd.py": "llama"}


def step_arithmetic(commands: Commands, point: Point) -> float | None:
    """Forward passes, input and weight gradients of the layers, over those of full training; None for a program that
    the planner does not know, or flags that it refuses."""
    if point.method.arithmetic_as is not None:
        point = Point(model=point.model, data=point.data, method=commands.study.method(point.method.arithmetic_as))
    program, *flags = commands.words(point.run(1e-3, 1))
    form = FORMS.get(PurePath(program).name)
    return of_flags(form, flags) if form is not None else None


def of_flags(form: str, flags: Sequence[str]) -> float | None:
    """The same, of a training script's flags."""
    from megatron.bcd.arguments import FAMILY_DEFAULTS, parse_run_config  # imports torch
    from megatron.bcd.blocks.partition import partition_from_config
    from megatron.bcd.planner.cost import total_compute_ratio

    try:
        config = parse_run_config(
            [*flags, "--data-path", "text"], prog="", defaults=FAMILY_DEFAULTS.get(form), world_size=1
        )
    except ValueError:
        return None
    partition = partition_from_config(config)
    return statistics.fmean(total_compute_ratio(partition, block) for block in range(partition.num_blocks))
