"""Tokenizers in an exported folder: transformers and this program's reader return the ids of training."""

from __future__ import annotations

import base64
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
import transformers

from megatron.bcd.huggingface import tokenizer_export
from megatron.bcd.tokenizer import Tokenizer, build_tokenizer

SCRIPTS = (
    (0x20, 0x7E), (0xA1, 0x17F), (0x370, 0x3FF), (0x400, 0x481), (0x5D0, 0x5EA), (0x620, 0x64A), (0x905, 0x939),
    (0xE01, 0xE30), (0x1100, 0x1112), (0x3041, 0x3096), (0x4E00, 0x4FFF), (0xAC00, 0xAD00), (0x1F600, 0x1F64F),
)  # fmt: skip
GAPS = (*" " * 6, "  ", "    ", "\t", "\n", "\r\n", "\n\n", "\u00a0", "\u2009", "\u3000", "\u200b", "\u2581")
SPELLED = ("", "</s>", "<s>", "<unk>", "<0x0A>", "<|endoftext|>", "<end>")


def lines(number: int) -> Iterator[str]:
    """Words of several scripts with unusual white space; some are spelled like tokens."""
    draw = random.Random(1)
    for _ in range(number):
        first, last = draw.choice(SCRIPTS)
        line = [draw.choice(("", *GAPS))]
        for _ in range(draw.randrange(1, 12)):
            letters = "".join(chr(draw.randint(first, last)) for _ in range(draw.randrange(1, 6)))
            line += [draw.choice((letters, *WORDS)), draw.choice(GAPS)]
        yield "".join(line) + draw.choice(SPELLED)


WORDS = ("The planner", "the", "of", "don't", "1234", "model", "banana", "</")
RUNS = ["a" * i + "=" * (17 - i) + " " * i + "-" * i for i in range(17)]
TEXT = [" ".join(WORDS)] * 20 + RUNS + list(lines(300))


def sentencepiece_model(path: Path, **options: Any) -> Tokenizer:
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXT),
            model_writer=file,
            **{"vocab_size": 1000, "hard_vocab_limit": False, "character_coverage": 0.99} | options,
            required_chars="".join(SPELLED),
            num_threads=1,
            minloglevel=2,
        )
    return build_tokenizer("SentencePieceTokenizer", tokenizer_model=str(path))


def exported(tokenizer: Tokenizer, folder: Path, *, family: str = "gpt2") -> Path:
    folder.mkdir()
    for name, content in tokenizer_export.export_files(tokenizer, adds_special_tokens=False).items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    return folder


def differing(tokenizer: Tokenizer, folder: Path, texts: list[str]) -> list[str]:
    """Return the texts for which transformers or this program's reader has other ids than the run."""
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(folder))
    assert (ours.vocab_size, ours.eod, ours.pad) == (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad)
    assert theirs.eos_token_id == tokenizer.eod and len(theirs) <= tokenizer.vocab_size
    return [
        text for text in texts if not (theirs(text)["input_ids"] == ours.tokenize(text) == tokenizer.tokenize(text))
    ]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize(  # every pair of values
    ("prefix", "fallback", "strips"),
    [(True, True, True), (True, False, False), (False, True, False), (False, False, True)],
)
def test_sentencepiece(tmp_path: Path, kind: str, prefix: bool, fallback: bool, strips: bool) -> None:
    """The export has the ids of training for white space, unknown characters and tokens spelled out, up to rounding of
    scores."""
    tokenizer = sentencepiece_model(
        tmp_path / "sp.model",
        model_type=kind,
        add_dummy_prefix=prefix,
        byte_fallback=fallback,
        remove_extra_whitespaces=strips,
        allow_whitespace_only_pieces=not strips,
        normalization_rule_name="identity",
    )
    folder = exported(tokenizer, tmp_path / "out", family="llama" if strips else "gpt2")
    texts = list(lines(1000))
    if kind == "bpe":
        assert differing(tokenizer, folder, texts + RUNS) == []
    else:  # a sum of the same scores in another order is rounded otherwise: " " + "   ", or "   " + " "
        ours = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(folder))
        odd = differing(tokenizer, folder, texts)
        assert len(odd) <= 2 and all(sorted(ours.tokenize(x)) == sorted(tokenizer.tokenize(x)) for x in odd)
    if fallback:
        ours = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(folder))
        pieces = tokenizer._model
        assert [
            x
            for x in texts
            if ours.engine.decode(ours.tokenize(x), skip_special_tokens=True) != pieces.decode(tokenizer.tokenize(x))
        ] == []


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_symbols_and_replaced_characters(tmp_path: Path, kind: str) -> None:
    """Symbols and replaced characters have the ids of training, and what the library applies otherwise is found."""
    symbols = ["<turn>", "[sep]", "[sep]]"]
    tokenizer = sentencepiece_model(
        tmp_path / "sp.model", model_type=kind, user_defined_symbols=symbols, normalization_rule_name="identity"
    )
    texts = [f"{text}{symbol}{text}" for text in WORDS for symbol in symbols] + [f"<turn>{text}" for text in lines(100)]
    assert differing(tokenizer, exported(tokenizer, tmp_path / "out"), texts) == []
    tokenizer = sentencepiece_model(
        tmp_path / "nfkc.model", model_type=kind, remove_extra_whitespaces=False, byte_fallback=True
    )
    folder = exported(tokenizer, tmp_path / "nfkc")
    texts = [*lines(1000), "\ufb01\uff21\u00bd \u212b"]
    assert differing(tokenizer, folder, texts) == []
    assert differing(tokenizer, folder, ["e\u0323\u0302"]) != []
    assert tokenizer_export.find_difference(tokenizer, str(folder)) is not None


