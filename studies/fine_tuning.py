"""Compare what fine-tuning methods learn at equal steps, and their model state.

    python studies/fine_tuning.py --peers full,badam,lora --output out/sft
    python studies/fine_tuning.py --base MODEL --variant "six=--bcd-num-blocks 6" --seeds 1,2,3

Fine-tunes a LLaMA on records with the BCD preset, in full with Adam, with BAdam (PyPI badam) and LoRA (PyPI peft), and
with every --variant. Each method's learning rate is tuned. The model is --base, or a small one that is first trained on
--pretrain-text. Runs, tuning and seeds are those of a study (studies/study.py), so an interrupted comparison continues
when started again. --output receives table.md (its columns: docs/learning.md), rows.csv with all runs, and the runs.
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
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

from _parser import Parser, command, run_main
from _processes import ROOT, failure_reason
from filelock import FileLock, Timeout
from results import NAME, Study, Table, Variant
from study import Commands, Runner, tell

PROG = "studies/fine_tuning.py"
PEERS = {"full": "full Adam", "badam": "BAdam (PyPI), transformers", "lora": "LoRA (peft), transformers"}
NEEDS = {"badam": ("badam", "transformers"), "lora": ("peft", "transformers")}
BASELINE, OURS = "full", "bcd"
EVALUATIONS, CYCLES = 8, 2
"""Evaluations and cycles of a run. With one layer per block and the preset's 50 steps per block, three epochs of Alpaca
are 1.4 cycles of 32 layers."""


# ---------------------------------------------------------------- model and records


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model that this tool trains, and how."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    vocab_size: int
    seq_length: int
    micro_batch: int
    """Batch sizes of fine-tuning."""
    global_batch: int
    base_steps: int
    """Steps, batch size and learning rate of training on the text."""
    base_batch: int
    base_lr: float = 3e-3


SIZES = {
    "tiny": Size(num_layers=3, hidden_size=32, ffn_hidden_size=64, num_heads=2, vocab_size=400, seq_length=256,
                 micro_batch=2, global_batch=4, base_steps=10, base_batch=4),
    "small": Size(num_layers=9, hidden_size=320, ffn_hidden_size=864, num_heads=5, vocab_size=2048, seq_length=256,
                  micro_batch=4, global_batch=8, base_steps=1200, base_batch=8),
}  # fmt: skip
"""`tiny` is for smoke tests; its figures mean nothing."""
BASE_FLAGS = (
    "--optimizer muon --muon-momentum 0.95 --muon-use-nesterov --muon-extra-scale-factor 0.2 --adam-beta2 0.95 --bf16"
)
"""Flags of full Muon, the method that learns most in this many steps (docs/learning.md)."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The model and records to fine-tune. All files are in `folder`, whose name identifies the model."""

    folder: Path
    tokenizer: str
    """A SentencePiece model, or ``model`` for the tokenizer in the model's folder."""
    num_layers: int
    about: str
    records: Path
    num_records: int
    steps: int
    test_iters: int

    @property
    def model(self) -> Path:
        """The folder of the model in Hugging Face's format."""
        return self.folder / "model"


def tokenizer_flags(folder: object, tokenizer: str) -> list[str]:
    """Return the tokenizer's flags of the training scripts."""
    kind = "HuggingFaceTokenizer" if tokenizer == "model" else "SentencePieceTokenizer"
    return ["--tokenizer-type", kind, "--tokenizer-model", f"{folder}/{tokenizer}"]


def chosen_size(arguments: argparse.Namespace) -> Size:
    """Return --size with --base-steps and --global-batch-size."""
    size = SIZES[arguments.size]
    batch = arguments.global_batch_size or size.global_batch
    micro_batch = math.gcd(batch, size.micro_batch)
    return replace(
        size, global_batch=batch, micro_batch=micro_batch, base_steps=arguments.base_steps or size.base_steps
    )


