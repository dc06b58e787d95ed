"""Samples of fine-tuning are divided, packed and stored without loss; files of a killed process are not used."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import fine_tuning

from megatron.bcd.data.sft import dataset as plan
from megatron.bcd.data.sft import store
from megatron.bcd.data.sft.dataset import FineTuningDataset, Packed, divide, pack
from megatron.bcd.data.sft.text import Tokens
from megatron.bcd.tokenizer import ByteLevelTokenizer, HuggingFaceTokenizer


def one_each(samples: plan.Indices) -> Packed:
    """Put every sample into a separate sequence."""
    return Packed(samples=samples, bounds=numpy.arange(len(samples) + 1))


@given(lengths=st.lists(st.integers(0, 20), max_size=40))
def test_every_sample_is_in_one_sequence(lengths: list[int]) -> None:
    """Every sample is in one sequence, no sequence is too full, and at most one is half empty."""
    samples = numpy.arange(len(lengths)) * 3
    packed = pack(samples, numpy.array(lengths, dtype=numpy.int64), 20)
    sequences = [packed.sequence_samples(number).tolist() for number in range(len(packed))]
    assert sorted(sample for sequence in sequences for sample in sequence) == samples.tolist()
    full = [sum(lengths[sample // 3] for sample in sequence) for sequence in sequences]
    assert all(sequences) and all(length <= 20 for length in full)
    assert sum(length <= 10 for length in full) <= 1, "two sequences that would fit into one"


@given(count=st.integers(0, 300), shares=st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(sum))
def test_splits_share_nothing(count: int, shares: list[int]) -> None:
    """The splits share nothing, have all records together, and each has its share within one record."""
    splits = divide(count, shares)
    assert sorted(index for split in splits for index in split.tolist()) == list(range(count))
    assert all(abs(len(split) - count * share / sum(shares)) <= 1 for split, share in zip(splits, shares, strict=True))


def test_a_record_is_in_one_split() -> None:
    """A record with all its samples is in one split, and in the same one at another --seq-length."""
    rows = [(line, length) for line in range(1, 41) for length in (3, 9 if line % 2 else 4)[: 1 + line % 3]]
    tokens = [Tokens(ids=numpy.arange(n, dtype=numpy.int32), learned=numpy.arange(n) > 0) for _, n in rows]
    samples = store.collect(((0, line), item) for (line, _), item in zip(rows, tokens, strict=True))
    splits = []
    for length in (16, 4):
        flags = {"seq_length": length, "max_position_embeddings": length, "sft_drop_long": True, "split": "50,50,0"}
        config = fine_tuning.config_of("records.jsonl", **flags)
        members, _ = plan._members(samples, config, [("--data-path", "records.jsonl")])
        splits.append([members[0], members[1]])
    lines = [[set(samples.records[of_split, 1].tolist()) for of_split in of_run] for of_run in splits]
    assert len(lines[0][0]) == len(lines[0][1]) == 20 and not lines[0][0] & lines[0][1]
    assert all(short <= long for short, long in zip(lines[1], lines[0], strict=True))
    assert sum(map(len, splits[0])) == len(rows) > sum(map(len, splits[1]))


@pytest.mark.parametrize(("flags", "kept"), [({}, [0, 1, 2]), ({"sft_drop_long": True}, [0, 1])])
def test_answers_that_do_not_fit(flags: dict[str, bool], kept: list[int]) -> None:
    """Long answers are kept or dropped as the flags ask, and a note counts the samples that are omitted."""
    answers = [(5, range(2, 5)), (9, range(3, 5)), (12, range(2, 12)), (12, range(9, 12))]
    rows = [
        Tokens(ids=numpy.arange(n, dtype=numpy.int32), learned=numpy.isin(numpy.arange(n), answer))
        for n, answer in answers
    ]
    samples = store.collect(((0, line), row) for line, row in enumerate(rows))
    sizes = {"seq_length": 6, "max_position_embeddings": 6, "split": "100,0,0", "eval_iters": 0}
    config = fine_tuning.config_of("records.jsonl", **sizes | flags)
    members, num_left_out = plan._members(samples, config, [("--data-path", "records.jsonl")])
    assert (sorted(members[0].tolist()), num_left_out) == (kept, 4 - len(kept))
    notes = plan._notes(config, samples, [one_each(members[0])] * 3, num_omitted=num_left_out, files=())
    assert f"{num_left_out} samples are omitted" in " ".join(notes)
    config = fine_tuning.config_of("records.jsonl", **sizes | flags | {"seq_length": 1})
    with pytest.raises(ValueError, match="training split has no record, and --seq-length is too short for 4 of 4"):
        plan._members(samples, config, [("--data-path", "records.jsonl")])


SAMPLES = [([1, 2, 3], [0, 1, 1]), ([4, 5], [0, 1]), ([6, 7, 8, 9], [0, 0, 1, 1])]


def samples_of(digest: str = "one") -> store.Samples:
    rows = [
        ((0, line), Tokens(ids=numpy.array(ids, dtype=numpy.int32), learned=numpy.array(learned, dtype=bool)))
        for line, (ids, learned) in enumerate(SAMPLES)
    ]
    return store.collect(rows, digest=digest)


def dataset_of(samples: store.Samples, packed: Packed | None = None, **flags: Any) -> FineTuningDataset:
    config = fine_tuning.config_of("records.jsonl", **{"seq_length": 6} | flags)
    packed = packed or pack(numpy.arange(3), samples.lengths - 1, 6)
    return FineTuningDataset(samples, packed, config, num_sequences=4, end_token=256)


def test_datasets_are_told_apart() -> None:
    """Datasets of other records, packing, order, length or segments have other hashes, and equal ones the same."""
    item, two = samples_of(), samples_of("two")
    datasets = [dataset_of(item), dataset_of(two), dataset_of(item, packed=one_each(numpy.arange(3)))]
    datasets += [dataset_of(item, seed=2), dataset_of(item, seq_length=7), dataset_of(item, no_sft_packing=True)]
    assert len({dataset.unique_description_hash for dataset in datasets}) == len(datasets)
    assert dataset_of(item).unique_description_hash == datasets[0].unique_description_hash


def test_samples_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored samples are read back; a killed writer leaves nothing, and a damaged file is not used."""
    path, samples = tmp_path / "sft" / "one.pt", samples_of()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        store.save_samples(str(path), samples)
    assert store.open_samples(str(path)) is None and [*path.parent.iterdir()] == []
    store.save_samples(str(path), samples)
    read = store.open_samples(str(path))
    assert read is not None and [*path.parent.iterdir()] == [path]
    assert all(numpy.array_equal(value, getattr(samples, name)) for name, value in vars(read).items())
    for size in (path.stat().st_size - 3, 0):
        os.truncate(path, size)
        assert store.open_samples(str(path)) is None


