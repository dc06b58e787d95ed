"""Compares what methods of fine-tuning learn: loss at equal steps and equal time, state, cost.

    python studies/fine_tuning.py --peers full,badam,lora --output out/sft
    python studies/fine_tuning.py --base MODEL --variant "six=--bcd-num-blocks 6" --seeds 1,2,3

Fine-tunes a LLaMA on records with the BCD preset, in full with Adam, with BAdam (PyPI badam) and LoRA (PyPI peft), and
with every --variant, each at its own tuned learning rate. The model is --base, or a small one that is trained on
--pretrain-text first. Runs, tuning and seeds are those of a study (studies/study.py): a comparison that was stopped
goes on when it is started again. --output gets table.md, rows.csv and the runs. See docs/fine_tuning.md.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import importlib.util
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

from _parser import Parser, command, cpu_model, run_main
from _processes import ROOT, failure_reason
from filelock import FileLock, Timeout
from results import NAME, Point, Result, Study, Variant, final_runs, grid, points
from study import Commands, Runner, make_folder, tell

PROG = "studies/fine_tuning.py"
PEERS = {"full": "full Adam", "badam": "BAdam (PyPI), transformers", "lora": "LoRA (peft), transformers"}
NEEDS = {"badam": ("badam", "transformers"), "lora": ("peft", "transformers")}
BASELINE, OURS = "full", "bcd"
EVALUATIONS, CYCLES = 8, 2
"""Of a run; with one layer a block three epochs of Alpaca at the preset's 50 steps are 1.4 cycles of 32 layers."""


# ---------------------------------------------------------------- model and records


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model that is trained here, and how."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    vocab_size: int
    seq_length: int
    micro_batch: int
    """Of fine-tuning, as the next."""
    global_batch: int
    base_steps: int
    """Of training on the text."""
    base_batch: int
    base_lr: float = 3e-3


SIZES = {
    "tiny": Size(num_layers=3, hidden_size=32, ffn_hidden_size=64, num_heads=2, vocab_size=400, seq_length=256,
                 micro_batch=2, global_batch=4, base_steps=10, base_batch=4),
    "small": Size(num_layers=9, hidden_size=320, ffn_hidden_size=864, num_heads=5, vocab_size=2048, seq_length=256,
                  micro_batch=4, global_batch=8, base_steps=1200, base_batch=8),
}  # fmt: skip
"""tiny is for trying the tool out; its figures mean nothing."""
BASE_FLAGS = (
    "--optimizer muon --muon-momentum 0.95 --muon-use-nesterov --muon-extra-scale-factor 0.2 --adam-beta2 0.95 --bf16"
)
"""Full Muon: of the methods here the one that learns most in so few steps (docs/learning.md)."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What is fine-tuned, and on what; all files lie in `folder`, whose name says what the model is."""

    folder: Path
    tokenizer: str
    """A SentencePiece model, or ``model`` for that of the model's folder."""
    num_layers: int
    about: str
    records: Path
    num_records: int
    steps: int
    test_iters: int

    @property
    def model(self) -> Path:
        """In Hugging Face's format."""
        return self.folder / "model"


def tokenizer_flags(folder: object, tokenizer: str) -> list[str]:
    """For the training scripts."""
    kind = "HuggingFaceTokenizer" if tokenizer == "model" else "SentencePieceTokenizer"
    return ["--tokenizer-type", kind, "--tokenizer-model", f"{folder}/{tokenizer}"]


def size_of(arguments: argparse.Namespace) -> Size:
    """Of --size, with --base-steps and --global-batch-size."""
    size = SIZES[arguments.size]
    batch = arguments.global_batch_size or size.global_batch
    micro_batch = math.gcd(batch, size.micro_batch)
    return replace(
        size, global_batch=batch, micro_batch=micro_batch, base_steps=arguments.base_steps or size.base_steps
    )


