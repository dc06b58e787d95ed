"""Small random models, written by transformers, named by family and variant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch.distributed import checkpoint

from megatron.bcd.checkpoint.shard_writer import IndexWriter, write_beside_shards
from megatron.bcd.huggingface.folder import ModelFolder
from support import decoders

FAMILIES = ("gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3_moe", "qwen3")
VOCABULARY, LAYERS = decoders.VOCABULARY, decoders.LAYERS
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0}
_LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SETTINGS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt2_exact_untied": {"activation_function": "gelu", "tie_word_embeddings": False, "n_inner": 40},
    "llama2": {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "llama3": {"head_dim": 16, "rope_parameters": _LLAMA3, "rms_norm_eps": 1e-2},
    "llama_tied": {"tie_word_embeddings": True},
    "llama_biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    "mistral": {"sliding_window": 64},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "qwen3_moe_plain": {"num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16},
}
"""Settings that differ from `decoders.SIZES` and transformers' defaults."""


def model_type(name: str) -> str:
    """Return the family of a model: the one that its name starts with."""
    return next(family for family in FAMILIES if name.startswith(family))


def model_of(name: str) -> Any:
    """Build the model of this name; no weight is 0 or 1, and dropout is off."""
    kind, settings = model_type(name), SETTINGS[name]
    if kind == "gpt2":
        sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": LAYERS, "n_head": 4}
        sizes |= {"n_positions": 64, "bos_token_id": None, "eos_token_id": None}
        sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    else:
        sizes = decoders.SIZES | {"tie_word_embeddings": False}
    described = transformers.AutoConfig.for_model(kind, **sizes | settings)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(described).eval()
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def write_model(name: str, folder: Path, *, dtype: torch.dtype = torch.float32, max_shard_size: str = "1GB") -> Path:
    transformers.utils.logging.disable_progress_bar()
    model_of(name).to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def write_checkpoint(source: Path, root: Path) -> Path:
    """Write the weights of a model folder as a checkpoint without flags, as another program would."""
    folder, model = root / "iter_0000001", ModelFolder(str(source))
    weights = {row.key: model.read(row) for row in model.rows if row.layer is None}
    for key in {row.key for row in model.rows} - weights.keys():
        weights[key] = torch.stack([model.read(row) for row in model.rows if row.key == key])
    checkpoint.save(weights, storage_writer=IndexWriter(str(folder)), no_dist=True)
    write_beside_shards(str(folder), iteration=1)
    (root / "latest_checkpointed_iteration.txt").write_text("1")
    return root


def tensors_of(folder: Path | str) -> dict[str, torch.Tensor]:
    """Return all tensors of the folder's safetensors files."""
    results: dict[str, torch.Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        results |= load_file(file)
    return results


def differing(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Return the names that only one of them has, or whose dtype, shape or bits differ."""
    alone = sorted(left.keys() ^ right.keys())
    return alone + [
        name
        for name in sorted(left.keys() & right.keys())
        if left[name].dtype != right[name].dtype or not torch.equal(left[name], right[name])
    ]
