"""Tokenizers: text to token ids, under Megatron's --tokenizer-type names. Pure.

Ids equal those of stock Megatron-LM core_v0.16.1 without --legacy-tokenizer. ByteLevelTokenizer is not in stock. One
deliberate difference: GPT2BPETokenizer reads a literal "<|endoftext|>" in the text as ordinary text, as OpenAI's
encoder and the legacy tokenizer do, so that a document cannot forge a document boundary.

These call the libraries themselves and not megatron.core.tokenizers, which imports torch and Megatron Core (seconds in
every preprocessing worker), needs transformers, downloads GPT-2's files, and has other ids for bytes.
"""

from __future__ import annotations

import base64
import binascii
import inspect
import json
import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

TOKENIZER_JSON, CONFIG = "tokenizer.json", "tokenizer_config.json"
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

    def __init__(self, *, vocab_file: str | None = None, merge_file: str | None = None) -> None:
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

    def __init__(self, *, tokenizer_model: str | None = None) -> None:
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

    def __init__(self, *, tokenizer_model: str | None = None) -> None:
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
            self._encode_options = {"add_special_tokens": False}
            self._has_encodings = True
        else:
            self.engine, special = load_with_transformers(folder)
            vocab = self.engine.get_vocab()
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
        first = self.engine.encode("", **self._encode_options | {"add_special_tokens": True})
        bos = special.get("bos_token")
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
        tokenizer_model: str | None = None,
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

    def __init__(self, *, vocab_size: int | None = None) -> None:
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


_CLASSES: dict[str, type[Tokenizer]] = {
    "ByteLevelTokenizer": ByteLevelTokenizer,
    "GPT2BPETokenizer": GPT2BPETokenizer,
    "SentencePieceTokenizer": SentencePieceTokenizer,
    "GPTSentencePieceTokenizer": SentencePieceTokenizer,
    "Llama2Tokenizer": SentencePieceTokenizer,
    "HuggingFaceTokenizer": HuggingFaceTokenizer,
    "TikTokenizer": TikTokenizer,
    "NullTokenizer": NullTokenizer,
}
"""By --tokenizer-type. The three SentencePiece names are one tokenizer, as in Megatron Core 0.16.1's build_tokenizer;
none of them prepends a begin-of-sentence id."""

TOKENIZER_TYPES = tuple(_CLASSES)
"""Values of --tokenizer-type."""


def build_tokenizer(tokenizer_type: str | None, **given: Any) -> Tokenizer:
    """The tokenizer of Megatron's flags of the same names: vocab_file, merge_file, tokenizer_model, vocab_size,
    tiktoken_pattern and tiktoken_num_special_tokens.

    Arguments that the type does not use are ignored, as stock recipes pass them. Without a type: NullTokenizer.

    Raises:
        ValueError: the type is unknown, or a file is absent or malformed; one line that names the flag.
    """
    tokenizer_type = tokenizer_type or "NullTokenizer"
    if tokenizer_type not in _CLASSES:
        raise ValueError(
            f"--tokenizer-type {tokenizer_type} is not supported; choose from {', '.join(TOKENIZER_TYPES)}"
        )
    build: Callable[..., Tokenizer] = _CLASSES[tokenizer_type]
    names = inspect.signature(build).parameters.keys() & given.keys()
    return build(**{name: given[name] for name in names})


