"""What a run is told: frozen, keyword-only dataclasses, one per group of flags.

A field's name is its flag's name (``micro_batch_size`` is ``--micro-batch-size``), its metadata's ``help`` is the
flag's help text. Flags that Megatron Core itself defines are not repeated here: they are generated from Megatron Core's
dataclasses (``arguments``) and travel in the three mappings of ``RunConfig``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

LAYOUTS = ("spread", "stage", "submodel")
SCHEDULES = ("bcd", "stock")
ORDERS = ("ascending", "descending", "random", "greedy")
SWITCHES = ("steps", "plateau")
OPTIMIZER_STATES = ("reset", "host")
ALWAYS_ACTIVE = ("norms", "embedding", "head")
CACHE_DTYPES = ("bf16", "fp32")


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[Any, ...] | None = None,
    nargs: str | int | None = None,
    type: Any = None,
    metavar: str | tuple[str, ...] | None = None,
) -> Any:
    """A dataclass field with what its command-line flag needs beside name, type and default."""
    metadata = {"help": help, "choices": choices, "nargs": nargs, "type": type, "metavar": metavar}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class BcdConfig:
    """Block coordinate descent (DESIGN words: block, phase, layout)."""

    bcd_num_blocks: int | None = option(
        None,
        "number of blocks M; each stage is cut into M submodels. 1 is ordinary full-parameter training. "
        "Default 3; with --bcd-layout stage it is the number of pipeline stages",
        type=int,
    )
    bcd_layout: str = option(
        "spread",
        "which submodels form a block: spread = the k-th of M submodels of every stage, stage = all of stage k, "
        "submodel = one submodel on one stage",
        choices=LAYOUTS,
    )
    bcd_steps_per_block: int = option(
        100, "training steps of one phase, after which the next block becomes active", type=int
    )
    bcd_order: str = option(
        "ascending",
        "in which order a cycle visits the blocks: random = an order of its own for each cycle, from --seed; greedy = "
        "the block with the largest gradient norm per parameter among those that the cycle has not visited yet",
        choices=ORDERS,
    )
    bcd_greedy_microbatches: int = option(
        4, "microbatches per data-parallel rank on which greedy order measures each block's gradient", type=int
    )
    bcd_switch: str = option(
        "steps",
        "what ends a phase: --bcd-steps-per-block, or a plateau of the training loss",
        choices=SWITCHES,
    )
    bcd_plateau_window: int = option(
        50,
        "steps over whose losses a mean is taken, and within which it has to improve, else the phase ends",
        type=int,
    )
    bcd_plateau_min_improvement: float = option(
        0.005, "least improvement of that mean that counts, relative to the best one", type=float
    )
    bcd_min_steps_per_block: int = option(1, "with --bcd-switch plateau: steps before which no phase ends", type=int)
    bcd_max_steps_per_block: int | None = option(
        None, "with --bcd-switch plateau: steps after which a phase ends anyway", type=int
    )
    bcd_stop_cycle_improvement: float | None = option(
        None,
        "end the run when a whole cycle improved the validation loss by less than this, relative to the cycle before "
        "(an evaluation follows each cycle)",
        type=float,
    )
    bcd_phase_warmup_steps: int = option(
        0, "steps at the beginning of each phase in which the learning rate rises to its full value", type=int
    )
    bcd_block_lr_multipliers: tuple[float, ...] | None = option(
        None, "a factor of the learning rate for each block", nargs="*", type=float, metavar="FACTOR"
    )
    bcd_optimizer_state: str = option(
        "reset",
        "what becomes of a block's optimizer state when its phase ends: reset = dropped, host = kept in host memory "
        "and brought back at the next visit",
        choices=OPTIMIZER_STATES,
    )
    bcd_always_active: str = option(
        "none",
        "parameters that are trained in every phase, beside the active block: none, or some of norms, embedding, head "
        "with commas in between",
        metavar="PARTS",
    )
    bcd_sample_ratio: float | None = option(
        None,
        "each phase draws a new subset of so much of one epoch of the training split, without replacement, and goes "
        "over it as often as its steps need; default: consecutive samples, as Megatron",
        type=float,
        metavar="RATIO",
    )
    bcd_prefix_cache: str | None = option(
        None,
        "folder in which the outputs of the layers before the active block are kept, so that a phase computes them "
        "once for each of its samples (needs --bcd-sample-ratio; a disk that all ranks share)",
    )
    bcd_prefix_cache_dtype: str = option("fp32", "precision of what is kept", choices=CACHE_DTYPES)
    bcd_prefix_cache_max_gib: float | None = option(
        None,
        "keep no more than so many GiB, all phases together; a phase that needs more computes; default: half of what "
        "is free on the disk",
        type=float,
        metavar="GIB",
    )
    bcd_schedule: str = option(
        "bcd",
        "pipeline schedule: bcd = stages before the first active layer run forward only and ahead, and no gradient is "
        "sent to them; stock = Megatron Core's own 1F1B, for comparison",
        choices=SCHEDULES,
    )
    bcd_run_ahead: int | None = option(
        None,
        "microbatches of the next iteration that forward-only stages compute while the others finish the present one "
        "(each costs one received activation on the first stage behind them); default: half as many as there "
        "are forward-only stages, a third where the last stage is the first active one",
        type=int,
    )

    @property
    def always_active(self) -> frozenset[str]:
        """Of ALWAYS_ACTIVE. Raises ValueError for anything else."""
        parts = self.bcd_always_active.split(",")
        if parts != ["none"] and not set(parts) <= set(ALWAYS_ACTIVE):
            raise ValueError(
                f"--bcd-always-active {self.bcd_always_active}: must be none, or some of {', '.join(ALWAYS_ACTIVE)} "
                "with commas in between"
            )
        return frozenset(parts) - {"none"}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Network size beyond Megatron Core's TransformerConfig."""

    seq_length: int = option(None, "tokens per sequence", type=int)
    max_position_embeddings: int = option(
        None, "largest position of the position table; default --seq-length", type=int
    )
    position_embedding_type: str = option(
        "learned_absolute", "position embedding", choices=("learned_absolute", "rope", "none")
    )
    rotary_base: int = option(10000, "base of the rotary position embedding", type=int)
    rotary_percent: float = option(1.0, "part of the head dimension that is rotated", type=float)
    make_vocab_size_divisible_by: int = option(
        128, "pad the vocabulary to a multiple of this times the tensor parallel size", type=int
    )
    untie_embeddings_and_output_weights: bool = option(False, "give the output head its own weights")
    swiglu: bool = option(False, "gated linear units with SiLU instead of GELU")
    openai_gelu: bool = option(
        False,
        "GELU in the tanh form of OpenAI's GPT-2, everywhere; without it GELU is exact where its kernel is not fused "
        "(on CPUs, without biases, and with --no-bias-gelu-fusion), and in the tanh form in Megatron Core's fused one",
    )
    transformer_impl: str = option(
        "auto",
        "layers: Transformer Engine's, or Megatron Core's local ones with PyTorch's scaled_dot_product_attention; "
        "auto takes Transformer Engine where it is importable and there is a GPU",
        choices=("auto", "local", "transformer_engine"),
    )


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Length of the run, batches, evaluation, randomness."""

    micro_batch_size: int = option(None, "sequences per microbatch and data-parallel rank", type=int)
    global_batch_size: int | None = option(
        None, "sequences per training step over all ranks; default --micro-batch-size x data parallel size", type=int
    )
    rampup_batch_size: tuple[int, ...] | None = option(
        None,
        "batch size ramp-up: start size, increment, number of samples of the ramp",
        nargs=3,
        type=int,
        metavar=("START", "INCREMENT", "SAMPLES"),
    )
    train_iters: int | None = option(None, "number of training steps (or give --train-samples)", type=int)
    train_samples: int | None = option(None, "number of training sequences (or give --train-iters)", type=int)
    skip_train: bool = option(False, "do not train: evaluate only")
    eval_iters: int = option(100, "steps (global batches) of one evaluation", type=int)
    eval_interval: int = option(1000, "training steps between evaluations on the validation split", type=int)
    seed: int = option(1234, "seed of Python, NumPy, PyTorch and the data order", type=int)
    data_parallel_random_init: bool = option(False, "initialise each data-parallel rank with its own seed")
    check_for_nan_in_loss_and_grad: bool = option(True, "skip a step whose loss or gradient is not finite")
    max_skipped_steps: int = option(
        10, "stop after so many steps in a row whose loss or gradient was not finite", type=int
    )
    manual_gc: bool = option(False, "collect Python garbage only at fixed intervals")
    manual_gc_interval: int = option(
        0, "training steps between garbage collections with --manual-gc; 0: never", type=int
    )
    distributed_backend: str = option(
        "auto", "torch.distributed backend; auto is nccl on GPUs and gloo on CPUs", choices=("auto", "nccl", "gloo")
    )
    distributed_timeout_minutes: int = option(10, "after this long without an answer a collective fails", type=int)
    use_distributed_optimizer: bool = option(
        True, "shard the active block's optimizer state over the data-parallel ranks"
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate and weight decay over the run (Megatron Core's OptimizerParamScheduler). Units: steps, or samples
    with --train-samples."""

    lr_decay_style: str = option(
        "linear", "shape of the decay", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    lr_wsd_decay_style: str = option(
        "exponential", "shape of the last part of WSD", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    lr_decay_iters: int | None = option(None, "steps until --min-lr; default --train-iters", type=int)
    lr_decay_samples: int | None = option(None, "samples until --min-lr; default --train-samples", type=int)
    lr_wsd_decay_iters: int | None = option(None, "steps of the last part of WSD", type=int)
    lr_wsd_decay_samples: int | None = option(None, "samples of the last part of WSD", type=int)
    lr_warmup_fraction: float | None = option(None, "warm-up as a fraction of the decay length", type=float)
    lr_warmup_iters: int = option(0, "steps of linear warm-up", type=int)
    lr_warmup_samples: int = option(0, "samples of linear warm-up", type=int)
    lr_warmup_init: float = option(0.0, "learning rate at the start of the warm-up", type=float)
    start_weight_decay: float | None = option(None, "weight decay at the start; default --weight-decay", type=float)
    end_weight_decay: float | None = option(None, "weight decay at the end; default --weight-decay", type=float)
    weight_decay_incr_style: str = option(
        "constant", "how weight decay goes from start to end", choices=("constant", "linear", "cosine")
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Indexed datasets (Megatron's .bin/.idx) and how they are split and read."""

    data_path: tuple[str, ...] | None = option(
        None, "prefix of an indexed dataset, or weight prefix weight prefix ...", nargs="*"
    )
    train_data_path: tuple[str, ...] | None = option(None, "as --data-path, for the training split alone", nargs="*")
    valid_data_path: tuple[str, ...] | None = option(None, "as --data-path, for the validation split alone", nargs="*")
    test_data_path: tuple[str, ...] | None = option(None, "as --data-path, for the test split alone", nargs="*")
    split: str | None = option(None, "train,validation,test shares of --data-path; default 969, 30, 1", metavar="T,V,E")
    data_cache_path: str | None = option(None, "folder for the index caches; default beside the data")
    mock_data: bool = option(False, "made-up tokens instead of --data-path, for speed measurements only")
    num_workers: int = option(2, "reader processes per rank", type=int)
    reset_position_ids: bool = option(False, "positions start again after each end-of-document token")
    reset_attention_mask: bool = option(False, "no attention across end-of-document tokens")
    eod_mask_loss: bool = option(False, "no loss on end-of-document tokens")


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Which tokenizer made the data (its vocabulary size and end-of-document id are needed in training)."""

    tokenizer_type: str | None = option(
        None,
        "tokenizer",
        choices=(
            "ByteLevelTokenizer",
            "GPT2BPETokenizer",
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
            "HuggingFaceTokenizer",
            "NullTokenizer",
        ),
    )
    vocab_file: str | None = option(None, "GPT-2 BPE vocabulary (vocab.json, encoder.json)")
    merge_file: str | None = option(None, "GPT-2 BPE merges (merges.txt, vocab.bpe)")
    tokenizer_model: str | None = option(None, "SentencePiece model file, or local Hugging Face tokenizer folder")
    vocab_size: int | None = option(None, "vocabulary size of NullTokenizer", type=int)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints: where, when, and what is taken from them."""

    save: str | None = option(None, "folder for checkpoints, at the end of the run and where it is stopped")
    save_interval: int | None = option(None, "training steps between checkpoints", type=int)
    async_save: bool = option(False, "write checkpoints in the background while training goes on")
    keep_last_checkpoints: int | None = option(None, "keep so many checkpoints and delete older ones", type=int)
    load: str | None = option(
        None,
        "folder to go on from: its newest valid checkpoint; an empty or absent one starts afresh. Give the same folder "
        "as --save, and a run that was killed goes on when it is started again",
    )
    finetune: bool = option(False, "take the weights of --load only, and start at iteration 0")
    load_optim: bool = option(
        True, "take up the optimizer state of --load; else the active block starts with a new one"
    )
    load_rng: bool = option(True, "take up the random generators of --load; else they are seeded anew")
    exit_interval: int | None = option(None, "save and stop after each multiple of so many training steps", type=int)
    exit_duration_in_mins: int | None = option(None, "save and stop after so many minutes", type=int)


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """What the run tells, and where."""

    log_interval: int = option(100, "training steps between log lines", type=int)
    metrics_file: str | None = option(
        None, "write one JSON line per log step and per evaluation to this file (a fresh run replaces it)"
    )
    tensorboard_dir: str | None = option(None, "write TensorBoard events to this folder")
    wandb_project: str | None = option(None, "log to this Weights & Biases project (needs wandb)")
    wandb_entity: str | None = option(None, "Weights & Biases entity")
    wandb_exp_name: str | None = option(None, "Weights & Biases run name")
    wandb_save_dir: str | None = option(None, "folder of the local Weights & Biases files")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything a run is told. Plain values only, so that it can be pickled, compared and written as JSON.

    ``transformer``, ``optimizer`` and ``ddp`` hold keyword arguments of Megatron Core's ``TransformerConfig``,
    ``OptimizerConfig`` and ``DistributedDataParallelConfig``: those that flags set, under Megatron Core's field names.
    """

    transformer: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    ddp: Mapping[str, Any]
    bcd: BcdConfig
    model: ModelConfig
    training: TrainingConfig
    schedule: ScheduleConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    checkpoint: CheckpointConfig
    report: ReportConfig

    def replace_section(self, section: str, **values: Any) -> RunConfig:
        """The same with other values in a section of dataclass type."""
        return replace(self, **{section: replace(getattr(self, section), **values)})

    @property
    def num_layers(self) -> int:
        return int(self.transformer["num_layers"])

    @property
    def hidden_size(self) -> int:
        return int(self.transformer["hidden_size"])

    @property
    def pipeline_size(self) -> int:
        return int(self.transformer.get("pipeline_model_parallel_size", 1))

    @property
    def tensor_size(self) -> int:
        return int(self.transformer.get("tensor_model_parallel_size", 1))

    @property
    def precision(self) -> str:
        """``fp32``, ``bf16`` or ``fp16``."""
        if self.transformer.get("bf16"):
            return "bf16"
        return "fp16" if self.transformer.get("fp16") else "fp32"

    @property
    def tied(self) -> bool:
        """The output head uses the word embedding's weight."""
        return not self.model.untie_embeddings_and_output_weights


def run_config_to_dict(config: RunConfig) -> dict[str, Any]:
    """Plain dicts, lists, strings and numbers, ready for JSON; undone by ``run_config_from_dict``."""
    return {section.name: _plain(getattr(config, section.name)) for section in fields(RunConfig)}


def run_config_from_dict(values: Mapping[str, Any]) -> RunConfig:
    """The RunConfig that ``run_config_to_dict`` wrote, also after a way through JSON.

    Raises:
        ValueError: a section or a field is unknown, or a section is absent.
    """
    names = {section.name for section in fields(RunConfig)}
    if set(values) != names:
        raise ValueError(
            f"run configuration: must have the sections {', '.join(sorted(names))}, "
            f"not {', '.join(sorted(values)) or 'none'}"
        )
    return RunConfig(**{name: _section(name, dict(values[name])) for name in names})


def _section(name: str, values: dict[str, Any]) -> Any:
    kind = _SECTION_TYPES.get(name)
    if kind is None:
        return values
    unknown = set(values) - {own.name for own in fields(kind)}
    if unknown:
        raise ValueError(f"run configuration: {name} has no field {', '.join(sorted(unknown))}")
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


def _plain(section: Any) -> dict[str, Any]:
    if not isinstance(section, Mapping):
        section = {own.name: getattr(section, own.name) for own in fields(section)}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in section.items()}


_SECTION_TYPES: dict[str, type[Any]] = {
    "bcd": BcdConfig,
    "model": ModelConfig,
    "training": TrainingConfig,
    "schedule": ScheduleConfig,
    "data": DataConfig,
    "tokenizer": TokenizerConfig,
    "checkpoint": CheckpointConfig,
    "report": ReportConfig,
}
