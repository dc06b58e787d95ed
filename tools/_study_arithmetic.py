"""Arithmetic of a training step relative to full training with Adam, by the planner's formulas."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from pathlib import PurePath

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from _study_plan import Point
from _study_runs import Commands

from megatron.bcd.blocks.stages import partition_from_config
from megatron.bcd.config import RunConfig

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

    try:
        config = parse_run_config(
            [*flags, "--data-path", "text"], prog="", defaults=FAMILY_DEFAULTS.get(form), world_size=1
        )
    except ValueError:
        return None
    return of_config(config)


def of_config(config: RunConfig) -> float:
    """Mean over the blocks of one process, as in planner.cost; orthogonalisation counts too."""
    partition = partition_from_config(config)
    num_layers = partition.num_layers
    orthogonalization = _orthogonalization(config)
    total = 0.0
    for block in range(partition.num_blocks):
        resting, active = len(partition.resting_layers(block)), len(partition.active_layers(block, 0))
        total += num_layers + (num_layers - len(partition.prefix_layers(block))) + active + resting
        total += orthogonalization * resting * (config.bcd.bcd_resting_update == "orthogonal")
        total += orthogonalization * active * (config.optimizer.optimizer == "muon")
    return total / partition.num_blocks / (3 * num_layers)


def _orthogonalization(config: RunConfig) -> float:
    """Newton-Schulz steps for one layer's matrices, over a forward pass of the layer for one iteration's tokens.

    A step multiplies m x n matrices (m <= n) in 4 m^2 n + 2 m^3 operations, a forward pass takes 2 m n per token.
    """
    fields = config.transformer
    hidden, heads = config.hidden_size, int(fields["num_attention_heads"])
    ffn = int(fields.get("ffn_hidden_size") or 4 * hidden)
    head_size = int(fields.get("kv_channels") or hidden // heads)
    query, key = heads * head_size, int(fields.get("num_query_groups") or heads) * head_size
    up = ffn * (2 if fields.get("gated_linear_unit") else 1)
    attention = [(query, hidden), (key, hidden), (key, hidden), (hidden, query)]
    if not config.optimizer.muon_split_qkv:
        attention[:3] = [(query + 2 * key, hidden)]
    matrices = [*attention, (up, hidden), (hidden, ffn)]
    operations = sum(4 * min(mn) * math.prod(mn) + 2 * min(mn) ** 3 for mn in matrices)
    assert config.training.global_batch_size is not None, "the parser fills it in"
    tokens = config.training.global_batch_size * config.model.seq_length
    return config.optimizer.muon_num_ns_steps * operations / (2 * tokens * sum(map(math.prod, matrices)))
