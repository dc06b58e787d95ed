"""Writes the peer's input for tools/compare.py: samples and initial weights of a run, in transformers' layout.

    python tools/_compare_export.py FOLDER {gpt,llama} FLAG ...

FLAGs are those of the BCD run that stands beside the peer. A process of its own, because the peer's must not hold
Megatron Core: what it needs of memory is measured.

Tensor shapes: H hidden size, F FFN size, G query groups, Q heads of a group, D head size, B micro-batch size, S
sequence length.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
from torch import Tensor

from megatron.bcd import data
from megatron.bcd.arguments import FAMILY_DEFAULTS, parse_run_config
from megatron.bcd.blocks.partition import Partition
from megatron.bcd.config import RunConfig
from megatron.bcd.metrics.reporter import SilentReporter
from megatron.bcd.model.builder import build_model, unwrap_model
from megatron.bcd.runtime import distributed, rng
from megatron.bcd.trainer import Trainer

PROG = "tools/_compare_export.py"
JOB_FILE, TENSORS_FILE = "job.json", "tensors.pt"


def is_llama(config: RunConfig) -> bool:
    """The family (gpt or llama) that the flags describe."""
    return config.model.position_embedding_type == "rope"


def split_qkv(weight: Tensor, *, groups: int, head_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Megatron Core's [G x (Q + 2) x D, ...], group by group, as query, key and value with heads in that order."""
    by_group = weight.view(groups, -1, head_size, *weight.shape[1:])
    parts = by_group[:, :-2], by_group[:, -2:-1], by_group[:, -1:]
    query, key, value = (part.reshape(-1, *weight.shape[1:]).contiguous() for part in parts)
    return query, key, value


