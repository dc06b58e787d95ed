"""What tools/compare.py --task sft fine-tunes: tokenizer, model trained on a text, records; kept in its folder."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from results import ROOT
from study import last_words, tell


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, and how it is trained."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    vocab_size: int
    seq_length: int
    micro_batch: int
    global_batch: int
    base_steps: int
    """Of training on the text."""
    base_batch: int
    base_lr: float
    base_flags: str = (
        "--optimizer muon --muon-momentum 0.95 --muon-use-nesterov --muon-extra-scale-factor 0.2 --adam-beta2 0.95 "
        "--bf16"
    )
    """Full Muon: of the methods here the one that learns most in these steps (docs/learning.md)."""

    @property
    def layer_parameters(self) -> int:
        """Weights outside embedding and head."""
        own = 4 * self.hidden_size**2 + 3 * self.hidden_size * self.ffn_hidden_size + 2 * self.hidden_size
        return self.num_layers * own + self.hidden_size


SIZES = {
    "tiny": Size(
        num_layers=3, hidden_size=32, ffn_hidden_size=64, num_heads=2, vocab_size=400, seq_length=256, micro_batch=2,
        global_batch=4, base_steps=10, base_batch=4, base_lr=3e-3,
    ),
    "small": Size(
        num_layers=9, hidden_size=320, ffn_hidden_size=864, num_heads=5, vocab_size=2048, seq_length=256, micro_batch=4,
        global_batch=8, base_steps=1200, base_batch=8, base_lr=3e-3,
    ),
}  # fmt: skip
"""tiny is for trying the tool out; its figures mean nothing."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """The model to start from."""

    folder: Path
    """Holds everything that belongs to it."""
    model: Path
    """In Hugging Face's format."""
    tokenizer: Path
    """A SentencePiece model, or the folder of `model`."""
    num_layers: int
    about: dict[str, Any]
    words: str
    """Of the table: what it is."""

    def tokenizer_flags(self, tokenizer: object) -> list[object]:
        """For the training scripts; `tokenizer` is the path as they get it."""
        kind = "HuggingFaceTokenizer" if self.tokenizer == self.model else "SentencePieceTokenizer"
        return ["--tokenizer-type", kind, "--tokenizer-model", tokenizer]


@dataclass(frozen=True, kw_only=True)
class Records:
    """What is fine-tuned on."""

    path: Path
    count: int
    steps: int
    test_iters: int
    """Global batches of the test split."""
    split: str


def size_of(arguments: argparse.Namespace) -> Size:
    """Of --size, with --base-steps and --global-batch-size."""
    size = SIZES[arguments.size]
    if arguments.global_batch_size is not None:
        batch = arguments.global_batch_size
        size = replace(size, global_batch=batch, micro_batch=math.gcd(batch, size.micro_batch))
    return size if arguments.base_steps is None else replace(size, base_steps=arguments.base_steps)


def prepare(arguments: argparse.Namespace, output: Path) -> tuple[Base, Records]:
    """The model and the records of these arguments, below `output`; what is there already is not made again.

    Raises:
        ValueError: a step failed; its last words.
    """
    size = size_of(arguments)
    if arguments.base is not None:
        base = _given_base(arguments.base.resolve(), output)
        return base, _prepare_records(arguments, base, size)
    with open(arguments.pretrain_text, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    fixed = {key: value for key, value in asdict(size).items() if key not in ("micro_batch", "global_batch")}
    about = {"size": arguments.size, **fixed, "text": arguments.pretrain_text.name, "sha256": digest}
    name = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:10]
    folder = output / f"base-{arguments.size}-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    base = Base(
        folder=folder,
        model=folder / "model",
        tokenizer=folder / "tokenizer.model",
        num_layers=size.num_layers,
        about=about,
        words=f"LLaMA of {size.num_layers} layers, hidden size {size.hidden_size}, {size.layer_parameters:,} weights "
        f"in layers, first trained for {size.base_steps:,} steps on {arguments.pretrain_text.name}",
    )
    _prepare_base(base, size, arguments.pretrain_text)
    return base, _prepare_records(arguments, base, size)


def layers_of(source: Path) -> int:
    """Layers of a LLaMA in Hugging Face's format. Raises ValueError if the folder has none."""
    try:
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        return int(config["num_hidden_layers"])
    except OSError:
        raise ValueError(f"--base {source}: no model in Hugging Face's format, it has no config.json") from None
    except (ValueError, TypeError, KeyError):
        raise ValueError(
            f"--base {source}: config.json has no num_hidden_layers; give a LLaMA, Mistral or Qwen"
        ) from None


