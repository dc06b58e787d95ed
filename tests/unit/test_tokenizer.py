"""Tokenizers: same ids as GPT-2 and as Megatron Core's own tokenizers, and errors that name the flag."""

import base64
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import preprocess_data
import pytest
import sentencepiece
from support.command_line import parse
from tokenizers import ByteLevelBPETokenizer

from megatron.bcd.tokenizer import (
    NO_PAD,
    TOKENIZER_TYPES,
    GPT2BPETokenizer,
    Tokenizer,
    build_tokenizer,
    padded_vocab_size,
)

ROOT = Path(__file__).resolve().parents[2]
TEXTS = (
    "plain words, numbers 1234 and don't",
    "  two spaces\tand a tab ",
    "two\nlines",
    "caf\u00e9 \u65e5\u672c\u8a9e \U0001f600 e\u0301",
    "",
)


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sp") / "tiny.model"
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["the quick brown fox", "jumps over the lazy dog"] * 20),
            model_writer=file,
            vocab_size=300,
            model_type="bpe",
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            num_threads=1,
            minloglevel=2,
        )
    return path


@pytest.fixture(scope="module")
def huggingface_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    engine = ByteLevelBPETokenizer()
    engine.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog"] * 5, vocab_size=280, special_tokens=["<end>", "<pad>"]
    )
    # As folders saved after an evaluation have it: long inputs would be cut without a word.
    engine.enable_truncation(4)
    engine.enable_padding(length=4, pad_id=1, pad_token="<pad>")
    engine.save(str(folder / "tokenizer.json"))
    entries = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": {
            "__type": "AddedToken",
            "content": "<end>",
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        },
        "pad_token": "<pad>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(entries), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def gpt2(shared_data: Path) -> Tokenizer:
    folder = shared_data / "gpt2-bpe"
    return build_tokenizer(
        "GPT2BPETokenizer", vocab_file=str(folder / "encoder.json"), merge_file=str(folder / "vocab.bpe")
    )


def check_contract(tokenizer: Tokenizer, texts: tuple[str, ...] = TEXTS) -> None:
    for text in texts:
        ids = tokenizer.tokenize(text)
        assert all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in ids)
        assert tokenizer.eod not in ids
        assert tokenizer.detokenize(ids) == text
    assert 0 <= tokenizer.eod < tokenizer.vocab_size
    assert tokenizer.pad != tokenizer.eod
    json.dumps(tokenizer.unique_identifiers)


def test_byte_level() -> None:
    """Exposes an eod that collides with a byte, and ids beyond the 257 rows of the embedding."""
    tokenizer = build_tokenizer("ByteLevelTokenizer")
    check_contract(tokenizer)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (257, 256, NO_PAD)
    assert tokenizer.tokenize("A\u00e9") == [65, 195, 169]
    assert tokenizer.detokenize([65, 256, 195]) == "A\ufffd"


def test_gpt2_ids(gpt2: Tokenizer) -> None:
    """Exposes a wrong split rule, merge order or prefix space: these ids are published ones of GPT-2."""
    check_contract(gpt2)
    assert (gpt2.vocab_size, gpt2.eod, gpt2.pad) == (50257, 50256, NO_PAD)
    assert gpt2.tokenize("Hello world") == [15496, 995]
    assert gpt2.tokenize(" Hello  world\n") == [18435, 220, 995, 198]


def test_gpt2_reads_the_end_token_as_text(gpt2: Tokenizer) -> None:
    """Exposes documents that forge a document boundary by spelling the end token out."""
    ids = gpt2.tokenize("a<|endoftext|>b")
    assert gpt2.eod not in ids
    assert gpt2.detokenize(ids) == "a<|endoftext|>b"
    assert gpt2.detokenize([gpt2.eod]) == "<|endoftext|>"


