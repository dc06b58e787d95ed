"""Both scripts take the same architecture flags: LLaMA's defaults, how to undo each, and GELU in its two forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.command_line import parse

from megatron.bcd.arguments import FAMILY_DEFAULTS
from megatron.bcd.config import RunConfig
from megatron.bcd.model.implementation import available_implementation
from megatron.bcd.model.transformer_config import build_transformer_config, describe_activation, tanh_gelu
from megatron.bcd.runtime import device, packages
from megatron.bcd.training import reporting

# LLaMA's defaults by field: the words that the GPT script needs for each, and those that undo it in the LLaMA script
WORDS: dict[str, tuple[str, str]] = {
    "normalization": ("--normalization RMSNorm", "--normalization LayerNorm"),
    "position_embedding_type": ("--position-embedding-type rope", "--position-embedding-type learned_absolute"),
    "swiglu": ("--swiglu", "--no-swiglu"),
    "add_bias_linear": ("--disable-bias-linear", "--add-bias-linear"),
    "untie_embeddings_and_output_weights": (
        "--untie-embeddings-and-output-weights",
        "--no-untie-embeddings-and-output-weights",
    ),
    "hidden_dropout": ("--hidden-dropout 0", "--hidden-dropout 0.1"),
    "attention_dropout": ("--attention-dropout 0", "--attention-dropout 0.1"),
}
# neither script has these by default
OTHER_FLAGS = ("", "--group-query-attention --num-query-groups 2", "--add-qkv-bias", "--ffn-hidden-size 96")


def parse_as(form: str, *words: str) -> RunConfig:
    return parse(*" ".join(words).split(), defaults=dict(FAMILY_DEFAULTS[form]))


@pytest.mark.parametrize("other", OTHER_FLAGS)
def test_gpt_with_llamas_flags_is_llama(other: str) -> None:
    """The GPT script with LLaMA's flags has the configuration of the LLaMA script."""
    flags = [on for on, _ in WORDS.values()]
    assert parse_as("gpt", *flags, other) == parse_as("llama", other) == parse_as("llama", *flags, other)
    assert not other or parse_as("llama", other) != parse_as("llama")


@pytest.mark.parametrize("field", WORDS)
def test_each_default_can_be_undone(field: str) -> None:
    """Each default of LLaMA's can be undone alone."""
    undone = parse_as("llama", WORDS[field][1])
    assert undone == parse_as("gpt", *(on for name, (on, _) in WORDS.items() if name != field))
    assert undone != parse_as("llama")


def activation(*words: str) -> tuple[Any, bool, str]:
    """Return the activation of Megatron Core's configuration, whether its kernel is fused, and the run summary's
    line."""
    config = parse(*words)
    built = build_transformer_config(config, available_implementation(config))
    return built.activation_func, built.bias_activation_fusion, describe_activation(built)


@pytest.mark.parametrize(
    ("words", "on_cpu", "on_gpu"),
    [
        ((), "GELU", "GELU (tanh form)"),
        (("--no-bias-gelu-fusion",), "GELU", "GELU"),
        (("--disable-bias-linear",), "GELU", "GELU"),
        (("--openai-gelu",), "GELU (tanh form)", "GELU (tanh form)"),
        (("--openai-gelu", "--no-bias-gelu-fusion"), "GELU (tanh form)", "GELU (tanh form)"),
        (("--openai-gelu", "--disable-bias-linear"), "GELU (tanh form)", "GELU (tanh form)"),
        (("--swiglu",), "SwiGLU", "SwiGLU"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_gelu(words: tuple[str, ...], on_cpu: str, on_gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GELU has the form and the fusion that were asked for, and the run summary names its form."""
    for has_gpu, said in ((False, on_cpu), (True, on_gpu)):
        monkeypatch.setattr(device, "has_cuda", lambda has_gpu=has_gpu: has_gpu)
        monkeypatch.setattr(packages, "has_transformer_engine", lambda: False)
        function, is_fused, description = activation(*words)
        assert description == said
        if "GELU" in said and not said.startswith("SwiGLU"):
            assert is_fused == (has_gpu and not {"--no-bias-gelu-fusion", "--disable-bias-linear"} & set(words))
            assert (function is tanh_gelu) == ("--openai-gelu" in words and not is_fused)
            assert function in (tanh_gelu, torch.nn.functional.gelu)


def test_a_slow_width() -> None:
    """The run summary names a width in 16 bits that is slow on GPUs, and no other."""
    for flags, is_slow in (("170 --bf16", True), ("170", False), ("168 --bf16", False), ("172 --fp16", True)):
        config = parse("--ffn-hidden-size", *flags.split())
        built = build_transformer_config(config, available_implementation(config))
        assert ("slow on GPUs" in reporting._describe_model(config, built, 256, 256)) == is_slow
