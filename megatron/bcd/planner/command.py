"""Write the command line of a recipe."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator

from megatron.bcd.planner.measured import learning_rate
from megatron.bcd.planner.recipe import METHOD_FLAGS, WITH_ORTHOGONAL, Recipe, flag_of

SCRIPTS = {"gpt": "pretrain_gpt_bcd.py", "llama": "pretrain_llama_bcd.py"}
"""The training script by model family. Each script has its family's flags as defaults."""
LEARNING_RATE_FLAGS = "--lr-warmup-fraction 0.01 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0"
"""As in examples/pretrain.sh."""
SFT_FLAGS = "--num-epochs 3 --lr-warmup-fraction 0.03 --lr-decay-style cosine --weight-decay 0 --clip-grad 1.0"
"""As in examples/finetune.sh."""
_WIDTH = 112


def network_flags(recipe: Recipe) -> list[str]:
    """Return the flags of the model. Raises ValueError if the training script has no flag for a property of it."""
    model, values, is_gpt = recipe.model, recipe.model.flags(recipe.tokens), recipe.model.form == "gpt"
    names = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "seq_length")
    flags = [f"{flag_of(name)} {values[name]}" for name in names]
    if values["num_query_groups"] is not None:
        flags.append(f"--group-query-attention --num-query-groups {values['num_query_groups']}")
    if values["kv_channels"] is not None:
        flags.append(f"--kv-channels {values['kv_channels']}")
    if is_gpt:
        positions = values["max_position_embeddings"]
        flags.append(f"--max-position-embeddings {positions} --hidden-dropout 0 --attention-dropout 0")
    if model.is_tied != is_gpt:
        flags.append(f"--{'no-' * model.is_tied}untie-embeddings-and-output-weights")
    if values["add_bias_linear"] and not is_gpt:
        raise ValueError(
            f"--model {model.name}: --task {recipe.task} cannot give a LLaMA biases in all linear layers. "
            "Use --task sft, whose --load-hf can."
        )
    if is_gpt and not values["add_bias_linear"]:
        flags.append("--disable-bias-linear")
    if values["add_qkv_bias"] and not values["add_bias_linear"]:
        flags.append("--add-qkv-bias")
    if values["qk_layernorm"]:
        flags.append("--qk-layernorm")
    if model.experts:
        words = [f"{flag_of(name)} {values[name]}" for name in ("moe_router_topk", "moe_ffn_hidden_size")]
        flags.append(
            " ".join([f"--num-experts {model.experts}", *words, "--moe-aux-loss-coeff 1e-2 --moe-grouped-gemm"])
        )
    return flags


def layout_flags(recipe: Recipe) -> list[str]:
    """Return the flags of ranks, batch, precision, recomputation and method."""
    config = recipe.config
    ranks = ["pipeline_model_parallel_size"] + ["context_parallel_size"] * (config.context_size > 1)
    lines = [
        _words(recipe, ranks) + " --pipeline-cut auto" * (config.training.pipeline_model_parallel_layout is not None),
        f"--micro-batch-size {recipe.micro_batch_size} --global-batch-size {recipe.global_batch_size}",
        f"--make-vocab-size-divisible-by {config.model.make_vocab_size_divisible_by}",
    ]
    if recipe.precision != "fp32":
        lines.append(f"--{recipe.precision}")
    if recipe.precision == "fp16":  # with --bf16 it is the default
        lines.append("--accumulate-allreduce-grads-in-fp32")
    if config.training.adam_moments_dtype != "fp32":
        lines.append(_words(recipe, ["adam_moments_dtype"]))
    if (loss := recipe.flag("cross_entropy_fusion_impl")) is not None:
        lines.append(f"--cross-entropy-loss-fusion --cross-entropy-fusion-impl {loss}")
    if recipe.recompute == "full":
        lines.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    elif recipe.recompute == "auto":
        memory = recipe.memory_share * recipe.cluster.memory_gib - recipe.cluster.framework_gib
        lines.append(f"--recompute auto --recompute-memory-gib {memory:g}")
    return [*lines, *_method_flags(recipe)]