@pytest.mark.parametrize("tokenizer_type", ["SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"])
def test_sentencepiece_equals_megatron_core(tokenizer_type: str, sentencepiece_model: Path) -> None:
    """Exposes a begin-of-sentence id or extra ids that stock Megatron's data does not have."""
    tokenizer = build_tokenizer(tokenizer_type, tokenizer_model=str(sentencepiece_model))
    check_contract(tokenizer)
    from megatron.core.tokenizers import MegatronTokenizer

    stock = MegatronTokenizer.from_pretrained(
        tokenizer_path=str(sentencepiece_model),
        metadata_path={"library": "sentencepiece"},
        legacy=False,
        special_tokens=None,
    )
    assert [tokenizer.tokenize(text) for text in TEXTS] == [stock.tokenize(text) for text in TEXTS]
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (stock.vocab_size, stock.eod, stock.pad)


def test_huggingface_equals_megatron_core(huggingface_folder: Path) -> None:
    """Exposes truncation and padding saved in the folder, added special tokens, and another eod."""
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(huggingface_folder))
    check_contract(tokenizer)
    pytest.importorskip("transformers")
    from megatron.core.tokenizers import MegatronTokenizer

    stock = MegatronTokenizer.from_pretrained(
        tokenizer_path=str(huggingface_folder), metadata_path={"library": "huggingface"}, use_fast=True
    )
    texts = (*TEXTS, "a<end>b")
    assert [tokenizer.tokenize(text) for text in texts] == [stock.tokenize(text) for text in texts]
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (stock.vocab_size, stock.eod, stock.pad)


def test_huggingface_folder_without_tokenizer_json(tmp_path: Path, huggingface_folder: Path) -> None:
    """Exposes a second loading path that gives other ids than the first."""
    pytest.importorskip("transformers")
    full = json.loads((huggingface_folder / "tokenizer.json").read_text(encoding="utf-8"))
    (tmp_path / "vocab.json").write_text(json.dumps(full["model"]["vocab"]), encoding="utf-8")
    merges = "\n".join(" ".join(pair) for pair in full["model"]["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
    entries = {
        "tokenizer_class": "GPT2Tokenizer",
        "eos_token": "<end>",
        "unk_token": "<end>",
        "bos_token": "<end>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(entries), encoding="utf-8")
    slow = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    fast = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(huggingface_folder))
    assert [slow.tokenize(text) for text in TEXTS] == [fast.tokenize(text) for text in TEXTS]
    assert (slow.vocab_size, slow.eod) == (fast.vocab_size, fast.eod)
    assert slow.detokenize(slow.tokenize("the fox")) == "the fox"


def test_null_equals_megatron_core() -> None:
    """Exposes a vocabulary without room for eod, and numbers that would index past the embedding."""
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=1023)
    check_contract(tokenizer, ("0 17 1022",))
    from megatron.core.tokenizers import MegatronTokenizer

    stock = MegatronTokenizer.from_pretrained(metadata_path={"library": "null"}, vocab_size=1023)
    assert (tokenizer.vocab_size, tokenizer.eod) == (stock.vocab_size, stock.eod) == (1024, 1023)
    for text in ("1024", "-1", "x", "1.5"):
        with pytest.raises(ValueError, match="1023"):
            tokenizer.tokenize(text)


def test_pad_that_equals_eod_is_none(tmp_path: Path, huggingface_folder: Path) -> None:
    """Exposes document ends left out of the loss, as folders with pad_token = eos_token would do."""
    (tmp_path / "tokenizer.json").write_bytes((huggingface_folder / "tokenizer.json").read_bytes())
    entries = {"eos_token": "<end>", "pad_token": "<end>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(entries), encoding="utf-8")
    assert build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path)).pad == NO_PAD


def test_identifiers_tell_tokenizers_apart(gpt2: Tokenizer) -> None:
    """Exposes a dataset index cached for one tokenizer and used with another."""
    kinds = [gpt2, build_tokenizer("ByteLevelTokenizer"), build_tokenizer("NullTokenizer", vocab_size=9)]
    assert len({json.dumps(kind.unique_identifiers) for kind in kinds}) == 3


