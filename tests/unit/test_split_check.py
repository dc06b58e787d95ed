"""The comparison of a small model with stages of its layers, before transformers' layers train."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from support import decoders
from support.decoder_table import EQUAL, REASONS, ROW
from transformers.models.llama import modeling_llama

from megatron.bcd.huggingface.architecture import TRANSFORMERS, architecture_of
from megatron.bcd.huggingface.folder import companions, read_architecture
from megatron.bcd.model.skeleton import TRUSTED, Refused, Skeleton, read_config
from megatron.bcd.model.split_check import check_split


def test_sizes_do_not_matter() -> None:
    """A published model's configuration is compared at a small size, in a moment."""
    for config in (
        transformers.Gemma3TextConfig(),
        transformers.LlamaConfig(hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8),
    ):
        checked = check_split(config, is_packed=True)
        assert checked.has_plain_head and not checked.tuple_length


_MAMBA = ["linear_attention"] * 5 + ["full_attention"]
WIDTHS: dict[str, dict[str, Any]] = {
    "helium": {},
    "kimi_linear": {},
    "mamba2": {},
    "falcon_h1": {"mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64},
    "granitemoehybrid": {"num_hidden_layers": 24, "layer_types": _MAMBA * 4},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "falcon": {},
    "gptj": {},
    "gpt2": {"n_embd": 1600, "n_layer": 48, "n_head": 25},
}


@pytest.mark.parametrize("name", WIDTHS)
def test_widths_fit_together(name: str) -> None:
    """Heads and states keep their widths in the small model, and their numbers fit its hidden size."""
    checked = check_split(transformers.AutoConfig.for_model(name, **WIDTHS[name]))
    assert checked.config.hidden_size <= 1024 and len(checked.layers) <= 4


def _refusal(name: str, sizes: dict[str, Any]) -> str:
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("takes more than a minute"))
    signal.alarm(60)
    try:
        config = transformers.AutoConfig.for_model(name, **sizes)
        if config.is_encoder_decoder:
            return "has an encoder"
        check_split(config.get_text_config())
    except Exception as error:  # configurations raise many types
        return str(error)
    finally:
        signal.alarm(0)
    return ""


@pytest.mark.long
@pytest.mark.parametrize("name", sorted({each.model_type for each in transformers.MODEL_FOR_CAUSAL_LM_MAPPING}))
def test_types(name: str, record_property: Callable[[str, object], None]) -> None:
    """The check of each type of decoder ends within a minute, and is recorded for the page of tested models."""
    refusal = _refusal(name, decoders.SIZES | decoders.SETTINGS[name] if name in decoders.SETTINGS else {})
    if "no small" in refusal:  # some have no default sizes that run
        refusal = _refusal(name, decoders.FULL_SIZES)
    record_property("split", next(label for part, label in REASONS.items() if part in refusal) if refusal else EQUAL)
    assert not refusal or name not in decoders.SETTINGS


def test_layers_that_share_more_than_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose layers read what earlier ones have kept is refused by name."""
    forward, kept = modeling_llama.LlamaDecoderLayer.forward, list[Any]()

    def reads_first(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        kept[:] = kept if kept and self.self_attn.layer_idx else [hidden_states]
        return forward(self, hidden_states + 0.5 * kept[0], *args, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", reads_first)
    with pytest.raises(Refused, match="LlamaForCausalLM computes otherwise when its layers are split"):
        check_split(decoders.config_of("llama"))


def test_a_cut_before_a_layer_that_reads_an_index() -> None:
    """A layer may return more than hidden states, which a later layer reads. A stage would have to send it."""
    sizes = {"num_hidden_layers": 8, "mlp_layer_types": ["dense"] * 8}
    alone = transformers.AutoConfig.for_model("glm_moe_dsa", **sizes, indexer_types=["full"] * 8)
    assert check_split(alone).tuple_length == 2
    for shared in (["full", "shared"] * 4, ["full"] * 7 + ["shared"]):
        reads = transformers.AutoConfig.for_model("glm_moe_dsa", **sizes, indexer_types=shared)
        with pytest.raises(Refused, match=r"GlmMoeDsaForCausalLM computes otherwise .*Shared"):
            check_split(reads)


def test_weights_between_layers_and_head() -> None:
    """A model with weights in unknown places is refused by their names."""
    config = decoders.config_of("gemma4_text")
    config.hidden_size_per_layer_input = 8
    with pytest.raises(Refused, match=r"Gemma4ForCausalLM has weights .* model.norm and model\.\w*per_layer"):
        Skeleton(config)


def test_ties_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that shares weights between its layers is refused by their names."""
    ties = {f"model.layers.{layer}.mlp.up_proj.weight": "model.layers.0.mlp.up_proj.weight" for layer in (1, 2, 3)}
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_tied_weights_keys", ties)
    config = decoders.config_of("llama")
    config.tie_word_embeddings = True
    with pytest.raises(Refused, match=r"ties model.layers.1.mlp.up_proj.weight to model.layers.0.mlp.up_proj.weight"):
        Skeleton(config)


