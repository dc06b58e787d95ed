"""huggingface.measure, and plans of models that Megatron Core's layers cannot express."""

from __future__ import annotations

import shlex
from math import prod
from pathlib import Path
from typing import Any

import plan
import pytest
import recipe
import torch
import transformers
from support import decoders
from support.command_line import PROG
from support.fine_tuning import tokenizer_folder, write_records

from megatron.bcd.arguments import parse_run_config
from megatron.bcd.config.measured import MeasuredModel
from megatron.bcd.huggingface.measure import measure

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def gemma() -> Any:
    return transformers.Gemma3TextConfig(
        **SIZES, sliding_window=16, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    )


@pytest.fixture(scope="module")
def measured() -> MeasuredModel:
    return measure(gemma(), sequence=32)


def test_layers_of_two_kinds(measured: MeasuredModel) -> None:
    """A model's layers are measured by kind: their parameters, and the products of their matrices and of attention."""
    model = transformers.AutoModelForCausalLM.from_config(gemma())
    assert measured.layers == (0, 1, 0)
    for layer, number in zip(model.model.layers, measured.layers, strict=True):
        kind = measured.kinds[number]
        assert kind.matrices == sum(each.numel() for each in layer.parameters() if each.dim() == 2)
        assert kind.core == 2 * 32 * 4 * 16  # scores and contexts: sequence, heads, width of a head
    assert sum(prod(shape) for _, shape in measured.parameters) == model.num_parameters()
    assert dict(measured.parameters)["decoder.final_layernorm.weight"] == (64,)


def test_saved_bytes_are_those_of_layers_with_values(measured: MeasuredModel) -> None:
    """The measured bytes are what autograd saves in a layer with weights, trained and frozen, and its output."""
    model = transformers.AutoModelForCausalLM.from_config(gemma(), dtype=torch.bfloat16).train()
    layer, given = model.model.layers[0], []
    layer.register_forward_pre_hook(lambda _, args, kwargs: given.append((args, kwargs)), with_kwargs=True)
    model.model(input_ids=torch.zeros(1, 32, dtype=torch.long), use_cache=False)
    [((hidden, *args), kwargs)] = given
    outside = {place(each) for each in (hidden, *kwargs["position_embeddings"], *layer.parameters())}
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    for is_trained, expected in ((True, measured.kinds[0].active), (False, measured.kinds[0].suffix)):
        layer.requires_grad_(is_trained)
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = layer.forward(hidden.detach().requires_grad_(), *args, **kwargs)
        storages = {place(each): each.untyped_storage().nbytes() for each in (*kept, output)}
        assert sum(size for start, size in storages.items() if start not in outside) == 32 * expected


def place(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's storage."""
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("is_text_part", [False, True])
def test_a_plan_of_gemma(tmp_path: Path, capsys: pytest.CaptureFixture[str], is_text_part: bool) -> None:
    """plan.py answers for a folder whose architecture Megatron Core cannot express. The plan of a model of images and
    text is that of its text part, which is what trains."""
    config = gemma()
    size = transformers.AutoModelForCausalLM.from_config(config).num_parameters()
    if is_text_part:
        config = transformers.Gemma3Config(text_config=config.to_dict())
    config.architectures = ["Gemma3ForConditionalGeneration" if is_text_part else "Gemma3ForCausalLM"]
    config.save_pretrained(tmp_path / "gemma")
    for task in ("sft",) if is_text_part else ("sft", "pretrain"):
        words = ["--model", str(tmp_path / "gemma"), "--task", task, "--gpu", "rtx4090", "--num-gpus", "1"]
        assert plan.main([*words, "--seq-length", "32"]) == 0
        text = capsys.readouterr().out
        assert f"gemma: {size:,} parameters" in text
        assert "--load-hf MODEL_DIR" in text and "--num-layers" not in text, "Megatron's flags are another network"


def test_masks_are_counted() -> None:
    """A plan counts masks of packed texts only for models whose layers need them: here Gemma 2 for its caps."""
    for name in ("gemma2", "gemma3_text"):
        assert measure(decoders.config_of(name), sequence=32).attends_by_text == (name == "gemma3_text")


def test_texts_that_layers_carry_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan of a model that cannot pack counts one record a sequence, and a run takes its flags, also those of
    examples/finetune.sh."""
    folder = tokenizer_folder(tmp_path / "qwen", None)
    decoders.config_of("qwen3_5_text", architectures=["Qwen3_5ForCausalLM"]).save_pretrained(folder)
    records = [{"prompt": "p" * 5, "completion": "c" * 4} for _ in range(8)]
    data = str(write_records(tmp_path / "data.jsonl", records))
    words = [str(folder), "--gpu", "rtx4090", "--num-gpus", "1", "--seq-length", "32", "--global-batch-size", "2"]
    assert plan.main(["--task", "sft", "--data", data, "--model", *words]) == 0
    text = capsys.readouterr().out
    assert "one record a sequence" in text and "in 8 sequences of 32" in text and "12 iterations" in text
    command = text[text.index("--sft --load-hf") :].partition("\n\n")[0].replace("\\\n", " ")
    planned = parse_run_config(shlex.split(command.replace("MODEL_DIR", str(folder))), prog=PROG)
    assert planned.data.sft and not planned.data.reset_attention_mask
    assert "--no-sft-packing" in recipe.run(["whole", words[0], "finetune", "rtx4090", *words[3:]], {})
    assert plan.main(["--task", "sft", "--model", *words]) == 0
    assert f"{3 * 52002 * 32 / 1e6:.1f} M tokens" in capsys.readouterr().out, "Alpaca's records, padded"