def _given_base(source: Path, output: Path) -> Base:
    """A model of --base, known by the content of its files."""
    found, suffixes = hashlib.sha256(), (".json", ".safetensors", ".model", ".jinja")
    for path in sorted(path for path in source.iterdir() if path.suffix in suffixes):
        found.update(path.name.encode())
        with open(path, "rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    digest = found.hexdigest()
    folder = output / f"base-{source.name}-{digest[:10]}"
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model"
    if model.resolve() != source:  # the same files at another place
        model.unlink(missing_ok=True)
        model.symlink_to(source)
    layers = layers_of(source)
    about = {"model": source.name, "sha256": digest}
    words = f"The model {source.name}, {layers} layers"
    return Base(folder=folder, model=model, tokenizer=model, num_layers=layers, about=about, words=words)


def _prepare_base(base: Base, size: Size, text: Path) -> None:
    if not base.tokenizer.is_file():
        tell("training a tokenizer")
        words = ["tools/train_tokenizer.py", "--input", text, "--vocab-size", size.vocab_size]
        _run([*words, "--output-prefix", base.tokenizer.with_suffix("")], base.folder)
    prefix = base.folder / "text"
    tokenizer = base.tokenizer_flags(base.tokenizer)
    if not Path(f"{prefix}_text_document.idx").is_file():
        _run(
            ["tools/preprocess_data.py", "--input", text, "--append-eod", *tokenizer, "--output-prefix", prefix],
            base.folder,
        )
    checkpoint = base.folder / "base_run"
    if (base.model / "config.json").is_file():
        shutil.rmtree(checkpoint, ignore_errors=True)  # of a start that was killed after it had exported the model
        return
    tell(f"training the model on {text.name}: {size.base_steps:,} steps")
    words = ["pretrain_llama_bcd.py", "--num-layers", size.num_layers, "--hidden-size", size.hidden_size]
    words += ["--ffn-hidden-size", size.ffn_hidden_size, "--num-attention-heads", size.num_heads]
    words += ["--seq-length", size.seq_length, "--max-position-embeddings", size.seq_length]
    words += ["--micro-batch-size", size.base_batch, "--train-iters", size.base_steps, "--lr", size.base_lr]
    words += ["--min-lr", size.base_lr / 10, "--lr-decay-style", "cosine", "--lr-warmup-iters", size.base_steps // 20]
    words += ["--weight-decay", 0.1, "--clip-grad", 1, "--split", "98,2,0", "--num-workers", 0, "--bcd-num-blocks", 1]
    words += size.base_flags.split()
    words += ["--eval-interval", size.base_steps, "--eval-iters", 4, "--log-interval", 20, *tokenizer]
    words += ["--data-path", f"{prefix}_text_document", "--save", checkpoint, "--load", checkpoint]
    words += ["--save-interval", max(1, size.base_steps // 4), "--save-hf", base.model]
    _run(words, base.folder)
    if not (base.model / "config.json").is_file():
        raise ValueError(f"training the model on {text.name} was stopped; started again, it goes on")
    shutil.rmtree(checkpoint, ignore_errors=True)


def _prepare_records(arguments: argparse.Namespace, base: Base, size: Size) -> Records:
    lines = arguments.data.read_bytes().splitlines(keepends=True)[: arguments.records]
    content = b"".join(lines)
    digest = hashlib.sha256(content).hexdigest()[:10]
    path = base.folder / f"records-{digest}.jsonl"
    if not path.is_file():
        aside = path.with_suffix(".tmp")
        aside.write_bytes(content)
        os.replace(aside, path)
    names = [digest, f"{arguments.num_epochs:g}", str(size.global_batch), arguments.split.replace(",", "_")]
    counted = base.folder / f"counted-{'-'.join(names)}.json"
    if not counted.is_file():
        words = ["tools/_compare_sft_peer.py", "--count", "--sft", "--load-hf", base.model, "--data-path", path]
        words += ["--split", arguments.split, "--data-cache-path", base.folder / "cache", "--sft-drop-long"]
        words += base.tokenizer_flags(base.tokenizer)
        words += ["--seq-length", size.seq_length, "--micro-batch-size", size.micro_batch, "--lr", 1e-3]
        words += ["--global-batch-size", size.global_batch, "--num-epochs", arguments.num_epochs]
        found = _run(words, base.folder).strip().splitlines()[-1]
        counted.write_text(found + "\n", encoding="utf-8")
    found = json.loads(counted.read_text(encoding="utf-8"))
    _, validation, test = (float(share) for share in arguments.split.split(","))  # of about equally long records
    return Records(
        path=path,
        count=sum(bool(line.strip()) for line in lines),
        steps=found["steps"],
        test_iters=max(1, round(found["validation"] * test / validation / size.global_batch)),
        split=arguments.split,
    )


def _run(words: Sequence[object], folder: Path) -> str:
    """Stdout of a script of the project. Raises ValueError with its last words if it fails."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    with open(folder / "preparation.log", "a", encoding="utf-8") as log:
        log.write(done.stdout + done.stderr)
    if done.returncode:
        raise ValueError(f"{words[0]}: {last_words(done.stdout + done.stderr, done.returncode)}")
    return done.stdout
