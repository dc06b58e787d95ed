"""Tokenizers: text to token ids, under Megatron's --tokenizer-type names. Pure.

Ids equal those of stock Megatron-LM core_v0.16.1 without --legacy-tokenizer. ByteLevelTokenizer is not in stock. One
deliberate difference: GPT2BPETokenizer reads a literal "<|endoftext|>" in the text as ordinary text, as OpenAI's
encoder and the legacy tokenizer do, so that a document cannot forge a document boundary.

Without torch and Megatron Core, preprocessing workers start in a fraction of a second.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from megatron.bcd.tokenizer_files import (
    load_tiktoken,
    load_tokenizer_json,
    load_with_transformers,
    one_line,
    read_merges,
    read_vocab,
)

NO_PAD = -1
"""The pad id of a tokenizer without one: Megatron Core's own value for "in no dataset"."""


class Tokenizer(ABC):
    """Interface of all tokenizers.

    It has what GPTDataset uses of Megatron Core's MegatronTokenizerBase: `vocab_size`, `eod`, `pad` and
    `unique_identifiers` (hashed into the name of the dataset's index cache).
    """

    def __init__(self, *, vocab_size: int, eod: int, pad: int = NO_PAD, **identifiers: str) -> None:
        self._vocab_size = vocab_size
        self._eod = eod
        # A pad that is also the end of a document would mask real document ends out of the loss.
        self._pad = NO_PAD if pad == eod else pad
        self._unique_identifiers = OrderedDict(
            {"class": f"{type(self).__module__}.{type(self).__qualname__}", **identifiers}
        )

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Ids of `text`, each in 0..vocab_size-1; no begin or end token is added."""

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, unpadded, `eod` included."""
        return self._vocab_size

    @property
    def eod(self) -> int:
        """Id that ends a document (--append-eod)."""
        return self._eod

    @property
    def pad(self) -> int:
        """Id whose labels are left out of the loss; NO_PAD if there is none beside `eod`."""
        return self._pad

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """Class, files and options as text; equal for tokenizers built alike."""
        return self._unique_identifiers


class ByteLevelTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0..255, and eod = 256: 257 ids, no file."""

    def __init__(self) -> None:
        super().__init__(vocab_size=257, eod=256)

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def detokenize(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i != self.eod).decode("utf-8", errors="replace")


class GPT2BPETokenizer(Tokenizer):
    """GPT-2's byte-level BPE from its vocabulary (JSON) and merges files; eod is "<|endoftext|>".

    Raises ValueError naming --vocab-file or --merge-file when a file is absent or malformed.
    """

    EOD_TOKEN = "<|endoftext|>"

    def __init__(self, *, vocab_file: str | None, merge_file: str | None) -> None:
        vocab_file = _existing_file("--vocab-file", vocab_file, "GPT2BPETokenizer")
        merge_file = _existing_file("--merge-file", merge_file, "GPT2BPETokenizer")
        from tokenizers import Tokenizer as Engine
        from tokenizers import decoders, models, pre_tokenizers

        vocab = read_vocab(vocab_file)
        merges = read_merges(merge_file)
        if self.EOD_TOKEN not in vocab:
            raise ValueError(f"--vocab-file {vocab_file} has no token {self.EOD_TOKEN}; give GPT-2's encoder.json")
        try:
            engine = Engine(models.BPE(vocab, merges))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(
                f"--merge-file {merge_file} does not belong to --vocab-file {vocab_file}: {one_line(error)}"
            ) from error
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        engine.decoder = decoders.ByteLevel()
        self.engine = engine
        super().__init__(vocab_size=len(vocab), eod=vocab[self.EOD_TOKEN], vocab_file=vocab_file, merge_file=merge_file)

    def tokenize(self, text: str) -> list[int]:
        return list(self.engine.encode(text).ids)

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self.engine.decode(list(ids)))


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model file; eod is the model's end-of-sentence piece.

    Raises ValueError naming --tokenizer-model when the file is absent, is no SentencePiece model, or
    was trained without an end-of-sentence piece.
    """

    def __init__(self, *, tokenizer_model: str | None) -> None:
        path = _existing_file("--tokenizer-model", tokenizer_model, "SentencePieceTokenizer")
        import sentencepiece

        self._model: Any = sentencepiece.SentencePieceProcessor()
        try:
            with open(path, "rb") as file:
                self._model.LoadFromSerializedProto(file.read())
        except RuntimeError as error:
            raise ValueError(
                f"--tokenizer-model {path} is not a SentencePiece model; "
                "give a .model file, such as tools/train_tokenizer.py writes"
            ) from error
        if self._model.eos_id() < 0:
            raise ValueError(
                f"--tokenizer-model {path} has no end-of-sentence piece to end a document with; "
                "train it with one (tools/train_tokenizer.py does)"
            )
        super().__init__(
            vocab_size=self._model.get_piece_size(),
            eod=self._model.eos_id(),
            pad=self._model.pad_id(),
            tokenizer_model=path,
        )

    def tokenize(self, text: str) -> list[int]:
        return list(self._model.encode(text, out_type=int))

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self._model.decode([int(i) for i in ids]))


