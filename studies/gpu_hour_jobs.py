"""The measurements of studies/gpu_hour.py, with one function per part."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PARTS = ("speed", "peers", "sanity", "learning", "fine_tuning")

Results = Mapping[str, Mapping[str, Any]]
"""Records of one part by job name."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command whose outcome is one record in the results of its part."""

    name: str
    words: tuple[str, ...]
    """Program and arguments, run in the project's root."""
    seconds: float
    """Time limit. The job only starts if this much time is left."""
    kind: str = "train"
    """`train` leaves a metrics file, `json` a JSON file, `plain` only its output."""
    texts: tuple[Path, ...] = ()
    """Texts (JSON lines) on which the model of --save-hf is scored afterwards."""
    makes: Path | None = None
    """A file for later jobs. If the file is missing the job runs again; it has no record unless it fails."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Method and learning rate, for the report."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The machine and the folders for which jobs are built."""

    is_tiny: bool
    has_gpu: bool
    inputs: Path
    """The folder that `gpu_hour_inputs.py --unpack` wrote."""
    output: Path

    @property
    def data(self) -> Path:
        return self.output / "data"

    def work(self, name: str) -> Path:
        return self.output / "runs" / name


def python(text: str, *more: object) -> tuple[str, ...]:
    return (sys.executable, *text.split(), *map(str, more))


def sanity(setting: Setting, results: Results) -> list[Job]:
    """Check that the code runs on this GPU as on emulated GPUs, and tokenize the texts."""
    check, tests = "tools/check_machine.py --json {metrics}", "-m pytest tests/gpu -q -p no:cacheprovider"
    if setting.is_tiny:
        return [
            *tokenization(setting),
            Job(name="machine", words=python(f"{check} --no-self-test"), seconds=120, kind="json"),
            Job(name="tests", words=python(f"{tests} -k test_gpus"), seconds=240, kind="plain"),
        ]
    return [
        *tokenization(setting),
        Job(name="tests", words=python(f"{tests} -n 8"), seconds=200, kind="plain"),
        Job(name="machine", words=python(check, "--only", "one block*"), seconds=110, kind="json"),
    ]  # fmt: skip


def tokenization(setting: Setting) -> list[Job]:
    """Return a job for every text that has arrived."""
    inputs, model, splits = setting.inputs, setting.inputs / "smollm2", ("train", "valid")
    published = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {model}"
    texts = {split: (inputs / "text" / f"{split}.jsonl", tokenizer_flags(setting)) for split in splits}
    if (model / "config.json").is_file():
        texts |= {f"chichewa_{split}": (inputs / "chichewa" / f"{split}.jsonl", published) for split in splits}
    jobs = []
    for name, (path, tokenizer) in texts.items():
        if path.is_file():
            prefix, workers = setting.data / name, min(12, os.cpu_count() or 1)
            files = f"--append-eod --workers {workers} --input {path} --output-prefix {prefix}"
            words = python(f"tools/preprocess_data.py {tokenizer} {files}")
            index = Path(f"{prefix}_text_document.idx")
            jobs.append(Job(name=f"tokenize_{name}", kind="plain", seconds=120, words=words, makes=index))
    return jobs


GPT2_SMALL = (
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024"
    " --micro-batch-size 32 --global-batch-size 128"
)
TINY_GPT = (
    "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
    " --micro-batch-size 2 --global-batch-size 4"
)
PRETRAINING = (
    "--hidden-dropout 0 --attention-dropout 0 --bf16 --lr-decay-style cosine --adam-beta1 0.9 --adam-beta2 0.95"
    " --weight-decay 0.1 --clip-grad 1 --eval-fixed --num-workers 2 --seed 1"
)
MUON = (
    "--bcd-num-blocks 1 --optimizer muon --muon-momentum 0.95 --muon-use-nesterov --muon-extra-scale-factor 0.2"
    " --muon-momentum-dtype bf16 --muon-grad-dtype bf16"
)
LEARNING = (
    ("full_muon", MUON, 3e-3),
    ("full_muon_int8", MUON.replace("momentum-dtype bf16", "momentum-dtype int8"), 3e-3),
    ("full_adam", "--bcd-num-blocks 1", 6e-4),
    ("pretrain", "--bcd-preset pretrain", 3e-3),
    ("full_adam", "--bcd-num-blocks 1", 1.2e-3),
    ("full_adam", "--bcd-num-blocks 1", 3e-4),
)
"""Method, flags and learning rate, the most informative first. Another optimizer is another row."""
LEARNING_STEPS, LEARNING_SECONDS = 458, 14 * 60
"""Steps of a run, which read 60 million tokens, and the time of all runs. On a slower GPU all runs have fewer steps;
`rate` measures how many."""
START_SECONDS = 20
"""Time of a run beside its steps."""


