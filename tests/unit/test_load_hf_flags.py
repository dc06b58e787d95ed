"""--load-hf on the command line: the flags that it sets, flags that contradict it, and config.json made from flags."""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import transformers
from support import worlds
from support.fine_tuning import tokenizer_folder

from megatron.bcd.checkpoint.run_state import RunState, changed_flags
from megatron.bcd.config import RunConfig, run_config_to_dict
from megatron.bcd.huggingface.architecture import architecture_of
from megatron.bcd.huggingface.run_network import describe_run, run_architecture

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 6, "hidden_size": 48}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 80, "max_position_embeddings": 96}
LLAMA |= {"rms_norm_eps": 1e-6, "rope_theta": 500.0, "vocab_size": 300}
GPT2 = {"model_type": "gpt2", "n_layer": 6, "n_embd": 48, "n_head": 4, "n_positions": 64, "vocab_size": 300}
GPT2 |= {"resid_pdrop": 0.25, "embd_pdrop": 0.25, "activation_function": "gelu"}
PHI = LLAMA | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": None}
SMOLLM3 = LLAMA | {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "pad_token_id": None}
GPT_OSS = LLAMA | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 16}
GPT_OSS |= {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "layer_types": None}


GEMMA = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 6}
GEMMA |= {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300}
SCRATCH = {"load_hf": None, "num_layers": 6, "hidden_size": 64, "num_attention_heads": 4}


def parse(folder: Path, config: dict[str, Any], *, form: str = "gpt", **flags: Any) -> RunConfig:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    values: dict[str, Any] = {"seq_length": 64, "micro_batch_size": 1, "train_iters": 1, "lr": 1e-3, "data_path": "x"}
    values |= {"load_hf": str(folder), "tokenizer_type": "ByteLevelTokenizer"}
    return worlds.config_of(form=form, **values | flags)


def test_the_model_sets_the_flags(tmp_path: Path) -> None:
    """The model sets the flags, whatever the script's defaults are."""
    for model, dropout in ((LLAMA, 0.0), (GPT2, 0.25)):
        gpt, llama = (parse(tmp_path / "m", model, form=form) for form in ("gpt", "llama"))
        assert (gpt.transformer, gpt.model) == (llama.transformer, llama.model)
        assert (gpt.transformer["num_layers"], gpt.transformer["hidden_dropout"]) == (6, dropout)
        assert gpt.model.make_vocab_size_divisible_by == 1


def test_flags_win_where_weights_do_not_depend_on_them(tmp_path: Path) -> None:
    """A flag wins where weights do not depend on it, and one that agrees is accepted; the folder's tokenizer is the
    default."""
    assert parse(tmp_path / "m", LLAMA, num_query_groups=2).transformer == parse(tmp_path / "m", LLAMA).transformer
    config = parse(
        tmp_path / "m", GPT2 | {"embd_pdrop": 0.1}, hidden_dropout=0, num_layers=6, make_vocab_size_divisible_by=64
    )
    assert config.transformer["hidden_dropout"] == 0 and config.model.make_vocab_size_divisible_by == 64
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    assert config.tokenizer.tokenizer_type == "ByteLevelTokenizer"
    config = parse(tmp_path / "m", GPT2, tokenizer_type=None)
    assert config.tokenizer.tokenizer_type == "HuggingFaceTokenizer"
    assert config.tokenizer.tokenizer_model == str(tmp_path / "m")


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (LLAMA, {"num_layers": 4}, "--num-layers"),
    (GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}}, {}, "quantised weights"),
    (
        GPT_OSS,
        {"transformer_impl": "local"},
        "gpt_oss is not one of .* --transformer-impl transformers trains",
    ),
    (PHI, {"transformer_impl": "local"}, "architecture phi3"),
    (LLAMA, {"transformer_impl": "transformers", "load_hf": None}, "--transformer-impl transformers needs --load-hf"),
    (GEMMA, {"tensor_model_parallel_size": 2, "world_size": 2}, "--tensor-model-parallel-size 2: the model runs on"),
    (GEMMA, {"recompute_activations": True}, "--recompute-granularity selective: the model runs on transformers' l"),
    (GEMMA, {"qk_layernorm": True}, "--qk-layernorm: .* runs on transformers' layers"),
    (GEMMA, {"expert_model_parallel_size": 2, "world_size": 2}, "--expert-model-parallel-size: .* runs on transf"),
    (GEMMA, {"num_layers": 4}, "--num-layers 4 contradicts"),
    (GEMMA, {"reset_position_ids": True}, "--reset-position-ids and --reset-attention-mask"),
    ({"model_type": "unheard_of", "auto_map": {}}, {}, "transformers can't read its config.json"),
    (GPT2, {"untie_embeddings_and_output_weights": True}, "--untie-embeddings-and-output-weights"),
    (LLAMA | {"head_dim": "64"}, {}, "head_dim"),
    (GPT2, {"seq_length": 65}, "--seq-length"),
    (LLAMA, {"seq_length": 97}, "--seq-length"),
    (LLAMA | {"model_type": "mistral", "architectures": None, "sliding_window": 63}, {}, "the sliding window of"),
    (LLAMA, {"load_hf": "/no/such/folder"}, "--load-hf"),
    (LLAMA, {"load_hf": __file__}, "is a file. Give the folder"),
    (GPT2 | {"embd_pdrop": 0.1}, {}, "--hidden-dropout"),
    (LLAMA, {"save_hf": "a", "save": "./a"}, "--save-hf"),
    (LLAMA, {"save": "{folder}"}, "--save"),
    (LLAMA, {"save_hf": "a", "skip_train": True, "load": "b"}, "--skip-train"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[2][:30])
