"""Builds every stage's model of a recipe on the meta device, and compares it with what the planner counts.

The meta device has shapes and no memory, and the ranks are one process that takes each place in turn.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.bcd.arguments import FAMILY_DEFAULTS, parse_run_config
from megatron.bcd.blocks.ownership import ownership
from megatron.bcd.config import RunConfig
from megatron.bcd.model.builder import build_model, unwrap_model
from megatron.bcd.model.implementation import choose_implementation
from megatron.bcd.planner import cost
from megatron.bcd.planner.command import SCRIPTS, torchrun_command
from megatron.bcd.planner.recipe import Recipe
from megatron.bcd.planner.tensors import stage_tensors
from megatron.bcd.runtime import device, rng

_META = torch.device("meta")


def verify(recipe: Recipe) -> list[dict[str, Any]]:
    """By pipeline stage: parameters in the model that the printed command builds, and by formula; whole, and by block.

    Data-parallel ranks of a stage hold the same. Raises ValueError where any number or size differs.
    """
    config = run_config(recipe)
    rows = []
    for stage in range(recipe.pipeline_size):
        with rank_of_stage(recipe, stage):
            rows.append(_compare(recipe, config, stage))
    wrong = [row["stage"] for row in rows if not row["equal"]]
    if wrong:
        raise ValueError(f"--verify: stages {wrong} hold other parameters than the planner counts: {rows[wrong[0]]}")
    whole = sum(row["built"] for row in rows) - sum(row["tied_copy"] for row in rows)
    padding = (recipe.padded_vocabulary - recipe.model.vocabulary) * recipe.model.hidden
    formula = recipe.shape.num_parameters + padding * (1 if recipe.shape.tied else 2)
    if whole != formula:
        raise ValueError(
            f"--verify: the stages hold {whole:,} parameters together, the closed formula gives {formula:,}"
        )
    return rows


def show_counts(recipe: Recipe, rows: list[dict[str, Any]]) -> str:
    """For people."""
    lines = ["stage  layers        built      formula  active by block"]
    for row in rows:
        by_block = ", ".join(f"{count:,}" for count in row["built_by_block"])
        lines.append(f"{row['stage']:5}  {row['layers']:6}  {row['built']:11,}  {row['formula']:11,}  {by_block}")
    whole = sum(row["built"] - row["tied_copy"] for row in rows)
    lines.append(
        f"equal on all {len(rows)} stages, each held by {recipe.num_replicas} rank(s); {whole:,} parameters "
        f"without the head's copy and with the vocabulary padded to {recipe.padded_vocabulary:,}"
    )
    return "\n".join(lines)


def run_config(recipe: Recipe) -> RunConfig:
    """Numbers from the printed command; for fine-tuning, whose command names no model, from its network's flags."""
    if recipe.task == "sft":
        recipe = replace(recipe, task="pretrain")
    words = shlex.split(torchrun_command(recipe, iterations=1).replace("\\\n", ""))
    script = SCRIPTS[recipe.model.form]
    flags = words[words.index(script) + 1 :]
    config = parse_run_config(
        flags, prog=script, defaults=FAMILY_DEFAULTS[recipe.model.form], world_size=recipe.num_gpus
    )
    return replace(config, transformer={**config.transformer, "perform_initialization": False})


@contextlib.contextmanager
def rank_of_stage(recipe: Recipe, stage: int) -> Iterator[None]:
    """This process as data-parallel rank 0 of a stage, in a world whose other ranks don't exist."""
    torch.distributed.init_process_group(
        "fake", rank=stage * recipe.num_replicas, world_size=recipe.num_gpus, store=FakeStore()
    )
    try:
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=recipe.pipeline_size,
            context_parallel_size=recipe.context_size,
            create_gloo_process_groups=False,
        )
        with (
            torch.device(_META),
            mock.patch.object(device, "current", return_value=_META),
            mock.patch.object(rng, "draw_as_stock_warm_up_does"),
            mock.patch.object(torch.cuda, "current_device", return_value=_META),
            mock.patch.object(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
        ):
            yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def _compare(recipe: Recipe, config: RunConfig, stage: int) -> dict[str, Any]:
    implementation = choose_implementation(
        "local",
        normalization=str(config.transformer.get("normalization", "LayerNorm")),
        transformer_engine=False,
        apex=False,
        optimizer="none",
    )
    model = unwrap_model(build_model(config, recipe.padded_vocabulary, implementation))
    parameters = {name: parameter.numel() for name, parameter in model.named_parameters()}
    tensors = stage_tensors(recipe.shape, recipe.partition, stage, padded_vocabulary=recipe.padded_vocabulary)
    planned = {tensor.name: tensor.size for tensor in tensors}
    blocks = range(recipe.partition.num_blocks)
    built_by_block = [
        sum(
            size
            for name, size in parameters.items()
            if ownership(name, partition=recipe.partition, stage=stage).is_active(block)
        )
        for block in blocks
    ]
    formula_by_block = [
        cost.active_parameters(recipe.shape, recipe.partition, block, padded_vocab_size=recipe.padded_vocabulary)[stage]
        for block in blocks
    ]
    return {
        "stage": stage,
        "layers": len(recipe.partition.stage_layers(stage)),
        "built": sum(parameters.values()),
        "formula": sum(planned.values()),
        "built_by_block": built_by_block,
        "formula_by_block": formula_by_block,
        "tied_copy": parameters.get("output_layer.weight", 0) if recipe.shape.tied else 0,
        "equal": list(parameters.items()) == list(planned.items()) and built_by_block == formula_by_block,
    }
