"""Describe the model of a checkpoint or a run in Hugging Face's format: config.json and its companions."""

from __future__ import annotations

import os
from dataclasses import replace

from megatron.bcd.checkpoint import layout, run_state
from megatron.bcd.config import RunConfig, run_config_from_dict
from megatron.bcd.huggingface import convert, folder, tokenizer_export
from megatron.bcd.huggingface.architecture import (
    TRANSFORMERS,
    Architecture,
    architecture_flags,
    architecture_of,
    make_config,
)
from megatron.bcd.tokenizer import (
    HuggingFaceTokenizer,
    NullTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    build_tokenizer,
)

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


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
        ValueError: transformers lacks the architecture, or the tokenizer, which has the size of the vocabulary, can't
            be read.
    """
    load_hf = config.checkpoint.load_hf
    tokenizer: Tokenizer | None = None
    try:
        tokenizer = build_tokenizer(**vars(config.tokenizer))
    except ValueError:
        if load_hf is None:
            raise
    if load_hf is not None:
        description = convert.describe(
            folder.locate(load_hf, flag="--load-hf", weights=config.model.transformer_impl == TRANSFORMERS),
            transformer_impl=config.model.transformer_impl,
        )
        positions = config.model.max_position_embeddings or 0
        if positions > description.network.max_positions:
            description = replace(description, config=dict(description.config) | {"max_position_embeddings": positions})
        if tokenizer is None or isinstance(tokenizer, NullTokenizer):
            return description
    else:
        assert tokenizer is not None
        network = run_architecture(config, is_on_gpu=is_on_gpu, vocab_size=tokenizer.vocab_size)
        content = make_config(network, dtype=_DTYPES[config.precision]) | {"eos_token_id": tokenizer.eod}
        description = convert.Description(network=network, config=content, companions={})
    return replace(description, companions=_companions(description, config, tokenizer), tokenizer=tokenizer)


def _companions(description: convert.Description, config: RunConfig, tokenizer: Tokenizer) -> dict[str, str | bytes]:
    """Return the generation_config.json of `description`, and the files of the tokenizer."""
    files = {name: path for name, path in description.companions.items() if name in folder.OF_THE_MODEL}
    if isinstance(tokenizer, HuggingFaceTokenizer):
        names = folder.companions(tokenizer.folder)
        files |= {name: os.path.join(tokenizer.folder, name) for name in names if name not in folder.OF_THE_MODEL}
    elif isinstance(tokenizer, SentencePieceTokenizer):
        files["tokenizer.model"] = tokenizer.unique_identifiers["tokenizer_model"]
    expects = config.checkpoint.load_hf is not None or config.data.sft
    return files | tokenizer_export.export_files(tokenizer, adds_special_tokens=expects)


def run_architecture(config: RunConfig, *, is_on_gpu: bool, vocab_size: int) -> Architecture:
    """Return the architecture that a run's flags describe, as one of transformers' families.

    Whether GELU is exact depends on the machine: Megatron Core's fused kernel, on GPUs only, has the tanh form.

    Raises:
        ValueError: no family fits. The message names a flag.
    """
    fields, model = config.transformer, config.model
    heads = int(fields["num_attention_heads"])
    is_rope = model.position_embedding_type == "rope"
    linear_bias = bool(fields.get("add_bias_linear", True))
    qkv_bias, qk_norm = linear_bias or bool(fields.get("add_qkv_bias")), bool(fields.get("qk_layernorm"))
    is_fused = is_on_gpu and linear_bias and bool(fields.get("bias_activation_fusion"))
    family = _family(
        is_rope=is_rope,
        qk_norm=qk_norm,
        only_qkv_bias=qkv_bias and not linear_bias,
        has_experts=bool(config.num_experts),
    )
    network = Architecture(
        family=family,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=int(fields.get("ffn_hidden_size") or 4 * config.hidden_size),
        num_attention_heads=heads,
        num_query_groups=int(fields.get("num_query_groups") or heads),
        head_size=int(fields.get("kv_channels") or config.hidden_size // heads),
        vocab_size=vocab_size,
        max_positions=model.max_position_embeddings or model.seq_length,
        norm_epsilon=float(fields.get("layernorm_epsilon", 1e-5)),
        tied=config.tied,
        rotary_base=model.rotary_base if is_rope else None,
        rope_scaling_factor=float(model.rope_scaling_factor) if model.use_rope_scaling else None,
        linear_bias=linear_bias,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        num_experts=config.num_experts or 0,
        experts_per_token=int(fields.get("moe_router_topk") or 0),
        expert_ffn_size=int(fields.get("moe_ffn_hidden_size") or 0),
        normalizes_probabilities=family != "qwen3_moe" or not fields.get("moe_router_pre_softmax"),
        router_loss=float(fields.get("moe_aux_loss_coeff") or 0.0),
        gelu=None if model.swiglu else "tanh" if model.openai_gelu or is_fused else "exact",
        hidden_dropout=float(fields.get("hidden_dropout", 0.1)),
        embedding_dropout=float(fields.get("hidden_dropout", 0.1)),
        attention_dropout=float(fields.get("attention_dropout", 0.1)),
    )
    _check_expressible(config, network)
    return network


def _family(*, is_rope: bool, qk_norm: bool, only_qkv_bias: bool, has_experts: bool) -> str:
    if not is_rope:
        return "gpt2"
    if has_experts:
        return "qwen3_moe" if qk_norm else "mixtral"
    return "qwen3" if qk_norm else "qwen2" if only_qkv_bias else "llama"


def _check_expressible(config: RunConfig, network: Architecture) -> None:
    """Compare the flags with those of the config.json of `network`, when it is read back. Raises ValueError."""
    from transformers import AutoConfig

    written = architecture_of(AutoConfig.for_model(**make_config(network, dtype="float32")))
    derived = architecture_flags(network)
    given = dict(config.transformer) | vars(config.model)
    actual = derived | {name: value for name, value in given.items() if value is not None}
    actual["openai_gelu"] = derived["openai_gelu"]  # the machine decides too
    expected = architecture_flags(written)
    if network.num_experts:  # no layer has the width of a dense one
        del expected["ffn_hidden_size"]
    if actual.get("moe_router_load_balancing_type") == "sinkhorn":
        expected["moe_router_load_balancing_type"] = "aux_loss"  # other balancing does not change the router's choice
    for name, value in expected.items():
        if actual.get(name, value) != value:
            raise ValueError(
                f"--{name.replace('_', '-')} {actual[name]}: transformers' {network.family} model has {value}, so this "
                "run's model can't be written in Hugging Face's format. Omit --save-hf."
            )