@pytest.mark.parametrize(
    ("vocab_size", "divisible_by", "tensor_parallel", "padded"),
    [
        (50257, 128, 1, 50304),
        (50257, 128, 2, 50432),
        (257, 128, 1, 384),
        (1024, 128, 2, 1024),
        (1, 1, 1, 1),
    ],
)
def test_padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel: int, padded: int) -> None:
    """Exposes another rounding than stock Megatron's, whose checkpoints would then not fit."""
    assert padded_vocab_size(vocab_size, divisible_by, tensor_parallel) == padded


@pytest.mark.parametrize("tokenizer_type", [name for name in TOKENIZER_TYPES if name != "ByteLevelTokenizer"])
def test_missing_flag_is_named(tokenizer_type: str) -> None:
    """Exposes a TypeError deep in a library where the user forgot a flag."""
    with pytest.raises(ValueError, match="--tokenizer-type") as error:
        build_tokenizer(tokenizer_type)
    assert "\n" not in str(error.value)


def test_unknown_type_is_named() -> None:
    """Exposes a stock type we lack being taken for another one."""
    with pytest.raises(ValueError, match="--tokenizer-type MultimodalTokenizer"):
        build_tokenizer("MultimodalTokenizer", tokenizer_model="x")


TIKTOKEN = [bytes([i]) for i in range(256)]
TIKTOKEN += [b"th", b"he", b"the", b" t", b" the", b"in", b"ing", b" ?", b"?\n", b"eT"]


def tiktoken_file(path: Path, tokens: list[bytes]) -> str:
    """A vocabulary as Megatron-LM's TikTokenizer reads it."""
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode("utf-8", "replace")}
        for rank, token in enumerate(tokens)
    ]
    path.write_text(json.dumps(entries))
    return str(path)


@pytest.mark.parametrize("pattern", ["v1", "v2"])
def test_tiktoken(pattern: str, tmp_path: Path) -> None:
    """Exposes other ids than stock's: another pattern, special tokens elsewhere, a vocabulary that is not cut off."""
    pytest.importorskip("tiktoken")
    from megatron.core.tokenizers.text.libraries.tiktoken_tokenizer import TikTokenTokenizer

    file = tiktoken_file(tmp_path / "vocab.json", TIKTOKEN)
    for size in (276, 275, 271):
        sizes: dict[str, Any] = {"tiktoken_pattern": pattern, "tiktoken_num_special_tokens": 10, "vocab_size": size}
        ours = build_tokenizer("TikTokenizer", tokenizer_model=file, **sizes)
        stock = TikTokenTokenizer(file, num_special_tokens=10, vocab_size=size, pattern=pattern)
        check_contract(ours)
        for text in (*TEXTS, "eTHE thing: the?\n\ntheTHE the12 345", "a</s>b<SPECIAL_8>", "\r\n/ \u00e9\u0130"):
            assert ours.tokenize(text) == stock.text_to_ids(text)
        assert (ours.vocab_size, ours.eod, ours.pad) == (stock.vocab_size, stock.eod, stock.pad_id) == (size, 2, 4)
    assert ours.unique_identifiers["pattern"] == pattern


def test_tiktoken_on_the_command_lines(tmp_path: Path) -> None:
    """Exposes a flag that training or preprocessing passes over: other ids than those of the data."""
    pytest.importorskip("tiktoken")
    file = tiktoken_file(tmp_path / "vocab.json", TIKTOKEN)
    words = ["--tokenizer-type", "TikTokenizer", "--tokenizer-model", file, "--vocab-size", "276"]
    words += ["--tiktoken-pattern", "v1", "--tiktoken-num-special-tokens", "10"]
    of_run = parse(*words, without=("--tokenizer-type",)).tokenizer
    tokenizer = build_tokenizer(**vars(of_run))
    found = (tokenizer.vocab_size, tokenizer.unique_identifiers["pattern"])
    assert (*found, tokenizer.unique_identifiers["num_special_tokens"]) == (276, "v1", "10")
    text = "eTHE thing"
    other = build_tokenizer(**vars(of_run) | {"tiktoken_pattern": "v2"})
    assert tokenizer.tokenize(text) != other.tokenize(text), "else the pattern is not seen"
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": text}))
    arguments = ["--input", str(tmp_path / "text.jsonl"), "--output-prefix", str(tmp_path / "text"), *words]
    assert preprocess_data.main(arguments) == 0
    ids = np.fromfile(tmp_path / "text_text_document.bin", dtype=np.uint16)
    assert ids.tolist() == tokenizer.tokenize(text)


