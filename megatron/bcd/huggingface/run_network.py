"""Describe the model of a checkpoint or a run in Hugging Face's format: config.json and its companions."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.bcd.checkpoint import layout, run_state
from megatron.bcd.config import RunConfig, run_config_from_dict
from megatron.bcd.huggingface import convert, folder, tokenizer_export
from megatron.bcd.huggingface.architecture import LLAMA3_ROPE, TRANSFORMERS, Architecture, architecture_of
from megatron.bcd.runtime.device import DTYPES
from megatron.bcd.tokenizer import (
    HuggingFaceTokenizer,
    NullTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    build_tokenizer,
)


def checkpoint_folder(path: str, *, flag: str) -> str:
    """Return `path` if it is a checkpoint, else the newest complete checkpoint below it.

    Raises:
        ValueError: there is no checkpoint, or one of its files is damaged.
    """
    if not os.path.isdir(path):
        raise ValueError(f"{flag} {path}: no such folder. Give a folder of --save.")
    if not os.path.isfile(os.path.join(path, ".metadata")):
        iterations = layout.candidates(path)
        if not iterations:
            raise ValueError(f"{flag} {path}: holds no checkpoint. Give a folder of --save, or a checkpoint in it.")
        path = layout.iteration_folder(path, iterations[0])
    damage = None if layout.is_foreign(path) else layout.damage(path)
    if damage is not None:
        raise ValueError(f"{flag} {path}: {damage}")
    return path


def describe_checkpoint(path: str, *, config_folder: str | None = None) -> convert.Description:
    """Return the description of a checkpoint's model.

    Args:
        path: the checkpoint.
        config_folder: the folder with config.json and companions. Default: the flags of its run.

    Raises:
        ValueError: there is no description, or transformers lacks the architecture.
    """
    if config_folder is not None:
        return convert.describe(config_folder)
    file = os.path.join(path, layout.RUN_STATE)
    if not os.path.isfile(file):
        raise ValueError(
            f"{path}: has no {layout.RUN_STATE} with the architecture. Give tools/convert_checkpoint.py --config."
        )
    with open(file, encoding="utf-8") as stream:
        state = run_state.from_json(stream.read(), path=file)
    return describe_run(run_config_from_dict(state.flags), is_on_gpu=state.layout.get("device", "cpu") != "cpu")


def describe_run(config: RunConfig, *, is_on_gpu: bool) -> convert.Description:
    """Return the description of a run's model: that of --load-hf, or a config.json made from the flags.

    Raises:
        ValueError: transformers lacks the architecture, or the tokenizer can't be read.
    """
    load_hf, tokenizer = config.checkpoint.load_hf, build_tokenizer(**vars(config.tokenizer))
    if load_hf is not None:
        description = convert.describe(
            folder.locate(load_hf, flag="--load-hf", weights=config.model.transformer_impl == TRANSFORMERS),
            transformer_impl=config.model.transformer_impl,
        )
        positions = config.model.max_position_embeddings or 0
        if positions > description.network.max_positions:
            description = replace(description, config=dict(description.config) | {"max_position_embeddings": positions})
        if isinstance(tokenizer, NullTokenizer):
            return description
    else:
        network, content = run_architecture(config, is_on_gpu=is_on_gpu, vocab_size=tokenizer.vocab_size)
        content["eos_token_id"] = tokenizer.eod
        description = convert.Description(network=network, config=content, companions={})
    return replace(description, companions=_companions(description, config, tokenizer), tokenizer=tokenizer)


def _companions(description: convert.Description, config: RunConfig, tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the files of the model of `description` that are not its tokenizer's, and those of the tokenizer."""
    files: dict[str, bytes] = {}
    if isinstance(tokenizer, HuggingFaceTokenizer):
        files = folder.companions(tokenizer.folder)
    elif isinstance(tokenizer, SentencePieceTokenizer):
        files["tokenizer.model"] = Path(tokenizer.unique_identifiers["tokenizer_model"]).read_bytes()
    of_the_model = [name for name in (*files, *description.companions) if name.endswith(".py")]
    for name in (*folder.OF_THE_MODEL, *of_the_model):
        files.pop(name, None)
        if name in description.companions:
            files[name] = description.companions[name]
    expects = config.checkpoint.load_hf is not None or config.data.sft
    return files | tokenizer_export.export_files(tokenizer, adds_special_tokens=expects)


