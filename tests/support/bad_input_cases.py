"""All kinds of bad input that ``test_bad_input.py`` tries: flags, changed files, and what the error line must name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy

BASE = {
    "--num-layers": "6",
    "--hidden-size": "32",
    "--num-attention-heads": "4",
    "--seq-length": "16",
    "--micro-batch-size": "2",
    "--global-batch-size": "4",
    "--train-iters": "1",
    "--lr": "1e-3",
    "--tokenizer-type": "ByteLevelTokenizer",
    "--data-path": "data/text_document",
    "--split": "80,10,10",
    "--num-workers": "0",
    "--eval-iters": "1",
    "--log-interval": "1",
    "--metrics-file": "metrics.jsonl",
}

Prepare = Callable[[Path], None]


def command_line(*extra: str, num_ranks: int = 1) -> list[str]:
    """Return BASE with two pipeline stages on two ranks, followed by `extra`; the last of repeated flags counts."""
    stages = ["--pipeline-model-parallel-size", "2"] if num_ranks == 2 else []
    return [word for pair in BASE.items() for word in pair] + stages + list(extra)


def write_dataset(prefix: Path, documents: list[list[int]], dtype: type = numpy.uint16) -> None:
    """Write an indexed dataset as tools/preprocess_data.py does."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(numpy.array(document, dtype=dtype), [len(document)])
    builder.finalize(f"{prefix}.idx")


def good_documents(largest: int = 256) -> list[list[int]]:
    return [[*range(60), largest] for _ in range(40)]


def edit(name: str, change: Callable[[bytes], bytes]) -> Prepare:
    """Change one file of the workplace."""

    def prepare(folder: Path) -> None:
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return prepare


def dataset(documents: list[list[int]], dtype: type = numpy.uint16, name: str = "text_document") -> Prepare:
    return lambda folder: write_dataset(folder / "data" / name, documents, dtype)


BIN, IDX = "data/text_document.bin", "data/text_document.idx"


@dataclass(frozen=True, kw_only=True)
class Case:
    """`flags` after BASE's, in a workplace changed by `prepare`, and what the error line must name."""

    name: str
    flags: tuple[str, ...] = ()
    named: tuple[str, ...]
    prepare: Prepare = lambda folder: None
    ranks: tuple[int, ...] = (2,)
    read_only: str | None = None


def case(name: str, *flags: str, named: str | tuple[str, ...], **options: object) -> Case:
    return Case(name=name, flags=flags, named=(named,) if isinstance(named, str) else named, **options)  # type: ignore[arg-type]


FLAG_CASES = (
    case("no torchft, or no lighthouse", "--lighthouse", "127.0.0.1:1", named="--lighthouse"),
    case("backend", "--distributed-backend", "nccl", named="--distributed-backend nccl"),
)
DATA_CASES = (
    case(
        "no such data", "--data-path", "data/nowhere", named=("--data-path data/nowhere", "nowhere.idx"), ranks=(1, 2),
    ),
    case("truncated .bin", named=BIN, prepare=edit(BIN, lambda content: content[:1001])),
    case(".idx truncated in its header", named=IDX, prepare=edit(IDX, lambda content: content[:20])),
    case(
        "noise behind the .idx header", named="data/text_document.",
        prepare=edit(IDX, lambda content: content[:34] + b"\xa5" * (len(content) - 34)),
    ),
    case("no documents", named="--data-path data/text_document", prepare=dataset([])),
    case(
        "larger vocabulary", named=("--data-path data/text_document", "token 300", "--tokenizer-type", "257"),
        prepare=dataset(good_documents(largest=300)),
    ),
    case(
        "negative token", named=("--data-path data/text_document", "token -7"),
        prepare=dataset(good_documents(largest=-7), numpy.int32),
    ),
    case(
        "second file of a blend", "--data-path", "1", "data/text_document", "1", "data/other",
        named="--data-path data/other", prepare=dataset(good_documents(300), name="other"),
    ),
    case(
        "blend with nothing to validate on", "--data-path", "1", "data/text_document", "1", "data/other",
        named=("--split", "validation", "data/other"), prepare=dataset(good_documents()[:2], name="other"),
    ),
    case(
        "a blend without weights that ends", "--data-path", "data/text_document", "data/other", "--train-iters", "500",
        "--eval-interval", "500", named="--data-path 1952 data/text_document",
        prepare=dataset(good_documents(), name="other"),
    ),
    case("short validation data", "--seq-length", "512", named="--split"),
)  # fmt: skip
RECORD = b'{"prompt": "p?", "completion": "c"}\n'
SFT = ("--sft", "--data-path", "records.jsonl", "--split", "50,50,0")


def records(content: bytes) -> Prepare:
    def prepare(folder: Path) -> None:
        (folder / "records.jsonl").write_bytes(content)

    return prepare


SFT_CASES = (
    case("no such records", *SFT, named="--data-path records.jsonl"),
    case(
        "bad records", *SFT, prepare=records(b"".join((RECORD, b"{\n", RECORD, RECORD.replace(b'"c"', b'" "')))),
        named=("--data-path records.jsonl, line 2 is not JSON", "; line 4 has an empty answer", "--sft-skip-bad"),
    ),
    case("one record", *SFT, named=("--split 50,50,0", "no record"), prepare=records(RECORD), ranks=(1,)),
)  # fmt: skip
TOKENIZER_CASES = (
    case(
        "no Hugging Face folder", "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "nowhere",
        named="--tokenizer-model nowhere",
    ),
)  # fmt: skip
OUTPUT_CASES = tuple(
    case(f"{flag[2:]} in {place}", flag, place, named=flag, read_only=read_only)
    for flag, place, read_only in (
        ("--save", "a_file/below", None),
        ("--save", "data/below/it", "data"),
        ("--metrics-file", "data/below/it", "data"),
        ("--tensorboard-dir", "a_file/below", None),
        ("--data-cache-path", "data/below/it", "data"),
    )
) + (
    case("metrics file is a folder", "--metrics-file", "data", named="--metrics-file data"),
    case(
        "new outputs of wrong data", "--data-path", "data/nowhere", "--metrics-file", "new/metrics.jsonl",
        "--tensorboard-dir", "new/events", "--save", "new/saved", named="--data-path data/nowhere",
    ),
)  # fmt: skip