def _method_flags(recipe: Recipe) -> Iterator[str]:
    """Yield the lines of the method."""
    method = METHOD_FLAGS[recipe.method]
    if not recipe.has_blocks:
        names = list(method)
        for start, end in ((0, 2), (2, 6), (6, None)):  # blocks and schedule, optimizer, its precision
            values = method if start or not recipe.is_streamed else {"bcd_num_blocks": 1, "bcd_layers_on": "host"}
            if line := " ".join(_word(name, values[name]) for name in list(values)[start:end]):
                yield line
        if recipe.is_streamed:
            yield from _chunk_flags(recipe, [])
        return
    bcd = recipe.config.bcd
    words = [_word(name, value) for name, value in method.items()]
    if recipe.method == "finetune":
        words.append(_word("bcd_inactive_update", bcd.bcd_inactive_update))
        if bcd.bcd_inactive_update == "orthogonal":
            yield " ".join(_word(name, getattr(bcd, name)) for name in WITH_ORTHOGONAL)
    if bcd.bcd_layout != "stage":
        words.append(f"--bcd-num-blocks {recipe.num_blocks_flag}")
    words.append(_word("bcd_layout", bcd.bcd_layout))
    chunks = recipe.flag("num_virtual_stages_per_pipeline_rank")
    if bcd.bcd_layout == "interleaved" and chunks not in (None, recipe.num_blocks_flag):
        words.append(_word("num_virtual_stages_per_pipeline_rank", chunks))
    names = ["bcd_layers_on"] * recipe.is_streamed + ["bcd_resident_layers"] * (bcd.bcd_resident_layers > 0)
    names += [*filter(recipe.flag, ("bcd_head_phase", "bcd_frozen", "bcd_always_active", "bcd_main_params"))]
    places = [_word(name, getattr(bcd, name)) for name in names]
    if not recipe.config.is_breadth_first:
        yield " ".join([*words, *places])
        return
    yield " ".join(words)
    yield from _chunk_flags(recipe, places)


def _chunk_flags(recipe: Recipe, places: list[str]) -> Iterator[str]:
    bcd, words = recipe.config.bcd, ["--bcd-schedule breadth-first", *places]
    if bcd.bcd_layers_per_pass > 1 and recipe.config.pipeline_size > 1:  # the layout's chunks
        words.append(_word("num_virtual_stages_per_pipeline_rank", recipe.config.num_chunks))
    elif bcd.bcd_layers_per_pass > 1:
        words.append(_word("bcd_layers_per_pass", bcd.bcd_layers_per_pass))
    if bcd.bcd_saved_inputs == "host":
        words.append(_word("bcd_saved_inputs", "host"))
    if bcd.bcd_saved_activations != "recompute":
        words.append(_word("bcd_saved_activations", bcd.bcd_saved_activations))
    yield " ".join(words)


def _words(recipe: Recipe, names: Iterable[str]) -> str:
    """Return flags with their values in the configuration."""
    sections = (*recipe.config.transformer.items(), *vars(recipe.config.training).items())
    values = dict(sections)
    return " ".join(_word(name, values[name]) for name in names)


def _word(name: str, value: object) -> str:
    return flag_of(name) if value is True else f"{flag_of(name)} {value}"


def torchrun_command(recipe: Recipe, *, iterations: int) -> str:
    """Return the command that starts the run on each node. Started again, it resumes from its newest checkpoint.

    In pretraining its last line is --mock-data, which the user's data replace. In fine-tuning it has placeholders for
    a model and for data.
    """
    start = f"torchrun --nproc-per-node {recipe.gpus_per_node}"
    if recipe.num_nodes > 1:
        start += f" --nnodes {recipe.num_nodes} --rdzv-backend c10d --rdzv-endpoint ${{HEAD_NODE:?}}:29500"
    rate = f"--lr {learning_rate(recipe).flag}"
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