def test_tiktoken_refusals(tmp_path: Path) -> None:
    """Exposes a traceback for a vocabulary that is damaged or too small, or without the library."""
    pytest.importorskip("tiktoken")
    good = tiktoken_file(tmp_path / "good.json", TIKTOKEN)
    (tmp_path / "damaged.json").write_text('[{"rank": 0}]')
    for file, sizes, problem in (
        (good, {}, "--vocab-size 1266"),
        (good, {"vocab_size": 1000}, "--tiktoken-num-special-tokens"),
        (good, {"vocab_size": 100, "tiktoken_num_special_tokens": 6}, "--tiktoken-num-special-tokens"),
        (tiktoken_file(tmp_path / "twice.json", [*TIKTOKEN, b"the"]), {}, "twice.json"),
        (tiktoken_file(tmp_path / "bytes.json", TIKTOKEN[1:]), {}, "bytes.json"),
        (str(tmp_path / "damaged.json"), {}, "damaged.json"),
        (str(tmp_path / "absent.json"), {}, "absent.json"),
    ):
        with pytest.raises(ValueError, match=problem) as error:
            build_tokenizer("TikTokenizer", tokenizer_model=file, **sizes)
        assert "\n" not in str(error.value)
    with mock.patch.dict(sys.modules, tiktoken=None), pytest.raises(ValueError, match="tiktoken"):
        build_tokenizer("TikTokenizer", tokenizer_model=good)


def test_malformed_gpt2_files(tmp_path: Path) -> None:
    """Exposes library errors, tracebacks or wrong ids from damaged vocabulary and merges files."""
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"

    def build(vocab_text: str, merges_text: str) -> Tokenizer:
        vocab.write_text(vocab_text, encoding="utf-8")
        merges.write_text(merges_text, encoding="utf-8")
        return GPT2BPETokenizer(vocab_file=str(vocab), merge_file=str(merges))

    good = '{"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}'
    assert build(good, "#version: 0.2\na b\n").tokenize("ab") == [2]
    for vocab_text, merges_text, flag in (
        ('{"a": 0', "a b", "--vocab-file"),
        ('["a"]', "a b", "--vocab-file"),
        ('{"a": 0, "<|endoftext|>": 7}', "", "--vocab-file"),
        ('{"a": 0, "b": 1, "ab": 2}', "a b", "--vocab-file"),
        (good, "a b\na b c\n", "--merge-file"),
        (good, "a z\n", "--merge-file"),
    ):
        with pytest.raises(ValueError, match=flag) as error:
            build(vocab_text, merges_text)
        assert "\n" not in str(error.value)


def test_malformed_models(tmp_path: Path, sentencepiece_model: Path, huggingface_folder: Path) -> None:
    """Exposes library errors for absent, damaged or incomplete model files and folders."""
    damaged = tmp_path / "damaged.model"
    damaged.write_bytes(b"not a model")
    with pytest.raises(ValueError, match="--tokenizer-model"):
        build_tokenizer("SentencePieceTokenizer", tokenizer_model=str(damaged))
    with pytest.raises(ValueError, match="--tokenizer-model"):
        build_tokenizer("SentencePieceTokenizer", tokenizer_model=str(tmp_path / "absent.model"))
    with pytest.raises(ValueError, match="--tokenizer-model openai/gpt2"):
        build_tokenizer("HuggingFaceTokenizer", tokenizer_model="openai/gpt2")
    (tmp_path / "tokenizer.json").write_bytes((huggingface_folder / "tokenizer.json").read_bytes())
    with pytest.raises(ValueError, match="eos_token"):
        build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
