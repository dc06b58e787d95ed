"""--dry-run: the parallel layout, blocks and planned memory of a run that is not started."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron.bcd.blocks.layers import describe_layers
from megatron.bcd.blocks.stages import partition_from_config
from megatron.bcd.config import RunConfig
from megatron.bcd.planner.run_state import stage_state
from megatron.bcd.tokenizer import TikTokenizer

_VOCABULARIES = {"ByteLevelTokenizer": 257, "GPT2BPETokenizer": 50257}
"""Of tokenizers whose size is known without their files."""
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
    vocabulary = _vocabulary(config)
    states = stage_state(config, partition, vocab_size=vocabulary or 0, num_replicas=data_size * config.context_size)
    lines.append("planned model state of a rank in its largest phase (weights, gradients, optimizer; no activations):")
    for stage, (num_parameters, state) in enumerate(states):
        held = (f"{len(block.layers_on_stage(stage))} of block {block.index}" for block in partition.blocks)
        layers = describe_layers(partition.stage_layers(stage))
        lines.append(
            f"  stage {stage}: layers {layers} ({', '.join(held)}), {num_parameters:,} parameters, "
            f"{state:,} bytes ({state / _GIB:.2f} GiB)"
        )
    if vocabulary is None:
        lines.append("  without embedding and output head: their size is known from the tokenizer's files only")
    return [*lines, *notes]


def _vocabulary(config: RunConfig) -> int | None:
    """The tokenizer's vocabulary size; None if only its files tell."""
    kind, size = config.tokenizer.tokenizer_type, config.tokenizer.vocab_size
    if kind == "NullTokenizer" and size is not None:
        return size + 1  # its end-of-document token
    if kind == "TikTokenizer":
        return size or TikTokenizer.VOCAB_SIZE
    return _VOCABULARIES.get(str(kind), size)
