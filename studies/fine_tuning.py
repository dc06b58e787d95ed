"""Compare what fine-tuning methods learn at equal steps, and their model state.

    python studies/fine_tuning.py --base MODEL --peers full,badam,lora --output out/sft
    python studies/fine_tuning.py --base MODEL --variant "six=--bcd-num-blocks 6" --seeds 1,2,3

Fine-tunes a LLaMA on records with the BCD preset, in full with Adam, with BAdam (PyPI badam) and LoRA (PyPI peft), and
with every --variant. Each method's learning rate is tuned. Runs, tuning and seeds are those of a study
(studies/study.py), so an interrupted comparison continues when started again. --output receives table.md (its columns:
docs/learning.md), rows.csv with all runs, and the runs.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

from _parser import Parser, command, run_main
from _processes import ROOT, CannotRun
from _processes import run as run_process
from filelock import FileLock, Timeout
from results import NAME, Study, Table, Variant, fill_in
from study import Commands, Runner, tell

PROG = "studies/fine_tuning.py"
PEERS = {"full": "full Adam", "badam": "BAdam (PyPI), transformers", "lora": "LoRA (peft), transformers"}
NEEDS = {"badam": ("badam", "transformers"), "lora": ("peft", "transformers")}
BASELINE, OURS = "full", "bcd"
SEQ_LENGTH, MICRO_BATCH = 256, 4
"""Tokens of a sequence, and the largest micro-batch."""
EVALUATIONS, CYCLES = 8, 2
"""Evaluations and cycles of a run. With one layer per block and the preset's 50 steps per block, three epochs of Alpaca
are 1.4 cycles of 32 layers."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The model and records to fine-tune. All files are in `folder`, whose name identifies the model."""

    folder: Path
    num_layers: int
    about: str
    records: Path
    num_records: int
    steps: int
    test_iters: int


def shared_flags(arguments: argparse.Namespace, records: Path) -> str:
    """Return the flags of model, records and batches; ``{data}`` stands for the prepared folder."""
    batch = arguments.global_batch_size
    return (
        f"--load-hf {{data}}/model --data-cache-path {{data}}/cache --tokenizer-type HuggingFaceTokenizer "
        f"--tokenizer-model {{data}}/model --data-path {{data}}/{records.name} --sft --sft-drop-long "
        f"--sft-skip-bad-records --split {arguments.split} "
        f"--seq-length {SEQ_LENGTH} --micro-batch-size {math.gcd(batch, MICRO_BATCH)} --global-batch-size {batch}"
    )


