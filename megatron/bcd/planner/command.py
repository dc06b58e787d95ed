"""Write the command line of a recipe."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from megatron.bcd.config.sections import dashed
from megatron.bcd.planner.findings import learning_rate
from megatron.bcd.planner.recipe import METHOD_FLAGS, PRECISION_FLAGS, WITH_ORTHOGONAL, Recipe

SCRIPTS = {"gpt": "pretrain_gpt_bcd.py", "llama": "pretrain_llama_bcd.py"}
"""The training script by model family. Each script has its family's flags as defaults."""
LEARNING_RATE_FLAGS = "--lr-warmup-fraction 0.01 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0"
"""As in examples/pretrain.sh."""
SFT_FLAGS = "--num-epochs 3 --lr-warmup-fraction 0.03 --lr-decay-style cosine --weight-decay 0 --clip-grad 1.0"
"""As in examples/finetune.sh."""
_WIDTH = 112
_GIVEN = {
    "bcd_schedule": None,
    "bcd_layers_on": "device",
    "bcd_resident_layers": 0,
    "bcd_layers_per_pass": 1,
    "bcd_saved_inputs": "device",
    "bcd_saved_activations": "recompute",
    "bcd_passes_on_host": 0,
    "bcd_head_phase": None,
    "bcd_frozen": None,
    "bcd_always_active": None,
    "bcd_main_params": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "adam_moments_dtype": "fp32",
    "muon_momentum_dtype": None,
    "muon_gram_iteration": False,
    "fp16_accumulation": None,
}
"""Flags that a command has if a plan has them, in their order, and the values that are left out."""