def test_no_single_list_of_layers() -> None:
    """A model whose attention and MLPs are in separate lists is refused."""
    with pytest.raises(Refused, match="XLMWithLMHeadModel has no single list of its layers"):
        Skeleton(transformers.XLMConfig(emb_dim=32, n_layers=2, n_heads=4, n_words=decoders.VOCABULARY))


QUANTISED = transformers.LlamaConfig(quantization_config={"quant_method": "fp8"})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (transformers.T5Config(), "t5 has an encoder"),
        (transformers.CLIPConfig(), "clip is no decoder of AutoModelForCausalLM"),
        (transformers.BltConfig(), "blt has no single list of layers"),
        (QUANTISED, "quantization_config: quantised weights"),
        (transformers.Gemma3Config(), "gemma3 reads more than text, and random weights"),
    ],
)
def test_refused_configurations(tmp_path: Path, config: Any, words: str) -> None:
    """A model that no run can train is refused in one line with the flag."""
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"^{tmp_path}: {words}[^\n]*$"):
        read_config(str(tmp_path))


def test_code_of_a_model_runs_with_trust_only(tmp_path: Path) -> None:
    """Without trust, a model that transformers lacks is refused, and one that it has is read, and no code of their
    folders runs. With it, this code computes the model, and belongs to its companions."""
    mark = f"open({str(tmp_path / 'it_ran')!r}, 'w').close()\n"
    code = {
        "configuration_own.py": "from transformers import LlamaConfig\n"
        "class OwnConfig(LlamaConfig): model_type = 'own'\n",
        "modeling_own.py": "from transformers import LlamaForCausalLM\nfrom .configuration_own import OwnConfig\n"
        "class OwnModel(LlamaForCausalLM): config_class = OwnConfig\n",
    }
    for name, text in code.items():
        (tmp_path / name).write_text(mark + text)
    auto_map = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    values = decoders.config_of("llama").to_dict() | {"auto_map": auto_map}
    path = str(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert Skeleton(read_config(path)).name == "LlamaForCausalLM" and not read_architecture(path).not_in_core
    (tmp_path / "config.json").write_text(json.dumps(values | {"model_type": "own"}))
    with pytest.raises(ValueError, match=r"^[^\n]*its code comes with the model[^\n]*--trust-remote-code[^\n]*$"):
        read_config(path)
    assert not (tmp_path / "it_ran").exists()
    TRUSTED.add(path)
    assert read_architecture(path).not_in_core == "its code comes with the model"
    assert Skeleton(read_config(path)).name == "OwnModel" and (tmp_path / "it_ran").exists()
    assert companions(path) == {name: (mark + text).encode() for name, text in code.items()}


def test_the_table_of_tested_models(repo_root: Path) -> None:
    """docs/huggingface.md lists the tested models, with nothing that failed, and refuses those that do not pack."""
    page = (repo_root / "docs" / "huggingface.md").read_text(encoding="utf-8")
    table = {name.strip("`"): cells for names, cells in ROW.findall(page) for name in names.split(", ")}
    assert table.keys() == decoders.SETTINGS.keys()
    for name, cells in table.items():
        assert cells.split(" | ") == [" yes", "yes", "yes", "refused " if name in decoders.UNPACKED else "yes "]
        assert architecture_of(decoders.config_of(name), family=TRANSFORMERS).flags["num_layers"] == decoders.LAYERS
        refusal = pytest.raises(Refused, match="--reset-attention-mask")
        with refusal if name in decoders.UNPACKED else contextlib.nullcontext():
            checked = check_split(decoders.config_of(name), is_packed=True)
            assert checked.has_plain_head == (name not in ("granite", "cohere2", "gemma2"))
