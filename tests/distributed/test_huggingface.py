"""--load-hf and --save-hf: models of transformers, on one rank and under any parallel layout."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import convert_checkpoint
import pytest
import torch
import transformers
from support import huggingface_models as models
from support import worlds
from support.dist import World

from megatron.bcd.huggingface import folder
from megatron.bcd.runtime import device

LENGTH = 48


def config_of(
    model: Path | str, data_path: str, *, pipeline: int = 1, tensor: int = 1, expert: int = 1, **flags: Any
) -> Any:
    """Return a run that starts from `model`."""
    values: dict[str, Any] = {"load_hf": str(model), "data_path": data_path, "tokenizer_type": "ByteLevelTokenizer"}
    values |= {"seq_length": LENGTH, "micro_batch_size": 1, "global_batch_size": 2, "train_iters": 2, "lr": 1e-3}
    values |= {"eval_iters": 0, "num_workers": 0, "hidden_dropout": 0, "attention_dropout": 0}
    values |= {"bcd_num_blocks": min(2, models.LAYERS // pipeline), "bcd_steps_per_block": 1}
    values |= {"pipeline_model_parallel_size": pipeline, "tensor_model_parallel_size": tensor}
    has_experts = folder.read_architecture(str(model)).flags["num_moe_experts"] is not None
    values["sequence_parallel"] = tensor > 1 and has_experts
    values["expert_model_parallel_size"] = expert if expert > 1 else None
    return worlds.config_of(world_size=pipeline * tensor * expert, **values | flags)


def write_out(config: Any) -> list[str]:
    """Load a model and write it to --save-hf; return the names of the tensors that this rank read."""
    read: list[str] = []
    one_tensor, some_rows = folder.ModelFolder._read, folder.ModelFolder.read_rows

    def watched(self: Any, name: str) -> Any:
        read.append(name)
        return one_tensor(self, name)

    def watched_rows(self: Any, row: Any, start: int, stop: int) -> Any:
        read.append(f"{row.names[0]} {start}")
        return some_rows(self, row, start, stop)

    folder.ModelFolder._read, folder.ModelFolder.read_rows = watched, watched_rows  # type: ignore[method-assign]
    try:
        with worlds.started(config) as run, run.active.whole_parameters():
            assert run.outputs.exporter is not None
            assert run.outputs.exporter.export(run.model)
    finally:
        folder.ModelFolder._read, folder.ModelFolder.read_rows = one_tensor, some_rows  # type: ignore[method-assign]
    return read


LOGITS_OF = ("gpt2", "llama3", "llama_biases", "qwen2", "qwen3", "mixtral", "qwen3_moe")


@pytest.mark.parametrize(("name", "expert"), [*((name, 1) for name in LOGITS_OF), ("qwen3_moe", 2)])
def test_logits(world1: World, world2: World, text_data: str, tmp_path: Path, name: str, expert: int) -> None:
    """A model loaded with --load-hf has transformers' logits."""
    source = models.write_model(name, tmp_path / "given")
    tokens = torch.randint(0, models.VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    world = (world1, world2)[expert - 1]
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(source)(tokens).logits
    for ours in world.run(worlds.logits_of, config_of(source, text_data, expert=expert), tokens):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() < 1e-4 and theirs.std() > 0.1


LAYOUTS = {"gpt2": (2, 1, 1), "llama3": (1, 2, 1), "qwen2": (2, 2, 1), "qwen3_moe": (1, 1, 2)}
"""Pipeline, tensor and expert sizes by family."""


@pytest.mark.parametrize(("name", "layout"), LAYOUTS.items())
def test_there_and_back(
    request: pytest.FixtureRequest, text_data: str, tmp_path: Path, name: str, layout: tuple[int, int, int]
) -> None:
    """A model that is loaded, from a folder or a checkpoint of another program, and exported again is unchanged. The
    stages read disjoint layers from a folder, and nothing where they load a checkpoint."""
    pipeline, tensor, expert = layout
    per_stage = tensor * expert
    source = models.write_model(name, tmp_path / "given", max_shard_size="60KB")
    size = pipeline * per_stage
    world: World = request.getfixturevalue(f"world{size}")
    sizes = {"pipeline": pipeline, "tensor": tensor, "expert": expert}
    read = world.run(write_out, config_of(source, text_data, **sizes, save_hf=str(tmp_path / "back")))
    assert models.differing(models.tensors_of(source), models.tensors_of(tmp_path / "back")) == []
    assert sorted(os.listdir(tmp_path)) == ["back", "given"]
    layers_of = [set(re.findall(r"\.(?:layers|h)\.(\d+)\.", " ".join(names))) for names in read]
    stages = [set().union(*layers_of[stage * per_stage : (stage + 1) * per_stage]) for stage in range(pipeline)]
    assert sorted(layer for stage in stages for layer in stage) == [str(layer) for layer in range(models.LAYERS)]

    target = models.write_checkpoint(source, tmp_path / "checkpoint")
    flags = {"load": str(target), "finetune": True, "save_hf": str(tmp_path / "again")}
    read = world.run(write_out, config_of(source, text_data, **sizes, **flags))
    assert models.differing(models.tensors_of(source), models.tensors_of(tmp_path / "again")) == []
    assert not any(read)


def test_a_run_writes_what_it_has_trained(world1: World, text_data: str, tmp_path: Path) -> None:
    """A run exports its trained weights at each interval and at its end. The converter and a resumed run export the
    same."""
    source = models.write_model("llama_tied", tmp_path / "given")
    config = config_of(source, text_data, save_hf=str(tmp_path / "out"), save_hf_interval=1, save=str(tmp_path / "run"))
    [trained] = world1.run(worlds.train_run, config)
    before, after = models.tensors_of(source), models.tensors_of(tmp_path / "out")
    assert not any(torch.equal(before[name], after[name]) for name in before if "proj" in name)
    assert torch.equal(trained["weights"]["embedding.word_embeddings.weight"], after["model.embed_tokens.weight"])
    assert sorted(path.name for path in (tmp_path / "out").glob("iter_*")) == ["iter_0000001", "iter_0000002"]
    assert models.differing(models.tensors_of(tmp_path / "out" / "iter_0000002"), after) == []
    assert models.differing(models.tensors_of(tmp_path / "out" / "iter_0000001"), after) != []
    back = tmp_path / "back"
    arguments = ["--input", str(tmp_path / "run"), "--output", str(back)]
    assert convert_checkpoint.main(arguments) == 0
    assert models.differing(models.tensors_of(back), after) == []
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    again = {"save": str(tmp_path / "run"), "load": str(tmp_path / "run"), "save_hf": str(tmp_path / "again")}
    world1.run(worlds.train_run, config_of(source, text_data, **again))  # trains nothing: the run is at its end
    assert models.differing(models.tensors_of(tmp_path / "again"), after) == []


FROM_SCRATCH: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt", {"openai_gelu": True, "bf16": True}),
    "qwen2": ("llama", {"add_qkv_bias": True, "no_untie_embeddings_and_output_weights": True}),
    "qwen3_moe": ("llama", {"num_experts": 4, "moe_router_topk": 3, "moe_ffn_hidden_size": 24, "qk_layernorm": True}),
}


