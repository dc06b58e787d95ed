"""Invariant 3: the active block's gradient is the gradient of the loss. Models equal Hugging Face transformers': the
same logits and gradients from the same random weights.

Shapes: B sequences, S tokens, V padded vocabulary, H hidden size.
"""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch
import transformers
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from support import huggingface_weights, worlds
from support.dist import World
from torch import Tensor

from megatron.bcd.blocks.partition import partition_from_config
from megatron.bcd.config import RunConfig
from megatron.bcd.model.builder import unwrap_model
from megatron.bcd.optim.step import Step

SIZES: dict[str, Any] = {"num_layers": 4, "global_batch_size": 4, "train_iters": 2, "bcd_num_blocks": 2, "lr": 1e-3}
SIZES |= {"max_position_embeddings": 33}  # transformers' own loss takes one token more
GROUPED = {"ffn_hidden_size": 88, "group_query_attention": True, "num_query_groups": 2}
UNFUSED = {"no_bias_gelu_fusion": True}
ONE_GROUP = {"group_query_attention": True}
EXACT, TANH = {"activation_function": "gelu"}, {"activation_function": "gelu_new"}
PIPELINE = {"pipeline_model_parallel_size": 2, "bcd_layout": "submodel"}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
TENSOR = {"tensor_model_parallel_size": 2}
NOT_GATED = {"no_swiglu": True, "squared_relu": True}
NEMOTRON = NOT_GATED | GROUPED | {"normalization": "LayerNorm", "apply_layernorm_1p": True, "rotary_percent": 0.5}
HALF_ROTATED = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
NEMOTRON_SETTINGS = HALF_ROTATED | {"model_type": "nemotron", "norm_eps": 1e-5}
# by name: script, ranks, flags, transformers' settings
CASES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "llama_grouped": (
        "llama",
        1,
        GROUPED | {"rotary_base": 500, "norm_epsilon": 1e-2, "kv_channels": 16},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rms_norm_eps": 1e-2, "head_dim": 16},
    ),
    "llama_pipeline2": ("llama", 2, GROUPED | PIPELINE, {}),
    "llama_one_group_tensor2": ("llama", 2, ONE_GROUP | TENSOR, {}),
    "arcee_tensor2": ("llama", 2, NOT_GATED | GROUPED | TENSOR, {"model_type": "arcee"}),
    "nemotron_sequence_parallel": ("llama", 2, NEMOTRON | TENSOR | {"sequence_parallel": True}, NEMOTRON_SETTINGS),
    "gpt_spread": ("gpt", 2, UNFUSED | {"pipeline_model_parallel_size": 2}, EXACT),
    "gpt_submodel_recomputed": ("gpt", 2, UNFUSED | PIPELINE | RECOMPUTED, EXACT),
    "gpt_tensor2_biases": ("gpt", 2, TENSOR | {"openai_gelu": True, "bcd_always_active": "biases"}, TANH),
}
LOGITS, GRADIENTS = 5e-5, 1e-5
"""Largest absolute differences, of logits up to 5; of gradients also relative to a parameter's largest."""


def config_of(form: str, num_ranks: int, data_path: str, **flags: Any) -> RunConfig:
    """Parse the command line as the script of that form does."""
    return worlds.run_config(form=form, world_size=num_ranks, data_path=data_path, **SIZES | flags)


def run_of(config: RunConfig) -> dict[str, Any]:
    """Return this rank's weights, the gradients of every block, the logits (None before the last stage) and the
    batch."""
    with worlds.started(config) as run:
        run.active.dispose()
        _draw(run)
        batches = worlds.first_batches(run)
        microbatches = [next(batches) for _ in range(get_num_microbatches())]
        batch = {name: torch.cat([microbatch[name] for microbatch in microbatches]) for name in microbatches[0]}
        weights = {name: chunks(p, p) for name, p in _named(run)}
        logits = logits_of(run.model, batch)
        gradients: list[dict[str, dict[str, Any]]] = []
        for block in range(run.partition.num_blocks):
            run.active.build(block)
            run.active.zero_grad()
            batches = worlds.first_batches(run)
            run.forward_backward(batches, get_num_microbatches(), Step(run.active))
            assert all(p.grad is None and p.requires_grad == hasattr(p, "main_grad") for _, p in _named(run))
            gradients.append({name: chunks(p, p.main_grad) for name, p in _named(run) if p.requires_grad})
            run.active.dispose()
        return {"weights": weights, "gradients": gradients, "logits": logits, "batch": batch}


def _named(item: Any) -> list[tuple[str, Any]]:
    """Return the stage's parameters by their names in the whole model; a tied head's copy is the embedding."""
    first = item.partition.stage_layers(item.active.stage).start
    results = []
    for name, parameter in unwrap_model(item.model).named_parameters():
        if name.startswith("decoder.layers."):
            index, _, rest = name.removeprefix("decoder.layers.").partition(".")
            name = f"decoder.layers.{int(index) + first}.{rest}"
        if name == "output_layer.weight" and item.config.tied:
            name = "embedding.word_embeddings.weight"
        results.append((name, parameter))
    return results


def _stride(parameter: Any) -> int:
    """Return the number of parts in each tensor-parallel rank's slice: gate and up are two."""
    return int(getattr(parameter, "partition_stride", 1))


