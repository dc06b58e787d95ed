"""Tokenizers: convert text to token ids, under Megatron's --tokenizer-type names. Pure.

Ids equal those of stock Megatron-LM core_v0.16.1 without --legacy-tokenizer. ByteLevelTokenizer does not exist in
stock. One difference is deliberate: GPT2BPETokenizer reads a literal "<|endoftext|>" as ordinary text, like OpenAI's
encoder and the legacy tokenizer. Thus a document cannot forge a document boundary.

Those of megatron.core.tokenizers download GPT-2's files, number bytes differently or rebuild tokenizer.json by model
family, or are not worth the seconds in which every worker imports torch.
"""

from __future__ import annotations

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

TOKENIZER_JSON, CONFIG = "tokenizer.json", "tokenizer_config.json"
NO_PAD = -1
"""The pad id of a tokenizer without padding: Megatron Core's value for an id that no dataset contains."""


class Tokenizer(ABC):
    """Interface of all tokenizers.

    It has the attributes of Megatron Core's MegatronTokenizerBase that GPTDataset uses: `vocab_size`, `eod`, `pad` and
    `unique_identifiers` (hashed into the name of the dataset's index cache).
    """

    def __init__(self, *, vocab_size: int, eod: int, pad: int = NO_PAD, **identifiers: str) -> None:
        self.vocab_size = vocab_size
        """Number of ids including `eod`, without padding."""
        self.eod = eod
        """Id of the end of a document (--append-eod)."""
        # a pad equal to `eod` would remove the ends of documents from the loss
        self.pad = NO_PAD if pad == eod else pad
        """Id whose labels have no loss; NO_PAD if it would be `eod`."""
        kind = f"{type(self).__module__}.{type(self).__qualname__}"
        self.unique_identifiers: dict[str, str] = {"class": kind, **identifiers}
        """Class, files and options as text; equal for equally built tokenizers."""

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Return the ids of `text`, each in 0..vocab_size-1. Add no begin or end token."""


class ByteLevelTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0..255, and eod = 256. Needs no file."""

    def __init__(self) -> None:
        super().__init__(vocab_size=257, eod=256)

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))


class GPT2BPETokenizer(Tokenizer):
    """GPT-2's byte-level BPE, from its vocabulary (JSON) and merges files. eod is "<|endoftext|>".

    Raises ValueError: --vocab-file or --merge-file is missing or malformed.
    """

    EOD_TOKEN = "<|endoftext|>"

    def __init__(self, *, vocab_file: str | None = None, merge_file: str | None = None) -> None:
        vocab_file = _existing_file("--vocab-file", vocab_file, "GPT2BPETokenizer")
        merge_file = _existing_file("--merge-file", merge_file, "GPT2BPETokenizer")
        from tokenizers import Tokenizer as Engine
        from tokenizers import decoders, models, pre_tokenizers

        try:
            engine = Engine(models.BPE.from_file(vocab_file, merge_file))
        except Exception as error:  # the library raises Exception itself
            raise ValueError(
                f"--vocab-file {vocab_file} and --merge-file {merge_file}: are no vocabulary: {one_line(error)}"
            ) from error
        eod = engine.token_to_id(self.EOD_TOKEN)
        if eod is None:
            raise ValueError(f"--vocab-file {vocab_file}: has no token {self.EOD_TOKEN}. Give GPT-2's encoder.json.")
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        engine.decoder = decoders.ByteLevel()
        self.engine = engine
        num_ids = max(engine.get_vocab().values()) + 1
        super().__init__(vocab_size=num_ids, eod=eod, vocab_file=vocab_file, merge_file=merge_file)

    def tokenize(self, text: str) -> list[int]:
        return list(self.engine.encode(text).ids)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model file. eod is the model's end-of-sentence piece.

    Raises ValueError: --tokenizer-model is missing, is no SentencePiece model, or has no end-of-sentence piece.
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
                f"--tokenizer-model {path}: is not a SentencePiece model. Give a .model file (docs/data.md)."
            ) from error
        if self._model.eos_id() < 0:
            raise ValueError(
                f"--tokenizer-model {path}: has no end-of-sentence piece to end a document with. "
                "Train it with one (docs/data.md)."
            )
        super().__init__(
            vocab_size=self._model.get_piece_size(),
            eod=self._model.eos_id(),
            pad=self._model.pad_id(),
            tokenizer_model=path,
        )

    def tokenize(self, text: str) -> list[int]:
        return list(self._model.encode(text, out_type=int))


