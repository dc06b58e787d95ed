"""preprocess_data.py: stock Megatron-LM's bytes, and nothing left behind on errors."""

import gzip
import hashlib
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import preprocess_data
import pytest
from support import small_text
from support.processes import disk_for

BYTE_LEVEL = ("--tokenizer-type", "ByteLevelTokenizer")


def preprocess(*arguments: str | Path) -> None:
    assert preprocess_data.main([str(argument) for argument in arguments]) == 0


def read_sequences(prefix: Path) -> list[list[int]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import IndexedDataset
    dataset = IndexedDataset(str(prefix), mmap=False)
    return [dataset[i].tolist() for i in range(len(dataset))]


def dataset_bytes(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def expect_error(capsys: pytest.CaptureFixture[str], arguments: Sequence[str | Path]) -> str:
    """Run the tool, which must fail; return its single line of error."""
    assert preprocess_data.main([str(argument) for argument in arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    return output.err


def test_equals_stock_megatron(tmp_path: Path, bpe_files: dict[str, Path], reference: dict[str, Any]) -> None:
    """The dataset has stock Megatron-LM's bytes: tokens, eod, types, index."""
    expected = reference["data"]
    flags = (
        *("--tokenizer-type", "GPT2BPETokenizer", "--append-eod"),
        *("--vocab-file", bpe_files["vocab_file"], "--merge-file", bpe_files["merge_file"]),
    )
    text, jsonl = small_text.write_text(tmp_path / "text.txt"), tmp_path / "text.jsonl"
    jsonl.write_text("".join(json.dumps({"text": line}) + "\n" for line in small_text.documents()))
    for name, source_file in (("txt", text), ("jsonl", jsonl)):
        preprocess("--input", source_file, "--output-prefix", tmp_path / name, *flags)
        hashes = [hashlib.sha256(part).hexdigest() for part in dataset_bytes(tmp_path / f"{name}_text_document")]
        assert hashes == [expected["bin_sha256"], expected["idx_sha256"]], name


def test_text_lines_are_documents(tmp_path: Path) -> None:
    """A line of text is a document, without a BOM at the start of the file, blank lines and white space at the ends."""
    source = tmp_path / "a.txt"
    source.write_bytes(b"\xef\xbb\xbf  first \r\n\n   \t\r\ncaf\xc3\xa9\n\xef\xbb\xbfx")
    preprocess("--input", source, "--output-prefix", tmp_path / "new" / "folder" / "o", *BYTE_LEVEL, "--append-eod")
    assert read_sequences(tmp_path / "new" / "folder" / "o_text_document") == [
        [*b"first", 256],
        [*"caf\u00e9".encode(), 256],
        [*"\ufeffx".encode(), 256],
    ]


def test_gzip_and_globs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compressed files are read in the order of their names, and a damaged or missing one leaves nothing behind."""
    lines = [f"line {number} {'x' * 300}" for number in range(40)]
    for part in (3, 1, 2):
        with gzip.open(tmp_path / f"part{part}.txt.gz", "wt") as file:
            file.write("".join(f"{part} {line}\n" for line in lines))
    with gzip.open(tmp_path / "z.jsonl.gz", "wt") as file:
        file.write('{"text": "last"}\n')
    inputs = ("--input", tmp_path / "part*.txt.gz", tmp_path / "z.jsonl.gz")
    preprocess(*inputs, "--output-prefix", tmp_path / "o", *BYTE_LEVEL)
    actual = [bytes(each).decode() for each in read_sequences(tmp_path / "o_text_document")]
    assert actual == [f"{part} {line}" for part in (1, 2, 3) for line in lines] + ["last"]
    capsys.readouterr()
    whole = (tmp_path / "part1.txt.gz").read_bytes()
    for name, content, expected in (
        ("cut.txt.gz", whole[:-20], "cut.txt.gz"),
        ("no.txt.gz", b"plain", "no.txt.gz"),
        (None, b"", "q*.txt"),
    ):
        if name:
            (tmp_path / name).write_bytes(content)
        source = tmp_path / (name or "q*.txt")
        error = expect_error(capsys, ["--input", source, "--output-prefix", tmp_path / "n" / "o", *BYTE_LEVEL])
        assert expected in error and not (tmp_path / "n").exists()


def test_workers_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several workers write the same bytes as one."""
    monkeypatch.setattr(preprocess_data, "BATCH_BYTES", 64)
    source = tmp_path / "a.txt"
    source.write_text("".join(f"{i} {'x' * (i * 37 % 90)}\n" for i in range(300)), encoding="utf-8")
    for num_workers in ("1", "2"):
        output = tmp_path / f"o{num_workers}"
        preprocess("--input", source, "--output-prefix", output, *BYTE_LEVEL, "--workers", num_workers)
    assert dataset_bytes(tmp_path / "o1_text_document") == dataset_bytes(tmp_path / "o2_text_document")
    assert len(read_sequences(tmp_path / "o1_text_document")) == 300


def test_several_inputs_and_keys(tmp_path: Path) -> None:
    """Inputs are read in order, and every key has its own dataset."""
    first, second = tmp_path / "a.jsonl", tmp_path / "b.json"
    first.write_text('{"q": "1", "a": ["2", "", "33"]}\n\n', encoding="utf-8")
    second.write_text('\ufeff{"a": "5", "q": "4", "other": 0}\n', encoding="utf-8")
    flags = ("--json-keys", "q", "a", *BYTE_LEVEL, "--append-eod")
    preprocess("--input", first, second, "--output-prefix", tmp_path / "o", *flags)
    assert read_sequences(tmp_path / "o_q_document") == [[*b"1", 256], [*b"4", 256]]
    assert read_sequences(tmp_path / "o_a_document") == [[*b"2"], [*b"33", 256], [*b"5", 256]]


def test_empty_documents_as_in_stock(tmp_path: Path) -> None:
    """An empty document has its boundary and no eod id, as in stock."""
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "a"}\n{"text": ""}\n{"text": "b"}\n', encoding="utf-8")
    preprocess("--input", source, "--output-prefix", tmp_path / "o", *BYTE_LEVEL, "--append-eod")
    assert read_sequences(tmp_path / "o_text_document") == [[97, 256], [98, 256]]
    boundaries = numpy.frombuffer(dataset_bytes(tmp_path / "o_text_document")[1][-32:], dtype=numpy.int64)
    assert boundaries.tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"\n', "a.jsonl, line 2"),
        ("a.jsonl", b'{"text": "a"}\n\n["b"]\n', "a.jsonl, line 3"),
        ("a.jsonl", b'{"body": "a"}\n', "--json-keys"),
        ("a.jsonl", b'{"text": 7}\n', "a.jsonl, line 1"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "a.jsonl, line 1"),
        ("a.txt", b"fine\n\xff\xfe\n", "a.txt, line 2"),
        ("a.txt", b"\n \n", "a.txt"),
        ("a.parquet", b"text\n", "datasets"),
        (None, b"", "a.txt"),
    ],
)
def test_bad_input_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str | None, content: bytes, expected: str
) -> None:
    """Bad input is refused in one line that names it, and leaves no file or folder."""
    source = tmp_path / (name or "a.txt")
    if name is not None:
        source.write_bytes(content)
    before = sorted(tmp_path.rglob("*"))
    error = expect_error(capsys, ["--input", source, "--output-prefix", tmp_path / "new" / "deep" / "o", *BYTE_LEVEL])
    assert expected in error
    assert sorted(tmp_path.rglob("*")) == before


def test_failed_run_keeps_the_old_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A failed run keeps the old dataset."""
    source = tmp_path / "a.txt"
    source.write_text("good\n", encoding="utf-8")
    arguments = ["--input", source, "--output-prefix", tmp_path / "o", *BYTE_LEVEL]
    preprocess(*arguments)
    good = dataset_bytes(tmp_path / "o_text_document")
    capsys.readouterr()
    source.write_bytes(b"better\n\xff\n")
    expect_error(capsys, arguments)
    assert dataset_bytes(tmp_path / "o_text_document") == good
    source.write_text("better\n", encoding="utf-8")
    preprocess(*arguments)
    assert read_sequences(tmp_path / "o_text_document") == [[*b"better"]]


def test_a_full_disk_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A full disk is reported in one line, and leaves no part of a dataset."""
    source = tmp_path / "a.txt"
    source.write_text("words and words\n" * 200, encoding="utf-8")
    with disk_for(1000):
        error = expect_error(capsys, ["--input", source, "--output-prefix", tmp_path / "n" / "o", *BYTE_LEVEL])
    assert "File too large" in error
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