@torch.no_grad()
def _draw(item: Any) -> None:
    """Draw random weights that depend only on the parameter's name; biases and norms are not 0 or 1 either."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in _named(item):
        is_split = getattr(parameter, "tensor_model_parallel", False)
        shape = list(parameter.shape)
        if is_split:
            shape[parameter.partition_dim] *= size
        drawn = 0.2 * torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        drawn += "norm" in name and name.endswith("weight")
        if is_split:
            parts = drawn.chunk(size * _stride(parameter), dim=parameter.partition_dim)
            drawn = torch.cat(parts[rank::size], dim=parameter.partition_dim)
        parameter.copy_(drawn)


def chunks(parameter: Any, tensor: Tensor) -> dict[str, Any]:
    """Copy a parameter's tensor, with the information that `whole` needs."""
    is_split = getattr(parameter, "tensor_model_parallel", False)
    return {
        "tensor": tensor.detach().clone(),
        "dim": parameter.partition_dim if is_split else None,
        "stride": _stride(parameter),
    }


@torch.no_grad()
def logits_of(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor | None:
    """Return [B, S, V / tensor-parallel size] on the last stage, None before it."""
    gpt = unwrap_model(model)
    batch_size, length = batch["tokens"].shape
    stage_input = torch.empty(length, batch_size, gpt.config.hidden_size)
    if not gpt.pre_process:
        torch.distributed.recv(stage_input, parallel_state.get_pipeline_model_parallel_prev_rank())
        gpt.set_input_tensor(stage_input)
    output: Tensor = gpt(batch["tokens"], batch["position_ids"], None)
    if gpt.post_process:
        return output
    torch.distributed.send(output, parallel_state.get_pipeline_model_parallel_next_rank())
    return None


def whole(ranks: list[dict[str, Any]]) -> Tensor:
    """Assemble a parameter's tensor from the parts of all ranks."""
    dim, stride = ranks[0]["dim"], ranks[0]["stride"]
    tensors = [rank["tensor"] for rank in ranks]
    if dim is None or len(ranks) == 1:
        assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
        return tensors[0]
    shares = [tensor.chunk(stride, dim=dim) for tensor in tensors]
    return torch.cat([share[part] for part in range(stride) for share in shares], dim=dim)


def merged(config: RunConfig, ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return the whole model's tensors by name; copies of a tied embedding must be equal."""
    size = config.tensor_size
    results: dict[str, Tensor] = {}
    for start in range(0, len(ranks), size):
        stage = ranks[start : start + size]
        for name in stage[0]:
            tensor = whole([rank[name] for rank in stage])
            assert name not in results or torch.equal(results[name], tensor), name
            results[name] = tensor
    return results


def _is_llama(config: RunConfig) -> bool:
    return config.model.position_embedding_type == "rope"


def reference_of(config: RunConfig, **settings: Any) -> torch.nn.Module:
    """Return transformers' model of the same size."""
    heads, length = config.transformer["num_attention_heads"], config.model.max_position_embeddings
    if not _is_llama(config):
        sizes = {"n_positions": length, "n_embd": config.hidden_size, "n_layer": config.num_layers, "n_head": heads}
        sizes |= {"vocab_size": worlds.PADDED_VOCABULARY, "bos_token_id": None, "eos_token_id": None}
        no_dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **no_dropout, **settings)).eval()
    kind = settings.pop("model_type", "llama")
    defaults = {"rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    described = transformers.AutoConfig.for_model(
        kind,
        vocab_size=worlds.PADDED_VOCABULARY,
        max_position_embeddings=length,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=config.transformer.get("num_query_groups", heads),
        intermediate_size=config.transformer["ffn_hidden_size"],
        **defaults | settings,
    )
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(described).eval()
    return model


def converted(config: RunConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    heads = config.transformer["num_attention_heads"]
    if not _is_llama(config):
        return huggingface_weights.to_gpt2(tensors, num_heads=heads)
    groups = config.transformer.get("num_query_groups", heads)
    return huggingface_weights.to_llama(tensors, num_heads=heads, num_groups=groups, is_gated=config.model.swiglu)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients(world1: World, world2: World, text_data: str, case: str) -> None:
    """Logits and the gradients of each block equal those of transformers' model with the same weights. Each block has
    gradients of its layers only, and all blocks together of every parameter."""
    form, num_ranks, flags, settings = CASES[case]
    config = config_of(form, num_ranks, text_data, **flags)
    ranks = (world1 if num_ranks == 1 else world2).run(run_of, config)
    reference = reference_of(config, **settings)
    weights = converted(config, merged(config, [rank["weights"] for rank in ranks]))
    parameters = dict(reference.named_parameters())
    assert weights.keys() == parameters.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            assert parameter.shape == weights[name].shape, name
            parameter.copy_(weights[name])

    batch = ranks[0]["batch"]
    assert batch["loss_mask"].min() == 1
    tokens = torch.cat((batch["tokens"], batch["labels"][:, -1:]), dim=1)
    output = reference(input_ids=tokens, labels=tokens)
    output.loss.backward()

    of_ranks = [rank["logits"] for rank in ranks if rank["logits"] is not None]
    logits = torch.cat(of_ranks, dim=-1)
    assert (logits - output.logits[:, :-1]).abs().max() < LOGITS
    seen: set[str] = set()
    for block in partition_from_config(config).blocks:
        ours = merged(config, [rank["gradients"][block.index] for rank in ranks])
        gradients = converted(config, ours)
        for name, gradient in gradients.items():
            expected = parameters[name].grad
            assert expected is not None
            assert (gradient - expected).abs().max() < GRADIENTS * min(1.0, float(expected.abs().max())), name
        if "biases" in config.bcd.always_active:
            always = {name for name in weights if ".h." in name and name.endswith(".bias") and "ln_" not in name}
            assert always <= gradients.keys()
            gradients = {name: gradient for name, gradient in gradients.items() if name not in always}
            seen |= always
        assert block.index == 0 or seen.isdisjoint(gradients)
        seen |= gradients.keys()
        layers = {int(name.split(".")[2]) for name in ours if name.endswith("linear_fc1.weight")}
        assert layers == set(block.layers)
    assert seen == parameters.keys()
