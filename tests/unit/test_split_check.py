"""The comparison of a small model with its two halves, before transformers' layers train."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import transformers
from support import decoders
from support.decoder_table import read_table
from transformers.models.llama import modeling_llama

from megatron.bcd.model.skeleton import Refused, Skeleton
from megatron.bcd.model.split_check import check_split


def test_sizes_do_not_matter() -> None:
    """A published model's configuration is compared at a small size, in a moment."""
    for config in (
        transformers.Gemma3TextConfig(),
        transformers.LlamaConfig(hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8),
    ):
        assert check_split(config, is_packed=True) is False


def test_layers_that_share_more_than_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose layers read what earlier ones have kept is refused by name."""
    forward, kept = modeling_llama.LlamaDecoderLayer.forward, list[Any]()

    def reads_first(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        kept[:] = kept if kept and self.self_attn.layer_idx else [hidden_states]
        return forward(self, hidden_states + 0.5 * kept[0], *args, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", reads_first)
    with pytest.raises(Refused, match="LlamaForCausalLM computes otherwise when its layers are split"):
        check_split(decoders.config_of("llama"))


def test_weights_between_layers_and_head() -> None:
    """A model with weights in unknown places is refused by their names."""
    config = decoders.config_of("gemma4_text")
    config.hidden_size_per_layer_input = 8
    with pytest.raises(Refused, match=r"Gemma4ForCausalLM has weights .* model.norm and model\.\w*per_layer"):
        Skeleton(config)


def test_the_table_of_tested_models() -> None:
    """docs/huggingface.md lists the tested models, with nothing that failed, and refuses those that do not pack."""
    table = read_table()
    assert table.keys() == decoders.SETTINGS.keys()
    for name, cells in table.items():
        assert [*cells.values()] == [*["yes"] * 3, "refused" if name in decoders.UNPACKED else "yes"]
        refusal = pytest.raises(Refused, match="--reset-attention-mask")
        with refusal if name in decoders.UNPACKED else contextlib.nullcontext():
            check_split(decoders.config_of(name), is_packed=True)
