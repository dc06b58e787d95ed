"""Tokenizers: same ids as GPT-2 and as Megatron Core's own tokenizers, also in an export; errors that name the flag."""

import itertools
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers
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


LOSSLESS = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
LOSSLESS["allow_whitespace_only_pieces"] = True
"""The rules of docs/data.md, and of Llama 2's model."""


def train(path: Path, texts: list[str], **options: Any) -> Path:
    """Train a SentencePiece model."""
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=file, num_threads=1, minloglevel=2, **options
        )
    return path


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = ["the quick brown fox", "jumps over the lazy dog"] * 20
    return train(tmp_path_factory.mktemp("sp") / "tiny.model", texts, vocab_size=300, model_type="bpe", **LOSSLESS)


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
    check_contract(gpt2, (*TEXTS, "a<|endoftext|>b"))


def check_stock(tokenizer: Tokenizer, folder: Path, texts: tuple[str, ...] = TEXTS, **options: Any) -> None:
    """Check the contract, and that ids, vocabulary size, eod and pad are those of Megatron Core."""
    check_contract(tokenizer)
    from megatron.core.tokenizers import MegatronTokenizer

    stock = MegatronTokenizer.from_pretrained(tokenizer_path=str(folder), **options)
    assert [tokenizer.tokenize(text) for text in texts] == [stock.tokenize(text) for text in texts]
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (stock.vocab_size, stock.eod, stock.pad)


@pytest.mark.parametrize("tokenizer_type", ["SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"])
def test_sentencepiece_equals_megatron_core(tokenizer_type: str, sentencepiece_model: Path) -> None:
    """Ids, vocabulary size, eod and pad are those of Megatron Core."""
    tokenizer = build_tokenizer(tokenizer_type, tokenizer_model=str(sentencepiece_model))
    options = {"metadata_path": {"library": "sentencepiece"}, "legacy": False, "special_tokens": None}
    check_stock(tokenizer, sentencepiece_model, **options)


def test_huggingface_equals_megatron_core(huggingface_folder: Path) -> None:
    """Ids, eod and pad are those of Megatron Core, and truncation and padding saved in the folder are off."""
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(huggingface_folder))
    options = {"metadata_path": {"library": "huggingface"}, "use_fast": True}
    check_stock(tokenizer, huggingface_folder, (*TEXTS, "a<end>b"), **options)


def test_pad_that_equals_eod_is_none(tmp_path: Path, huggingface_folder: Path) -> None:
    """A pad that equals eod is none, so document ends stay in the loss."""
    (tmp_path / "tokenizer.json").write_bytes((huggingface_folder / "tokenizer.json").read_bytes())
    entries = {"eos_token": "<end>", "pad_token": "<end>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(entries), encoding="utf-8")
    assert build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path)).pad == NO_PAD


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


# --- the tokenizer of an export

WORDS = ("The planner", "the", "of", "don't", "1234", "model", "banana", "</")
GAPS = (*" " * 6, "  ", "    ", "\t", "\n", "\n\n", "\u00a0", "\u2009", "\u3000", "\u200b")
SPELLED = ("", "</s>", "<s>", "<unk>", "<0x0A>", "<|endoftext|>", "<end>")
SCRIPTS = (
    (0x20, 0x7E), (0xA1, 0x17F), (0x370, 0x3FF), (0x400, 0x481), (0x5D0, 0x5EA), (0x620, 0x64A), (0x905, 0x939),
    (0xE01, 0xE30), (0x1100, 0x1112), (0x3041, 0x3096), (0x4E00, 0x4FFF), (0xAC00, 0xAD00), (0x1F600, 0x1F64F),
)  # fmt: skip


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


def differing(tokenizer: Tokenizer, folder: Path, texts: list[str], *, family: str = "llama") -> list[str]:
    """Export the tokenizer. Return the texts for which transformers or this program has other ids than the run."""
    folder.mkdir()
    for name, content in tokenizer_export.export_files(tokenizer, adds_special_tokens=False).items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(folder))
    assert (ours.vocab_size, ours.eod, ours.pad) == (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad)
    return [
        text for text in texts if not (theirs(text)["input_ids"] == ours.tokenize(text) == tokenizer.tokenize(text))
    ]


SYMBOLS = ["<turn>", "[sep]", "[sep]]"]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize(
    "rules",
    [LOSSLESS, LOSSLESS | {"add_dummy_prefix": False, "user_defined_symbols": SYMBOLS}, {"byte_fallback": True}],
)
def test_export_of_sentencepiece(tmp_path: Path, kind: str, rules: dict[str, Any]) -> None:
    """The export has the ids of training for white space, unknown characters, symbols and tokens spelled out, up to
    ties of a unigram model. That the library replaces some characters otherwise is reported."""
    options = {"vocab_size": 1000, "hard_vocab_limit": False, "character_coverage": 0.99, "model_type": kind} | rules
    corpus = [" ".join(WORDS)] * 20 + list(lines(300))
    path = train(tmp_path / "sp.model", corpus, required_chars="".join(SPELLED), **options)
    tokenizer = build_tokenizer("SentencePieceTokenizer", tokenizer_model=str(path))
    texts = list(lines(1000)) + [f"{text}{symbol}{text}" for text in WORDS for symbol in SYMBOLS]
    odd = differing(tokenizer, tmp_path / "out", texts)
    ours = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "out"))
    # a sum of the same scores in another order is rounded otherwise: " " + "   ", or "   " + " "
    assert len(odd) <= 2 * (kind == "unigram")
    assert all(sorted(ours.tokenize(text)) == sorted(tokenizer.tokenize(text)) for text in odd)
    assert (tokenizer_export.find_difference(tokenizer, str(tmp_path / "out")) is None) == (len(rules) > 1)
    if rules is LOSSLESS:
        decoded = [ours.engine.decode(ours.tokenize(text), skip_special_tokens=True) for text in texts]
        assert decoded == texts


@pytest.mark.parametrize(
    ("kind", "family"),
    [("bytes", "gpt2"), *itertools.product(("gpt2", "huggingface"), ("gpt2", "llama", "qwen3"))],
)
def test_export_of_other_types(
    tmp_path: Path, gpt2: Tokenizer, huggingface_folder: Path, kind: str, family: str
) -> None:
    """The export of every other type has the ids of training, whatever the model's family and the folder's class."""
    tokenizer = gpt2 if kind == "gpt2" else build_tokenizer("ByteLevelTokenizer")
    if kind == "huggingface":
        given = shutil.copytree(huggingface_folder, tmp_path / "given")
        entries = json.loads((given / "tokenizer_config.json").read_text())
        entries |= {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
        (given / "tokenizer_config.json").write_text(json.dumps(entries))
        tokenizer = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(given))
    assert differing(tokenizer, tmp_path / "out", list(lines(1000)), family=family) == []
    assert tokenizer_export.find_difference(tokenizer, str(tmp_path / "out")) is None