def trained_logits(config: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Train, and return [B, S, V] of the trained model."""
    with worlds.started(config) as run, torch.no_grad():
        with torch.enable_grad():
            run.train()
        tokens = tokens.to(device.current())
        positions = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
        with run.active.whole_parameters():
            logits: torch.Tensor = run.model.eval()(tokens, positions, None)
        return logits.float().cpu()


@pytest.mark.parametrize("family", FROM_SCRATCH)
def test_a_model_that_was_trained_from_scratch(world1: World, text_data: str, tmp_path: Path, family: str) -> None:
    """A model trained from scratch is exported as its family, without padding, and has the run's logits here and in
    transformers."""
    form, flags = FROM_SCRATCH[family]
    sizes = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "seq_length": LENGTH, "train_iters": 1}
    config = worlds.run_config(
        form=form, data_path=text_data, save_hf=str(tmp_path / "out"), **sizes, max_position_embeddings=64, **flags
    )
    tokens = torch.randint(0, 257, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    [trained] = world1.run(trained_logits, config, tokens)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert model.config.model_type == family and model.config.vocab_size == 257
    [ours] = world1.run(worlds.logits_of, config_of(tmp_path / "out", text_data), tokens)
    with torch.no_grad():
        exported = model(tokens).logits
    assert (ours - exported).abs().max() < 1e-4
    assert (trained[..., :257] - exported).abs().max() < (2e-2 if "bf16" in flags else 1e-4) and exported.std() > 0.05


def refusal(config: Any) -> str | None:
    """Return the error of a start with these flags; None after a whole run."""
    try:
        worlds.train_run(config)
    except ValueError as error:
        return str(error)
    return None


def test_a_resumed_run_replaces_its_own_models_alone(world1: World, text_data: str, tmp_path: Path) -> None:
    """A resumed run replaces the models that it exported itself, also after a move, and refuses other folders with
    models."""
    source = models.write_model("llama_tied", tmp_path / "given")
    other = models.write_model("llama_tied", tmp_path / "other")
    kept = models.tensors_of(source)
    start = {"save": str(tmp_path / "run"), "save_hf": str(tmp_path / "out"), "save_hf_interval": 2, "train_iters": 3}
    goes_on = start | {"load": str(tmp_path / "run"), "train_iters": 4}

    def asked(**flags: Any) -> str | None:
        [said] = world1.run(refusal, config_of(source, text_data, **flags))
        return said  # type: ignore[no-any-return]

    assert "is not empty" in str(asked(**start | {"save_hf": str(source)}))
    assert asked(**start) is None
    before = models.tensors_of(tmp_path / "out")
    (tmp_path / "link").symlink_to(source)
    assert "--save-hf" in str(asked(**goes_on | {"save_hf": str(tmp_path / "link")}))
    assert "--save-hf" in str(asked(**goes_on | {"save_hf": str(other)}))
    assert asked(save_hf=str(tmp_path / "else"), lr=2e-3) is None  # another run's
    assert "--save-hf" in str(asked(**goes_on | {"save_hf": str(tmp_path / "else")}))
    assert "--save-hf" in str(asked(**start | {"save": str(tmp_path / "new")}))
    for folder_ in (source, other):
        assert models.differing(kept, models.tensors_of(folder_)) == []
    for name in ("run", "out"):
        (tmp_path / name).rename(tmp_path / f"{name}_moved")
    moved = {"save": str(tmp_path / "run_moved"), "load": str(tmp_path / "run_moved")}
    assert asked(**goes_on | moved | {"save_hf": str(tmp_path / "out_moved")}) is None
    assert models.differing(before, models.tensors_of(tmp_path / "out_moved")) != []
