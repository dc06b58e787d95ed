"""The flags that Megatron Core has no fields for: one frozen dataclass per group. Pure.

The name of a field is the name of its flag (``micro_batch_size`` is ``--micro-batch-size``), its annotation the type.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron.bcd.tokenizer import TOKENIZER_TYPES

DEFAULT_NUM_BLOCKS = 3
LONGEST_PHASES = {None: 100, "paper": 100, "pretrain": 50, "finetune": 50}
"""The largest number of steps of a phase without --bcd-steps-per-block, by --bcd-preset."""
LAYOUTS = ("spread", "strided", "stage", "submodel", "interleaved")
ORDERS = ("ascending", "descending", "random")
SWITCHES = ("steps", "plateau")
ALWAYS_ACTIVE = ("norms", "biases", "embedding", "head")
FROZEN = ("embedding", "head", "norms")
BF16_OR_FP32 = ("bf16", "fp32")

# groups of --help with fields of several dataclasses
NETWORK = "network size"
BATCH = "batch size"
OPTIMIZER = "optimizer"
PARALLELISM = "parallelism"
RECOMPUTATION = "recomputation of activations"
FINE_TUNING = "supervised fine-tuning"
REPORT = "report"


MAY_CHANGE = (
    "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage", "bcd_layers_on",
    "bcd_resident_layers", "bcd_schedule", "bcd_layers_per_pass", "bcd_saved_inputs", "bcd_saved_activations",
    "bcd_passes_on_host", "bcd_compile", "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split", "pipeline_model_parallel_layout", "pipeline_cut", "recompute",
    "recompute_memory_gib", "num_workers",
)  # fmt: skip
"""Our own fields that a resumed run may change without a message."""


def dashed(field: str) -> str:
    """Return a field's name as a flag."""
    return "--" + field.replace("_", "-")


class Refusal(ValueError):
    """Flags that a run does not take together. The planner, which tries many combinations, passes over these only."""


@dataclass(frozen=True)
class Range:
    """The range of values that a number may have."""

    text: str
    """Completes "must be"."""
    contains: Callable[[float], bool]


