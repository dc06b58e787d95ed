"""Text, questions and a GPT-2 vocabulary for tests: the same bytes with every Python and on every machine.

`tests/data/stock_megatron_cpu.json` has the SHA-256 of what stock Megatron-LM makes of them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from tokenizers.pre_tokenizers import ByteLevel

NUM_MERGES = 300
"""With 256 bytes and the end token 557 tokens, which stock pads to 640, and to 768 with tensor parallel size 2."""
ODD_WORDS = ("don't", "it's", "we'll", "1234", "3.5", "2026-11-28", "caf\u00e9", "\u65e5\u672c\u8a9e", "\U0001f600")
SIGNS = (".", ".", ".", "?", "!", ":", ";", " -", "...")


def draws(seed: int) -> Iterator[int]:
    """Yield numbers from 0 to 2^31 - 1 (Knuth's linear congruential generator, the upper bits)."""
    while True:
        seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
        yield seed >> 33


def sentences(seed: int) -> Iterator[str]:
    """Yield sentences of 3 to 12 invented words. Most words have four possible successors, which a model can learn."""
    numbers = draws(seed)
    syllables = [first + second for first in "bdfglmnprst" for second in ("a", "e", "in", "o", "ur")]
    words = [syllables[i * 7 % 55] + (syllables[i * i % 55] if i % 3 else "") for i in range(300)]
    word = 0
    while True:
        sentence = []
        for _ in range(3 + next(numbers) % 10):
            is_odd = next(numbers) % 12 == 0
            word = next(numbers) % 300 if is_odd else (word * 31 + next(numbers) % 4 + 1) % 300
            sentence.append(ODD_WORDS[next(numbers) % len(ODD_WORDS)] if is_odd else words[word])
        yield " ".join(sentence).capitalize() + SIGNS[next(numbers) % len(SIGNS)]


def documents(number: int = 1500) -> list[str]:
    """Return documents of one to six sentences, a line each."""
    numbers, lines = draws(1), sentences(2)
    return [" ".join(next(lines) for _ in range(1 + next(numbers) % 6)) for _ in range(number)]


def questions(number: int = 50) -> list[tuple[str, str]]:
    """Return questions and answers; answers have several lines, lists and code. Every tenth is empty."""
    numbers, lines = draws(3), sentences(4)
    forms = ("{}", "{} {}", "{}\n\n{}", "1. {}\n2. {}\n", "- {}\n  - {}", "```\n{}\n```\n{}", " {}\t{}", "({}) [{}]")
    return [
        (
            " ".join(next(lines) for _ in range(1 + next(numbers) % 2)),
            "" if i % 10 == 9 else forms[next(numbers) % len(forms)].format(next(lines), next(lines)),
        )
        for i in range(number)
    ]


def write_text(path: Path) -> Path:
    """Write the documents, one a line, with empty lines between some and white space at some ends."""
    path.write_text("".join(f"{'' if i % 7 else ' '}{text} \n" + "\n" * (i % 5 == 0) for i, text in
                            enumerate(documents())), encoding="utf-8")  # fmt: skip
    return path


def write_vocabulary(folder: Path) -> dict[str, Path]:
    """Train a byte-level BPE on the text and write it in GPT-2's files; return them by the name of their flag.

    Chunks end at white space only, so that there are tokens with letters and punctuation, as `:The`. They show where a
    tokenizer splits words.
    """
    letters = sorted(ByteLevel.alphabet())
    level = ByteLevel(add_prefix_space=False, use_regex=False)
    text = "\n".join([*documents(), *(answer for _, answer in questions())])
    chunks = Counter(re.findall(r" ?[^ \n\t]+|[ \n\t]+", text))
    words = {tuple(level.pre_tokenize_str(chunk)[0][0]): count for chunk, count in chunks.items()}
    merges: list[tuple[str, str]] = []
    while len(merges) < NUM_MERGES:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                pairs[pair] += count
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        words = {_merged(word, best): count for word, count in words.items()}
    tokens = [*letters, *map("".join, merges), "<|endoftext|>"]
    assert len({*tokens}) == 256 + NUM_MERGES + 1
    files = {"vocab_file": folder / "encoder.json", "merge_file": folder / "vocab.bpe"}
    files["vocab_file"].write_text(json.dumps({token: i for i, token in enumerate(tokens)}), encoding="utf-8")
    lines = ["#version: 0.2", *map(" ".join, merges)]
    files["merge_file"].write_text("\n".join(lines) + "\n", encoding="utf-8")
    return files


def _merged(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    merged: list[str] = []
    for symbol in word:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return tuple(merged)
