"""Measure what local steps cost in loss: K workers in one process, and an outer Nesterov step on their mean change.

    python studies/local_steps.py --data-path out/wikitext-2_text_document --workers 4 --interval 25

Every worker is a separate `Trainer` with 1/K of the batch; worker k reads the samples that data-parallel rank k of K
would. After every --interval steps the workers' changes are averaged, the outer optimizer (DiLoCo, arXiv 2311.08105)
steps the common weights, and all workers continue from them. --workers 1 --interval 0 is synchronous training. Each run
adds a line to --csv; a run that has a line is not repeated. studies/local_steps.md has the results.
"""

from __future__ import annotations

import argparse
import csv
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

import torch
from _parser import Parser, command, cpu_model, run_main
from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator

from megatron.bcd import FAMILY_DEFAULTS, RunConfig, parse_run_config
from megatron.bcd.data.batches import BatchSharding, consecutive_indices, load_batch
from megatron.bcd.metrics.reporter import SilentReporter
from megatron.bcd.model.builder import unwrap_model
from megatron.bcd.runtime import device, distributed, rng, threads
from megatron.bcd.trainer import Trainer
from megatron.bcd.training.resolve import resolve_run

PROG = "studies/local_steps.py"
ROOT = Path(__file__).resolve().parents[1]
Tensors = dict[str, torch.Tensor]
"""Tensors by parameter name."""

BATCH, SEQUENCE = 8, 128
COMMON = f"""--seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE} --lr-decay-style cosine
    --lr-warmup-iters 50 --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1 --hidden-dropout 0
    --attention-dropout 0 --tokenizer-type ByteLevelTokenizer --split 90,5,5 --num-workers 0 --eval-fixed"""
MODELS = {
    "gpt": ("gpt", "--num-layers 6 --hidden-size 208 --num-attention-heads 4"),
    "llama": ("llama", "--num-layers 6 --hidden-size 208 --ffn-hidden-size 560 --num-attention-heads 4"),
    "llama-small": ("llama", "--num-layers 6 --hidden-size 96 --ffn-hidden-size 256 --num-attention-heads 3"),
    "llama-tiny": ("llama", "--num-layers 3 --hidden-size 64 --ffn-hidden-size 176 --num-attention-heads 2"),
}
"""Family and flags; the first two are those of gpt_headline.yaml and llama_headline.yaml."""
MUON = "--optimizer muon --muon-momentum 0.95 --muon-use-nesterov --muon-extra-scale-factor 0.2"
METHODS = {
    "full_adam": "--bcd-num-blocks 1",
    "pretrain": "--bcd-preset pretrain",
    "full_muon": f"--bcd-num-blocks 1 {MUON}",
    "paper": "--bcd-preset paper",
}
BITS = {"fp32": 32.0, "bf16": 16.0}
"""Bits per exchanged number."""
COLUMNS = ("model", "method", "workers", "interval", "outer_lr", "outer_momentum", "fragments", "compression", "delay",
           "lr", "seed", "steps", "batch", "test", "test_of_mean", "validation", "bytes_per_step", "peak_bytes",
           "minutes", "text", "commit", "cpu", "flags")  # fmt: skip
FIRST_RESULT = COLUMNS.index("test")
"""Index of the first column that is a result and not an input."""