AT_LEAST_1 = Range("at least 1", lambda value: value >= 1)
AT_LEAST_0 = Range("at least 0", lambda value: value >= 0)
ABOVE_0 = Range("greater than 0", lambda value: value > 0)
BELOW_1 = Range("from 0 to less than 1", lambda value: 0 <= value < 1)
SHARE = Range("greater than 0 and at most 1", lambda value: 0 < value <= 1)


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[Any, ...] | None = None,
    nargs: str | int | None = None,
    type: Any = None,
    metavar: str | tuple[str, ...] | None = None,
    group: str | None = None,
    range: Range | None = None,
) -> Any:
    """Define a field, and what the annotation does not say about its flag.

    Args:
        group: the group of --help that shows the flag, if not that of its dataclass.
        range: the numbers that it accepts. By default a whole number is at least 1, or 0 if that is its default.
    """
    metadata = {"help": help, "choices": choices, "nargs": nargs, "type": type, "metavar": metavar}
    metadata |= {"group": group, "range": range}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class BcdConfig:
    """Block coordinate descent (docs/concepts.md)."""

    bcd_preset: str | None = option(
        None,
        "method, sets flags that are not given: paper = as published; pretrain = inactive layers are updated too, "
        "blocks by Muon; finetune = all layers in every step by the factored update (docs/fine_tuning.md)",
        choices=("paper", "pretrain", "finetune"),
    )
    bcd_num_blocks: int | None = option(
        None,
        f"number of blocks M; 1 = full training, 0 = no active block. Default {DEFAULT_NUM_BLOCKS}; with layout stage "
        "the number of pipeline stages",
        range=AT_LEAST_0,
    )
    bcd_layout: str = option(
        "spread",
        "layers of a block: spread = the k-th of M parts of every stage, strided = every M-th layer of every stage, "
        "stage = all of stage k, submodel = one part of one stage, interleaved = the k-th part of the model, of which "
        "every stage holds a chunk (a virtual pipeline)",
        choices=LAYOUTS,
    )
    num_virtual_stages_per_pipeline_rank: int | None = option(
        None, "chunks on every pipeline stage, a multiple of the blocks; implies --bcd-layout interleaved"
    )
    num_layers_per_virtual_pipeline_stage: int | None = option(
        None, "layers of a chunk, in place of the number of chunks"
    )
    # if derived, the mean of phases that differ by one step
    bcd_steps_per_block: float | None = option(
        None,
        "training steps of a phase. Default: as many as visit every block equally often, at least twice, and at most "
        f"{LONGEST_PHASES[None]} ({LONGEST_PHASES['finetune']} with preset finetune or pretrain)",
        type=int,
        range=AT_LEAST_1,
    )
    bcd_order: str = option(
        "ascending", "order of the blocks in a cycle: random = a new order in each cycle, from --seed", choices=ORDERS
    )
    bcd_switch: str = option(
        "steps", "what ends a phase: --bcd-steps-per-block, or a plateau of the training loss", choices=SWITCHES
    )
    bcd_plateau_window: int = option(
        50, "steps of the mean loss, and within which it must improve, else the phase ends"
    )
    bcd_plateau_min_improvement: float = option(
        0.005, "smallest improvement of that mean that counts, relative", range=BELOW_1
    )
    bcd_optimizer_state: str = option(
        "reset",
        "a block's optimizer state when its phase ends: reset = freed, host = offloaded to host memory",
        choices=("reset", "host"),
    )
    bcd_main_params: str = option(
        "host",
        "with --bf16 or --fp16, a block's fp32 main parameters when its phase ends: host = the bits that the weights "
        "lack are offloaded to host memory, drop = the next visit starts from the rounded weights",
        choices=("host", "drop"),
    )
    bcd_layers_on: str = option(
        "device",
        "where inactive layers, or those of a single block, are: host = in host memory, auto = those that do not fit",
        choices=("device", "host", "auto"),
    )
    bcd_resident_layers: int = option(0, "with --bcd-layers-on host: N more buffers for layers on the device")
    bcd_always_active: str | None = option(
        None,
        "parameters trained in every phase: none, or a comma-separated list of norms, biases (of layers), embedding, "
        "head. Default none; with --bcd-inactive-update all of them",
    )
    bcd_frozen: str = option(
        "none", "parameters that no phase trains: none, or a list of embedding (with a tied head), head, norms"
    )
    bcd_head_phase: bool = option(False, "the final norm and an untied output head are a separate block, the last one")
    bcd_inactive_update: str = option(
        "none",
        "update of the layer matrices outside the active block (docs/update_rules.md)",
        choices=("none", "orthogonal", "factored"),
    )
    bcd_inactive_lr_ratio: float | None = option(
        None, "learning rate of inactive updates over the active block's; default: 0.2, with factored 1", range=ABOVE_0
    )
    bcd_embedding_update: str = option(
        "adam",
        "update of the word embedding and an untied head that --bcd-always-active names; factored: almost no state",
        choices=("adam", "factored"),
    )
    bcd_inactive_grad_dtype: str = option("bf16", "precision of gradients of inactive updates", choices=BF16_OR_FP32)
    muon_momentum_dtype: str = option(
        "fp32",
        "precision of Muon's momentum; int8: 8-bit codes, an fp32 scale per 256 elements, unclipped gradients",
        choices=("fp32", "bf16", "int8"),
        group=OPTIMIZER,
    )
    muon_gram_iteration: bool = option(
        False,
        "orthogonalise matrices whose sides differ by a factor of 2 or more by their Gram matrix, with fewer products",
        group=OPTIMIZER,
    )
    muon_grad_dtype: str = option(
        "fp32", "precision in which gradients for Muon are reduced", choices=BF16_OR_FP32, group=OPTIMIZER
    )
    bcd_sample_ratio: float | None = option(
        None,
        "each phase repeats a new subset, this share of an epoch; default: consecutive samples, as Megatron-LM",
        range=SHARE,
    )
    bcd_prefix_cache: str | None = option(
        None, "with --bcd-sample-ratio: folder that all ranks share, for outputs of layers before the active block"
    )
    bcd_schedule: str | None = option(
        None,
        "order of the microbatches (docs/pipeline.md): bcd = stages before the first active layer run forward only; "
        "breadth-first = all microbatches pass through a chunk of the model before the next chunk; stock = Megatron "
        "Core's own 1F1B. Default: bcd; breadth-first with layers in host memory",
        choices=("bcd", "breadth-first", "stock"),
    )
    bcd_layers_per_pass: int = option(
        1, "with --bcd-schedule breadth-first: layers of a chunk, a divisor of the layers of a stage"
    )
    bcd_saved_inputs: str = option(
        "auto",
        "with --bcd-schedule breadth-first: where the inputs of chunks wait for the backward pass; auto = on the "
        "device if they fit, else in page-locked host memory",
        choices=("device", "host", "auto"),
    )
    bcd_saved_activations: str = option(
        "recompute",
        "with --bcd-schedule breadth-first: recompute = each chunk's forward pass is repeated; device, host = its "
        "activations wait there instead; auto = as many as fit on the device, and of the others --bcd-passes-on-host",
        choices=("auto", "recompute", "device", "host"),
    )
    bcd_passes_on_host: int = option(
        0, "with --bcd-saved-activations auto: passes on each stage whose activations wait in host memory"
    )
    bcd_compile: str = option(
        "auto",
        "compile updates, norms and rotary embeddings; auto = on a GPU with a C compiler. Results differ by rounding",
        choices=("auto", "on", "off"),
    )

    @property
    def mean_steps(self) -> float:
        """Mean number of steps per phase. While the length of the run is unknown, the largest possible one."""
        steps = self.bcd_steps_per_block
        return LONGEST_PHASES[self.bcd_preset] if steps is None else steps

    @property
    def num_blocks(self) -> int:
        """--bcd-num-blocks with its default. Layout stage has a block per stage instead."""
        return DEFAULT_NUM_BLOCKS if self.bcd_num_blocks is None else self.bcd_num_blocks

    @property
    def num_parts(self) -> int:
        """Number of chunks of every stage in layout interleaved."""
        return self.num_virtual_stages_per_pipeline_rank or max(self.num_blocks, 1)

    @property
    def always_active(self) -> frozenset[str]:
        """The entries of --bcd-always-active. The default excludes parts that are frozen or have a head phase.

        Raises ValueError for an entry that is not in ALWAYS_ACTIVE.
        """
        if self.bcd_always_active is None:
            left = frozenset(ALWAYS_ACTIVE if self.bcd_inactive_update != "none" else ()) - self.frozen
            return left - (frozenset({"head"}) if self.bcd_head_phase else frozenset())
        return _parts("--bcd-always-active", self.bcd_always_active, ALWAYS_ACTIVE)

    @property
    def frozen(self) -> frozenset[str]:
        """The entries of --bcd-frozen. Raises ValueError for an entry that is not in FROZEN."""
        return _parts("--bcd-frozen", self.bcd_frozen, FROZEN)