class HuggingFaceTokenizer(Tokenizer):
    """A local Hugging Face folder, read by transformers, from its tokenizer.json if it has one.

    eod is the folder's eos_token, or its sep_token if it has no eos_token. Special tokens in the text are recognised
    unless the folder sets split_special_tokens; none are added. Nothing is downloaded, and no code of the folder runs.

    Raises ValueError: --tokenizer-model is missing, unreadable or has no eos_token.
    """

    def __init__(self, *, tokenizer_model: str | None = None) -> None:
        folder = _required("--tokenizer-model", tokenizer_model, "HuggingFaceTokenizer")
        if not os.path.isdir(folder):
            raise ValueError(
                f"--tokenizer-model {folder}: is not a folder. "
                "HuggingFaceTokenizer needs a local one, because nothing is downloaded."
            )
        self.folder = folder
        try:
            self.engine = open_tokenizer(folder)
        except ValueError as error:
            raise ValueError(f"--tokenizer-model {error}") from error
        self.special_tokens: dict[str, str] = dict(self.engine.special_tokens_map)
        """Special tokens by the name that chat templates use: bos_token, eos_token, ..."""
        vocab: dict[str, int] = self.engine.get_vocab()
        eod_token = self.special_tokens.get("eos_token") or self.special_tokens.get("sep_token")
        if eod_token is None or eod_token not in vocab:
            raise ValueError(
                f"--tokenizer-model {folder}: names no known eos_token to end a document with. "
                'Set "eos_token" in its tokenizer_config.json to a token of its vocabulary.'
            )
        bos = self.special_tokens.get("bos_token")
        is_first = bos in vocab and list(self.engine.encode(""))[:1] == [vocab[bos]]
        self.start_of_text = bos if bos and is_first else ""
        """The token that the model expects before a text, or an empty string."""
        super().__init__(
            # not len(vocab): ids may have gaps, and the embedding needs a row for the largest
            vocab_size=max(vocab.values()) + 1,
            eod=vocab[eod_token],
            pad=vocab.get(self.special_tokens.get("pad_token", ""), NO_PAD),
            tokenizer_model=folder,
        )

    def tokenize(self, text: str) -> list[int]:
        return list(self.engine.encode(text, add_special_tokens=False, truncation=False, verbose=False))


class NullTokenizer(Tokenizer):
    """Text that consists of ids, "17 4 256", for --mock-data and for text tokenized elsewhere.

    As in Megatron, `vocab_size` ids 0..vocab_size-1 are followed by eod = vocab_size.
    """

    def __init__(self, *, vocab_size: int | None = None) -> None:
        if vocab_size is None:
            raise ValueError("--vocab-size: is required by --tokenizer-type NullTokenizer. Give the number of ids.")
        if vocab_size < 1:
            raise ValueError(f"--vocab-size {vocab_size}: is too small. Give at least 1.")
        super().__init__(vocab_size=vocab_size + 1, eod=vocab_size)

    def tokenize(self, text: str) -> list[int]:
        """Return the numbers in `text`. Raises ValueError: a word is not a number in 0..eod."""
        ids = []
        for word in text.split():
            if not (word.isascii() and word.isdigit() and int(word) <= self.eod):
                raise ValueError(f"NullTokenizer needs numbers from 0 to {self.eod}, not {word[:40]!r}")
            ids.append(int(word))
        return ids


_CLASSES: dict[str, type[Tokenizer]] = {
    "ByteLevelTokenizer": ByteLevelTokenizer,
    "GPT2BPETokenizer": GPT2BPETokenizer,
    "SentencePieceTokenizer": SentencePieceTokenizer,
    "GPTSentencePieceTokenizer": SentencePieceTokenizer,
    "Llama2Tokenizer": SentencePieceTokenizer,
    "HuggingFaceTokenizer": HuggingFaceTokenizer,
    "NullTokenizer": NullTokenizer,
}
"""Classes by --tokenizer-type. As in Megatron Core 0.16.1's build_tokenizer, the SentencePiece names mean the same
class, and it prepends no begin-of-sentence id."""

TOKENIZER_TYPES = tuple(_CLASSES)
"""Values of --tokenizer-type."""


def build_tokenizer(tokenizer_type: str | None, **options: Any) -> Tokenizer:
    """Return the tokenizer of this type, by default a NullTokenizer.

    The options are Megatron's flags: vocab_file, merge_file, tokenizer_model and vocab_size. Options that the type does
    not use are ignored, because stock recipes pass them.

    Raises:
        ValueError: the type is unknown, or a file is missing or malformed. One line that names the flag.
    """
    tokenizer_type = tokenizer_type or "NullTokenizer"
    if tokenizer_type not in _CLASSES:
        raise ValueError(
            f"--tokenizer-type {tokenizer_type}: is not supported. Give one of {', '.join(TOKENIZER_TYPES)}."
        )
    build: Callable[..., Tokenizer] = _CLASSES[tokenizer_type]
    names = inspect.signature(build).parameters.keys() & options.keys()
    return build(**{name: options[name] for name in names})


def padded_vocab_size(vocab_size: int, make_vocab_size_divisible_by: int, tensor_model_parallel_size: int) -> int:
    """Return `vocab_size` rounded up to a multiple of both factors' product, as stock Megatron-LM does.

    50257 ids and 128 give 50304 rows at tensor parallel 1 and 50432 at 2.
    """
    multiple = make_vocab_size_divisible_by * tensor_model_parallel_size
    return -(-vocab_size // multiple) * multiple


def _required(flag: str, value: str | None, tokenizer_type: str) -> str:
    if not value:
        raise ValueError(f"{flag}: is required by --tokenizer-type {tokenizer_type}. Give a path.")
    return value


def _existing_file(flag: str, value: str | None, tokenizer_type: str) -> str:
    path = _required(flag, value, tokenizer_type)
    if not os.path.isfile(path) or not os.access(path, os.R_OK):
        raise ValueError(f"{flag} {path}: is not a readable file. Give another path.")
    return path


def open_tokenizer(folder: str) -> Any:
    """Return transformers' tokenizer for a folder. Raises ValueError."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # the model families' own classes would rebuild parts of tokenizer.json
    is_whole = os.path.isfile(os.path.join(folder, TOKENIZER_JSON))
    kind = PreTrainedTokenizerFast if is_whole else AutoTokenizer
    try:
        return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a folder's tokenizer class may raise anything
        raise ValueError(f"{folder}: holds no tokenizer that transformers can read: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """Return an error's text on one line, truncated to 200 characters."""
    return " ".join(str(error).split())[:200]