def test_bad_records_are_reported(tmp_path: Path) -> None:
    """All bad records are counted and the first ten named, on reuse too; --sft-skip-bad-records leaves them out."""
    good, bad = '{"prompt": "p", "completion": "c"}\n', '{"prompt": "p", "completion": ""}\n'
    paths = [tmp_path / "a.jsonl", tmp_path / "b.json"]
    paths[0].write_text(good + bad + "{\n" + good)
    paths[1].write_text(f"[{','.join([good] + [bad] * 10)}]")
    files = [("--data-path", str(path)) for path in paths]
    samples = store.collect(store.tokenize_files(files, ByteLevelTokenizer(), "auto", ()))
    assert (len(samples), samples.num_bad) == (3, 12)
    config = fine_tuning.config_of("a.jsonl", split="100,0,0", eval_iters=0)
    with pytest.raises(ValueError, match="give --sft-skip-bad-records") as caught:
        plan._members(samples, config, files)
    for words in (
        f"{paths[0]}, line 2 has an empty",
        "; line 3 is not JSON",
        f"{paths[1]}, entry 2 has",
        "; entry 9 has",
    ):
        assert words in str(caught.value)
    assert "entry 10" not in str(caught.value) and "; and 2 more bad records. " in str(caught.value)
    config = fine_tuning.config_of("a.jsonl", split="100,0,0", eval_iters=0, sft_skip_bad_records=True)
    members, _ = plan._members(samples, config, files)
    assert len(members[0]) == 3
    notes = plan._notes(config, samples, [one_each(members[0])] * 3, num_omitted=0, files=files)
    assert any("12 bad records are left out: --data-path" in note for note in notes)


def test_the_digest_is_of_content(tmp_path: Path) -> None:
    """The digest depends on the content of the records and of the tokenizer, on the prompt format and on the ignored
    keys, and not on names."""
    path, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    item, two = ("--data-path", str(path)), ("--data-path", str(other))
    path.write_text("one")
    shutil.copy(path, other)
    folder = fine_tuning.tokenizer_folder(tmp_path / "tokenizer", None)
    moved = shutil.copytree(folder, tmp_path / "moved")
    tokenizer = HuggingFaceTokenizer(tokenizer_model=folder)
    digest = store.data_digest([item], tokenizer, "auto")
    assert store.data_digest([two], HuggingFaceTokenizer(tokenizer_model=str(moved)), "auto") == digest
    assert store.data_digest([item], ByteLevelTokenizer(), "auto") != digest
    assert store.data_digest([item], tokenizer, "text") != digest
    assert store.data_digest([item], tokenizer, "auto", ("id",)) != digest
    assert store.data_digest([item, two], tokenizer, "auto") != digest
    fine_tuning.tokenizer_folder(tmp_path / "moved", fine_tuning.CHATML)
    assert store.data_digest([item], HuggingFaceTokenizer(tokenizer_model=str(moved)), "auto") != digest
    path.write_text("two")
    assert store.data_digest([item], tokenizer, "auto") != digest