class HuggingFaceTokenizer(Tokenizer):
    """A local Hugging Face folder: its tokenizer.json where there is one, else AutoTokenizer.

    eod is the folder's eos_token, or its sep_token if it names no eos_token. Special tokens in the text are read as
    such unless the folder says split_special_tokens; none is added. Nothing is downloaded, and no code of the folder
    runs.
    Raises ValueError naming --tokenizer-model when the folder is absent, unreadable or names no eos_token.
    """

    def __init__(self, *, tokenizer_model: str | None) -> None:
        folder = _required("--tokenizer-model", tokenizer_model, "HuggingFaceTokenizer")
        if not os.path.isdir(folder):
            raise ValueError(
                f"--tokenizer-model {folder} is not a folder; "
                "HuggingFaceTokenizer needs a local one (nothing is downloaded)"
            )
        self.engine: Any
        if os.path.isfile(os.path.join(folder, "tokenizer.json")):
            self.engine, special = load_tokenizer_json(folder)
            vocab: dict[str, int] = self.engine.get_vocab(with_added_tokens=True)
            added = self.engine.get_added_tokens_decoder()
            self._encode_options = {"add_special_tokens": False}
            self._has_encodings = True
        else:
            self.engine, special = load_with_transformers(folder)
            vocab = self.engine.get_vocab()
            added = self.engine.added_tokens_decoder
            self._encode_options = {"add_special_tokens": False, "truncation": False, "verbose": False}
            self._has_encodings = False
        eod_token = special.get("eos_token") or special.get("sep_token")
        if eod_token is None or eod_token not in vocab:
            raise ValueError(
                f"--tokenizer-model {folder} names no known eos_token to end a document with; "
                'set "eos_token" in its tokenizer_config.json to a token of its vocabulary'
            )
        self.folder, self.special_tokens = folder, special
        """The latter by name, as templates of conversations use them: bos_token, eos_token, ..."""
        self.added_ids = frozenset(added)
        """Tokens that the vocabulary was extended by, special ones among them; no other text becomes one of them."""
        first, bos = (
            self.engine.encode("", **self._encode_options | {"add_special_tokens": True}),
            special.get("bos_token"),
        )
        is_first = bos in vocab and list(first.ids if self._has_encodings else first)[:1] == [vocab[bos]]
        self.start_of_text = bos if bos and is_first else ""
        """The token that the model expects before a text; empty if it expects none."""
        super().__init__(
            # Not len(vocab): ids may have gaps, and the embedding must hold the largest.
            vocab_size=max(vocab.values()) + 1,
            eod=vocab[eod_token],
            pad=vocab.get(special.get("pad_token", ""), NO_PAD),
            tokenizer_model=folder,
        )

    def tokenize(self, text: str) -> list[int]:
        encoding = self.engine.encode(text, **self._encode_options)
        return list(encoding.ids if self._has_encodings else encoding)

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self.engine.decode([int(i) for i in ids], skip_special_tokens=True))


class TikTokenizer(Tokenizer):
    """A byte-level BPE vocabulary in tiktoken's terms, as stock reads it: a JSON list of ranked tokens.

    The ids begin with `num_special_tokens` special tokens, of which seven have names; eod is "</s>". The ranked tokens
    follow, cut off so that there are `vocab_size` ids in all. Special tokens in the text are read as such.
    Raises ValueError naming --tokenizer-model, --vocab-size or --tiktoken-num-special-tokens when the file is absent
    or malformed, or has too few tokens; or when tiktoken is not installed.
    """

    VOCAB_SIZE = 2**17
    """Without --vocab-size."""

    def __init__(
        self,
        *,
        tokenizer_model: str | None,
        vocab_size: int | None = None,
        tiktoken_pattern: str = "v2",
        tiktoken_num_special_tokens: int = 1000,
    ) -> None:
        path = _existing_file("--tokenizer-model", tokenizer_model, "TikTokenizer")
        num_ids = vocab_size or self.VOCAB_SIZE
        self.engine, special = load_tiktoken(
            path, num_ids=num_ids, num_special=tiktoken_num_special_tokens, pattern=tiktoken_pattern
        )
        super().__init__(
            vocab_size=num_ids,
            eod=special["</s>"],
            pad=special["<pad>"],
            tokenizer_model=path,
            pattern=tiktoken_pattern,
            num_special_tokens=str(tiktoken_num_special_tokens),
        )

    def tokenize(self, text: str) -> list[int]:
        return list(self.engine.encode(text, allowed_special="all"))

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self.engine.decode([int(i) for i in ids]))


