"""The runs of tools/compare_runs.py: small, short, and together through most of what a training can do."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

GPT = "pretrain_gpt_bcd.py"
LLAMA = "pretrain_llama_bcd.py"
COMMON = (
    "--num-layers 6 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 14 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine "
    "--lr-warmup-iters 2 --seed 1234 --data-cache-path {folder}/index --num-workers 1 --eval-interval 6 --eval-iters 2 "
    "--log-interval 1 --metrics-file {folder}/metrics.jsonl --save {folder}/checkpoints "
    "--distributed-timeout-minutes 5 --cpu-kernels megatron"
)
"""Of every start; what a configuration says comes after it and wins. Older versions have CPU kernels of their own,
which --cpu-kernels turns off; now it has no effect."""
DATA = "--tokenizer-type ByteLevelTokenizer --data-path {data} --split 80,10,10"
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
LOAD = "--load {folder}/checkpoints"


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of an entry script. ``flags`` may name ``{folder}``, the run's own, and ``{data}``."""

    flags: str
    num_processes: int = 1
    script: str = GPT
    always_before: bool = False
    """Whether the code before makes this start on both sides."""

    def argv(self, *, folder: Path, data: Path) -> list[str]:
        """What is started, in a checkout."""
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.num_processes)]
        words = [word.format(folder=folder, data=data) for word in f"{COMMON} {self.flags}".split()]
        return [sys.executable, *(launcher if self.num_processes > 1 else []), self.script, *words]


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One run, of one start or of several that each go on where the last one stopped."""

    name: str
    about: str
    starts: tuple[Start, ...]


def _one(name: str, about: str, flags: str, *, processes: int = 1, script: str = GPT) -> Configuration:
    start = Start(flags=f"{DATA} {flags}", num_processes=processes, script=script)
    return Configuration(name=name, about=about, starts=(start,))


_LAYOUTS = (
    _one(
        "quickstart",
        "2 stages, spread, ascending",
        f"{NO_DROPOUT} --pipeline-model-parallel-size 2 --bcd-num-blocks 3 --bcd-steps-per-block 3",
        processes=2,
    ),
    _one(
        "one-block",
        "full training, 2 stages, dropout, log interval of 3",
        "--pipeline-model-parallel-size 2 --bcd-num-blocks 1 --log-interval 3",
        processes=2,
    ),
    _one(
        "stage",
        "2 stages, stage, descending, dropout, full recomputation, untied head",
        "--pipeline-model-parallel-size 2 --bcd-layout stage --bcd-order descending --bcd-steps-per-block 4 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
        "--untie-embeddings-and-output-weights",
        processes=2,
    ),
    _one(
        "submodel",
        "2 stages, submodel, random, run-ahead, warm-up of phases, learning-rate factors",
        "--pipeline-model-parallel-size 2 --bcd-layout submodel --bcd-num-blocks 3 --bcd-order random "
        "--bcd-run-ahead 2 --bcd-steps-per-block 3 --bcd-phase-warmup-steps 2 --train-iters 20 --seed 7 "
        "--bcd-block-lr-multipliers 0.83 0.67 1.9 0.71 1.3 0.29",
        processes=2,
    ),
    _one(
        "stock-schedule",
        "2 stages, stage, Megatron Core's own schedule, tied head, WSD",
        f"{NO_DROPOUT} --pipeline-model-parallel-size 2 --bcd-layout stage --bcd-schedule stock "
        "--bcd-steps-per-block 4 --lr-decay-style WSD --lr-wsd-decay-iters 5",
        processes=2,
    ),
    _one(
        "greedy",
        "greedy order, always-active norms, selective recomputation, rotary positions, norms of queries and keys",
        "--bcd-order greedy --bcd-greedy-microbatches 2 --bcd-always-active norms --bcd-steps-per-block 3 "
        "--recompute-granularity selective --recompute-modules core_attn --position-embedding-type rope "
        "--rotary-percent 0.5 --qk-layernorm --openai-gelu",
    ),
    _one(
        "plateau",
        "switch at a plateau, host state, stop by improvement of a cycle",
        "--bcd-switch plateau --bcd-plateau-window 2 --bcd-plateau-min-improvement 0.005 --bcd-min-steps-per-block 4 "
        "--bcd-max-steps-per-block 7 --bcd-optimizer-state host --bcd-stop-cycle-improvement 0.9 --train-iters 40 "
        "--lr-decay-style constant",
    ),
)
_PARALLEL = (
    _one(
        "tensor",
        "2 tensor parallel ranks, dropout, decoupled learning rate, untied head, host state",
        "--tensor-model-parallel-size 2 --bcd-steps-per-block 4 --decoupled-lr 5e-4 "
        "--untie-embeddings-and-output-weights --bcd-optimizer-state host",
        processes=2,
    ),
    _one(
        "data",
        "2 data-parallel ranks, distributed optimizer, overlap, host state, always-active norms, batch size ramp-up",
        "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 9000 --bcd-optimizer-state host "
        "--bcd-always-active norms --bcd-steps-per-block 4 --rampup-batch-size 4 4 24",
        processes=2,
    ),
    _one(
        "data-sgd",
        "2 data-parallel ranks without distributed optimizer, SGD, rising weight decay, loss per token",
        "--no-use-distributed-optimizer --optimizer sgd --lr 1e-2 --bcd-steps-per-block 4 --calculate-per-token-loss "
        "--start-weight-decay 0.01 --end-weight-decay 0.1 --weight-decay-incr-style linear --clip-grad 0.5 "
        "--bcd-optimizer-state host",
        processes=2,
    ),
    _one(
        "grid",
        "2 stages x 2 data-parallel ranks, submodel, bf16, overlap, host state, always-active embedding",
        "--pipeline-model-parallel-size 2 --bcd-layout submodel --bcd-num-blocks 3 --bcd-steps-per-block 2 --bf16 "
        "--overlap-grad-reduce --overlap-param-gather --bcd-optimizer-state host --bcd-always-active embedding",
        processes=4,
    ),
)
_PRECISION = (
    _one("bf16", "bf16, reset state, dropout, two visits to every block", "--bf16 --bcd-steps-per-block 2"),
    _one(
        "bf16-host",
        "bf16, host state, gradients in bf16, always-active embedding and head",
        f"{NO_DROPOUT} --bf16 --bcd-steps-per-block 2 --bcd-optimizer-state host --grad-reduce-in-bf16 "
        "--bcd-always-active embedding,head --untie-embeddings-and-output-weights",
    ),
    _one(
        "fp16",
        "fp16 with overflows, host state",
        "--fp16 --initial-loss-scale 1048576 --loss-scale-window 3 --hysteresis 1 --bcd-steps-per-block 4 "
        "--bcd-optimizer-state host --train-iters 18",
    ),
)
_SAMPLES = (
    _one(
        "prefix-cache",
        "2 stages, submodel, sample ratio, prefix cache",
        f"{NO_DROPOUT} --pipeline-model-parallel-size 2 --bcd-layout submodel --bcd-num-blocks 3 "
        "--bcd-steps-per-block 4 --bcd-sample-ratio 0.001 --bcd-prefix-cache {folder}/cache --train-iters 24",
        processes=2,
    ),
    _one(
        "prefix-cache-bf16",
        "sample ratio, prefix cache in bf16, bf16",
        f"{NO_DROPOUT} --bcd-steps-per-block 5 --bcd-sample-ratio 0.001 --bcd-prefix-cache {{folder}}/cache "
        "--bcd-prefix-cache-dtype bf16 --bf16 --train-iters 19",
    ),
    _one(
        "blend",
        "blend of two weights, sample ratio, positions, attention and loss by document, no evaluation",
        "--data-path 0.3 {data} 0.7 {data} --bcd-sample-ratio 0.002 --bcd-steps-per-block 5 --reset-position-ids "
        "--reset-attention-mask --eod-mask-loss --eval-iters 0",
    ),
    Configuration(
        name="mock-data",
        about="made-up tokens, no reader processes",
        starts=(
            Start(
                flags="--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --num-workers 0 "
                "--bcd-steps-per-block 3 --bcd-num-blocks 2"
            ),
        ),
    ),
)
_LLAMA = (
    _one(
        "llama",
        "LLaMA, 2 query groups, 2 stages, full recomputation",
        "--pipeline-model-parallel-size 2 --group-query-attention --num-query-groups 2 --bcd-steps-per-block 4 "
        "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
        processes=2,
        script=LLAMA,
    ),
    _one(
        "llama-tensor",
        "LLaMA, 2 query groups, 2 tensor parallel ranks, bf16, tied head, recomputed feed-forward",
        "--tensor-model-parallel-size 2 --group-query-attention --num-query-groups 2 --bcd-steps-per-block 4 --bf16 "
        "--no-untie-embeddings-and-output-weights --recompute-granularity selective --recompute-modules core_attn mlp",
        processes=2,
        script=LLAMA,
    ),
)
_RESUME = f"{DATA} {LOAD} --bcd-steps-per-block 4 --bcd-optimizer-state host"
_PIPELINE = "--pipeline-model-parallel-size 2 --bcd-layout submodel --bcd-num-blocks 3"
_RESUMED = (
    Configuration(
        name="resume",
        about="2 stages, stopped in the middle of a phase and started again, dropout, random order, async save",
        starts=(
            Start(
                flags=f"{_RESUME} {_PIPELINE} --bcd-order random --async-save --save-interval 3 --exit-interval 6",
                num_processes=2,
            ),
            Start(flags=f"{_RESUME} {_PIPELINE} --bcd-order random --async-save --save-interval 3", num_processes=2),
        ),
    ),
    Configuration(
        name="resume-other-sizes",
        about="stopped on 2 data-parallel ranks, taken up by 1, then as weights by 2 stages",
        starts=(
            Start(flags=f"{_RESUME} --exit-interval 6", num_processes=2),
            Start(flags=f"{_RESUME} --exit-interval 10"),
            Start(flags=f"{_RESUME} --pipeline-model-parallel-size 2 --bcd-num-blocks 3", num_processes=2),
        ),
    ),
    Configuration(
        name="resume-from-before",
        about="bf16, on both sides saved by the code before in the middle of a phase, and then taken up",
        starts=(
            Start(flags=f"{_RESUME} --bf16 --bcd-always-active norms --exit-interval 6", always_before=True),
            Start(flags=f"{_RESUME} --bf16 --bcd-always-active norms"),
        ),
    ),
    Configuration(
        name="evaluate-only",
        about="trained, then evaluated with --skip-train and --finetune",
        starts=(
            Start(
                flags=f"{DATA} {NO_DROPOUT} --bcd-steps-per-block 2 --train-iters 5 "
                "--metrics-file {folder}/training.jsonl"
            ),
            Start(flags=f"{DATA} {NO_DROPOUT} {LOAD} --finetune --skip-train"),
        ),
    ),
)
_RESTING = (
    _one(
        "resting",
        "2 data-parallel ranks, Adam blocks, orthogonal inactive layers, bf16, host state, overlap",
        "--bcd-layout strided --bcd-resting-update orthogonal --bcd-optimizer-state host --bf16 "
        "--bcd-steps-per-block 3 --overlap-grad-reduce --overlap-param-gather",
        processes=2,
    ),
    _one(
        "pretrain",
        "preset pretrain on 2 stages",
        f"{NO_DROPOUT} --pipeline-model-parallel-size 2 --bcd-preset pretrain --bcd-steps-per-block 3",
        processes=2,
    ),
    _one(
        "no-active-block",
        "2 tensor-parallel ranks, all layers rest, rows normalised",
        "--tensor-model-parallel-size 2 --bcd-num-blocks 0 --bcd-resting-update normalized",
        processes=2,
    ),
)
CONFIGURATIONS = (*_LAYOUTS, *_PARALLEL, *_RESTING, *_PRECISION, *_SAMPLES, *_LLAMA, *_RESUMED)