class Outer:
    """The common weights and the outer momentum."""

    def __init__(self, weights: Tensors, trainers: Sequence[Trainer], args: argparse.Namespace) -> None:
        self.weights, self._trainers, self.args = weights, trainers, args
        self.momentum = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self.bytes_sent, self.peak_bytes = 0.0, 0.0
        """Payload per worker, without the factor 2 (K - 1) / K of a ring all-reduce."""

    @property
    def workers(self) -> list[Tensors]:
        return [current_weights(trainer) for trainer in self._trainers]

    def mean(self) -> Tensors:
        workers = self.workers
        return {name: torch.stack([worker[name] for worker in workers]).mean(0) for name in self.weights}

    def exchange(self, names: Iterable[str]) -> list[Tensors]:
        """Step the common weights. Return, for each worker, what to add to its weights to reach them.

        Parameters that no worker changed (frozen layers) are not sent, and their outer momentum stays.
        """
        workers = self.workers
        names = [name for name in names if any(not worker[name].equal(self.weights[name]) for worker in workers)]
        sent = BITS[self.args.compression] / 8 * sum(self.weights[name].numel() for name in names)
        self.bytes_sent, self.peak_bytes = self.bytes_sent + sent, max(self.peak_bytes, sent)
        for name in names:
            weight, momentum = self.weights[name], self.momentum[name]
            changes = [worker[name] - weight for worker in workers]
            change = self._mean(changes)
            momentum.mul_(self.args.outer_momentum).add_(change)
            weight.add_(change + self.args.outer_momentum * momentum, alpha=self.args.outer_lr)
        return [{name: self.weights[name] - worker[name] for name in names} for worker in workers]

    def _mean(self, changes: list[torch.Tensor]) -> torch.Tensor:
        """Return the mean change, summed in the precision in which groups send."""
        dtype = device.DTYPES[self.args.compression]
        return sum(change.to(dtype) for change in changes).float() / len(changes)

    def apply(self, moves: list[Tensors]) -> None:
        """Add each worker's move to its weights. With --delay, workers keep what they have learned meanwhile."""
        for worker, move in zip(self.workers, moves, strict=True):
            for name, value in move.items():
                worker[name].add_(value)


def build_config(args: argparse.Namespace, batch: int) -> RunConfig:
    """Return the configuration of a trainer with `batch` of the sequences; the evaluation has all."""
    family, shape = MODELS[args.model]
    flags = f"""{COMMON} {shape} {METHODS[args.method]} --micro-batch-size {batch} --global-batch-size {batch}
        --train-iters {args.steps} --lr {args.lr:g} --min-lr {args.lr / 10:g} --seed {args.seed}
        --eval-interval {args.steps} --eval-iters {256 // batch} {args.flags}"""
    words = [*shlex.split(flags), "--data-path", args.data_path]
    return parse_run_config(words, prog=PROG, defaults=FAMILY_DEFAULTS[family], world_size=1)


def build_trainer(config: RunConfig) -> Trainer:
    """Build a trainer that prints nothing. All trainers start from the same weights."""
    unset_num_microbatches_calculator()
    rng.seed_everything(config.training.seed)
    return Trainer(resolve_run(config), reporter=SilentReporter())


def current_weights(trainer: Trainer) -> Tensors:
    """Return the current weights; a switch may replace the tensors."""
    return {name: weight.data for name, weight in unwrap_model(trainer.model).named_parameters()}


