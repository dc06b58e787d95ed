"""Tokenizers: same ids as GPT-2 and as Megatron Core's own tokenizers, and errors that name the flag."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import preprocess_data
import pytest
import sentencepiece
from support.command_line import parse
from tokenizers import ByteLevelBPETokenizer

from megatron.bcd.tokenizer import NO_PAD, TOKENIZER_TYPES, Tokenizer, build_tokenizer

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
    switches = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    end = {"__type": "AddedToken", "content": "<end>", "special": True} | switches
    entries = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(entries), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def gpt2(bpe_files: dict[str, Path]) -> Tokenizer:
    return build_tokenizer("GPT2BPETokenizer", **{flag: str(path) for flag, path in bpe_files.items()})


def check_contract(tokenizer: Tokenizer, texts: tuple[str, ...] = TEXTS) -> None:
    for text in texts:
        ids = tokenizer.tokenize(text)
        assert all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in ids)
        assert tokenizer.eod not in ids
    assert 0 <= tokenizer.eod < tokenizer.vocab_size
    assert tokenizer.pad != tokenizer.eod
    json.dumps(tokenizer.unique_identifiers)


def test_byte_level() -> None:
    """The eod of the bytes is 256, which no byte has, and all ids are within the 257 rows."""
    tokenizer = build_tokenizer("ByteLevelTokenizer")
    check_contract(tokenizer)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (257, 256, NO_PAD)
    assert tokenizer.tokenize("A\u00e9") == [65, 195, 169]


def test_gpt2_reads_the_end_token_as_text(gpt2: Tokenizer) -> None:
    """The end token in a text is read as text. That ids are stock's: test_preprocess.py."""
    check_contract(gpt2)
    ids = gpt2.tokenize("a<|endoftext|>b")
    assert gpt2.eod not in ids


@pytest.mark.parametrize("tokenizer_type", ["SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"])
def test_sentencepiece_equals_megatron_core(tokenizer_type: str, sentencepiece_model: Path) -> None:
    """Ids, vocabulary size, eod and pad are those of Megatron Core."""
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
    """Ids, eod and pad are those of Megatron Core, and truncation and padding saved in the folder are off."""
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(huggingface_folder))
    check_contract(tokenizer)
    from megatron.core.tokenizers import MegatronTokenizer

    stock = MegatronTokenizer.from_pretrained(
        tokenizer_path=str(huggingface_folder), metadata_path={"library": "huggingface"}, use_fast=True
    )
    texts = (*TEXTS, "a<end>b")
    assert [tokenizer.tokenize(text) for text in texts] == [stock.tokenize(text) for text in texts]
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (stock.vocab_size, stock.eod, stock.pad)


def test_pad_that_equals_eod_is_none(tmp_path: Path, huggingface_folder: Path) -> None:
    """A pad that equals eod is none, so document ends stay in the loss."""
    (tmp_path / "tokenizer.json").write_bytes((huggingface_folder / "tokenizer.json").read_bytes())
    entries = {"eos_token": "<end>", "pad_token": "<end>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(entries), encoding="utf-8")
    assert build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path)).pad == NO_PAD


TIKTOKEN = [bytes([i]) for i in range(256)]
TIKTOKEN += [b"th", b"he", b"the", b" t", b" the", b"in", b"ing", b" ?", b"?\n", b"eT"]


def tiktoken_file(path: Path, tokens: list[bytes]) -> str:
    """Write a vocabulary in the format of Megatron-LM's TikTokenizer."""
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode("utf-8", "replace")}
        for rank, token in enumerate(tokens)
    ]
    path.write_text(json.dumps(entries))
    return str(path)


def test_tiktoken_on_the_command_lines(tmp_path: Path) -> None:
    """Training and preprocessing follow the flags of TikTokenizer, and have the same ids."""
    pytest.importorskip("tiktoken")
    file = tiktoken_file(tmp_path / "vocab.json", TIKTOKEN)
    words = ["--tokenizer-type", "TikTokenizer", "--tokenizer-model", file, "--vocab-size", "276"]
    words += ["--tiktoken-pattern", "v1", "--tiktoken-num-special-tokens", "10"]
    of_run = parse(*words, without=("--tokenizer-type",)).tokenizer
    tokenizer = build_tokenizer(**vars(of_run))
    check_contract(tokenizer)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (276, 2, 4)
    text = "eTHE thing"
    other = build_tokenizer(**vars(of_run) | {"tiktoken_pattern": "v2"})
    assert tokenizer.tokenize(text) != other.tokenize(text), "else the pattern is not seen"
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": text}))
    arguments = ["--input", str(tmp_path / "text.jsonl"), "--output-prefix", str(tmp_path / "text"), *words]
    assert preprocess_data.main(arguments) == 0
    ids = np.fromfile(tmp_path / "text_text_document.bin", dtype=np.uint16)
    assert ids.tolist() == tokenizer.tokenize(text)


GOOD_VOCAB = '{"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}'
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("MultimodalTokenizer", {}, "--tokenizer-type MultimodalTokenizer"),
    *((name, {}, "--tokenizer-type") for name in TOKENIZER_TYPES if name != "ByteLevelTokenizer"),
    ("GPT2BPETokenizer", {"vocab_file": '{"a": 0', "merge_file": "a b"}, "--vocab-file"),
    ("GPT2BPETokenizer", {"vocab_file": '{"a": 0, "b": 1, "ab": 2}', "merge_file": "a b"}, "--vocab-file"),
    ("GPT2BPETokenizer", {"vocab_file": GOOD_VOCAB, "merge_file": "a b\na b c\n"}, "--merge-file"),
    ("GPT2BPETokenizer", {"vocab_file": GOOD_VOCAB, "merge_file": "a z\n"}, "--merge-file"),
    ("SentencePieceTokenizer", {"tokenizer_model": "not a model"}, "--tokenizer-model"),
    ("HuggingFaceTokenizer", {"tokenizer_model": "not a folder"}, "--tokenizer-model"),
    ("TikTokenizer", {"tokenizer_model": '[{"rank": 0}]'}, "--tokenizer-model"),
    ("TikTokenizer", {"tokenizer_model": "[]", "vocab_size": 9}, "--tiktoken-num-special-tokens"),
]


@pytest.mark.parametrize(("kind", "files", "named"), REFUSED)
def test_what_cannot_be_read(tmp_path: Path, kind: str, files: dict[str, Any], named: str) -> None:
    """A missing flag or a damaged file is refused in one line that names the flag."""
    for name, content in files.items():
        if isinstance(content, str):
            (tmp_path / name).write_text(content)
            files = files | {name: str(tmp_path / name)}
    with pytest.raises(ValueError, match=named) as error:
        build_tokenizer(kind, **files)
    assert "\n" not in str(error.value)


def test_damaged_folders(tmp_path: Path, huggingface_folder: Path) -> None:
    """A folder that names no end token, or whose files are no tokenizer, is refused."""
    (tmp_path / "tokenizer.json").write_bytes((huggingface_folder / "tokenizer.json").read_bytes())
    with pytest.raises(ValueError, match="eos_token"):
        build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="no tokenizer"):
        build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