def network_flags(recipe: Recipe) -> list[str]:
    """Return the flags of the model. For transformers' layers it is a folder, whose config.json alone is enough."""
    if recipe.model.measured is not None:
        return [f"--load-hf MODEL_DIR --seq-length {recipe.tokens}"]
    model, values, is_gpt = recipe.model, recipe.model.flags(recipe.tokens), recipe.model.form == "gpt"
    has_biases = values["add_bias_linear"]
    names = ["num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "seq_length", "num_query_groups"]
    names += ["kv_channels", "qk_layernorm"] + ["max_position_embeddings"] * is_gpt
    flags = {name: values[name] for name in names}
    flags["group_query_attention"] = values["num_query_groups"] is not None
    flags["add_bias_linear"] = has_biases and not is_gpt
    if is_gpt:
        flags |= {"hidden_dropout": 0, "attention_dropout": 0, "disable_bias_linear": not has_biases}
    flags["no_" * model.is_tied + "untie_embeddings_and_output_weights"] = model.is_tied != is_gpt
    flags["add_qkv_bias"] = values["add_qkv_bias"] and not has_biases
    if model.experts:
        flags |= {name: values[name] for name in ("moe_router_topk", "moe_ffn_hidden_size")}
        flags |= {"num_experts": model.experts, "moe_aux_loss_coeff": "1e-2", "moe_grouped_gemm": True}
    return _words(flags)


def layout_flags(recipe: Recipe) -> list[str]:
    """Return the flags of ranks, batch, precision, recomputation and method."""
    config, bcd = recipe.config, recipe.config.bcd
    flags: dict[str, Any] = {
        "pipeline_model_parallel_size": config.pipeline_size,
        "context_parallel_size": config.context_size if config.context_size > 1 else None,
        "pipeline_cut": None if config.training.pipeline_cut == "even" else "auto",
        "pipeline_model_parallel_layout": recipe.flag("pipeline_model_parallel_layout"),
        "micro_batch_size": recipe.micro_batch_size,
        "global_batch_size": recipe.global_batch_size,
        "make_vocab_size_divisible_by": config.model.make_vocab_size_divisible_by,
        **PRECISION_FLAGS[recipe.precision],
        "accumulate_allreduce_grads_in_fp32": recipe.precision == "fp16",  # with --bf16 it is the default
        "no_sft_packing": recipe.task == "sft" and not recipe.model.can_pack,
    }
    if recipe.recompute == "full":
        flags |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif recipe.recompute == "auto":
        flags |= {"recompute": "auto", "recompute_memory_gib": f"{recipe.run_gib:g}"}
    given = {name: recipe.flag(name) for name, left_out in _GIVEN.items() if recipe.flag(name) != left_out}
    if config.is_breadth_first:
        given = {"bcd_schedule": bcd.bcd_schedule} | given
        if config.pipeline_size > 1 and bcd.bcd_layers_per_pass > 1:  # the layout's chunks
            given |= {"bcd_layers_per_pass": None, "num_virtual_stages_per_pipeline_rank": config.num_chunks}
    if not (recipe.memory.num_kept or recipe.memory.num_on_host):
        given.pop("bcd_saved_activations", None)
    elif given["bcd_saved_activations"] == "auto":
        given["recompute_memory_gib"] = f"{recipe.run_gib:g}"
    loss = recipe.flag("cross_entropy_fusion_impl")
    fused = {"cross_entropy_loss_fusion": loss is not None, "cross_entropy_fusion_impl": loss}
    if not recipe.has_blocks:
        return _words(flags | fused | METHOD_FLAGS[recipe.method] | given)
    if recipe.is_whole and bcd.bcd_inactive_update == "orthogonal":
        flags |= {name: getattr(bcd, name) for name in WITH_ORTHOGONAL}
    method = METHOD_FLAGS[recipe.method] | {
        "bcd_inactive_update": bcd.bcd_inactive_update if recipe.method == "finetune" else None,
        "bcd_num_blocks": bcd.num_blocks if bcd.bcd_layout != "stage" else None,
        "bcd_layout": bcd.bcd_layout,
    }
    return [*_words(flags), *filter(None, (" ".join(_words(part)) for part in (fused, method, given)))]


def _words(flags: Mapping[str, Any]) -> list[str]:
    """Return each flag with its value, in a shell's words. None and False leave it out."""
    shown = [(dashed(name), value) for name, value in flags.items() if value is not None and value is not False]
    return [name if value is True else f"{name} {shlex.quote(str(value))}" for name, value in shown]


def torchrun_command(recipe: Recipe, *, iterations: int) -> str:
    """Return the command that starts the run on each node. Started again, it resumes from its newest checkpoint.

    In pretraining its last line is --mock-data, which the user's data replace. In fine-tuning it has placeholders for
    a model and for data.
    """
    start = f"torchrun --nproc-per-node {recipe.gpus_per_node}"
    if recipe.num_nodes > 1:
        start += f" --nnodes {recipe.num_nodes} --rdzv-backend c10d --rdzv-endpoint ${{HEAD_NODE:?}}:29500"
    rate = f"--lr {learning_rate(recipe)[0]}"
    if recipe.task == "sft":
        model = f"--load-hf MODEL_DIR{' --moe-grouped-gemm' * bool(recipe.config.transformer.get('moe_grouped_gemm'))}"
        flags = [f"--sft {model} --seq-length {recipe.tokens}", *layout_flags(recipe), rate, SFT_FLAGS]
        mock, data = "", "--data-path DATA.jsonl --save-hf OUT_DIR"
    else:
        length = f"--train-iters {iterations}"
        flags = [*network_flags(recipe), *layout_flags(recipe), length, rate, LEARNING_RATE_FLAGS]
        # a run on mock data has its own folder: otherwise a run on the user's data would resume from it
        mock = "-mock"
        # NullTokenizer adds an end-of-document token to its vocabulary
        data = f"--mock-data --tokenizer-type NullTokenizer --vocab-size {recipe.model.vocabulary - 1}"
    folder = shlex.quote(f"out/{recipe.model.name}-{recipe.name.replace(', ', '-')}-{recipe.cluster.name}{mock}")
    flags += [f"--save {folder} --load {folder}", "--save-interval 500 --keep-last-checkpoints 2"]
    lines = [flags[0]]
    for flag in flags[1:]:
        if len(lines[-1]) + 1 + len(flag) <= _WIDTH:
            lines[-1] += f" {flag}"
        else:
            lines.append(flag)
    return " \\\n    ".join([f"{start} {SCRIPTS[recipe.model.form]}", *lines, data])