def layers_of(source: Path) -> int:
    """Of a model in Hugging Face's format. Raises ValueError."""
    try:
        return int(json.loads((source / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"])
    except (OSError, ValueError, TypeError, KeyError):
        raise ValueError(f"--base {source}: must be a LLaMA, Mistral or Qwen in Hugging Face's format") from None


def prepare(arguments: argparse.Namespace, output: Path) -> Prepared:
    """Model and records below `output`; what is there already is not made again. Raises ValueError if a step fails."""
    size = size_of(arguments)
    if arguments.base is not None:
        source = arguments.base.resolve()
        layers, tokenizer = layers_of(source), "model"
        suffixes = {".json", ".safetensors", ".model", ".jinja"}
        digest = digest_of(*sorted(path for path in source.iterdir() if path.suffix in suffixes))
        folder = output / f"base-{source.name}-{digest}"
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "model").resolve() != source:  # the same files at another place
            (folder / "model").unlink(missing_ok=True)
            (folder / "model").symlink_to(source)
        about = f"The model {source.name}, {layers} layers"
    else:
        layers, tokenizer, text = size.num_layers, "tokenizer.model", arguments.pretrain_text
        fixed = replace(size, micro_batch=0, global_batch=0)
        digest = hashlib.sha256(f"{fixed} {BASE_FLAGS} {digest_of(text)}".encode()).hexdigest()[:10]
        folder = output / f"base-{arguments.size}-{digest}"
        folder.mkdir(parents=True, exist_ok=True)
        train_base(folder, size, text)
        about = (
            f"LLaMA of {layers} layers, hidden size {size.hidden_size}, first trained for {size.base_steps:,} steps on "
            f"{text.name}"
        )
    return _with_records(arguments, size, folder=folder, tokenizer=tokenizer, num_layers=layers, about=about)


def digest_of(*paths: Path) -> str:
    """Of names and contents."""
    found = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            found.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()[:10]


def train_base(folder: Path, size: Size, text: Path) -> None:
    """Tokenizer, tokens, and the model, each unless it is there."""
    tokenizer, prefix, checkpoint = tokenizer_flags(folder, "tokenizer.model"), folder / "text", folder / "base_run"
    if not (folder / "tokenizer.model").is_file():
        tell("training a tokenizer")
        words = ["tools/train_tokenizer.py", "--input", text, "--vocab-size", size.vocab_size]
        call([*words, "--output-prefix", folder / "tokenizer"], folder)
    if not Path(f"{prefix}_text_document.idx").is_file():
        words = ["tools/preprocess_data.py", "--input", text, "--append-eod", *tokenizer, "--output-prefix", prefix]
        call(words, folder)
    if not (folder / "model" / "config.json").is_file():
        tell(f"training the model on {text.name}: {size.base_steps:,} steps")
        flags = (
            f"--num-layers {size.num_layers} --hidden-size {size.hidden_size} --ffn-hidden-size {size.ffn_hidden_size} "
            f"--num-attention-heads {size.num_heads} --seq-length {size.seq_length} --max-position-embeddings "
            f"{size.seq_length} --micro-batch-size {size.base_batch} --train-iters {size.base_steps} --lr "
            f"{size.base_lr} --min-lr {size.base_lr / 10} --lr-decay-style cosine --lr-warmup-iters "
            f"{size.base_steps // 20} --weight-decay 0.1 --clip-grad 1 --split 98,2,0 --num-workers 0 "
            f"--bcd-num-blocks 1 {BASE_FLAGS} --eval-interval {size.base_steps} --eval-iters 4 --log-interval 20 "
            f"--save-interval {max(1, size.base_steps // 4)}"
        )
        files = ["--data-path", f"{prefix}_text_document", "--save", checkpoint, "--load", checkpoint]
        call(["pretrain_llama_bcd.py", *flags.split(), *tokenizer, *files, "--save-hf", folder / "model"], folder)
        if not (folder / "model" / "config.json").is_file():
            raise ValueError(f"training the model on {text.name} was stopped; started again, it goes on")
    shutil.rmtree(checkpoint, ignore_errors=True)


def _with_records(arguments: argparse.Namespace, size: Size, *, folder: Path, tokenizer: str, **about: Any) -> Prepared:
    content = b"".join(arguments.data.read_bytes().splitlines(keepends=True)[: arguments.records])
    digest = hashlib.sha256(content).hexdigest()[:10]
    path = folder / f"records-{digest}.jsonl"
    if not path.is_file():
        path.with_suffix(".tmp").write_bytes(content)
        os.replace(path.with_suffix(".tmp"), path)
    split = arguments.split.replace(",", "_")
    counted = folder / f"counted-{digest}-{arguments.num_epochs:g}-{size.global_batch}-{split}.json"
    if not counted.is_file():
        words = ["studies/peer.py", "--count", "--sft", "--load-hf", folder / "model", "--data-path", path, "--split",
                 arguments.split, "--data-cache-path", folder / "cache", "--sft-drop-long",
                 *tokenizer_flags(folder, tokenizer), "--seq-length", size.seq_length, "--micro-batch-size",
                 size.micro_batch, "--global-batch-size", size.global_batch, "--lr", 1e-3,
                 "--num-epochs", arguments.num_epochs]  # fmt: skip
        counted.write_text(call(words, folder).strip().splitlines()[-1] + "\n", encoding="utf-8")
    found = json.loads(counted.read_text(encoding="utf-8"))
    _, validation, test = map(float, arguments.split.split(","))  # of about equally long records
    return Prepared(
        folder=folder,
        tokenizer=tokenizer,
        records=path,
        num_records=len(content.split(b"\n")) - content.endswith(b"\n"),
        steps=found["steps"],
        test_iters=max(1, round(found["validation"] * test / validation / size.global_batch)),
        **about,
    )


def call(words: Sequence[object], folder: Path) -> str:
    """Stdout of a script of the project. Raises ValueError with its last words if it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    with open(folder / "preparation.log", "a", encoding="utf-8") as log:
        log.write(done.stdout + done.stderr)
    if done.returncode:
        raise ValueError(f"{words[0]}: {failure_reason(done.stdout + done.stderr, done.returncode)}")
    return done.stdout


def study_of(arguments: argparse.Namespace, prepared: Prepared) -> Study:
    """All runs, as studies/study.py knows them; ``{data}`` is the prepared folder."""
    size = size_of(arguments)
    flags = (
        f"--sft --load-hf {{data}}/model --data-path {{data}}/{prepared.records.name} --split {arguments.split} "
        f"--data-cache-path {{data}}/cache {' '.join(tokenizer_flags('{data}', prepared.tokenizer))} "
        f"--seq-length {size.seq_length} --sft-drop-long --micro-batch-size {size.micro_batch} --global-batch-size "
        f"{size.global_batch} --train-iters {{steps}} --lr-decay-style cosine --min-lr {{lr/10}} --lr-warmup-iters "
        f"{{steps/30}} {'--bf16 ' if arguments.bf16 else ''}--weight-decay 0.01 --clip-grad 1 --hidden-dropout 0 "
        f"--attention-dropout 0 --num-workers 0 --log-interval 1 --eval-interval "
        f"{max(1, prepared.steps // EVALUATIONS)} --full-validation --eval-iters {prepared.test_iters} "
        f"--bcd-steps-per-block {max(2, prepared.steps // (CYCLES * prepared.num_layers))}"
    )
    preset = "--bcd-preset finetune"
    methods = [Variant(name=OURS, label="BCD, preset finetune", flags=preset)]
    methods += [
        Variant(name=name, label=f"BCD, {name}: {own}", flags=f"{preset} {own}")
        for name, own in arguments.variants.items()
    ]
    if BASELINE in arguments.peers:
        methods.insert(0, Variant(name=BASELINE, label=PEERS[BASELINE], flags="--bcd-num-blocks 1"))
    methods += [
        Variant(name=name, label=PEERS[name], program=f"studies/peer.py --peer {name}")
        for name in NEEDS
        if name in arguments.peers
    ]
    return Study(
        path="sft",
        program="pretrain_llama_bcd.py",
        flags=flags,
        checkpoint_flags="--save {folder} --load {folder} --save-interval {steps/3}",
        steps=prepared.steps,
        models=(Variant(name=arguments.size),),
        data=(Variant(name="records"),),
        methods=tuple(methods),
        baseline=BASELINE if BASELINE in arguments.peers else OURS,
        seeds=arguments.seeds,
        learning_rates=arguments.learning_rates,
        extend=1,
        jobs=1,
    )


# ---------------------------------------------------------------- figures


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One finished run. Its time is its steps times the step's, without evaluations: other work on the machine is left
    out, and how often is evaluated."""

    seed: int
    curve: tuple[tuple[int, float], ...]
    """Iteration and validation loss, ascending; the last entry is the end of the run."""
    step_ms: float
    state_bytes: int
    peak_bytes: int
    test: float | None

    @property
    def best(self) -> tuple[int, float]:
        """Where the validation loss is lowest."""
        return min(self.curve, key=lambda point: point[1])

    def at_time(self, milliseconds: float) -> float:
        """The validation loss after so much training, interpolated; of a run that ended before, its last."""
        step = milliseconds / self.step_ms
        for (before, one), (after, two) in pairwise(self.curve):
            if step <= after:
                return one + max(0.0, (step - before) / (after - before)) * (two - one)
        return self.curve[-1][1]

    def time_to(self, loss: float) -> float | None:
        """Milliseconds of training until the validation loss is first `loss`, interpolated; None if it never is."""
        first = self.curve[0]
        if first[1] <= loss:
            return first[0] * self.step_ms
        for (before, above), (after, below) in pairwise(self.curve):
            if below <= loss:
                return (before + (above - loss) / (above - below) * (after - before)) * self.step_ms
        return None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method; means over the seeds, and their spread (largest minus smallest)."""

    method: str
    label: str
    failure: str = ""
    """Why there are no figures; then all others are as by default."""
    lr: float | None = None
    lr_at_edge: bool = False
    rates: tuple[tuple[float, float | None], ...] = ()
    """Learning rates with the validation loss that they end at (first seed); None: not finite, or failed."""
    seeds: tuple[int, ...] = ()
    best: float = math.nan
    """Lowest validation loss."""
    best_spread: float = math.nan
    last: float = math.nan
    """Validation loss at the end: at equal epochs."""
    last_spread: float = math.nan
    at_full_time: float = math.nan
    """Validation loss after the least time that full training or the method took."""
    to_full: float | None = None
    """Lowest validation loss over full training's, less 1."""
    cost: float | None = None
    """Time to full training's lowest validation loss, over full training's own."""
    num_reached: int = 0
    """Seeds that reach it at all; `cost` is of these."""
    test: float | None = None
    tokens_per_second: float = math.nan
    """Positions, those that no loss counts included."""
    step_ms: float = math.nan
    state_bytes: float = math.nan
    peak_bytes: float = math.nan
    """Of the process, all libraries included."""


def row_of(runs: Sequence[Trained], full: Mapping[int, Trained], *, tokens: float, **about: Any) -> Row:
    """The row of a method's runs at its tuned rate, one for each seed; `full` has full training's by seed."""
    paired = [(one, full[one.seed]) for one in runs if one.seed in full]
    needed = [(one.time_to(other.best[1]), other.best[0] * other.step_ms) for one, other in paired]
    costs = [mine / theirs for mine, theirs in needed if mine is not None and theirs]
    tests = [one.test for one in runs if one.test is not None]
    best, last = [one.best[1] for one in runs], [one.curve[-1][1] for one in runs]
    in_time = [one.at_time(other.curve[-1][0] * other.step_ms) for one, other in paired]
    return Row(
        **about,
        seeds=tuple(one.seed for one in runs),
        best=statistics.fmean(best),
        best_spread=max(best) - min(best),
        last=statistics.fmean(last),
        last_spread=max(last) - min(last),
        at_full_time=statistics.fmean(in_time or [math.nan]),
        to_full=statistics.fmean(one.best[1] / other.best[1] - 1 for one, other in paired) if paired else None,
        cost=statistics.fmean(costs) if costs else None,
        num_reached=len(costs),
        test=statistics.fmean(tests) if tests else None,
        tokens_per_second=statistics.fmean(tokens / one.step_ms * 1e3 for one in runs),
        step_ms=statistics.fmean(one.step_ms for one in runs),
        state_bytes=max(one.state_bytes for one in runs),
        peak_bytes=max(one.peak_bytes for one in runs),
    )


def rows_of(runner: Runner, *, tokens: float) -> list[Row]:
    """Of everything that has finished, in the study's order."""
    study = runner.study
    trained = {point: _trained(runner, point) for point in points(study)}
    full = {one.seed: one for point, runs in trained.items() if point.method.name == BASELINE for one in runs}
    rows = []
    for point, runs in trained.items():
        tried = grid(study, point, runner.lookup)
        rates = tuple((lr, value if math.isfinite(value) else None) for lr, value in sorted(tried.values.items()))
        about: dict[str, Any] = {"method": point.method.name, "label": point.method.label, "rates": rates}
        if runs:
            edge = tried.at_edge and len(rates) > 1
            rows.append(row_of(runs, full, tokens=tokens, lr=tried.best_so_far, lr_at_edge=edge, **about))
        elif rates:
            failed = [runner.lookup(point.run(lr, study.seeds[0])) for lr, _ in rates]
            reason = next((one.failure for one in failed if one and one.failure), "no finite loss")
            rows.append(Row(failure=reason, **about))
    return rows


def _trained(runner: Runner, point: Point) -> list[Trained]:
    """The method's runs at its best rate so far."""
    lr = grid(runner.study, point, runner.lookup).best_so_far
    found = []
    for run in [] if lr is None else final_runs(runner.study, point, lr)[0]:
        result = runner.lookup(run)
        if result is None or result.validation is None or result.step_ms is None:
            continue
        curve = {step: value for step, value in result.curve if value is not None}
        curve[result.steps or 0] = result.validation
        found.append(
            Trained(
                seed=run.seed,
                curve=tuple(sorted(curve.items())),
                step_ms=runner.step_ms(point) or result.step_ms,
                state_bytes=round((result.state_bytes_per_parameter or 0) * (result.num_parameters or 0)),
                peak_bytes=result.peak_bytes or 0,
                test=result.test,
            )
        )
    return found


def table(rows: Sequence[Row], *, num_seeds: int = 1) -> list[str]:
    """Markdown lines, rows in the order given; `num_seeds`: that were asked for."""
    base = next((row for row in rows if row.method == BASELINE and not row.failure), None)

    def spread(value: float, row: Row) -> str:
        return f" ± {value / 2:.4f}" if len(row.seeds) > 1 else ""

    def cost(row: Row) -> str:
        if row.cost is None:
            return "not reached" if base else "-"
        some = "" if row.num_reached == len(row.seeds) else f" ({row.num_reached} of {len(row.seeds)})"
        return f"{row.cost:.2f}{some}"

    columns = {
        "learning rate": lambda row: f"{row.lr:g}" + " *edge*" * row.lr_at_edge,
        "best validation loss": lambda row: (
            f"{row.best:.4f}"
            + spread(row.best_spread, row)
            + (f" *{len(row.seeds)} of {num_seeds} seeds*" if len(row.seeds) < num_seeds else "")
        ),
        "to full": lambda row: "-" if row.to_full is None else f"{100 * row.to_full:+.2f} %",
        "at equal epochs": lambda row: f"{row.last:.4f}" + spread(row.last_spread, row),
        "at equal time": lambda row: "-" if math.isnan(row.at_full_time) else f"{row.at_full_time:.4f}",
        "test": lambda row: "-" if row.test is None else f"{row.test:.4f}",
        "tokens/s": lambda row: f"{row.tokens_per_second:,.0f}",
        "model state": lambda row: f"{row.state_bytes / 2**20:.1f} MiB",
        "of full": lambda row: f"{100 * row.state_bytes / base.state_bytes:.0f} %" if base else "-",
        "peak memory": lambda row: f"{row.peak_bytes / 2**20:,.0f} MiB",
        "cost to full's best": cost,
    }
    lines = ["| " + " | ".join(("method", *columns)) + " |", "|---|" + "---|" * len(columns)]
    for row in rows:
        failed = [f"failed: {row.failure.replace('|', '/')}", *[""] * (len(columns) - 1)]
        cells = failed if row.failure else [cell(row) for cell in columns.values()]
        lines.append("| " + " | ".join((row.label, *cells)) + " |")
    return lines


def grid_lines(rows: Sequence[Row]) -> list[str]:
    """Markdown lines: the validation loss that every learning rate ends at."""
    rates = sorted({rate for row in rows for rate, _ in row.rates})
    lines = ["| learning rate | " + " | ".join(f"{rate:g}" for rate in rates) + " |", "|---|" + "---|" * len(rates)]
    for row in rows:
        known = {rate: "diverged" if value is None else f"{value:.4f}" for rate, value in row.rates}
        lines.append(f"| {row.label} | " + " | ".join(known.get(rate, "") for rate in rates) + " |")
    return lines


def document(
    rows: Sequence[Row], arguments: argparse.Namespace, prepared: Prepared, argv: Sequence[str], timing: Result | None
) -> str:
    """The table with what it rests on, as Markdown."""
    size = size_of(arguments)
    timed = (
        f"Step times: 60 steps of every method in turn, median of {timing.rounds} rounds."
        if timing
        else "Step times: of the runs, which may have shared the machine."
    )
    return "\n".join(
        [
            "# Fine-tuning side by side",
            "",
            f"`python {PROG} {shlex.join(argv)}`",
            "",
            *table(rows, num_seeds=len(arguments.seeds)),
            "",
            "Validation loss at the end, by learning rate (first seed):",
            "",
            *grid_lines(rows),
            "",
            f"{prepared.about}. Then {prepared.steps:,} steps of {size.global_batch} sequences of {size.seq_length} "
            f"tokens, {arguments.num_epochs:g} epochs of {prepared.num_records:,} records ({arguments.split} into "
            f"training, validation and test), in {'bf16' if arguments.bf16 else 'fp32'}. Seeds: "
            f"{', '.join(map(str, arguments.seeds))}; ± is half the range over them, *n of m seeds*: those that have "
            "run. To full: best validation loss, relative. At equal time: after the time that full training took, or "
            "at the end where that was earlier. Cost: training time to full Adam's lowest validation loss, over full "
            "Adam's own. Times count training steps only. Model state: weights, gradients, moments, adapters. Peak "
            "memory: of the process, with its libraries. *edge*: the best rate is the grid's first or last.",
            "",
            f"{cpu_model()}, one thread. {timed}",
            "",
        ]
    )


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """The rows as CSV."""

    def text(value: Any) -> str:
        if isinstance(value, tuple):
            return " ".join(":".join(map(text, one)) if isinstance(one, tuple) else text(one) for one in value)
        return "" if value is None or value != value else str(value)

    names = [each.name for each in fields(Row)]
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([names, *([text(getattr(row, name)) for name in names] for row in rows)])


# ---------------------------------------------------------------- command line


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The checked command line. Raises ValueError: a flag is unknown, or its value does not fit."""
    shared = ROOT.parent / "shared" / "data"
    parser = Parser(prog=PROG, description=__doc__)
    add = parser.add_argument
    add("--task", choices=("sft",), default="sft", help=argparse.SUPPRESS)
    add("--output", type=Path, default=Path("out", "sft"), metavar="FOLDER", help="(default: out/sft)")
    add("--peers", default=",".join(PEERS), metavar="LIST", help=f"beside the BCD preset: of {', '.join(PEERS)}, with"
        " commas (default: all)")  # fmt: skip
    add("--data", type=Path, default=shared / "alpaca" / "alpaca_5000.jsonl", metavar="FILE", help="records of --sft")
    add("--pretrain-text", type=Path, default=shared / "wikitext-2" / "train.txt", metavar="FILE",
        help="what the model is trained on first")  # fmt: skip
    add("--base", type=Path, metavar="FOLDER", help="a model in Hugging Face's format, with its tokenizer, that is "
        "fine-tuned in place of one that is trained here")  # fmt: skip
    add("--size", choices=tuple(SIZES), default="small", help="of the model (default: small, 11 M weights in layers)")
    add("--variant", action="append", default=[], metavar="NAME=FLAGS", help="one more row: the BCD preset with these "
        "flags of the training scripts besides; may be given several times")  # fmt: skip
    add("--global-batch-size", type=int, metavar="N", help="sequences of a step of fine-tuning (default: the size's)")
    add("--bf16", action="store_true", help="fine-tune in bf16, with fp32 main parameters (BCD and full Adam), "
        "BAdam's fp32 copies, fp32 adapters (default: fp32)")  # fmt: skip
    add("--base-steps", type=int, metavar="N", help="of training on the text (default: the size's)")
    add("--records", type=int, metavar="N", help="the first N of --data (default: all)")
    add("--split", default="90,5,5", metavar="LIST", help="of the records (default: 90,5,5)")
    add("--num-epochs", type=float, default=3.0, metavar="X", help="of fine-tuning (default: 3)")
    add("--learning-rates", default="1e-4,3e-4,1e-3,3e-3", metavar="LIST", help="grid of every method (default: "
        "1e-4,3e-4,1e-3,3e-3)")  # fmt: skip
    add("--seeds", default="1,2,3", metavar="LIST", help="the first one tunes (default: 1,2,3)")
    add("--step-times", type=int, default=0, metavar="N", help="when all runs are done, time 60 steps of every "
        "method in turn, N times (default: 0, times come from the runs)")  # fmt: skip
    add("--max-minutes", type=float, metavar="X", help="start no run after this time; a later start goes on")
    arguments = parser.parse_args(argv)
    arguments.learning_rates = _numbers(arguments.learning_rates, float, "--learning-rates")
    arguments.seeds = _numbers(arguments.seeds, int, "--seeds")
    peers = [word.strip() for word in arguments.peers.split(",")]
    if set(peers) - set(PEERS) or len(set(peers)) < len(peers):
        raise ValueError(f"--peers {arguments.peers}: must be some of {', '.join(PEERS)}, each once")
    arguments.peers = peers
    if len(parts := _numbers(arguments.split, float, "--split", distinct=False)) != 3:
        raise ValueError(f"--split {arguments.split}: must be three shares, of training, validation and test")
    arguments.split = ",".join(f"{part:g}" for part in parts)
    least = {"num_epochs": 1e-9, "base_steps": 1, "global_batch_size": 1, "step_times": 0, "records": 20}
    for name, smallest in least.items():
        value = getattr(arguments, name)
        if value is not None and not value >= smallest:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least {smallest:g}")
    arguments.variants = {}
    for entry in arguments.variant:
        name, _, flags = (part.strip() for part in entry.partition("="))
        if not NAME.fullmatch(name) or not flags.startswith("--") or name in (*arguments.variants, OURS, *PEERS):
            raise ValueError(f"--variant {entry}: must be a new NAME (letters, digits, . _ -), =, and flags")
        arguments.variants[name] = flags
    return arguments


def _numbers(text: str, kind: Any, flag: str, *, distinct: bool = True) -> tuple[Any, ...]:
    try:
        found = tuple(kind(word) for word in text.split(","))
    except ValueError:
        raise ValueError(f"{flag} {text}: must be numbers with commas between them") from None
    if (distinct and len(set(found)) < len(found)) or (kind is float and not min(found) > 0):
        raise ValueError(f"{flag} {text}: must be {'different ' * distinct}numbers{' above 0' * (kind is float)}")
    return found


def check(arguments: argparse.Namespace) -> None:
    """Raises ValueError for what can be found before anything runs."""
    if arguments.base is not None:
        layers_of(arguments.base)
    for name in ("data",) if arguments.base is not None else ("data", "pretrain_text"):
        path = getattr(arguments, name)
        if not path.is_file():
            raise ValueError(f"--{name.replace('_', '-')} {path}: no such file")
        setattr(arguments, name, path.resolve())  # the tools that read them start in the repository
    with open(arguments.data, "rb") as file:
        if file.read(1024).lstrip().startswith(b"["):
            raise ValueError(f"--data {arguments.data}: is a JSON list; give a file with one record per line")
    for peer in arguments.peers:
        missing = [name for name in NEEDS.get(peer, ()) if importlib.util.find_spec(name) is None]
        if missing:
            raise ValueError(f"--peers {peer} needs {' and '.join(missing)}: the pins are in requirements.txt")


@command(PROG)
def main(argv: Sequence[str]) -> int:
    """Prepare, run what is missing, print, write."""
    arguments = parse_arguments(argv)
    check(arguments)
    folder, size = arguments.output.resolve(), size_of(arguments)
    make_folder(folder, flag="--output")
    try:
        with FileLock(folder / ".lock", timeout=0):
            prepared = prepare(arguments, folder)
            study, runs = study_of(arguments, prepared), prepared.folder / "runs"
            commands = Commands(study=study, texts={}, data_folder=prepared.folder, folder=runs)
            results = prepared.folder / f"results-{size.global_batch}{'-bf16' * arguments.bf16}.csv"
            runner = Runner(commands, results)
            tell(f"{len(runner.todo()[0])} runs can start now; {prepared.steps} steps each, in {prepared.folder}")

            def report() -> list[Row]:
                rows = rows_of(runner, tokens=float(size.seq_length * size.global_batch))
                text = document(rows, arguments, prepared, argv, runner.timing)
                (folder / "table.md").write_text(text, encoding="utf-8")
                write_rows(folder / "rows.csv", rows)
                return rows

            runner.run(max_minutes=arguments.max_minutes, finished=report)
            rows = report()
            if arguments.step_times and not runner.todo()[0] and not any(row.failure for row in rows):
                runner.take_times(arguments.step_times)
                rows = report()
    except Timeout:
        raise ValueError(f"--output {folder} is in use by another {PROG}; wait for it, or give another one") from None
    print((folder / "table.md").read_text(encoding="utf-8"))
    print(f"wrote {folder / 'table.md'} and {folder / 'rows.csv'}")
    return 1 if not rows or any(row.failure for row in rows) else 0


if __name__ == "__main__":
    run_main(main)