def test_what_is_refused(tmp_path: Path, case: tuple[dict[str, Any], dict[str, Any], str]) -> None:
    """An unsupported model, a flag that contradicts the model and a folder with two uses are refused by name."""
    config, flags, message = case
    flags = {name: tmp_path / "m" if value == "{folder}" else value for name, value in flags.items()}
    with pytest.raises(ValueError, match=message):
        parse(tmp_path / "m", config, **flags)


def test_layers_of_transformers(tmp_path: Path) -> None:
    """A model that Megatron Core can't express runs on transformers' layers, with sizes from config.json."""
    for other in (PHI, SMOLLM3, GPT_OSS):
        assert parse(tmp_path / "m", other).model.transformer_impl == "transformers"
    config = parse(tmp_path / "m", GEMMA, form="llama")
    assert config.model.transformer_impl == "transformers" and config.tied
    assert (config.num_layers, config.hidden_size, config.transformer["num_query_groups"]) == (6, 48, 2)
    assert parse(tmp_path / "m", LLAMA).model.transformer_impl == "auto"
    assert parse(tmp_path / "m", LLAMA, transformer_impl="transformers").model.position_embedding_type == "none"


def test_a_sliding_window_limits_positions(tmp_path: Path) -> None:
    """A sliding window limits the positions, unless they are given."""
    mistral = LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 64}
    assert parse(tmp_path / "m", mistral).model.max_position_embeddings == 64
    assert parse(tmp_path / "m", mistral | {"sliding_window": 128}).model.max_position_embeddings == 96
    assert parse(tmp_path / "m", mistral, max_position_embeddings=96).model.max_position_embeddings == 96


