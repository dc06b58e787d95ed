"""The comparison of a small model with its two halves, before transformers' layers train."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from support import decoders
from transformers.models.llama import modeling_llama

from megatron.bcd.model.skeleton import Refused, Skeleton
from megatron.bcd.model.split_check import check_split

TABLE = Path(__file__).parents[2] / "docs" / "huggingface.md"


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


PACKED = re.compile(r"^\| `(\w+)` \| (yes|no) \|$", re.MULTILINE)


def test_the_table_of_packing() -> None:
    """docs/huggingface.md lists the tested models, and which of them keep packed texts apart."""
    table = dict(PACKED.findall(TABLE.read_text()))
    assert table.keys() == decoders.SETTINGS.keys()
    for name, is_packed in table.items():
        if is_packed == "no":
            with pytest.raises(Refused, match="--reset-attention-mask"):
                check_split(decoders.config_of(name), is_packed=True)
        else:
            check_split(decoders.config_of(name), is_packed=True)