def byte_level_bpe(folder: Path) -> tokenizers.ByteLevelBPETokenizer:
    engine = tokenizers.ByteLevelBPETokenizer()
    engine.train_from_iterator(TEXT, vocab_size=600, special_tokens=["<|endoftext|>", "<s>", "<end>"])
    folder.mkdir()
    return engine


def gpt2(folder: Path) -> Tokenizer:
    vocab, merges = byte_level_bpe(folder).save_model(str(folder))
    return build_tokenizer("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)


def tiktoken(folder: Path, pattern: str) -> Tokenizer:
    pytest.importorskip("tiktoken")
    words = dict.fromkeys(word[:i] for word in (" the", " model", "don't", "1234", "<s>", "the") for i in range(2, 9))
    tokens = [bytes([i]) for i in range(256)] + [word.encode() for word in words]
    entries = [
        {"rank": i, "token_bytes": base64.b64encode(token).decode(), "token_str": ""} for i, token in enumerate(tokens)
    ]
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(entries))
    sizes: dict[str, Any] = {"vocab_size": len(tokens) + 10, "tiktoken_num_special_tokens": 10}
    return build_tokenizer(
        "TikTokenizer", tokenizer_model=str(folder / "vocab.json"), tiktoken_pattern=pattern, **sizes
    )


def hugging_face(folder: Path, *, is_whole: bool = True) -> Tokenizer:
    """A folder whose class, length limit and begin token differ from those of training."""
    engine = byte_level_bpe(folder)
    config: dict[str, Any] = {"eos_token": "<end>", "bos_token": "<s>", "unk_token": "<end>"}
    if is_whole:
        engine.enable_truncation(4)
        first = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        engine._tokenizer.post_processor = first
        engine.save(str(folder / "tokenizer.json"))
        config |= {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
    else:
        engine.save_model(str(folder))
        config["tokenizer_class"] = "GPT2Tokenizer"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(folder))


OTHERS = {
    "bytes": lambda folder: build_tokenizer("ByteLevelTokenizer"),
    "gpt2": gpt2,
    "tiktoken_v1": lambda folder: tiktoken(folder, "v1"),
    "tiktoken_v2": lambda folder: tiktoken(folder, "v2"),
    "hugging_face": hugging_face,
    "hugging_face_without_json": lambda folder: hugging_face(folder, is_whole=False),
}


@pytest.mark.parametrize(
    ("kind", "family"),
    [*itertools.product(("gpt2", "hugging_face"), ("gpt2", "llama", "qwen3")), ("bytes", "gpt2"),
     ("tiktoken_v1", "llama"), ("tiktoken_v2", "qwen3"), ("hugging_face_without_json", "llama")],
)  # fmt: skip
def test_other_types(tmp_path: Path, kind: str, family: str) -> None:
    """The export of every other type has the ids of training, whatever the model's family."""
    tokenizer = OTHERS[kind](tmp_path / "given")
    folder = exported(tokenizer, tmp_path / "out", family=family)
    assert differing(tokenizer, folder, list(lines(1000))) == []
    assert tokenizer_export.find_difference(tokenizer, str(folder)) is None