def fragment(trainer: Trainer, args: argparse.Namespace, step: int, names: Iterable[str]) -> set[str]:
    """Return the parameters to exchange after this step: all, or the layers of one block in turn; all at the end."""
    if args.fragments == "all" or step == args.steps:
        return set(names)
    parameters = trainer.active.parameters
    block = (step // args.interval - 1) % trainer.block_schedule.num_blocks
    return set(parameters.owned_by(block)) | set(parameters.always_active())


def train(args: argparse.Namespace) -> dict[str, object]:
    """Train, and return the results by column."""
    started = time.monotonic()
    center = build_trainer(build_config(args, args.batch))
    common, worker_batch = current_weights(center), args.batch // args.workers
    trainers = [build_trainer(build_config(args, worker_batch)) for _ in range(args.workers)]
    for trainer in trainers:
        trainer.restore()
    outer = Outer(common, trainers, args)
    dataset = center.splits.train
    orders = [
        consecutive_indices(BatchSharding(micro_batch_size=worker_batch, rank=k, num_ranks=args.workers),
                            total_samples=len(dataset), consumed_samples=0) for k in range(args.workers)
    ]  # fmt: skip
    moves: list[Tensors] | None = None
    for step in range(1, args.steps + 1):
        step_results = []
        for trainer, order in zip(trainers, orders, strict=True):
            step_results.append(trainer.train_step(iter([load_batch(dataset, next(order), trainer.config)])))
        is_end = step == args.steps
        if args.interval and moves is not None and (step % args.interval == args.delay or is_end):
            outer.apply(moves)
            moves = None
        if is_end:
            mean = outer.mean()
        if args.interval and (step % args.interval == 0 or is_end):
            moves = outer.exchange(fragment(trainers[0], args, step, common))
            if args.delay == 0 or is_end:
                outer.apply(moves)
                moves = None
        for trainer, result in zip(trainers, step_results, strict=True):
            trainer._after_step(result)
        if step % 100 == 0:
            loss = sum(result.loss for result in step_results) / args.workers
            print(f"step {step} loss {loss:.4f} {(time.monotonic() - started) / 60:.1f} min", flush=True)
    if not args.interval:
        common = mean
    results: dict[str, object] = {}
    for split, column, values in (("test", "test_of_mean", mean), ("test", "test", common),
                                  ("validation", "validation", common)):  # fmt: skip
        for name, weight in unwrap_model(center.model).named_parameters():
            weight.data = values[name]
        results[column] = round(center.evaluator.evaluate(split), 5)
    is_sync = not args.interval
    sent = 2.0 * sum(weight.numel() for weight in common.values()) if is_sync else outer.bytes_sent / args.steps
    results |= {"bytes_per_step": round(sent), "peak_bytes": round(sent if is_sync else outer.peak_bytes)}
    return results | {"minutes": round((time.monotonic() - started) / 60, 1)}


def parser() -> Parser:
    parser = Parser(prog=PROG, description=__doc__)
    parser.add_argument("--data-path", required=True, help="a text of tools/preprocess_data.py, by bytes")
    parser.add_argument("--csv", type=Path, default=ROOT / "studies" / "local_steps.csv")
    parser.add_argument("--model", choices=MODELS, default="llama-small")
    parser.add_argument("--method", choices=METHODS, default="pretrain")
    parser.add_argument("--workers", type=int, default=1, help="K, which divides --batch")
    parser.add_argument("--batch", type=int, default=BATCH, help="sequences of a step, over all workers")
    parser.add_argument(
        "--interval", type=int, default=0, help="H, steps between exchanges; 0: synchronous, one worker"
    )
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--outer-momentum", type=float, default=0.9)
    parser.add_argument("--fragments", choices=("all", "block"), default="all", help="what an exchange holds")
    parser.add_argument("--compression", choices=BITS, default="fp32")
    parser.add_argument("--delay", type=int, default=0, help="steps from an exchange until its result is applied")
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--flags", default="", help="more flags of the training scripts")
    return parser


def is_done(args: argparse.Namespace, text: str) -> bool:
    """Return whether the CSV has a line with these inputs."""
    inputs = [*(str(getattr(args, column)) for column in COLUMNS[:FIRST_RESULT]), args.flags, text]
    if not args.csv.exists():
        return False
    with args.csv.open(newline="") as file:
        rows = [[row[column] for column in (*COLUMNS[:FIRST_RESULT], "flags", "text")] for row in csv.DictReader(file)]
    return inputs in rows


def append(args: argparse.Namespace, text: str, results: dict[str, object]) -> None:
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    row = {**vars(args), **results, "text": text, "commit": commit, "cpu": cpu_model()}
    is_new = not args.csv.exists()
    with args.csv.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


@command(PROG)
def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    if args.batch % args.workers or (args.workers > 1 and not args.interval):
        raise ValueError("--workers: must divide --batch, and more than one need an --interval")
    if args.interval and not 0 <= args.delay < args.interval:
        raise ValueError("--delay: must be shorter than --interval")
    text = Path(args.data_path).name.removesuffix("_text_document")
    if is_done(args, text):
        return 0
    print(" ".join(argv), flush=True)
    threads.set_threads()
    distributed.initialize(backend="auto", timeout_minutes=10, tensor_size=1, pipeline_size=1)
    append(args, text, train(args))
    return 0


if __name__ == "__main__":
    run_main(main)
