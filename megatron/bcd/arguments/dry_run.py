"""--dry-run: the parallel layout, blocks and planned memory of a run that is not started."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron.bcd.arguments.pipeline_cut import known_vocabulary
from megatron.bcd.blocks.partition import describe_layers, partition_from_config
from megatron.bcd.config import RunConfig
from megatron.bcd.planner.run_state import model_state_of
from megatron.bcd.tokenizer import padded_vocab_size

_GIB = 2**30


def leave(code: int, lines: Sequence[str]) -> NoReturn:
    """End the process after rank 0 has printed the lines, to stderr if the code is not 0."""
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(lines), file=sys.stderr if code else sys.stdout, flush=True)
    raise SystemExit(code)


def plan_lines(config: RunConfig, *, world_size: int, notes: Sequence[str] = ()) -> list[str]:
    """What would run on ``world_size`` ranks. Reads no file and needs no GPU."""
    partition = partition_from_config(config)
    data_size = world_size // config.model_size
    lines = [
        f"{world_size} ranks: {config.describe_ranks(data_size)}, {config.precision}; "
        f"{config.training.global_batch_size} sequences per step",
        f"{partition.num_blocks} blocks, layout {partition.layout}:",
    ]
    for block in partition.blocks:
        extras = partition.describe_extras(block.index)
        lines.append(f"  block {block.index}: {', '.join((f'layers {describe_layers(block.layers)}', *extras))}")
    vocabulary = known_vocabulary(config)
    padded = padded_vocab_size(vocabulary or 0, config.model.make_vocab_size_divisible_by, config.tensor_size)
    planned = model_state_of(config, partition, padded_vocab_size=padded, num_replicas=data_size * config.context_size)
    lines.append("planned model state of a rank in its largest phase (weights, gradients, optimizer; no activations):")
    for stage, num_parameters in enumerate(planned.num_parameters):
        state = planned.largest_bytes(stage)
        held = (f"{len(block.layers_on_stage(stage))} of block {block.index}" for block in partition.blocks)
        layers = describe_layers(partition.stage_layers(stage))
        lines.append(
            f"  stage {stage}: layers {layers} ({', '.join(held)}), {num_parameters:,} parameters, "
            f"{state:,} bytes ({state / _GIB:.2f} GiB)"
        )
    if vocabulary is None:
        lines.append("  without embedding and output head: their size is known from the tokenizer's files only")
        if config.training.pipeline_cut == "auto" and partition.num_stages > 1:
            lines.append("  stages cut evenly: --pipeline-cut auto needs the vocabulary's size")
    return [*lines, *notes]