def run_architecture(config: RunConfig, *, is_on_gpu: bool, vocab_size: int) -> tuple[Architecture, dict[str, Any]]:
    """Return the architecture that a run's flags describe, as one of transformers' families, and its config.json.

    Whether GELU is exact depends on the machine: Megatron Core's fused kernel, on GPUs only, has the tanh form.

    Raises:
        ValueError: no family fits. The message names a flag.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    fields, model = config.transformer, config.model
    has_bias, qk_norm = fields.get("add_bias_linear", True), fields.get("qk_layernorm")
    if model.position_embedding_type != "rope":
        family = "gpt2"
    elif config.num_experts:
        family = "qwen3_moe" if qk_norm else "mixtral"
    else:
        family = "qwen3" if qk_norm else "qwen2" if fields.get("add_qkv_bias") and not has_bias else "llama"
    content = {
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]],
        "model_type": family,
        "torch_dtype": str(DTYPES[config.precision]).removeprefix("torch."),
        "vocab_size": vocab_size,
        "tie_word_embeddings": config.tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    content |= _gpt2_config(config, is_on_gpu=is_on_gpu) if family == "gpt2" else _llama_config(config, family)
    network = architecture_of(AutoConfig.for_model(**content))
    groups = fields.get("num_query_groups")
    given = dict(fields) | vars(model) | {"group_query_attention": groups not in (None, fields["num_attention_heads"])}
    expected = dict(network.flags)
    del expected["openai_gelu"]  # the machine decides too
    if config.num_experts:  # no layer has the width of a dense one
        del expected["ffn_hidden_size"]
    if given.get("moe_router_load_balancing_type") == "sinkhorn":
        expected["moe_router_load_balancing_type"] = "aux_loss"  # other balancing does not change the router's choice
    for name, value in expected.items():
        if given.get(name) not in (None, value):
            raise ValueError(
                f"--{name.replace('_', '-')} {given[name]}: transformers' {family} model has {value}, so this run's "
                "model can't be written in Hugging Face's format. Omit --save-hf."
            )
    return network, content


def _gpt2_config(config: RunConfig, *, is_on_gpu: bool) -> dict[str, Any]:
    fields, model = config.transformer, config.model
    is_fused = is_on_gpu and fields.get("add_bias_linear", True) and fields.get("bias_activation_fusion")
    return {
        "n_layer": config.num_layers,
        "n_embd": config.hidden_size,
        "n_head": fields["num_attention_heads"],
        "n_inner": fields.get("ffn_hidden_size") or 4 * config.hidden_size,
        "n_positions": model.max_position_embeddings or model.seq_length,
        "layer_norm_epsilon": fields.get("layernorm_epsilon", 1e-5),
        "activation_function": "gelu_new" if model.openai_gelu or is_fused else "gelu",
        "resid_pdrop": fields.get("hidden_dropout", 0.1),
        "embd_pdrop": fields.get("hidden_dropout", 0.1),
        "attn_pdrop": fields.get("attention_dropout", 0.1),
    }


def _llama_config(config: RunConfig, family: str) -> dict[str, Any]:
    fields, model = config.transformer, config.model
    heads, is_sparse = fields["num_attention_heads"], family == "mixtral"
    ffn_size = fields.get("moe_ffn_hidden_size" if is_sparse else "ffn_hidden_size") or 4 * config.hidden_size
    values: dict[str, Any] = {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": ffn_size,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("num_query_groups") or heads,
        "head_dim": fields.get("kv_channels") or config.hidden_size // heads,
        "max_position_embeddings": model.max_position_embeddings or model.seq_length,
        "rms_norm_eps": fields.get("layernorm_epsilon", 1e-5),
        "rope_theta": float(model.rotary_base),
        "hidden_act": "silu",
        "attention_dropout": fields.get("attention_dropout", 0.1),
    }
    if model.use_rope_scaling:
        values["rope_scaling"] = {"rope_type": "llama3", "factor": float(model.rope_scaling_factor), **LLAMA3_ROPE}
    if family == "llama":  # the other families have biases or not
        values |= dict.fromkeys(("attention_bias", "mlp_bias"), bool(fields.get("add_bias_linear", True)))
    if config.num_experts:
        values["num_local_experts" if is_sparse else "num_experts"] = config.num_experts
        values["num_experts_per_tok"] = fields["moe_router_topk"]
        values["router_aux_loss_coef"] = fields.get("moe_aux_loss_coeff") or 0.0
    if family == "qwen3_moe":
        values["moe_intermediate_size"] = fields["moe_ffn_hidden_size"]
        values["norm_topk_prob"] = not fields.get("moe_router_pre_softmax")
    return values
