"""What the planner counts is what the printed command builds: every parameter of every stage, on the meta device.

The meta device has shapes and no memory, and the ranks are one process that takes each place in turn.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import plan
import pytest
import torch
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.bcd.arguments import FAMILY_DEFAULTS, parse_run_config
from megatron.bcd.model.builder import build_model, unwrap_model
from megatron.bcd.model.implementation import SCALED_DOT_PRODUCT, Implementation
from megatron.bcd.planner.command import SCRIPTS, torchrun_command
from megatron.bcd.planner.recipe import Recipe
from megatron.bcd.planner.tensors import stage_tensors
from megatron.bcd.runtime import device, rng

META = torch.device("meta")
STAGES = "--gpu rtx4090 --num-gpus 6 --pipeline-model-parallel-size 3 --global-batch-size 60"
TWO = "--gpu rtx4090 --num-gpus 2 --pipeline-model-parallel-size 2 --seq-length 64"
LLAMA = {
    "num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 500, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_positions": 96, "vocab_size": 500,
             "n_layer": 6, "n_embd": 64, "n_head": 4},
    "qwen2": LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32,
                      "tie_word_embeddings": True},
}  # fmt: skip


@contextlib.contextmanager
def rank_of_stage(recipe: Recipe, stage: int) -> Iterator[None]:
    """This process as data-parallel rank 0 of a stage, in a world whose other ranks don't exist."""
    torch.distributed.init_process_group(
        "fake", rank=stage * recipe.num_replicas, world_size=recipe.num_gpus, store=FakeStore()
    )
    try:
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=recipe.pipeline_size, create_gloo_process_groups=False
        )
        with (
            META,
            mock.patch.object(device, "current", return_value=META),
            mock.patch.object(rng, "draw_like_stock_warm_up"),
            mock.patch.object(torch.cuda, "current_device", return_value=META),
            mock.patch.object(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
        ):
            yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def built(recipe: Recipe) -> list[dict[str, int]]:
    """By stage, the parameters of the model that the recipe's command builds."""
    words = shlex.split(torchrun_command(recipe.changed(task="pretrain"), iterations=1).replace("\\\n", ""))
    script = SCRIPTS[recipe.model.form]
    defaults = FAMILY_DEFAULTS[recipe.model.form]
    config = parse_run_config(
        words[words.index(script) + 1 :], prog=script, defaults=defaults, world_size=recipe.num_gpus
    )
    config = replace(config, transformer={**config.transformer, "perform_initialization": False})
    norm = str(config.transformer.get("normalization", "LayerNorm"))
    local = Implementation(layers="local", attention=SCALED_DOT_PRODUCT, norm=f"PyTorch {norm}", optimizer="none")
    stages = []
    for stage in range(recipe.pipeline_size):
        with rank_of_stage(recipe, stage):
            model = unwrap_model(build_model(config, recipe.padded_vocabulary, local))
            stages.append({name: parameter.numel() for name, parameter in model.named_parameters()})
    return stages


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "flags",
    [
        f"--model G-0.15B --bcd-layout submodel {STAGES}",
        f"--model L-6.0B {STAGES}",
        "--task sft --model LLaMA-7B --gpu rtx4090 --num-gpus 4",
        *(f"--model {name}/config.json {TWO}" for name in CONFIGS),
    ],
)
def test_every_parameter_is_the_built_models(flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every planned parameter is one of the built model, by name, size and stage."""
    monkeypatch.chdir(tmp_path)
    for name, content in CONFIGS.items():
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps(content))
    recipe = plan.recipe_of(plan.parse_arguments(flags.split()))
    held = 0
    for stage, parameters in enumerate(built(recipe)):
        tensors = stage_tensors(recipe.shape, recipe.partition, stage, padded_vocabulary=recipe.padded_vocabulary)
        assert list(parameters.items()) == [(tensor.name, tensor.size) for tensor in tensors]
        held += sum(parameters.values()) - parameters.get("output_layer.weight", 0) * recipe.shape.tied
    padding = (recipe.padded_vocabulary - recipe.model.vocabulary) * recipe.model.hidden
    assert held == recipe.shape.num_parameters + padding * (1 if recipe.shape.tied else 2)