def _parts(flag: str, value: str, choices: tuple[str, ...]) -> frozenset[str]:
    parts = value.split(",")
    if parts != ["none"] and not set(parts) <= set(choices):
        raise ValueError(f"{flag} {value}: must be none, or a comma-separated list of {', '.join(choices)}")
    return frozenset(parts) - {"none"}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Network size beyond Megatron Core's TransformerConfig."""

    seq_length: int = option(None, "tokens per sequence")
    max_position_embeddings: int = option(None, "largest position of the position table; default --seq-length")
    position_embedding_type: str = option(
        "learned_absolute", "position embedding", choices=("learned_absolute", "rope", "none")
    )
    rotary_base: int = option(10000, "base of the rotary position embedding")
    rotary_percent: float = option(1.0, "share of the head dimension that is rotated", range=SHARE)
    use_rope_scaling: bool = option(
        False, "lower the rotary embedding's low frequencies as Llama 3.1 does, for sequences longer than 8,192 tokens"
    )
    rope_scaling_factor: float = option(8.0, "factor of --use-rope-scaling", range=ABOVE_0)
    make_vocab_size_divisible_by: int = option(128, "pad the vocabulary to a multiple of this x tensor parallel size")
    untie_embeddings_and_output_weights: bool = option(False, "give the output head its own weights")
    swiglu: bool = option(False, "gated linear units with SiLU instead of GELU")
    squared_relu: bool = option(False, "the square of ReLU instead of GELU")
    openai_gelu: bool = option(
        False, "GELU in the tanh form of OpenAI's GPT-2; without it GELU is exact where its kernel is not fused"
    )
    transformer_impl: str = option(
        "auto",
        "layers: Transformer Engine's, or Megatron Core's local ones; auto takes Transformer Engine where it is "
        "importable and there is a GPU; transformers: those of the model of --load-hf, as transformers has them",
        choices=("auto", "local", "transformer_engine", "transformers"),
    )


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Length of the run, batches, evaluation, randomness."""

    micro_batch_size: int = option(None, "sequences per microbatch and data-parallel rank", group=BATCH)
    global_batch_size: int | None = option(
        None, "sequences per training step over all ranks; default one microbatch a rank", group=BATCH
    )
    rampup_batch_size: tuple[int, ...] | None = option(
        None,
        "batch size ramp-up: start size, increment, number of samples of the ramp",
        nargs=3,
        metavar=("START", "INCREMENT", "SAMPLES"),
        group=BATCH,
    )
    train_iters: int | None = option(None, "number of training steps (or give --train-samples)")
    train_samples: int | None = option(None, "number of training sequences (or give --train-iters)")
    num_epochs: float | None = option(
        None, "passes over the records of --sft, in place of --train-iters", group=FINE_TUNING, range=ABOVE_0
    )
    skip_train: bool = option(False, "do not train: evaluate only")
    eval_iters: int = option(100, "steps (global batches) of one evaluation; -1 = --full-validation", range=AT_LEAST_0)
    eval_fixed: bool = option(False, "evaluate on the same validation samples each time, not on the next ones")
    full_validation: bool = option(False, "evaluate on the whole validation split; --eval-iters is for the test split")
    eval_interval: int = option(1000, "training steps between evaluations on the validation split")
    seed: int = option(1234, "seed of Python, NumPy, PyTorch and the data order")
    check_for_nan_in_loss_and_grad: bool = option(True, "skip a step whose loss or gradient is not finite")
    check_weight_hash_across_dp_replicas_interval: int | None = option(
        None, "training steps between comparisons of weights of data-parallel ranks"
    )
    max_skipped_steps: int = option(10, "stop after this many steps in a row whose loss or gradient is not finite")
    manual_gc: bool = option(False, "collect Python garbage only at fixed intervals")
    manual_gc_interval: int = option(0, "training steps between garbage collections with --manual-gc; 0: never")
    empty_unused_memory_level: int = option(
        0,
        "return unused memory to the GPU: 1 after the passes of each step, 2 after the optimizer too",
        choices=(0, 1, 2),
    )
    distributed_backend: str = option(
        "auto", "auto is nccl on GPUs and gloo on CPUs", choices=("auto", "nccl", "gloo"), group=PARALLELISM
    )
    account_for_embedding_in_pipeline_split: bool = option(False, "count the embedding as a layer", group=PARALLELISM)
    account_for_loss_in_pipeline_split: bool = option(False, "count the head as a layer", group=PARALLELISM)
    pipeline_model_parallel_layout: str | None = option(
        None, "what each stage holds: E embedding, t layer, L loss, | between stages: Et*3|t*4L", group=PARALLELISM
    )
    pipeline_cut: str = option(
        "even",
        "layers of the pipeline stages: even = as many on each; auto = even work, output head and vocabulary counted",
        choices=("even", "auto"),
        group=PARALLELISM,
    )
    recompute: str | None = option(
        None,
        "auto = in each phase and on each stage recompute the least that fits --recompute-memory-gib",
        choices=("auto",),
        group=RECOMPUTATION,
    )
    recompute_memory_gib: float | None = option(
        None,
        "GiB of a rank for model state and activations; default: the GPU's memory less 1 GiB",
        group=RECOMPUTATION,
        range=ABOVE_0,
    )
    fp16_accumulation: bool = option(
        False,
        "with --fp16: matrix products add up in fp16, at twice the rate on GeForce cards, and round more",
        group=OPTIMIZER,
    )
    distributed_timeout_minutes: int = option(10, "minutes after which a collective fails", group=PARALLELISM)
    adam_moments_dtype: str = option(
        "fp32",
        "precision in which Adam's two moments are stored; int8: 8-bit codes with an fp32 scale per 256 elements",
        choices=("fp32", "int8"),
        group=OPTIMIZER,
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate and weight decay over the run, in steps or, with --train-samples, samples."""

    lr_decay_style: str = option(
        "linear", "shape of the decay", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    lr_wsd_decay_style: str = option(
        "exponential", "shape of the last part of WSD", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    lr_decay_iters: int | None = option(None, "steps until --min-lr; default --train-iters")
    lr_decay_samples: int | None = option(None, "samples until --min-lr; default --train-samples")
    lr_wsd_decay_iters: int | None = option(None, "steps of the last part of WSD")
    lr_wsd_decay_samples: int | None = option(None, "samples of the last part of WSD")
    lr_warmup_fraction: float | None = option(None, "warm-up as a fraction of the decay length", range=BELOW_1)
    lr_warmup_iters: int = option(0, "steps of linear warm-up")
    lr_warmup_samples: int = option(0, "samples of linear warm-up")
    lr_warmup_init: float = option(0.0, "learning rate at the start of the warm-up", range=AT_LEAST_0)
    start_weight_decay: float | None = option(None, "weight decay at the start", group=OPTIMIZER, range=AT_LEAST_0)
    end_weight_decay: float | None = option(None, "weight decay at the end", group=OPTIMIZER, range=AT_LEAST_0)
    weight_decay_incr_style: str = option(
        "constant", "how weight decay goes from start to end", choices=("constant", "linear", "cosine"), group=OPTIMIZER
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Indexed datasets (Megatron's .bin/.idx) and how they are split and read."""

    data_path: tuple[str, ...] | None = option(None, "prefix of an indexed dataset, or weight prefix weight prefix ...")
    train_data_path: tuple[str, ...] | None = option(None, "the same for the training split alone")
    valid_data_path: tuple[str, ...] | None = option(None, "the same for the validation split alone")
    test_data_path: tuple[str, ...] | None = option(None, "the same for the test split alone")
    split: str | None = option(None, "train,validation,test shares of --data-path; default 969, 30, 1")
    data_cache_path: str | None = option(None, "folder for the index caches; default beside the data")
    mock_data: bool = option(False, "synthetic tokens instead of --data-path, for speed measurements only")
    mmap_bin_files: bool = option(True, "map data files into memory; without it they are read")
    num_workers: int = option(2, "reader processes per rank", range=AT_LEAST_0)
    reset_position_ids: bool = option(False, "restart positions after each end-of-document token")
    reset_attention_mask: bool = option(False, "no attention across end-of-document tokens")
    eod_mask_loss: bool = option(False, "no loss on end-of-document tokens")
    sft: bool = option(
        False,
        "fine-tune on the records of JSONL, JSON, CSV or Parquet files, or folders of the datasets library "
        "(docs/fine_tuning.md); the loss counts answers only",
        group=FINE_TUNING,
    )
    sft_prompt_format: str = option(
        "auto",
        "form of the records: chat = the tokenizer's chat template, which auto takes if there is one; text = Alpaca's",
        choices=("auto", "chat", "text"),
        group=FINE_TUNING,
    )
    sft_ignore_keys: tuple[str, ...] | None = option(
        None, "keys of records and messages to leave out, such as id", group=FINE_TUNING
    )
    sft_skip_bad_records: bool = option(
        False, "leave out malformed records and report them, instead of ending with an error", group=FINE_TUNING
    )
    sft_packing: bool = option(
        True, "put several records into a sequence, without attention between them", group=FINE_TUNING
    )
    sft_drop_long: bool = option(
        False, "leave out records whose answer does not fit into --seq-length, instead of cutting it", group=FINE_TUNING
    )

    @property
    def split_shares(self) -> list[float] | None:
        """The shares of the training, validation and test split; None without --split.

        Raises ValueError unless they are three numbers of at least 0, not all of them 0.
        """
        if self.split is None:
            return None
        try:
            shares = [float(share) for share in self.split.strip("'\"").replace("/", ",").split(",")]
        except ValueError:
            shares = []
        if len(shares) != 3 or not all(0 <= share < math.inf for share in shares) or not sum(shares):
            raise ValueError(
                f"--split {self.split!r}: must be three numbers of at least 0, not all of them 0: the shares of "
                "training, validation and test, e.g. 95,5,0"
            )
        return shares


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The tokenizer of the data. Training needs its vocabulary size and end-of-document id."""

    tokenizer_type: str | None = option(None, "tokenizer", choices=TOKENIZER_TYPES, metavar="TYPE")
    vocab_file: str | None = option(None, "GPT-2 BPE vocabulary (vocab.json, encoder.json)")
    merge_file: str | None = option(None, "GPT-2 BPE merges (merges.txt, vocab.bpe)")
    tokenizer_model: str | None = option(None, "SentencePiece model file, or local Hugging Face tokenizer folder")
    vocab_size: int | None = option(None, "vocabulary size of NullTokenizer")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints: where, when, and what is loaded from them."""

    save: str | None = option(None, "folder for checkpoints")
    save_interval: int | None = option(None, "training steps between checkpoints")
    async_save: bool = option(False, "write checkpoints in the background while training continues")
    keep_last_checkpoints: int | None = option(None, "keep this many checkpoints and delete older ones")
    save_retain_interval: int | None = option(
        None,
        "keep the checkpoints of multiples of this many training steps, and of others only the newest "
        "(--keep-last-checkpoints: more of them)",
    )
    save_optim: bool = option(True, "save the optimizer state; without it a run resumes with --no-load-optim only")
    save_rng: bool = option(True, "save the random generators; without them a run resumes with --no-load-rng only")
    load: str | None = option(
        None,
        "folder to resume from: its newest valid checkpoint; an empty or absent folder starts a new run. With the same "
        "folder as --save, a run that was killed resumes when it is started again",
    )
    ckpt_step: int | None = option(None, "load the checkpoint of this iteration instead of the newest")
    load_hf: str | None = option(
        None, "model in Hugging Face's format, a folder or a name on the hub: network, tokenizer, and initial weights"
    )
    trust_remote_code: bool = option(False, "run the code that comes with the model of --load-hf")
    save_hf: str | None = option(None, "folder for the trained model in Hugging Face's format, at the end of the run")
    save_hf_interval: int | None = option(None, "training steps between further models, in --save-hf/iter_NNNNNNN")
    exit_on_missing_checkpoint: bool = option(False, "end with an error if --load holds no checkpoint")
    finetune: bool = option(False, "load the weights of --load only, and start at iteration 0")
    load_optim: bool = option(True, "load the optimizer state of --load; else the active block starts with a new one")
    use_checkpoint_opt_param_scheduler: bool = option(
        False, "take the learning-rate schedule of the checkpoint, not that of the flags"
    )
    use_checkpoint_args: bool = option(
        False, "take flags of network and tokenizer that are not given from the checkpoint"
    )
    load_rng: bool = option(True, "load the random generators of --load; else they are seeded again")
    exit_interval: int | None = option(None, "save and stop after each multiple of this many training steps")
    exit_duration_in_mins: int | None = option(None, "save and stop after this many minutes")


@dataclass(frozen=True, kw_only=True)
class GroupsConfig:
    """Replica groups: worlds that train one model together over slow links (docs/replica_groups.md)."""

    lighthouse: str | None = option(
        None, "HOST:PORT of torchft's lighthouse: this job is one of several replica groups. The flags below need it"
    )
    replica_groups: int = option(1, "number of replica groups that the data are divided for")
    min_replica_groups: int = option(1, "wait at an exchange while there are fewer replica groups than this")
    replica_id: str | None = option(
        None, "name of this replica group; the order of the names is that of the data. Default: the name of the host"
    )
    outer_interval: int | None = option(
        None, "steps of a phase between exchanges, besides the one at its end. Default: only at the end"
    )
    outer_lr: float = option(
        0.7, "learning rate of the outer step by the mean change; 1 with momentum 0 averages the weights", range=ABOVE_0
    )
    outer_momentum: float = option(0.6, "Nesterov momentum of the outer step", range=BELOW_1)
    outer_compression: str = option("bf16", "precision in which changes are sent", choices=BF16_OR_FP32)
    outer_timeout_seconds: int = option(300, "seconds of an exchange without progress after which it fails")


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Logs, metrics and where they go."""

    log_interval: int = option(100, "training steps between log lines")
    log_params_norm: bool = option(False, "log the norm of all weights")
    log_num_zeros_in_grad: bool = option(False, "log the number of zeros in the active gradient")
    log_throughput: bool = option(False, "log TFLOP/s per GPU, of what the phase computes")
    profile: bool = option(False, "profile some training steps: --use-pytorch-profiler, or marks for Nsight Systems")
    profile_step_start: int = option(10, "steps before those that are profiled", range=AT_LEAST_0)
    profile_step_end: int = option(12, "last step that is profiled")
    profile_ranks: tuple[int, ...] = option((0,), "ranks that are profiled, default 0", nargs="+")
    use_pytorch_profiler: bool = option(False, "write a trace of PyTorch's profiler to --tensorboard-dir")
    metrics_file: str | None = option(None, "write one JSON line per log step and per evaluation to this file")
    tensorboard_dir: str | None = option(None, "write TensorBoard events to this folder")
    wandb_project: str | None = option(None, "log to this Weights & Biases project (needs wandb)")
    wandb_entity: str | None = option(None, "Weights & Biases entity")
    wandb_exp_name: str | None = option(None, "Weights & Biases run name")
    wandb_save_dir: str | None = option(None, "folder of the local Weights & Biases files", metavar="FOLDER")
