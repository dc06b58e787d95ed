"""Flags beyond Megatron Core's and `--bcd-*`: one frozen dataclass per group.

A field's name is its flag's name (``micro_batch_size`` is ``--micro-batch-size``).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.bcd.config.option import option
from megatron.bcd.tokenizer import TOKENIZER_TYPES


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
    rotary_percent: float = option(1.0, "share of the head dimension that is rotated", type=float)
    use_rope_scaling: bool = option(
        False, "lower the rotary embedding's low frequencies as Llama 3.1 does, for sequences longer than 8,192 tokens"
    )
    rope_scaling_factor: float = option(8.0, "factor of --use-rope-scaling", type=float)
    make_vocab_size_divisible_by: int = option(
        128, "pad the vocabulary to a multiple of this times the tensor parallel size", type=int
    )
    untie_embeddings_and_output_weights: bool = option(False, "give the output head its own weights")
    swiglu: bool = option(False, "gated linear units with SiLU instead of GELU")
    quick_geglu: bool = option(False, "gated linear units with x sigmoid(1.702 x) instead of GELU")
    squared_relu: bool = option(False, "the square of ReLU instead of GELU")
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
    num_epochs: float | None = option(
        None, "passes over the training records, with --sft, in place of --train-iters", type=float
    )
    skip_train: bool = option(False, "do not train: evaluate only")
    eval_iters: int = option(100, "steps (global batches) of one evaluation; -1 = --full-validation", type=int)
    eval_fixed: bool = option(
        False, "evaluate on the same validation samples each time, the first --eval-iters steps, not on the next ones"
    )
    full_validation: bool = option(
        False, "evaluate on the whole validation split each time; --eval-iters is then for the test split alone"
    )
    eval_interval: int = option(1000, "training steps between evaluations on the validation split", type=int)
    seed: int = option(1234, "seed of Python, NumPy, PyTorch and the data order", type=int)
    data_parallel_random_init: bool = option(False, "initialise each data-parallel rank with its own seed")
    check_for_nan_in_loss_and_grad: bool = option(True, "skip a step whose loss or gradient is not finite")
    check_weight_hash_across_dp_replicas_interval: int | None = option(
        None, "training steps between comparisons of the weights of all data-parallel ranks", type=int
    )
    max_skipped_steps: int = option(
        10, "stop after this many steps in a row whose loss or gradient is not finite", type=int
    )
    manual_gc: bool = option(False, "collect Python garbage only at fixed intervals")
    manual_gc_interval: int = option(
        0, "training steps between garbage collections with --manual-gc; 0: never", type=int
    )
    empty_unused_memory_level: int = option(
        0,
        "return unused memory to the GPU's driver: 1 after the passes of each step and of each evaluation step, 2 "
        "after the optimizer too",
        type=int,
        choices=(0, 1, 2),
    )
    distributed_backend: str = option(
        "auto", "torch.distributed backend; auto is nccl on GPUs and gloo on CPUs", choices=("auto", "nccl", "gloo")
    )
    decoder_first_pipeline_num_layers: int | None = option(
        None, "layers of the first pipeline stage; the others share the rest evenly", type=int
    )
    decoder_last_pipeline_num_layers: int | None = option(None, "layers of the last pipeline stage", type=int)
    account_for_embedding_in_pipeline_split: bool = option(
        False, "count the embedding as a layer when layers are divided over the pipeline stages"
    )
    account_for_loss_in_pipeline_split: bool = option(False, "count the output head and the loss as a layer")
    pipeline_model_parallel_layout: str | None = option(
        None, "what each pipeline stage holds: E embedding, t layer, L loss, | between stages, e.g. Et*3|t*4|t*3L"
    )
    pipeline_cut: str = option(
        "even",
        "layers of the pipeline stages: even = as many on each, the first ones one more; auto = the stages' work is "
        "even, output head and vocabulary counted. Sets --pipeline-model-parallel-layout",
        choices=("even", "auto"),
    )
    recompute: str | None = option(
        None,
        "auto = in each phase and on each stage recompute the least that fits --recompute-memory-gib: nothing, the "
        "core of attention, or the first few layers after the prefix",
        choices=("auto",),
    )
    recompute_memory_gib: float | None = option(
        None,
        "GiB of a rank for model state and activations, by which --recompute auto decides; default: the GPU's memory "
        "less 1 GiB",
        type=float,
        metavar="GIB",
    )
    distributed_timeout_minutes: int = option(10, "minutes after which a collective fails", type=int)
    use_distributed_optimizer: bool = option(
        True, "shard the active block's optimizer state over the data-parallel ranks"
    )
    adam_moments_dtype: str = option(
        "fp32",
        "precision in which Adam's two moments are stored; int8: 8-bit codes with an fp32 scale per 256 elements",
        choices=("fp32", "bf16", "int8"),
    )
    main_grads_dtype: str = option(
        "fp32",
        "with --use-precision-aware-optimizer: bf16 is --grad-reduce-in-bf16",
        choices=("fp32", "bf16"),
    )
    exp_avg_dtype: str = option(
        "fp32",
        "precision in which Transformer Engine's Adam stores its first moment, with --use-precision-aware-optimizer",
        choices=("fp32", "bf16", "fp16", "fp8"),
    )
    exp_avg_sq_dtype: str = option("fp32", "the same of its second moment", choices=("fp32", "bf16", "fp16", "fp8"))


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
    data_args_path: str | None = option(None, "file that holds what --data-path would", metavar="FILE")
    per_split_data_args_path: str | None = option(
        None, "JSON file with the lists train, valid and test, as --train-data-path and its relatives", metavar="FILE"
    )
    split: str | None = option(None, "train,validation,test shares of --data-path; default 969, 30, 1", metavar="T,V,E")
    data_cache_path: str | None = option(None, "folder for the index caches; default beside the data")
    mock_data: bool = option(False, "synthetic tokens instead of --data-path, for speed measurements only")
    mmap_bin_files: bool = option(True, "map data files into memory; without it they are read")
    dataloader_type: str = option(
        "single",
        "order of the samples: single = as the dataset has shuffled them; cyclic = shuffled again in every epoch, also "
        "by the number of the epoch",
        choices=("single", "cyclic"),
    )
    data_sharding: bool = option(
        True, "with --dataloader-type cyclic: each data-parallel rank shuffles a part of its own, not all samples"
    )
    num_workers: int = option(2, "reader processes per rank", type=int)
    reset_position_ids: bool = option(False, "restart positions after each end-of-document token")
    reset_attention_mask: bool = option(False, "no attention across end-of-document tokens")
    eod_mask_loss: bool = option(False, "no loss on end-of-document tokens")
    sft: bool = option(
        False,
        "fine-tune on instructions or conversations: --data-path names JSONL files (or JSON lists) of records "
        "{instruction, input, output}, {prompt, completion} or {messages}; the loss counts answers only",
    )
    sft_prompt_format: str = option(
        "auto",
        "form of the records as text: chat = the tokenizer's chat template; text = Alpaca's prompt for instructions, "
        "other prompts as they are; auto = chat where the tokenizer has a template",
        choices=("auto", "chat", "text"),
    )
    sft_packing: bool = option(
        True, "put several records into a sequence, without attention between them; without it each has its own"
    )
    sft_drop_long: bool = option(
        False, "leave out records whose answer does not fit into --seq-length, in place of an error"
    )


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The tokenizer of the data. Training needs its vocabulary size and end-of-document id."""

    tokenizer_type: str | None = option(
        None,
        "tokenizer",
        choices=TOKENIZER_TYPES,
    )
    vocab_file: str | None = option(None, "GPT-2 BPE vocabulary (vocab.json, encoder.json)")
    merge_file: str | None = option(None, "GPT-2 BPE merges (merges.txt, vocab.bpe)")
    tokenizer_model: str | None = option(
        None, "SentencePiece model file, local Hugging Face tokenizer folder, or JSON vocabulary of TikTokenizer"
    )
    vocab_size: int | None = option(
        None, "vocabulary size of NullTokenizer, or of TikTokenizer (default 131072)", type=int
    )
    tiktoken_pattern: str = option("v2", "what cuts text into words for TikTokenizer", choices=("v1", "v2"))
    tiktoken_num_special_tokens: int = option(1000, "first ids of TikTokenizer that are special tokens", type=int)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints: where, when, and what is loaded from them."""

    save: str | None = option(None, "folder for checkpoints, at the end of the run and when it is stopped")
    save_interval: int | None = option(None, "training steps between checkpoints", type=int)
    async_save: bool = option(False, "write checkpoints in the background while training continues")
    keep_last_checkpoints: int | None = option(None, "keep this many checkpoints and delete older ones", type=int)
    save_retain_interval: int | None = option(
        None,
        "keep the checkpoints of multiples of this many training steps, and of others only the newest "
        "(--keep-last-checkpoints: more of them)",
        type=int,
    )
    save_optim: bool = option(True, "save the optimizer state; without it a run resumes with --no-load-optim only")
    save_rng: bool = option(True, "save the random generators; without them a run resumes with --no-load-rng only")
    log_progress: bool = option(False, "write starts and checkpoints to progress.txt in the folder of --save")
    load: str | None = option(
        None,
        "folder to resume from: its newest valid checkpoint; an empty or absent folder starts a new run. With the same "
        "folder as --save, a run that was killed resumes when it is started again",
    )
    ckpt_step: int | None = option(None, "load the checkpoint of this iteration instead of the newest", type=int)
    load_hf: str | None = option(
        None,
        "model in Hugging Face's format, a folder or a name on the hub: sizes of the network, tokenizer, and, where "
        "--load has no checkpoint, the weights",
        metavar="MODEL",
    )
    save_hf: str | None = option(
        None, "folder for the trained model in Hugging Face's format, at the end of the run", metavar="FOLDER"
    )
    save_hf_interval: int | None = option(
        None, "training steps between further models, in iter_NNNNNNN in the folder of --save-hf", type=int
    )
    overwrite_checkpoints: bool = option(
        False, "delete the checkpoints of another run in the folder of --save when this one starts"
    )
    exit_on_missing_checkpoint: bool = option(False, "end with an error if --load holds no checkpoint")
    finetune: bool = option(False, "load the weights of --load only, and start at iteration 0")
    load_optim: bool = option(True, "load the optimizer state of --load; else the active block starts with a new one")
    use_checkpoint_opt_param_scheduler: bool = option(
        False, "take the learning-rate and weight-decay schedule of the checkpoint in --load, not that of the flags"
    )
    use_checkpoint_args: bool = option(
        False, "take the flags of network and tokenizer that are not given from the checkpoint in --load"
    )
    load_rng: bool = option(True, "load the random generators of --load; else they are seeded again")
    exit_interval: int | None = option(None, "save and stop after each multiple of this many training steps", type=int)
    exit_duration_in_mins: int | None = option(None, "save and stop after this many minutes", type=int)


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Logs, metrics and where they go."""

    log_interval: int = option(100, "training steps between log lines", type=int)
    log_params_norm: bool = option(False, "log the norm of all weights")
    log_num_zeros_in_grad: bool = option(
        False, "log the number of zeros in the gradient of what Megatron Core's optimizer steps in the phase"
    )
    log_throughput: bool = option(False, "log TFLOP/s per GPU, of what the phase computes")
    timing_log_level: int = option(
        0,
        "log the times of parts of a step: 1 = passes, reductions and optimizer; 2 = each pass and message too. Every "
        "timer waits for the GPU",
        type=int,
        choices=(0, 1, 2),
    )
    timing_log_option: str = option(
        "minmax",
        "what is logged of these times over the ranks: the maximum, minimum and maximum, or all",
        choices=("max", "minmax", "all"),
    )
    barrier_with_level_1_timing: bool = option(True, "let all ranks wait for each other before timers of level 1")
    log_timers_to_tensorboard: bool = option(
        False, "write these times to --tensorboard-dir and --wandb-project too: NAME-time, the maximum in seconds"
    )
    log_straggler: bool = option(
        False, "log the slowest and the fastest rank by forward passes and by waits for batches"
    )
    straggler_minmax_count: int = option(
        1, "ranks that --log-straggler names at either end, by their forward passes", type=int, metavar="N"
    )
    profile: bool = option(False, "profile some training steps: --use-pytorch-profiler, or marks for Nsight Systems")
    profile_step_start: int = option(10, "steps before those that are profiled", type=int)
    profile_step_end: int = option(12, "last step that is profiled", type=int)
    profile_ranks: tuple[int, ...] = option(
        (0,), "ranks that are profiled, default 0", nargs="+", type=int, metavar="RANK"
    )
    use_pytorch_profiler: bool = option(False, "write a trace of PyTorch's profiler to --tensorboard-dir")
    metrics_file: str | None = option(
        None, "write one JSON line per log step and per evaluation to this file (of another run: refused)"
    )
    tensorboard_dir: str | None = option(None, "write TensorBoard events to this folder")
    wandb_project: str | None = option(None, "log to this Weights & Biases project (needs wandb)")
    wandb_entity: str | None = option(None, "Weights & Biases entity")
    wandb_exp_name: str | None = option(None, "Weights & Biases run name")
    wandb_save_dir: str | None = option(None, "folder of the local Weights & Biases files")