def learning(setting: Setting, results: Results) -> list[Job]:
    """Test whether BCD learns at 124 million parameters: full Adam, full Muon and the presets on the same tokens."""
    if not has_tokens(setting, "train", "valid"):
        return tokenization(setting)
    sizes = TINY_GPT if setting.is_tiny else GPT2_SMALL
    shared = f"pretrain_gpt_bcd.py {sizes} {PRETRAINING} {tokenizer_flags(setting)} --train-data-path " \
        f"{setting.data}/train_text_document --valid-data-path {setting.data}/valid_text_document " \
        "--metrics-file {metrics}"  # fmt: skip
    rate = Job(
        name="rate",
        words=python(f"{shared} --bcd-num-blocks 1 --lr 1e-4 --train-iters 14 --log-interval 1 --eval-iters 0"),
        seconds=240 if setting.is_tiny else 80,
    )
    if "rate" not in results:
        return [rate]
    seconds = LEARNING_SECONDS / len(LEARNING) - START_SECONDS
    steps = 8 if setting.is_tiny else min(LEARNING_STEPS, steps_within(seconds, results["rate"]))
    limit = 240 if setting.is_tiny else 1.5 * seconds + 35
    jobs = []
    for method, flags, lr in LEARNING:
        length = f"--train-iters {steps} --lr-warmup-iters {max(1, steps // 12)} --lr {lr:g} --min-lr {lr / 10:g}"
        reports = f"--log-interval {max(1, steps // 60)} --eval-interval {max(1, steps // 8)} --eval-iters 3"
        jobs.append(Job(name=f"{method}-{lr:g}", words=python(f"{shared} {flags} {length} {reports}"), seconds=limit,
                        about={"method": method, "lr": lr, "steps": steps}))  # fmt: skip
    return [rate, *jobs]


def has_tokens(setting: Setting, *names: str) -> bool:
    return all((setting.data / f"{name}_text_document.idx").is_file() for name in names)


def tokenizer_flags(setting: Setting) -> str:
    files = setting.inputs / "gpt2"
    if not (files / "vocab.json").is_file():
        return "--tokenizer-type ByteLevelTokenizer"
    return f"--tokenizer-type GPT2BPETokenizer --vocab-file {files}/vocab.json --merge-file {files}/merges.txt"