def test_more_positions_are_exported(tmp_path: Path) -> None:
    """The exported config.json has the positions of the run, and all else as in the model's."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled = LLAMA | {"rope_scaling": scaling | {"original_max_position_embeddings": 8192}, "of_another": "program"}
    for asked, exported in ((128, 128), (96, 96), (None, 96)):
        run = parse(tmp_path / "m", scaled, max_position_embeddings=asked, seq_length=asked or 64)
        config = describe_run(run, is_on_gpu=False).config
        assert config == scaled | {"max_position_embeddings": exported}


def test_flags_that_a_resumed_run_leaves_out(tmp_path: Path) -> None:
    """A changed flag is named with its old value, and an unchanged one is not."""
    absent = {field.name: None for field in dataclasses.fields(RunState) if field.name != "format_version"}

    def changes(before: dict[str, int], now: dict[str, int]) -> list[str]:
        flags = run_config_to_dict(parse(tmp_path / "m", LLAMA, **before))
        saved = RunState(**absent | {"flags": flags, "blocks": ["one", "two", "three"]})
        return changed_flags(saved, parse(tmp_path / "m", LLAMA, **now))

    assert changes({"bcd_num_blocks": 3}, {"bcd_num_blocks": 2}) == ["--bcd-num-blocks 2 (was 3)"]
    assert changes({"bcd_num_blocks": 3, "kv_channels": 12}, {"bcd_num_blocks": 3}) == []


@pytest.mark.parametrize("config", [LLAMA, GPT2, LLAMA | {"attention_bias": True, "mlp_bias": True}])
def test_config_json_and_flags_say_the_same(tmp_path: Path, config: dict[str, Any]) -> None:
    """A config.json made from flags describes the network of the flags."""
    network = architecture_of(transformers.AutoConfig.for_model(**config))
    run = parse(tmp_path / "m", config)
    rebuilt, _ = run_architecture(run, is_on_gpu=False, vocab_size=300)
    assert rebuilt.flags == network.flags


def test_vocabulary_of_a_run(tmp_path: Path) -> None:
    """The exported vocabulary has all trained tokens; the tokenizer says how many these are."""
    run = parse(tmp_path / "m", LLAMA, form="llama", **SCRATCH)
    assert describe_run(run, is_on_gpu=False).network.config.vocab_size == 257
    run = run.replace_section("tokenizer", tokenizer_type="SentencePieceTokenizer", tokenizer_model="absent")
    with pytest.raises(ValueError, match="absent"):
        describe_run(run, is_on_gpu=False)


def test_the_tokenizer_that_is_exported(tmp_path: Path) -> None:
    """The tokenizer of the training is exported, from scratch without begin token; ids keep the model's files."""
    tokenizer_folder(tmp_path / "m", None, bos=True)
    (tmp_path / "m" / "generation_config.json").write_text("{}")
    original = (tmp_path / "m" / "tokenizer.json").read_bytes()
    other = describe_run(parse(tmp_path / "m", LLAMA), is_on_gpu=False).companions
    assert other.keys() == {"generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert json.loads(other["tokenizer.json"]) != json.loads(original)
    tokenizer = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tmp_path / "m")}
    kept = describe_run(parse(tmp_path / "m", LLAMA, **tokenizer), is_on_gpu=False).companions
    assert kept.keys() == other.keys()
    assert json.loads(kept["tokenizer.json"])["post_processor"] == json.loads(original)["post_processor"]
    scratch = describe_run(parse(tmp_path / "m", LLAMA, form="llama", **tokenizer, **SCRATCH), is_on_gpu=False)
    assert scratch.companions.keys() == {"tokenizer.json", "tokenizer_config.json"}
    assert json.loads(scratch.companions["tokenizer.json"])["post_processor"] is None
    assert scratch.tokenizer is not None and scratch.config["eos_token_id"] == scratch.tokenizer.eod
    ids = {"tokenizer_type": "NullTokenizer", "vocab_size": 200}
    numbers = describe_run(parse(tmp_path / "m", LLAMA, **ids), is_on_gpu=False).companions
    assert numbers["tokenizer.json"] == original and numbers.keys() == kept.keys()


def test_what_transformers_does_not_have(tmp_path: Path) -> None:
    """A network that transformers does not have is refused by its flag. On a GPU the fused GELU has the tanh form."""
    for flags, message in (
        ({"form": "llama", "rotary_percent": 0.5}, "--rotary-percent 0.5: transformers' llama model has 1.0"),
        ({"apply_residual_connection_post_layernorm": True}, "--apply-residual-connection-post-layernorm True"),
        ({"kv_channels": 32}, "--kv-channels 32: transformers' gpt2 model has 16"),
        ({"form": "llama", "qk_layernorm": True, "add_qkv_bias": True}, "--add-qkv-bias True"),
    ):
        with pytest.raises(ValueError, match=message):
            run_architecture(parse(tmp_path / "m", GPT2, **SCRATCH | flags), is_on_gpu=False, vocab_size=300)
    run = parse(tmp_path / "m", GPT2, **SCRATCH)
    assert [run_architecture(run, is_on_gpu=gpu, vocab_size=300)[0].flags["openai_gelu"] for gpu in (False, True)] == [
        False,
        True,
    ]


EXPERTS = {"form": "llama", "num_experts": 4, "moe_router_topk": 2}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (EXPERTS | {"moe_router_load_balancing_type": "sinkhorn"}, "--moe-router-load-balancing-type sinkhorn"),
        ({"form": "llama", "qk_layernorm": True, "add_bias_linear": True}, "--add-bias-linear True: .* qwen3"),
        ({"num_query_groups": 2, "group_query_attention": True}, "--group-query-attention True"),
        (EXPERTS, None),
    ],
    ids=lambda value: (value or "exported")[:30] if not isinstance(value, dict) else "",
)
def test_config_json_is_compared_as_it_is_read_back(tmp_path: Path, flags: dict[str, Any], message: str | None) -> None:
    """A run whose flags differ from those that its written config.json asks for is refused, with the flag's name."""
    run = parse(tmp_path / "m", GPT2, **SCRATCH | flags)
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        run_architecture(run, is_on_gpu=False, vocab_size=300)