def count_layers(source: Path) -> int:
    """Return the number of layers of a model in Hugging Face's format. Raises ValueError if it cannot be read."""
    try:
        return int(json.loads((source / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"])
    except (OSError, ValueError, TypeError, KeyError):
        raise ValueError(f"--base {source}: must be a LLaMA, Mistral or Qwen in Hugging Face's format") from None


def prepare(arguments: argparse.Namespace, output: Path) -> Prepared:
    """Create what is missing of model and records in `output`. Raises ValueError if the records can't be used."""
    source = arguments.base.resolve()
    suffixes = {".json", ".safetensors", ".model", ".jinja"}
    digest = hash_files(*sorted(path for path in source.iterdir() if path.suffix in suffixes))
    folder, layers = output / f"base-{source.name}-{digest}", count_layers(source)
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "model").resolve() != source:  # the same files may have moved
        (folder / "model").unlink(missing_ok=True)
        (folder / "model").symlink_to(source)
    content = b"".join(arguments.data.read_bytes().splitlines(keepends=True)[: arguments.records])
    digest = hashlib.sha256(content).hexdigest()[:10]
    records = folder / f"records-{digest}.jsonl"
    if not records.is_file():
        records.with_suffix(".tmp").write_bytes(content)
        os.replace(records.with_suffix(".tmp"), records)
    split, batch = arguments.split.replace(",", "_"), arguments.global_batch_size
    counted = folder / f"counted-{digest}-{arguments.num_epochs:g}-{batch}-{split}"
    if not counted.is_file():
        words = f"studies/peer.py --count --lr 1e-3 --num-epochs {arguments.num_epochs}"
        words = fill_in(f"{words} {shared_flags(arguments, records)}", {"data": str(folder)}, where="count")
        try:
            run_process([sys.executable, *words], folder / "count.log")
        except CannotRun as error:
            raise ValueError(f"--data {arguments.data}: {error}") from None
        os.replace(folder / "count.log", counted)
    lines = counted.read_text(encoding="utf-8").splitlines()
    counts = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
    _, validation, test = map(float, arguments.split.split(","))  # shares of records of about equal length
    return Prepared(
        folder=folder,
        num_layers=layers,
        about=f"The model {source.name}, {layers} layers",
        records=records,
        num_records=len(content.split(b"\n")) - content.endswith(b"\n"),
        steps=counts["steps"],
        test_iters=max(1, round(counts["validation"] * test / validation / batch)),
    )


def hash_files(*paths: Path) -> str:
    """Return a hash of the files' names and contents."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:10]


def build_study(arguments: argparse.Namespace, prepared: Prepared) -> Study:
    """Build the study of all runs; ``{data}`` stands for the prepared folder."""
    flags = (
        f"{shared_flags(arguments, prepared.records)} "
        f"--train-iters {{steps}} --lr-decay-style cosine --min-lr {{lr/10}} --lr-warmup-iters "
        f"{{steps/30}} {'--bf16 ' if arguments.bf16 else ''}--weight-decay 0.01 --clip-grad 1 --hidden-dropout 0 "
        f"--attention-dropout 0 --num-workers 0 --log-interval 1 --eval-interval "
        f"{max(1, prepared.steps // EVALUATIONS)} --full-validation --eval-iters {prepared.test_iters} "
        f"--bcd-steps-per-block {max(2, prepared.steps // (CYCLES * prepared.num_layers))}"
    )
    preset = "--bcd-preset finetune"
    methods = [Variant(name=OURS, label="BCD, preset finetune", flags=preset)]
    methods += [
        Variant(name=name, label=f"BCD, {name}: {words}", flags=f"{preset} {words}")
        for name, words in arguments.variants.items()
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
        data=(Variant(name="records"),),
        methods=tuple(methods),
        title="Fine-tuning side by side",
        conclusion=f"{prepared.about}. Then {prepared.steps:,} steps of {arguments.global_batch_size} "
        f"sequences of {SEQ_LENGTH} tokens, {arguments.num_epochs:g} epochs of {prepared.num_records:,} records "
        f"({arguments.split} into training, validation and test), in {'bf16' if arguments.bf16 else 'fp32'}.",
        baseline=BASELINE if BASELINE in arguments.peers else OURS,
        seeds=arguments.seeds,
        learning_rates=arguments.learning_rates,
        extend=1,
        jobs=1,
    )


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return the checked flags. Raises ValueError for an unknown flag or a bad value."""
    shared = ROOT.parent / "shared" / "data"
    parser = Parser(prog=PROG, description=__doc__)
    add = parser.add_argument
    add("--output", type=Path, default=Path("out", "sft"), metavar="FOLDER", help="(default: out/sft)")
    add("--peers", default=",".join(PEERS), metavar="LIST", help="methods besides the BCD preset, any of "
        f"{','.join(PEERS)} (default: all)")  # fmt: skip
    add("--data", type=Path, default=shared / "alpaca" / "alpaca_5000.jsonl", metavar="FILE", help="records of --sft")
    add("--base", type=Path, metavar="FOLDER", help="the model in Hugging Face's format, with its tokenizer")
    add("--variant", action="append", default=[], metavar="NAME=FLAGS", help="one more row: the BCD preset with these "
        "flags of the training scripts added; may be given several times")  # fmt: skip
    add("--global-batch-size", type=int, default=8, metavar="N", help="sequences per step (default: 8)")
    add("--bf16", action="store_true", help="fine-tune in bf16, with fp32 main parameters (BCD and full Adam), "
        "BAdam's fp32 copies, fp32 adapters (default: fp32)")  # fmt: skip
    add("--records", type=int, metavar="N", help="use the first N records of --data (default: all)")
    add("--split", default="90,5,5", metavar="LIST", help="split of the records (default: 90,5,5)")
    add("--num-epochs", type=float, default=3.0, metavar="X", help="epochs of fine-tuning (default: 3)")
    add("--learning-rates", default="1e-4,3e-4,1e-3,3e-3", metavar="LIST", help="grid of every method (default: "
        "1e-4,3e-4,1e-3,3e-3)")  # fmt: skip
    add("--seeds", default="1,2,3", metavar="LIST", help="the first seed is used for tuning (default: 1,2,3)")
    add("--step-times", type=int, default=0, metavar="N", help="when all runs are done, time 60 steps of every "
        "method in turn, N times (default: 0, times come from the runs)")  # fmt: skip
    add("--max-minutes", type=float, metavar="X", help="start no run after this time; start again to continue")
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
    least = {"num_epochs": 1e-9, "global_batch_size": 1, "step_times": 0, "records": 20}
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
        numbers = tuple(kind(word) for word in text.split(","))
    except ValueError:
        raise ValueError(f"{flag} {text}: must be numbers separated by commas") from None
    if (distinct and len(set(numbers)) < len(numbers)) or (kind is float and not min(numbers) > 0):
        raise ValueError(f"{flag} {text}: must be {'different ' * distinct}numbers{' above 0' * (kind is float)}")
    return numbers


def check(arguments: argparse.Namespace) -> None:
    """Raise ValueError for mistakes that can be detected before anything runs."""
    if arguments.base is None:
        raise ValueError("--base: missing. Give the folder of a model in Hugging Face's format.")
    count_layers(arguments.base)
    if not arguments.data.is_file():
        raise ValueError(f"--data {arguments.data}: no such file")
    for peer in arguments.peers:
        missing = [name for name in NEEDS.get(peer, ()) if importlib.util.find_spec(name) is None]
        if missing:
            raise ValueError(f"--peers {peer} needs {' and '.join(missing)}: the pins are in requirements.txt")


@command(PROG)
def main(argv: Sequence[str]) -> int:
    """Prepare, run what is missing, and write the results."""
    arguments = parse_arguments(argv)
    check(arguments)
    folder = arguments.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            prepared = prepare(arguments, folder)
            study, runs = build_study(arguments, prepared), prepared.folder / "runs"
            commands = Commands(study=study, texts={}, data_folder=prepared.folder, folder=runs)
            results = prepared.folder / f"results-{arguments.global_batch_size}{'-bf16' * arguments.bf16}.csv"
            runner = Runner(commands, results)
            tell(f"{len(runner.todo()[0])} runs can start now; {prepared.steps} steps each, in {prepared.folder}")

            def report() -> Table:
                table = Table(study, runner.lookup, arithmetic=lambda point: None, step_ms=runner.step_ms)
                text = table.markdown(command=f"python {PROG} {shlex.join(argv)}", timing=runner.timing)
                (folder / "table.md").write_text(text, encoding="utf-8")
                if results.exists():
                    shutil.copyfile(results, folder / "rows.csv")
                return table

            runner.run(max_minutes=arguments.max_minutes, finished=report)
            rows = report().rows
            if arguments.step_times and not runner.todo()[0] and not any(row.failure for row in rows):
                runner.take_times(arguments.step_times)
                report()
    except Timeout:
        raise ValueError(f"--output {folder}: in use by another {PROG}. Wait for it, or give another folder.") from None
    print((folder / "table.md").read_text(encoding="utf-8"))
    print(f"wrote {folder / 'table.md'} and {folder / 'rows.csv'}")
    return 1 if not rows or any(row.failure for row in rows) else 0


if __name__ == "__main__":
    run_main(main)