def steps_within(seconds: float, record: Mapping[str, Any], default: int = 240) -> int:
    """Return the number of steps that take `seconds`, from the settled steps of a record."""
    times = sorted(line["step_time_ms"] for line in record["metrics"][4:] if "step_time_ms" in line)
    return max(60, int(1e3 * seconds / times[len(times) // 2])) if times else default


def read_results(folder: Path, part: str) -> dict[str, dict[str, Any]]:
    """Return the records of a part by job name; a line that a killed process left incomplete is ignored."""
    records = {}
    with contextlib.suppress(FileNotFoundError):
        for line in (folder / f"{part}.jsonl").read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                records[record["job"]] = record
    return records


def final_loss(record: Mapping[str, Any]) -> float | None:
    """Return the last validation loss of a record, None if the run did not reach the end."""
    losses = [line["validation_loss"] for line in record.get("metrics", ()) if "validation_loss" in line]
    return losses[-1] if losses and not record["failure"] else None


LANGUAGE = (
    "--seq-length 256 --micro-batch-size 4 --global-batch-size 4 --train-iters 500 --lr-warmup-iters 15"
    " --eval-interval 100000"
)
LARGE_BATCH = LANGUAGE.replace("size 4", "size 16").replace("iters 500", "iters 125").replace("iters 15", "iters 4")
TINY_LANGUAGE = (
    "--seq-length 64 --micro-batch-size 2 --global-batch-size 2 --train-iters 6 --lr-warmup-iters 1"
    " --eval-interval 100000"
)
FINE_TUNING = (
    "--lr-decay-style cosine --bf16 --weight-decay 0.01 --clip-grad 1 --hidden-dropout 0 --attention-dropout 0"
    " --num-workers 0 --log-interval 10 --full-validation"
)
FACTORED = "--bcd-inactive-update factored"
METHODS = {
    "full_adam": "--bcd-num-blocks 1",
    "full_adam_8_bit": "--bcd-num-blocks 1 --adam-moments-dtype int8",
    "full_muon": MUON,
    "six_blocks": "--bcd-preset finetune --bcd-inactive-update none --bcd-num-blocks 6 --bcd-steps-per-block 25",
    "factored": f"--bcd-num-blocks 0 {FACTORED} --bcd-embedding-update factored",
    "orthogonal": "--bcd-num-blocks 0 --bcd-inactive-update orthogonal --bcd-inactive-lr-ratio 0.4",
}
LANGUAGE_RATES: Mapping[str, Sequence[float]] = {
    "factored": (1.2e-3, 6e-4, 2.4e-3),
    "full_adam": (1.2e-3, 6e-4, 2.4e-3),
    "orthogonal": (1.2e-3, 2.4e-3, 6e-4),
    "full_muon": (1.2e-3, 6e-4, 2.4e-3),
    "full_adam_8_bit": (1.2e-3,),
    "six_blocks": (4e-4,),
}
"""Learning rates by method, the most informative methods first."""
LARGE_BATCH_RATES: Mapping[str, Sequence[float]] = {
    "factored": (1.2e-3, 2.4e-3, 6e-4),
    "orthogonal": (2.4e-3, 1.2e-3, 4.8e-3),
    "full_adam": (1.2e-3, 6e-4, 2.4e-3),
    "full_muon": (1.2e-3, 2.4e-3),
}
"""Rates for a quarter of the steps, each of four times the tokens."""
LARGE_STEPS = "-4096"
"""Suffix of the names of these jobs and methods."""
DECIDING = ("full_adam", "factored")
"""Methods that get two more seeds at their best rate."""


def fine_tuning(setting: Setting, results: Results) -> list[Job]:
    """Compare how methods adapt SmolLM2-135M to a new language, and what it forgets."""
    if not has_tokens(setting, "chichewa_train", "chichewa_valid"):
        return tokenization(setting)
    length = TINY_LANGUAGE if setting.is_tiny else LANGUAGE
    texts = f"--train-data-path {setting.data}/chichewa_train_text_document" \
        f" --valid-data-path {setting.data}/chichewa_valid_text_document"  # fmt: skip
    large_batch = length if setting.is_tiny else LARGE_BATCH
    return [
        *task_jobs(setting, results, f"{length} {texts}", LANGUAGE_RATES),
        *task_jobs(setting, results, f"{large_batch} {texts}", LARGE_BATCH_RATES, suffix=LARGE_STEPS),
    ]


def task_jobs(setting: Setting, results: Results, task: str, table: Mapping[str, Sequence[float]],
              suffix: str = "") -> list[Job]:  # fmt: skip
    """Return every method at every rate, and more seeds for the deciding ones once their best rate is known. A suffix
    of the names tells tasks with the same methods apart; they get one seed."""
    texts = tuple(setting.inputs / name / "valid.jsonl" for name in ("chichewa", "english"))
    model = setting.inputs / "smollm2"
    before = Job(name="before", words=python("studies/gpu_hour.py --score", model, *texts), seconds=90, kind="plain")
    jobs = [] if suffix else [before]
    for method, rates in table.items():
        flags = METHODS[method]
        if setting.is_tiny:
            rates = rates[:1]
        best = best_rate(results, method, rates) if method in DECIDING and not (setting.is_tiny or suffix) else None
        for lr, seed in [*((lr, 1) for lr in rates), *((best, seed) for seed in (2, 3) if best)]:
            words = python(
                f"pretrain_llama_bcd.py {task} {FINE_TUNING} {flags} --lr {lr:g} --min-lr {lr / 10:g}"
                f" --seed {seed} --load-hf {model} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {model}"
                " --metrics-file {metrics} --save-hf {model}"
            )
            jobs.append(Job(name=f"{method}-{lr:g}-seed{seed}{suffix}", words=words, seconds=200, texts=texts,
                            about={"method": method + suffix, "lr": lr, "seed": seed}))  # fmt: skip
    return jobs


def best_rate(results: Results, method: str, rates: Sequence[float]) -> float | None:
    """Return the learning rate with the lowest validation loss of the first seed; None while one is missing."""
    losses = {lr: final_loss(results.get(f"{method}-{lr:g}-seed1", {})) for lr in rates}
    if any(f"{method}-{lr:g}-seed1" not in results for lr in rates):
        return None
    reached = {lr: loss for lr, loss in losses.items() if loss is not None}
    return min(reached, key=reached.__getitem__) if reached else None


LLAMA_1_3B = (
    "--num-layers 24 --hidden-size 2048 --ffn-hidden-size 5504 --num-attention-heads 16 --vocab-size 31999"
    " --seq-length 2048 --micro-batch-size 4 --global-batch-size 16"
)
TINY_LLAMA = (
    "--num-layers 3 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --vocab-size 255"
    " --seq-length 64 --micro-batch-size 2 --global-batch-size 4"
)
TINY_EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64"
BATCH = "--seq-length 1024 --micro-batch-size 4 --global-batch-size 16 --make-vocab-size-divisible-by 1"
LLAMA_8B = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32"
    f" --group-query-attention --num-query-groups 8 --vocab-size 128255 {BATCH}"
)
QWEN_14B = (
    "--num-layers 48 --hidden-size 5120 --ffn-hidden-size 13824 --num-attention-heads 40 --add-qkv-bias"
    f" --group-query-attention --num-query-groups 8 --vocab-size 152063 {BATCH}"
)
QWEN_30B_A3B = (
    "--num-layers 12 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --kv-channels 128"
    " --group-query-attention --num-query-groups 4 --qk-layernorm --num-experts 128 --moe-router-topk 8"
    f" --moe-ffn-hidden-size 768 --moe-aux-loss-coeff 1e-3 --vocab-size 151935 {BATCH}"
)
"""Sizes of Llama-3-8B, Qwen2.5-14B and a quarter of Qwen3-30B-A3B's layers."""
STEPS = (
    "--bf16 --mock-data --tokenizer-type NullTokenizer --lr 1e-5 --lr-decay-style constant --eval-iters 0"
    " --log-interval 1 --num-workers 2 --seed 1 --train-iters 6"
)
"""Steps with random weights."""
EVERY_LAYER = "--bcd-preset finetune --cross-entropy-loss-fusion --cross-entropy-fusion-impl linear"
"""Every layer is trained in every step."""
RTX4090_GIB, KEPT_GIB = 22.6, 21.4
"""Limit of PyTorch's allocator; the framework takes another GiB of an RTX 4090's 23.6. Limit of kept activations."""
LIMITED = """
import runpy, sys, torch
from megatron.bcd.runtime import device
device.set_allocator()
if torch.cuda.is_available():
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, float(sys.argv[1]) * 2**30 / total))
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""A program that limits the allocator to its first argument and runs the script behind it."""
ADAM_ON_HOST = (
    "--bcd-num-blocks 1 --adam-moments-dtype int8 --clip-grad 0 --cross-entropy-loss-fusion"
    " --cross-entropy-fusion-impl linear --bcd-schedule breadth-first --bcd-layers-on host"
)
SCHEDULES = {
    "breadth_first_device": "--bcd-schedule breadth-first",
    "breadth_first_host": "--bcd-schedule breadth-first --bcd-layers-on host",
    "depth_first_device": "--bcd-schedule bcd",
}
"""Place and order of the layers. On the host a run is limited to the memory of an RTX 4090."""
KEPT, FP8 = "--bcd-saved-activations auto", "--fp8-format hybrid --fp8-recipe tensorwise"
VARIANTS = {
    "": "",
    "fp8": FP8,
    "kept": KEPT,
    "kept_fp8": f"{KEPT} {FP8}",
    "kept_eager": f"{KEPT} --bcd-compile off",
    "kept_logits": f"{KEPT} --no-cross-entropy-loss-fusion",
    "kept_texts": f"{KEPT} --reset-attention-mask",
    "kept_texts_mask": f"{KEPT} --reset-attention-mask --attention-dropout 1e-9",
    "kept_grouped": f"{KEPT} --moe-grouped-gemm",
}
"""Optimisations of a schedule. Without `kept` breadth-first recomputes; `eager` compiles nothing; `logits` stores them;
`texts` have bounds, or a mask where there is dropout; `grouped` multiplies all experts at once."""
NETWORKS = {"8b": LLAMA_8B, "14b": QWEN_14B, "experts": QWEN_30B_A3B, "1.3b": LLAMA_1_3B}
PLACES = ("breadth_first_host", "breadth_first_device")
TIMED = (
    *itertools.product(("8b", "14b"), PLACES, ("kept", "kept_fp8")),
    *itertools.product(("8b",), PLACES, ("kept_eager", "")),
    *itertools.product(("experts",), PLACES, ("kept_grouped",)), ("experts", "breadth_first_device", "kept"),
    *itertools.product(("8b",), PLACES[1:], ("kept_logits", "kept_texts", "kept_texts_mask")),
    ("8b", "depth_first_device", ""), ("8b", "depth_first_device", "fp8"),
)  # fmt: skip
"""Runs of every layer: network, schedule and variant, the most informative first."""


def speed(setting: Setting, results: Results) -> list[Job]:
    """Measure steps that train every layer, and their kernels."""
    first, *others = [time_schedule(setting, *names) for names in TIMED]
    adam = time_steps(setting, "8b_full_adam_8_bit_host", "8b", ADAM_ON_HOST, limit=True)
    profile = []
    for place in PLACES if setting.has_gpu and not setting.is_tiny else ():
        flags = f"{LLAMA_8B} {STEPS} {EVERY_LAYER} {SCHEDULES[place]} {KEPT} --recompute-memory-gib {KEPT_GIB}"
        words = python(f"studies/kernel_kinds.py --json {{metrics}} pretrain_llama_bcd.py {flags}")
        profile.append(Job(name=f"8b_{place}_kernels", words=words, seconds=150, kind="json"))
    return [first, *profile, *others, adam]


def time_schedule(setting: Setting, model: str, schedule: str, variant: str) -> Job:
    """Return the job that trains every layer of one of NETWORKS by one of SCHEDULES and VARIANTS."""
    is_limited, name = "host" in schedule, "_".join(filter(None, (model, schedule, variant)))
    flags = f"{EVERY_LAYER} {SCHEDULES[schedule]} {VARIANTS[variant]}"
    if "kept" in variant and (is_limited or not setting.has_gpu):
        flags += f" --recompute-memory-gib {KEPT_GIB}"
    return time_steps(setting, name, model, flags, limit=is_limited)


def time_steps(setting: Setting, name: str, model: str, flags: str, *, limit: bool = False) -> Job:
    """Return the job that times six steps of a model of NETWORKS, with `limit` in the memory of an RTX 4090."""
    words = python(f"pretrain_llama_bcd.py {network(setting, model)} {STEPS} {flags} --metrics-file {{metrics}}")
    if limit:
        words = (words[0], "-c", LIMITED, f"{RTX4090_GIB}", *words[1:])
    return Job(name=name, words=words, seconds=200 if setting.is_tiny else 120, about={"model": model})


def network(setting: Setting, model: str) -> str:
    if setting.is_tiny:
        return f"{TINY_LLAMA} {TINY_EXPERTS * (model == 'experts')}"
    return NETWORKS[model]


PEERS = {
    "8b_every_layer_host": f"{EVERY_LAYER} {SCHEDULES['breadth_first_host']}",
    "8b_every_layer_device": f"{EVERY_LAYER} {SCHEDULES['breadth_first_device']} {KEPT} --recompute-memory-gib {{gib}}",
    "8b_trainer": None, "8b_deepspeed": None, "1.3b_megatron": None,
    "1.3b_full_adam": "--bcd-num-blocks 1 --cross-entropy-loss-fusion --cross-entropy-fusion-impl linear",
    "1.3b_trainer": None, "1.3b_deepspeed": None,
}  # fmt: skip
"""Runs of other systems by model and name, and runs of this project with their flags."""
STOCK = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights"
    " --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --max-position-embeddings 2048 --eval-interval 99"
)
"""What stock Megatron-LM needs to train the network of pretrain_llama_bcd.py."""


def peers(setting: Setting, results: Results) -> list[Job]:
    """Time other systems and this project on the same sizes, tokens and card."""
    jobs = []
    for name, flags in PEERS.items():
        model, _, peer = name.partition("_")
        if flags is not None:
            jobs.append(time_steps(setting, name, model, flags.format(gib=130), limit="host" in name))
            continue
        words = f"studies/peer_steps.py --peer {peer} --json {{metrics}} {network(setting, model)} {STEPS}"
        words += f" {STOCK}" if peer == "megatron" else ""
        jobs.append(Job(name=name, words=python(words), seconds=300, kind="json", about={"model": model}))
    return jobs


JOBS = {"speed": speed, "peers": peers, "sanity": sanity, "learning": learning, "fine_tuning": fine_tuning}
WIDTHS = {"sanity": 4, "fine_tuning": 8}
"""How many jobs of a part run at once; 1 if times are measured."""
