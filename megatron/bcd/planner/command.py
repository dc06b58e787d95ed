"""The command line of a recipe."""

from __future__ import annotations

from megatron.bcd.config import DEFAULT_NUM_BLOCKS
from megatron.bcd.planner.measured import finding, learning_rate
from megatron.bcd.planner.recipe import MUON, PRESET_OF, Recipe

SCRIPTS = {"gpt": "pretrain_gpt_bcd.py", "llama": "pretrain_llama_bcd.py"}
"""By model family; each script has its family's flags as defaults."""
LEARNING_RATE_FLAGS = "--lr-warmup-fraction 0.01 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0"
"""As in examples/pretrain.sh."""
SFT_FLAGS = "--num-epochs 3 --lr-warmup-fraction 0.03 --lr-decay-style cosine --weight-decay 0 --clip-grad 1.0"
"""As in examples/finetune.sh."""
_WIDTH = 112


def network_flags(recipe: Recipe) -> list[str]:
    """Flags of the model. Raises ValueError for what the script has no flag for."""
    model, shape = recipe.model, recipe.shape
    flags = [
        f"--num-layers {model.layers}",
        f"--hidden-size {model.hidden}",
        f"--num-attention-heads {model.heads}",
        f"--ffn-hidden-size {model.ffn}",
        f"--seq-length {recipe.tokens}",
    ]
    if model.groups != model.heads:
        flags.append(f"--group-query-attention --num-query-groups {model.groups}")
    if model.head_dim not in (0, model.hidden // model.heads):
        flags.append(f"--kv-channels {model.head_dim}")
    if model.form == "gpt":
        flags += [f"--max-position-embeddings {shape.num_positions} --hidden-dropout 0 --attention-dropout 0"]
    if shape.tied != (model.form == "gpt"):
        flags.append(f"--{'no-' * shape.tied}untie-embeddings-and-output-weights")
    if shape.biases and model.form == "llama":
        raise ValueError(f"--model {model.name}: only --load-hf (--task sft) gives a LLaMA biases in all linear layers")
    if model.form == "gpt" and not shape.biases:
        flags.append("--disable-bias-linear")
    if shape.qkv_bias:
        flags.append("--add-qkv-bias")
    if shape.qk_norm_size:
        flags.append("--qk-layernorm")
    return flags


def layout_flags(recipe: Recipe) -> list[str]:
    """Flags of ranks, batch, precision, recomputation and method."""
    context = f" --context-parallel-size {recipe.context_size}" if recipe.context_size > 1 else ""
    cut = " --pipeline-cut auto" if recipe.cut == "auto" and recipe.pipeline_size > 1 else ""
    flags = [
        f"--pipeline-model-parallel-size {recipe.pipeline_size}{context}{cut}",
        f"--micro-batch-size {recipe.micro_batch_size} --global-batch-size {recipe.global_batch_size}",
        f"--make-vocab-size-divisible-by {recipe.vocabulary_multiple}",
    ]
    if recipe.precision != "fp32":
        flags.append(f"--{recipe.precision}")
    if recipe.precision == "fp16":  # with --bf16 the default
        flags.append("--accumulate-allreduce-grads-in-fp32")
    if recipe.adam_moments_dtype != "fp32":
        flags.append(f"--adam-moments-dtype {recipe.adam_moments_dtype}")
    if recipe.cross_entropy_fusion_impl is not None:
        flags.append(f"--cross-entropy-loss-fusion --cross-entropy-fusion-impl {recipe.cross_entropy_fusion_impl}")
    if recipe.recompute == "full":
        flags.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    elif recipe.recompute == "auto":
        memory = recipe.memory_share * recipe.cluster.memory_gib - recipe.cluster.framework_gib
        flags.append(f"--recompute auto --recompute-memory-gib {memory:g}")
    if recipe.replica_groups > 1:
        interval = f" --outer-interval {recipe.outer_interval}" if recipe.outer_interval else ""
        interval += f" --outer-delay {recipe.outer_delay}" if recipe.outer_delay else ""
        other = recipe.outer_compression != "bf16"
        compression = f" --outer-compression {recipe.outer_compression}" if other else ""
        lighthouse = "--lighthouse ${LIGHTHOUSE:-HOST:29510}"
        flags.append(f"{lighthouse} --replica-groups {recipe.replica_groups}{interval}{compression}")
    if not recipe.has_blocks:
        more = {"offload": ["--optimizer-cpu-offload --optimizer-offload-fraction 1.0"], "muon": _muon_flags()}
        return [*flags, "--bcd-num-blocks 1 --bcd-schedule stock", *more.get(recipe.method, [])]
    layout = recipe.partition.layout
    number = DEFAULT_NUM_BLOCKS if recipe.asked_blocks is None else recipe.asked_blocks
    words = [] if recipe.method == "bcd" else [f"--bcd-preset {PRESET_OF[recipe.method]}"]
    if recipe.method == "finetune":
        words.append(f"--bcd-inactive-update {recipe.inactive_update or 'none'}")
    if layout != "stage":
        words.append(f"--bcd-num-blocks {number}")
    words.append(f"--bcd-layout {layout}")
    if layout == "interleaved" and recipe.num_chunks not in (None, number):
        words.append(f"--num-virtual-stages-per-pipeline-rank {recipe.num_chunks}")
    if recipe.is_streamed:
        resident = f" --bcd-resident-layers {recipe.resident_layers}" if recipe.resident_layers else ""
        words.append(f"--bcd-frozen-weights host{resident}")
    if recipe.head_phase:
        words.append("--bcd-head-phase")
    if recipe.low_rank:
        layers = f" --bcd-low-rank-layers {recipe.low_rank_layers}" if recipe.low_rank_layers else ""
        words.append(f"--bcd-low-rank {recipe.low_rank}{layers}")
        if (ratio := finding(recipe).adapter_rate) is not None:
            words.append(f"--bcd-low-rank-lr-ratio {ratio:g}")
    for flag, parts in (("--bcd-frozen", recipe.frozen), ("--bcd-always-active", recipe.always_active)):
        if parts is not None:
            words.append(f"{flag} {parts_of(parts)}")
    return [*flags, " ".join(words)]


def _muon_flags() -> list[str]:
    flags = [f"--{name.replace('_', '-')}{'' if value is True else f' {value}'}" for name, value in MUON.items()]
    return [" ".join(flags[:4]), " ".join(flags[4:])]


def parts_of(named: frozenset[str]) -> str:
    """The value of --bcd-frozen or --bcd-always-active."""
    return ",".join(sorted(named)) or "none"


def torchrun_command(recipe: Recipe, *, iterations: int) -> str:
    """The whole command, to be started on each node: with --mock-data on its last line in place of the user's data; for
    fine-tuning with names of a model and of data to fill in. Started again, it goes on from its newest checkpoint."""
    start = f"torchrun --nproc-per-node {recipe.gpus_per_node}"
    if recipe.num_nodes > 1:
        start += f" --nnodes {recipe.num_nodes} --rdzv-backend c10d --rdzv-endpoint ${{HEAD_NODE:?}}:29500"
    rate = f"--lr {learning_rate(recipe).flag}"
    if recipe.task == "sft":
        flags = [f"--sft --load-hf MODEL_DIR --seq-length {recipe.tokens}", *layout_flags(recipe), rate, SFT_FLAGS]
        mock, data = "", "--data-path DATA.jsonl --save-hf OUT_DIR"
    else:
        length = f"--train-iters {iterations}"
        flags = [*network_flags(recipe), *layout_flags(recipe), length, rate, LEARNING_RATE_FLAGS]
        # a folder of its own for what is trained on mock data: a run on the user's data would resume from it
        mock = "-mock"
        # NullTokenizer adds an end-of-document token to its vocabulary
        data = f"--mock-data --tokenizer-type NullTokenizer --vocab-size {recipe.model.vocabulary - 1}"
    folder = f"out/{recipe.model.name}-{recipe.name.replace(', ', '-')}-{recipe.cluster.name}{mock}"
    flags += [f"--save {folder} --load {folder}", "--save-interval 500 --keep-last-checkpoints 2"]
    lines = [flags[0]]
    for flag in flags[1:]:
        if len(lines[-1]) + 1 + len(flag) <= _WIDTH:
            lines[-1] += f" {flag}"
        else:
            lines.append(flag)
    return " \\\n    ".join([f"{start} {SCRIPTS[recipe.model.form]}", *lines, data])