def count_layers(source: Path) -> int:
    """Return the number of layers of a model in Hugging Face's format. Raises ValueError if it cannot be read."""
    try:
        return int(json.loads((source / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"])
    except (OSError, ValueError, TypeError, KeyError):
        raise ValueError(f"--base {source}: must be a LLaMA, Mistral or Qwen in Hugging Face's format") from None


def prepare(arguments: argparse.Namespace, output: Path) -> Prepared:
    """Create what is missing of model and records in `output`. Raises ValueError if a step fails."""
    size = chosen_size(arguments)
    if arguments.base is not None:
        source = arguments.base.resolve()
        layers, tokenizer = count_layers(source), "model"
        suffixes = {".json", ".safetensors", ".model", ".jinja"}
        digest = hash_files(*sorted(path for path in source.iterdir() if path.suffix in suffixes))
        folder = output / f"base-{source.name}-{digest}"
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "model").resolve() != source:  # the same files may have moved
            (folder / "model").unlink(missing_ok=True)
            (folder / "model").symlink_to(source)
        about = f"The model {source.name}, {layers} layers"
    else:
        layers, tokenizer, text = size.num_layers, "tokenizer.model", arguments.pretrain_text
        fixed = replace(size, micro_batch=0, global_batch=0)
        digest = hashlib.sha256(f"{fixed} {BASE_FLAGS} {hash_files(text)}".encode()).hexdigest()[:10]
        folder = output / f"base-{arguments.size}-{digest}"
        folder.mkdir(parents=True, exist_ok=True)
        train_base(folder, size, text)
        about = (
            f"LLaMA of {layers} layers, hidden size {size.hidden_size}, first trained for {size.base_steps:,} steps on "
            f"{text.name}"
        )
    return _with_records(arguments, size, folder=folder, tokenizer=tokenizer, num_layers=layers, about=about)


def hash_files(*paths: Path) -> str:
    """Return a hash of the files' names and contents."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:10]


def train_base(folder: Path, size: Size, text: Path) -> None:
    """Train the tokenizer, tokenize the text and train the model, skipping steps that are done."""
    tokenizer, prefix, checkpoint = tokenizer_flags(folder, "tokenizer.model"), folder / "text", folder / "base_run"
    if not (folder / "tokenizer.model").is_file():
        tell("training a tokenizer")
        rules = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
        rules |= {"input": str(text), "vocab_size": size.vocab_size, "allow_whitespace_only_pieces": True}
        import sentencepiece

        prefix_of_model = str(folder / "tokenizer")
        sentencepiece.SentencePieceTrainer.train(model_prefix=prefix_of_model, model_type="bpe", minloglevel=2, **rules)
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
            raise ValueError(f"training the model on {text.name} was stopped. Start again to continue.")
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
                 arguments.split, "--data-cache-path", folder / "cache", "--sft-drop-long", "--sft-skip-bad-records",
                 *tokenizer_flags(folder, tokenizer), "--seq-length", size.seq_length, "--micro-batch-size",
                 size.micro_batch, "--global-batch-size", size.global_batch, "--lr", 1e-3,
                 "--num-epochs", arguments.num_epochs]  # fmt: skip
        counted.write_text(call(words, folder).strip().splitlines()[-1] + "\n", encoding="utf-8")
    counts = json.loads(counted.read_text(encoding="utf-8"))
    _, validation, test = map(float, arguments.split.split(","))  # shares of records of about equal length
    return Prepared(
        folder=folder,
        tokenizer=tokenizer,
        records=path,
        num_records=len(content.split(b"\n")) - content.endswith(b"\n"),
        steps=counts["steps"],
        test_iters=max(1, round(counts["validation"] * test / validation / size.global_batch)),
        **about,
    )


def call(words: Sequence[object], folder: Path) -> str:
    """Run a script of the project and return its stdout. Raises ValueError with its error line if it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    with open(folder / "preparation.log", "a", encoding="utf-8") as log:
        log.write(done.stdout + done.stderr)
    if done.returncode:
        raise ValueError(f"{words[0]}: {failure_reason(done.stdout + done.stderr, done.returncode)}")
    return done.stdout


def build_study(arguments: argparse.Namespace, prepared: Prepared) -> Study:
    """Build the study of all runs; ``{data}`` stands for the prepared folder."""
    size = chosen_size(arguments)
    flags = (
        f"--sft --load-hf {{data}}/model --data-path {{data}}/{prepared.records.name} --split {arguments.split} "
        f"--data-cache-path {{data}}/cache {' '.join(tokenizer_flags('{data}', prepared.tokenizer))} "
        f"--seq-length {size.seq_length} --sft-drop-long --sft-skip-bad-records "
        f"--micro-batch-size {size.micro_batch} --global-batch-size {size.global_batch} "
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
        models=(Variant(name=arguments.size),),
        data=(Variant(name="records"),),
        methods=tuple(methods),
        title="Fine-tuning side by side",
        conclusion=f"{prepared.about}. Then {prepared.steps:,} steps of {size.global_batch} sequences of "
        f"{size.seq_length} tokens, {arguments.num_epochs:g} epochs of {prepared.num_records:,} records "
        f"({arguments.split} into training, validation and test), in {'bf16' if arguments.bf16 else 'fp32'}.",
        baseline=BASELINE if BASELINE in arguments.peers else OURS,
        seeds=arguments.seeds,
        learning_rates=arguments.learning_rates,
        extend=1,
        jobs=1,
    )


# ---------------------------------------------------------------- command line


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return the checked flags. Raises ValueError for an unknown flag or a bad value."""
    shared = ROOT.parent / "shared" / "data"
    parser = Parser(prog=PROG, description=__doc__)
    add = parser.add_argument
    add("--task", choices=("sft",), default="sft", help=argparse.SUPPRESS)
    add("--output", type=Path, default=Path("out", "sft"), metavar="FOLDER", help="(default: out/sft)")
    add("--peers", default=",".join(PEERS), metavar="LIST", help="methods besides the BCD preset, any of "
        f"{','.join(PEERS)} (default: all)")  # fmt: skip
    add("--data", type=Path, default=shared / "alpaca" / "alpaca_5000.jsonl", metavar="FILE", help="records of --sft")
    add("--pretrain-text", type=Path, default=shared / "wikitext-2" / "train.txt", metavar="FILE",
        help="text on which the model is trained first")  # fmt: skip
    add("--base", type=Path, metavar="FOLDER", help="fine-tune this model in Hugging Face's format, with its tokenizer,"
        " instead of training one first")  # fmt: skip
    add("--size", choices=tuple(SIZES), default="small", help="model size (default: small, 11 M weights in layers)")
    add("--variant", action="append", default=[], metavar="NAME=FLAGS", help="one more row: the BCD preset with these "
        "flags of the training scripts added; may be given several times")  # fmt: skip
    add("--global-batch-size", type=int, metavar="N", help="sequences per fine-tuning step (default: the size's)")
    add("--bf16", action="store_true", help="fine-tune in bf16, with fp32 main parameters (BCD and full Adam), "
        "BAdam's fp32 copies, fp32 adapters (default: fp32)")  # fmt: skip
    add("--base-steps", type=int, metavar="N", help="steps of training on the text (default: the size's)")
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
        numbers = tuple(kind(word) for word in text.split(","))
    except ValueError:
        raise ValueError(f"{flag} {text}: must be numbers separated by commas") from None
    if (distinct and len(set(numbers)) < len(numbers)) or (kind is float and not min(numbers) > 0):
        raise ValueError(f"{flag} {text}: must be {'different ' * distinct}numbers{' above 0' * (kind is float)}")
    return numbers


def check(arguments: argparse.Namespace) -> None:
    """Raise ValueError for mistakes that can be detected before anything runs."""
    if arguments.base is not None:
        count_layers(arguments.base)
    for name in ("data",) if arguments.base is not None else ("data", "pretrain_text"):
        path = getattr(arguments, name)
        if not path.is_file():
            raise ValueError(f"--{name.replace('_', '-')} {path}: no such file")
        setattr(arguments, name, path.resolve())  # the tools that read it run in the repository
    for peer in arguments.peers:
        missing = [name for name in NEEDS.get(peer, ()) if importlib.util.find_spec(name) is None]
        if missing:
            raise ValueError(f"--peers {peer} needs {' and '.join(missing)}: the pins are in requirements.txt")


@command(PROG)
def main(argv: Sequence[str]) -> int:
    """Prepare, run what is missing, and write the results."""
    arguments = parse_arguments(argv)
    check(arguments)
    folder, size = arguments.output.resolve(), chosen_size(arguments)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            prepared = prepare(arguments, folder)
            study, runs = build_study(arguments, prepared), prepared.folder / "runs"
            commands = Commands(study=study, texts={}, data_folder=prepared.folder, folder=runs)
            results = prepared.folder / f"results-{size.global_batch}{'-bf16' * arguments.bf16}.csv"
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
