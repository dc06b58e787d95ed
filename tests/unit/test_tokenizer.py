"""Tokenizers: the ids of GPT-2 and of Megatron Core's own tokenizers, errors that name the flag, and exported folders,
in which transformers and this program's reader return the ids of training."""

import base64
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import preprocess_data
import pytest
import sentencepiece
import tokenizers
import transformers
from support.command_line import parse
from tokenizers import ByteLevelBPETokenizer

from megatron.bcd.huggingface import tokenizer_export
from megatron.bcd.tokenizer import NO_PAD, TOKENIZER_TYPES, Tokenizer, build_tokenizer

TEXTS = (
    "plain words, numbers 1234 and don't",
    "  two spaces\tand a tab ",
    "two\nlines",
    "caf\u00e9 \u65e5\u672c\u8a9e \U0001f600 e\u0301",
    "",
)


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


def test_gpt2_reads_the_end_token_as_text(bpe_files: dict[str, Path]) -> None:
    """The end token in a text is read as text. That ids are stock's: test_preprocess.py."""
    gpt2 = build_tokenizer("GPT2BPETokenizer", **{flag: str(path) for flag, path in bpe_files.items()})
    check_contract(gpt2)
    ids = gpt2.tokenize("a<|endoftext|>b")
    assert gpt2.eod not in ids


def test_sentencepiece_equals_megatron_core(tmp_path: Path) -> None:
    """Ids, vocabulary size, eod and pad are those of Megatron Core, by each name of the type."""
    from megatron.core.tokenizers import MegatronTokenizer

    path, rules = tmp_path / "sp.model", {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    sentencepiece_model(path, model_type="bpe", byte_fallback=True, **rules)
    stock = MegatronTokenizer.from_pretrained(
        tokenizer_path=str(path), metadata_path={"library": "sentencepiece"}, legacy=False, special_tokens=None
    )
    for tokenizer_type in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"):
        tokenizer = build_tokenizer(tokenizer_type, tokenizer_model=str(path))
        check_contract(tokenizer)
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
    folder.mkdir()
    file = tiktoken_file(folder / "vocab.json", tokens)
    sizes: dict[str, Any] = {"vocab_size": len(tokens) + 10, "tiktoken_num_special_tokens": 10}
    return build_tokenizer("TikTokenizer", tokenizer_model=file, tiktoken_pattern=pattern, **sizes)


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
