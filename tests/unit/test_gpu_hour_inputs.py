"""studies/gpu_hour_inputs.py: portions for a GPU machine without a network, and what is unpacked there."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import gpu_hour_inputs
import numpy as np
import pytest
from gpu_hour_inputs import dequantized, main
from gpu_hour_text import Document, divide


def texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_tiny_portions_unpack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A portion that arrives later adds its part of the text, and a second start changes nothing."""
    monkeypatch.setattr(gpu_hour_inputs, "TOKENIZER", tmp_path / "missing")  # no model: transformers is slow to import
    portions, output = tmp_path / "portions", tmp_path / "unpacked"
    assert main(["--tiny", "--output", str(portions)]) == 0
    (portions / "4").rename(tmp_path / "4")
    assert main(["--unpack", str(portions), "--output", str(output)]) == 0
    first = texts(output / "text/train.jsonl")
    (tmp_path / "4").rename(portions / "4")
    assert main(["--unpack", str(portions), "--output", str(output)]) == 0
    train = texts(output / "text/train.jsonl")
    assert first and train[: len(first)] == first and len(train) > len(first)
    assert not set(train) & set(texts(output / "text/valid.jsonl"))
    assert all(texts(output / f"{name}.jsonl") for name in ("chichewa/train", "chichewa/valid", "english/valid"))
    times = {path: path.stat().st_mtime_ns for folder in (portions, output) for path in folder.rglob("*")}
    assert main(["--tiny", "--output", str(portions)]) == 0
    assert main(["--unpack", str(portions), "--output", str(output)]) == 0
    assert times == {path: path.stat().st_mtime_ns for folder in (portions, output) for path in folder.rglob("*")}


def test_a_tiny_model_unpacks(tmp_path: Path) -> None:
    """The unpacked folder is one that transformers reads: weights, config.json with the architecture, and the
    tokenizer."""
    transformers = pytest.importorskip("transformers")
    if not gpu_hour_inputs.TOKENIZER.is_dir():
        pytest.skip("needs GPT-2's tokenizer")
    assert main(["--tiny", "--output", str(tmp_path / "portions")]) == 0
    assert main(["--unpack", str(tmp_path / "portions"), "--output", str(tmp_path)]) == 0
    _, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "smollm2", output_loading_info=True)
    assert not any(report.values())
    assert json.loads((tmp_path / "smollm2/config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "smollm2")
    assert tokenizer.decode(tokenizer("Mulungu analenga")["input_ids"]) == "Mulungu analenga"


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_blocks_become_weights(kind: str) -> None:
    """GGUF's layout: the low halves of the bytes are the first 16 codes of a block, not every second one."""
    codes = np.arange(64).reshape(2, 32) % 16 if kind == "Q4_1" else np.arange(64).reshape(2, 32) - 32
    scale, minimum = np.array([[0.5], [2]], np.float16), np.array([[-1], [3]], np.float16)
    if kind == "Q4_1":
        packed = (codes[:, :16] | codes[:, 16:] << 4).astype(np.uint8)
        rows = np.concatenate([scale.view(np.uint8), minimum.view(np.uint8), packed], axis=1)
        expected = codes * scale.astype(np.float32) + minimum
    else:
        rows = np.concatenate([scale.view(np.uint8), codes.astype(np.int8).view(np.uint8)], axis=1)
        expected = codes * scale.astype(np.float32)
    np.testing.assert_array_equal(dequantized(rows.reshape(1, -1), kind), expected.reshape(1, -1).astype(np.float32))


class Words:
    """A tokenizer with a token for every word."""

    def encode(self, text: str) -> SimpleNamespace:
        return SimpleNamespace(ids=text.split())


def test_documents_stay_whole() -> None:
    """Each document is whole in training, validation or English."""
    results = [
        Document("anarchism" if index % 10 == 0 else "other", "plain", f"word{index:03} " * 500) for index in range(200)
    ]
    corpus = divide(results, {"anarchism": "1", "other": "2"}, Words(), valid_tokens=5000, train_tokens=10**6)
    parts = [{word for text in part for word in text.split()} for part in (corpus.train, corpus.valid, corpus.english)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 200
    assert corpus.manifest["valid_tokens"] == 5000 and len(parts[1]) == 10
    assert corpus.manifest["train_tokens"] == 500 * len(corpus.train)