def local_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """GPTModel's weights by the names of Megatron Core's own layers; in Transformer Engine's, a linear layer holds the
    norm before it."""
    norms = {
        "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
        "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    }
    renamed = {}
    for name, weight in weights.items():
        for fused, own in norms.items():
            name = name.replace(fused, own)
        renamed[name] = weight
    return renamed


def gpt2_state(weights: dict[str, Tensor], config: RunConfig) -> dict[str, Tensor]:
    """GPTModel's weights by the names of GPT2LMHeadModel, whose linear layers are [in, out]."""
    modules = {
        "input_layernorm": "ln_1",
        "self_attention.linear_qkv": "attn.c_attn",
        "self_attention.linear_proj": "attn.c_proj",
        "pre_mlp_layernorm": "ln_2",
        "mlp.linear_fc1": "mlp.c_fc",
        "mlp.linear_fc2": "mlp.c_proj",
    }
    state = {
        "transformer.wte.weight": weights["embedding.word_embeddings.weight"],
        "transformer.wpe.weight": weights["embedding.position_embeddings.weight"],
    }
    for kind in ("weight", "bias"):
        state[f"transformer.ln_f.{kind}"] = weights[f"decoder.final_layernorm.{kind}"]
        for layer in range(config.num_layers):
            for module, name in modules.items():
                tensor = weights[f"decoder.layers.{layer}.{module}.{kind}"]
                if module.endswith("qkv"):
                    tensor = torch.cat(split_qkv(tensor, **_heads(config)))
                is_linear = "linear" in module and kind == "weight"
                state[f"transformer.h.{layer}.{name}.{kind}"] = tensor.t().contiguous() if is_linear else tensor
    return state


def llama_state(weights: dict[str, Tensor], config: RunConfig) -> dict[str, Tensor]:
    """GPTModel's weights by the names of LlamaForCausalLM."""
    state = {
        "model.embed_tokens.weight": weights["embedding.word_embeddings.weight"],
        "model.norm.weight": weights["decoder.final_layernorm.weight"],
        "lm_head.weight": weights["output_layer.weight"],
    }
    for layer in range(config.num_layers):
        ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
        query, key, value = split_qkv(weights[f"{ours}.self_attention.linear_qkv.weight"], **_heads(config))
        gate, up = weights[f"{ours}.mlp.linear_fc1.weight"].chunk(2)
        named = {
            "input_layernorm": weights[f"{ours}.input_layernorm.weight"],
            "self_attn.q_proj": query,
            "self_attn.k_proj": key,
            "self_attn.v_proj": value,
            "self_attn.o_proj": weights[f"{ours}.self_attention.linear_proj.weight"],
            "post_attention_layernorm": weights[f"{ours}.pre_mlp_layernorm.weight"],
            "mlp.gate_proj": gate.contiguous(),
            "mlp.up_proj": up.contiguous(),
            "mlp.down_proj": weights[f"{ours}.mlp.linear_fc2.weight"],
        }
        state |= {f"{theirs}.{name}.weight": tensor for name, tensor in named.items()}
    return state


def _heads(config: RunConfig) -> dict[str, int]:
    heads = int(config.transformer["num_attention_heads"])
    groups = int(config.transformer.get("num_query_groups") or heads)
    return {"groups": groups, "head_size": int(config.transformer["hidden_size"]) // heads}


def model_settings(config: RunConfig, vocabulary: int) -> dict[str, Any]:
    """Keyword arguments of transformers' LlamaConfig or GPT2Config for a model of the same shape."""
    fields, positions = config.transformer, config.model.max_position_embeddings
    if is_llama(config):
        return {
            "vocab_size": vocabulary,
            "hidden_size": fields["hidden_size"],
            "intermediate_size": fields["ffn_hidden_size"],
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": fields["num_attention_heads"],
            "num_key_value_heads": _heads(config)["groups"],
            "max_position_embeddings": positions,
            "rms_norm_eps": fields["layernorm_epsilon"],
            "rope_theta": float(config.model.rotary_base),
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
        }
    return {
        "vocab_size": vocabulary,
        "n_embd": fields["hidden_size"],
        "n_inner": fields.get("ffn_hidden_size"),  # None: 4 x hidden, as Megatron Core
        "n_layer": config.num_layers,
        "n_head": fields["num_attention_heads"],
        "n_positions": positions,
        "layer_norm_epsilon": fields["layernorm_epsilon"],
        "activation_function": "gelu",  # Megatron's is the exact one, not GPT-2's
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


def block_prefixes(partition: Partition, *, llama: bool) -> list[list[str]]:
    """BAdam's block_prefix_list: the same layers, embedding, final norm and head per block as in the BCD run."""
    stem = "model.layers" if llama else "transformer.h"
    blocks = []
    for block in partition.blocks:
        prefixes = [f"{stem}.{layer}." for layer in block.layers]
        if partition.embedding_active(block.index):
            prefixes += ["model.embed_tokens."] if llama else ["transformer.wte.", "transformer.wpe."]
        if partition.final_norm_active(block.index):
            prefixes += ["model.norm."] if llama else ["transformer.ln_f."]
        if partition.head_active(block.index) and llama:  # GPT-2's is the embedding itself
            prefixes += ["lm_head."]
        blocks.append(prefixes)
    return blocks


def samples(config: RunConfig, dataset: Any, num_microbatches: int) -> dict[str, Tensor]:
    """Tokens and labels of the first microbatches that the run trains on, [microbatches, B, S]."""
    batches = data.batches(dataset, config, consumed_samples=0)
    taken = [next(batches) for _ in range(num_microbatches)]
    assert all(bool(batch["loss_mask"].all()) for batch in taken), "every token counts"
    return {name: torch.stack([batch[name].cpu() for batch in taken]) for name in ("tokens", "labels")}


def export(folder: str, form: str, argv: Sequence[str]) -> None:
    """Write JOB_FILE and TENSORS_FILE below `folder` for a model of that form."""
    config = parse_run_config(list(argv), prog=PROG, defaults=FAMILY_DEFAULTS[form])
    distributed.initialize(backend="auto", timeout_minutes=10, tensor_size=1, pipeline_size=1)
    rng.seed_everything(config.training.seed)
    job, tensors = job_of(Trainer(config, build_model, reporter=SilentReporter()))
    torch.save(tensors, os.path.join(folder, TENSORS_FILE))
    with open(os.path.join(folder, JOB_FILE), "w", encoding="utf-8") as file:
        json.dump(job, file, indent=1)
    torch.distributed.destroy_process_group()


def job_of(components: Trainer) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the peer needs of a run that has not started: settings, and samples and initial weights."""
    config = components.config
    weights = {
        name: weight.detach().cpu().clone() for name, weight in unwrap_model(components.model).named_parameters()
    }
    vocabulary = weights["embedding.word_embeddings.weight"].size(0)
    training, optimizer = config.training, config.optimizer
    assert training.global_batch_size is not None, "the parser fills it in"
    per_step, num_steps = training.global_batch_size // training.micro_batch_size, data.num_iterations(config)
    tensors = {"weights": (llama_state if is_llama(config) else gpt2_state)(local_names(weights), config)}
    job = {
        "form": "llama" if is_llama(config) else "gpt",
        "model": model_settings(config, vocabulary),
        "num_parameters": sum(weight.numel() for weight in weights.values()),
        "blocks": block_prefixes(components.partition, llama=is_llama(config)),
        "steps_per_block": round(components.block_schedule.settings.mean_steps),
        "num_steps": num_steps,
        "microbatches_per_step": per_step,
        "lr": optimizer.lr,
        "betas": [optimizer.adam_beta1, optimizer.adam_beta2],
        "eps": optimizer.adam_eps,
        "weight_decay": optimizer.weight_decay,
        "clip_grad": optimizer.clip_grad,
    }
    return job, tensors | samples(config, components.splits.train, per_step * num_steps)


if __name__ == "__main__":  # reader processes may import this file
    export(sys.argv[1], sys.argv[2], sys.argv[3:])