def padded_vocab_size(vocab_size: int, make_vocab_size_divisible_by: int, tensor_model_parallel_size: int) -> int:
    """`vocab_size` rounded up to a multiple of both factors' product (stock Megatron's rule).

    50257 ids and 128 give 50304 rows at tensor parallel 1 and 50432 at 2.
    """
    multiple = make_vocab_size_divisible_by * tensor_model_parallel_size
    return -(-vocab_size // multiple) * multiple


def _required(flag: str, value: str | None, tokenizer_type: str) -> str:
    if not value:
        raise ValueError(f"{flag} is required by --tokenizer-type {tokenizer_type}")
    return value


def _existing_file(flag: str, value: str | None, tokenizer_type: str) -> str:
    path = _required(flag, value, tokenizer_type)
    if not os.path.isfile(path) or not os.access(path, os.R_OK):
        raise ValueError(f"{flag} {path} is no file that can be read")
    return path


# --- files


def read_vocab(path: str) -> dict[str, int]:
    """Ids by token of a JSON file. Raises ValueError naming --vocab-file."""
    try:
        with open(path, encoding="utf-8") as file:
            vocab = json.load(file)
    except ValueError as error:
        raise ValueError(f"--vocab-file {path} is not JSON: {one_line(error)}") from error
    if not isinstance(vocab, dict) or not _counts_from_zero(list(vocab.values())):
        raise ValueError(f"--vocab-file {path} must map every token to an id, 0 up to the number of tokens less 1")
    return vocab


def _counts_from_zero(ids: list[Any]) -> bool:
    return all(type(i) is int for i in ids) and sorted(ids) == list(range(len(ids)))


def read_merges(path: str) -> list[tuple[str, str]]:
    """Pairs in order of rank; the first line may be a "#version" line. Raises ValueError naming --merge-file."""
    merges = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                words = line.split()
                if (number == 1 and line.startswith("#version")) or not words:
                    continue
                if len(words) != 2:
                    raise ValueError(f"--merge-file {path}, line {number}: expected two tokens, not {len(words)}")
                merges.append((words[0], words[1]))
    except UnicodeDecodeError as error:
        raise ValueError(f"--merge-file {path} is not UTF-8 text: {one_line(error)}") from error
    return merges


TIKTOKEN_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""What cuts text into words, by --tiktoken-pattern; part of Megatron-LM's format."""
TIKTOKEN_SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")


def load_tiktoken(path: str, *, num_ids: int, num_special: int, pattern: str) -> tuple[Any, dict[str, int]]:
    """tiktoken's encoding of a JSON vocabulary, and the ids of its special tokens, which come first.

    Raises ValueError naming --tokenizer-model, --vocab-size or --tiktoken-num-special-tokens.
    """
    try:
        import tiktoken
    except ImportError as error:
        raise ValueError("--tokenizer-type TikTokenizer needs tiktoken: pip install tiktoken") from error
    if not len(TIKTOKEN_SPECIAL) <= num_special < num_ids:
        raise ValueError(
            f"--tiktoken-num-special-tokens {num_special}: must be at least {len(TIKTOKEN_SPECIAL)} and less than the "
            f"vocabulary of {num_ids} ids (--vocab-size)"
        )
    tokens = _read_tiktoken_vocab(path)
    if len(tokens) < num_ids - num_special:
        raise ValueError(
            f"--tokenizer-model {path} has {len(tokens)} tokens, too few for {num_ids} ids with {num_special} special "
            f"ones: give --vocab-size {len(tokens) + num_special} or less"
        )
    names = [*TIKTOKEN_SPECIAL, *(f"<SPECIAL_{i}>" for i in range(len(TIKTOKEN_SPECIAL), num_special))]
    special = {name: i for i, name in enumerate(names)}
    encoding = tiktoken.Encoding(
        name=os.path.basename(os.path.dirname(path)),
        pat_str=TIKTOKEN_PATTERNS[pattern],
        mergeable_ranks={token: num_special + i for i, token in enumerate(tokens[: num_ids - num_special])},
        special_tokens=special,
    )
    return encoding, special


def _read_tiktoken_vocab(path: str) -> list[bytes]:
    """Tokens in order of rank, of a JSON list of ``{"rank", "token_bytes", "token_str"}`` whose bytes are in base64.

    The first 256 are the single bytes. Raises ValueError naming --tokenizer-model.
    """
    problem = f"--tokenizer-model {path} is no vocabulary of TikTokenizer: "
    try:
        with open(path, encoding="utf-8") as file:
            entries = json.load(file)
        tokens = [base64.b64decode(entry["token_bytes"], validate=True) for entry in entries]
        ranks = [entry["rank"] for entry in entries]
    except (ValueError, TypeError, KeyError, binascii.Error) as error:
        raise ValueError(
            f"{problem}it must be a JSON list of objects with rank and token_bytes ({one_line(error)})"
        ) from error
    if ranks != list(range(len(ranks))) or tokens[:256] != [bytes([i]) for i in range(256)]:
        raise ValueError(f"{problem}ranks must count from 0, and the first 256 tokens be the single bytes")
    if len(set(tokens)) < len(tokens):
        raise ValueError(f"{problem}a token stands in it twice")
    return tokens


def load_tokenizer_json(folder: str) -> tuple[Any, dict[str, str]]:
    """The tokenizer of a folder's tokenizer.json and its special tokens. Raises ValueError naming --tokenizer-model."""
    from tokenizers import Tokenizer as Engine

    try:
        engine = Engine.from_file(os.path.join(folder, TOKENIZER_JSON))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"--tokenizer-model {folder}: cannot read its tokenizer.json: {one_line(error)}") from error
    # A model's input limits, saved along with it, must not truncate or pad documents.
    engine.no_truncation()
    engine.no_padding()
    engine.encode_special_tokens = bool(entries_of(folder, CONFIG).get("split_special_tokens"))
    return engine, _special_tokens(folder)


def load_with_transformers(folder: str) -> tuple[Any, dict[str, str]]:
    """The same through transformers' AutoTokenizer."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError(
            f"--tokenizer-model {folder} has no tokenizer.json; install transformers to read its other files"
        ) from error
    try:
        engine = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever the folder's tokenizer class raises
        raise ValueError(
            f"--tokenizer-model {folder} holds no tokenizer that transformers can read: {one_line(error)}"
        ) from error
    names = ("bos_token", "eos_token", "sep_token", "pad_token", "unk_token")
    return engine, {name: str(token) for name in names if (token := getattr(engine, name, None)) is not None}


def _special_tokens(folder: str) -> dict[str, str]:
    """eos_token and the like, from the folder's two small JSON files; the first takes precedence."""
    special: dict[str, str] = {}
    for name in (CONFIG, "special_tokens_map.json"):
        for key, value in entries_of(folder, name).items():
            token = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(token, str):
                special.setdefault(key, token)
    return special


def entries_of(folder: str, name: str) -> dict[str, Any]:
    """What a JSON file of a tokenizer's folder says; nothing if it is absent. Raises ValueError."""
    path = os.path.join(folder, name)
    if not os.path.isfile(path):
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            return dict(json.load(file))
    except ValueError as error:
        raise ValueError(f"--tokenizer-model {folder}: {name} is not JSON: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """An error's text without line breaks, cut to 200 characters."""
    return " ".join(str(error).split())[:200]
