"""Records of fine-tuning in tables and in folders of the datasets library."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
from support import fine_tuning

from megatron.bcd.data.sft import store
from megatron.bcd.data.sft.records import parse_record, read_values
from megatron.bcd.tokenizer import ByteLevelTokenizer

PAIRS: list[dict[str, Any]] = [
    {"prompt": "p, q", "completion": "42", "system": None},
    {"prompt": 'q\n"é"', "completion": "NA", "system": "s"},
    {"prompt": "when", "completion": "2024-01-01 00:00:00", "system": ""},
]
CALLS = [{"type": "function", "function": {"name": name, "arguments": {name: 1}}} for name in ("f", "g")]
TALKS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": CALLS}]},
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "tools": None},
]
FORMS = ("[1].parquet", ".csv", "saved", "repository of lines", "repository of tables")


@pytest.fixture(autouse=True)
def no_bars() -> None:
    datasets.disable_progress_bars()


def write_table(path: Path, form: str, rows: list[dict[str, Any]]) -> str:
    """Write rows in a form below a path, and return what --data-path names."""
    table = datasets.Dataset.from_list(rows)
    path.mkdir(parents=True)
    if form == "saved":
        table.save_to_disk(path, num_shards=2)
    elif form == "repository of lines":
        (path / "data").mkdir()
        fine_tuning.write_records(path / "data" / "train-1.jsonl", rows)
    elif form == "repository of tables":
        table.select(range(1)).to_parquet(path / "train-1.parquet")
        table.select(range(1, len(rows))).to_parquet(path / "train-2.parquet")
    elif form == ".csv":
        path /= f"a{form}"
        texts = [{k: json.dumps(v) if isinstance(v, list) else v for k, v in row.items()} for row in rows]
        datasets.Dataset.from_list(texts).to_csv(path)
    else:
        path /= f"a{form}"
        table.to_parquet(path)
    return str(path)


def files_of(*paths: str, flag: str = "data_path") -> store.Files:
    config = fine_tuning.config_of("")
    return store.files_of(config.replace_section("data", **{"data_path": None, flag: paths}))


def values_of(files: store.Files) -> list[Any]:
    return [value for _, path in files for _, value in read_values(path)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [PAIRS, TALKS], ids=["pairs", "talks"])
def test_records_of_tables(tmp_path: Path, form: str, rows: list[dict[str, Any]]) -> None:
    """Tables and folders have the records of JSONL: text stays text, and gaps of columns are no keys."""
    values = values_of(files_of(write_table(tmp_path / "a", form, rows)))
    assert [parse_record(value) for value in values] == [parse_record(row) for row in rows]


def test_samples_of_several_sources(tmp_path: Path) -> None:
    """Sources of all kinds have the tokens of the same records in one file, and their digest is of their content."""
    tokenizer = ByteLevelTokenizer()
    rows = [row | {"prompt": f"{form} {row['prompt']}"} for form in FORMS for row in PAIRS]
    paths = [write_table(tmp_path / form, form, rows[3 * i : 3 * i + 3]) for i, form in enumerate(FORMS)]
    lines = fine_tuning.write_records(tmp_path / "all.jsonl", rows)
    files = files_of(*paths)
    found, expected = (
        [(tokens.ids.tolist(), tokens.learned.tolist()) for _, tokens in rows if not isinstance(tokens, str)]
        for rows in (store.tokenize_files(these, tokenizer, "text", ("system",)) for these in (files, files_of(lines)))
    )
    assert found == expected and len(found) == 15
    assert len(files) == 7  # two shards, two tables
    digest = store.data_digest(files, tokenizer, "text")
    moved = [shutil.move(path, tmp_path / f"moved {i}{Path(path).suffix}") for i, path in enumerate(paths)]
    assert store.data_digest(files_of(*map(str, moved)), tokenizer, "text") == digest
    fine_tuning.write_records(Path(moved[3]) / "data" / "train-2.jsonl", PAIRS)
    assert store.data_digest(files_of(*map(str, moved)), tokenizer, "text") != digest


def test_weights_are_refused(tmp_path: Path) -> None:
    """Weights before tables or folders are refused as before files: an epoch has every record once."""
    with pytest.raises(ValueError, match="--data-path 0.7 .* --sft reads .* Leave the weights out"):
        fine_tuning.config_of("", data_path=("0.7", str(tmp_path), "0.3", "a.csv"))


@pytest.mark.parametrize("is_saved", [True, False])
def test_splits_of_a_folder(tmp_path: Path, is_saved: bool) -> None:
    """The flag chooses the split of a folder; --data-path refuses to mix them or to leave one out."""
    if is_saved:
        parts = {"train": PAIRS, "validation": PAIRS[:1]}
        datasets.DatasetDict({k: datasets.Dataset.from_list(v) for k, v in parts.items()}).save_to_disk(tmp_path)
    else:
        fine_tuning.write_records(tmp_path / "train.jsonl", PAIRS)
        fine_tuning.write_records(tmp_path / "validation.jsonl", PAIRS[:1])
    path = str(tmp_path)
    assert len(values_of(files_of(path, flag="train_data_path"))) == 3
    assert len(values_of(files_of(path, flag="valid_data_path"))) == 1
    for flag in ("data_path", "test_data_path"):
        with pytest.raises(ValueError, match=f"^--{flag.replace('_', '-')} {path}: .* splits train, validation. Give"):
            files_of(path, flag=flag)
    Path(f"{path}.idx").touch()
    assert files_of(path) == [("--data-path", path)], "the index cache of an indexed dataset is no folder of records"


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.csv", "empty.csv", "folder", "images"])
def test_what_is_no_table(tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A file that is no table, or a folder without records, is one line that names it, and no other output."""
    path = tmp_path / name
    if "." in name:
        path.write_text("" if "empty" in name else 'prompt,completion\n"x\n')
    else:
        path.mkdir()
        (path / "a.txt").write_text("a" if name == "images" else "")
    with pytest.raises(ValueError) as caught:
        list(store.tokenize_files(files_of(str(path)), ByteLevelTokenizer(), "text", ()))
    assert str(caught.value).startswith(f"--data-path {path}: ") and "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_bad_rows_are_named(tmp_path: Path) -> None:
    """A bad row has its file and number; a row of CSV with too many cells is bad, and shifts no column."""
    write_table(tmp_path / "saved", "saved", [*PAIRS, {"prompt": "p", "completion": ""}])
    (tmp_path / "a.csv").write_text("prompt,completion\np,c,d\np,c\np\n")
    files = files_of(str(tmp_path / "saved"), str(tmp_path / "a.csv"))
    samples = store.collect(store.tokenize_files(files, ByteLevelTokenizer(), "text", ("system",)))
    assert (len(samples), samples.num_bad) == (4, 3)
    report = samples.describe_bad(files)
    assert "saved/data-00001-of-00002.arrow, entry 2 has an empty answer" in report
    assert "a.csv, entry 1 has more cells than" in report and "; entry 3 has 'completion'" in report


@pytest.mark.parametrize("form", ["[1].parquet", "saved", "repository of lines"])
def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """Without the datasets library, one line says what to install."""
    path = write_table(tmp_path / "a", form, PAIRS)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="--data-path .*: needs the datasets library.* pip install datasets"):
        list(store.tokenize_files(files_of(path), ByteLevelTokenizer(), "text", ()))
