"""What an earlier start has left: a run on mock data, another tokenizer's checkpoint, a half written index cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from support.bad_input_cases import BASE, command_line, good_documents, write_dataset
from support.forked_runs import ForkedRuns

SAVED = ("--save", "saved", "--load", "saved")
MOCK = ("--mock-data", "--tokenizer-type", "ByteLevelTokenizer")


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder in which BASE runs."""
    write_dataset(tmp_path / "data" / "text_document", good_documents())
    return tmp_path


def on_mock_data(*flags: str) -> list[str]:
    """BASE without its data."""
    kept = {name: value for name, value in BASE.items() if name not in ("--data-path", "--split", "--tokenizer-type")}
    return [*(word for pair in kept.items() for word in pair), *MOCK, *flags]


def refusal(runs: ForkedRuns, folder: Path, words: Sequence[str], *, num_ranks: int = 1) -> str:
    """The one line of a run that ends with 2 on every rank."""
    results = runs.run(words, folder=folder, num_ranks=num_ranks)
    assert [rank.code for rank in results] == [2] * num_ranks, results
    (line,) = "".join(rank.stderr for rank in results).splitlines()
    return line


def test_a_run_of_other_tokens_is_not_resumed(runs: ForkedRuns, workplace: Path) -> None:
    """Weeks of training on top of weights that were trained on mock tokens, or on ids of another meaning, after one
    warning in the log."""
    (first,) = runs.run(on_mock_data(*SAVED), folder=workplace, num_ranks=1)
    assert first.code == 0, first.stderr
    line = refusal(runs, workplace, command_line(*SAVED))
    assert "saved/iter_0000001" in line and "--mock-data" in line
    other = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "256")
    line = refusal(runs, workplace, on_mock_data(*SAVED, *other))
    assert "--tokenizer-type" in line
    (again,) = runs.run(on_mock_data(*SAVED), folder=workplace, num_ranks=1)
    assert again.code == 0 and "resuming from saved/iter_0000001" in again.stdout
    weights_alone = ("--finetune", "--load", "saved", "--metrics-file", "new.jsonl")
    (tuned,) = runs.run(command_line(*weights_alone), folder=workplace, num_ranks=1)
    assert tuned.code == 0, tuned.stderr


@pytest.mark.parametrize("num_ranks, cache, left", [(1, "", 0.5), (2, "cache", 0.0)])
def test_a_half_written_index_cache(runs: ForkedRuns, workplace: Path, num_ranks: int, cache: str, left: float) -> None:
    """After a kill every start fails for ever with numpy's words, or a traceback, and without a file to delete."""
    words = command_line(*(("--data-cache-path", cache) if cache else ()), num_ranks=num_ranks)
    first = runs.run(words, folder=workplace, num_ranks=num_ranks)
    assert [rank.code for rank in first] == [0] * num_ranks, first
    folder = workplace / (cache or "data/text_document/cache/GPTDataset_indices")
    (index, *_) = sorted(folder.glob("*train-shuffle_index.npy"))
    whole = index.read_bytes()
    index.write_bytes(whole[: int(len(whole) * left)])
    line = refusal(runs, workplace, words, num_ranks=num_ranks)
    place = str(index.relative_to(workplace))
    assert "--data-cache-path" in line and place in line
    index.unlink()
    assert [rank.code for rank in runs.run(words, folder=workplace, num_ranks=num_ranks)] == [0] * num_ranks
    assert index.read_bytes() == whole
