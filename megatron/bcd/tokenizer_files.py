"""Reads the files of tokenizers. Pure."""

from __future__ import annotations

import base64
import binascii
import json
import os
from typing import Any


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


TOKENIZER_JSON, CONFIG = "tokenizer.json", "tokenizer_config.json"


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