class NullTokenizer(Tokenizer):
    """Text that consists of ids, "17 4 256"; for --mock-data and for text tokenized elsewhere.

    `vocab_size` ids 0..vocab_size-1 plus eod = vocab_size, so vocab_size + 1 in all, as in Megatron.
    """

    def __init__(self, *, vocab_size: int | None) -> None:
        if vocab_size is None:
            raise ValueError("--vocab-size is required by --tokenizer-type NullTokenizer")
        if vocab_size < 1:
            raise ValueError(f"--vocab-size {vocab_size} must be at least 1")
        super().__init__(vocab_size=vocab_size + 1, eod=vocab_size)

    def tokenize(self, text: str) -> list[int]:
        """Raises ValueError for a word that is not a number in 0..eod."""
        ids = []
        for word in text.split():
            if not (word.isascii() and word.isdigit() and int(word) <= self.eod):
                raise ValueError(f"NullTokenizer needs numbers from 0 to {self.eod}, not {word[:40]!r}")
            ids.append(int(word))
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in ids)


_BUILDERS: dict[str, tuple[Callable[..., Tokenizer], tuple[str, ...]]] = {
    "ByteLevelTokenizer": (ByteLevelTokenizer, ()),
    "GPT2BPETokenizer": (GPT2BPETokenizer, ("vocab_file", "merge_file")),
    "SentencePieceTokenizer": (SentencePieceTokenizer, ("tokenizer_model",)),
    "GPTSentencePieceTokenizer": (SentencePieceTokenizer, ("tokenizer_model",)),
    "Llama2Tokenizer": (SentencePieceTokenizer, ("tokenizer_model",)),
    "HuggingFaceTokenizer": (HuggingFaceTokenizer, ("tokenizer_model",)),
    "TikTokenizer": (
        TikTokenizer,
        ("tokenizer_model", "vocab_size", "tiktoken_pattern", "tiktoken_num_special_tokens"),
    ),
    "NullTokenizer": (NullTokenizer, ("vocab_size",)),
}
"""Class, and the arguments that it takes, by --tokenizer-type. The three SentencePiece names are one tokenizer, as in
Megatron Core 0.16.1's build_tokenizer; none of them prepends a begin-of-sentence id."""

TOKENIZER_TYPES = tuple(_BUILDERS)
"""Values of --tokenizer-type."""


def build_tokenizer(
    tokenizer_type: str | None,
    *,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    tokenizer_model: str | None = None,
    vocab_size: int | None = None,
    tiktoken_pattern: str = "v2",
    tiktoken_num_special_tokens: int = 1000,
) -> Tokenizer:
    """The tokenizer of Megatron's flags of the same names.

    Arguments that the type does not use are ignored, as stock recipes pass them. Without a type: NullTokenizer.

    Raises:
        ValueError: the type is unknown, or a file is absent or malformed; one line that names the flag.
    """
    tokenizer_type = tokenizer_type or "NullTokenizer"
    if tokenizer_type not in _BUILDERS:
        raise ValueError(
            f"--tokenizer-type {tokenizer_type} is not supported; choose from {', '.join(TOKENIZER_TYPES)}"
        )
    build, names = _BUILDERS[tokenizer_type]
    given = {
        "vocab_file": vocab_file,
        "merge_file": merge_file,
        "tokenizer_model": tokenizer_model,
        "vocab_size": vocab_size,
        "tiktoken_pattern": tiktoken_pattern,
        "tiktoken_num_special_tokens": tiktoken_num_special_tokens,
    }
    return build(**{name: given[name] for name in names})


def padded_vocab_size(vocab_size: int, make_vocab_size_divisible_by: int, tensor_model_parallel_size: int) -> int:
    """`vocab_size` rounded up to a multiple of both factors' product (stock Megatron's rule).

    50257 ids and 128 give 50304 rows at tensor parallel 1 and 50432 at 2.
    Raises ValueError for a factor or a vocabulary below 1.
    """
    for flag, value in (
        ("--vocab-size", vocab_size),
        ("--make-vocab-size-divisible-by", make_vocab_size_divisible_by),
        ("--tensor-model-parallel-size", tensor_model_parallel_size),
    ):
        if value < 1:
            raise ValueError(f"{flag} {value} must be at least 1")
    multiple = make_vocab_size_divisible_by * tensor_model_parallel_size
    return -(-vocab_size // multiple) * multiple


def _required(flag: str, value: str | None, tokenizer_type: str) -> str:
    if not value:
        raise ValueError(f"{flag} is required by --tokenizer-type {tokenizer_type}")
    return value


def _existing_file(flag: str, value: str | None, tokenizer_type: str) -> str:
    path = _required(flag, value, tokenizer_type)
    if not os.path.exists(path):
        raise ValueError(f"{flag} {path} does not exist")
    if not os.path.isfile(path):
        raise ValueError(f"{flag} {path} is not a file")
    if not os.access(path, os.R_OK):
        raise ValueError(f"{flag} {path} cannot be read")
    return path
