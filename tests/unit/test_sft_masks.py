"""The tokens that are learned, compared with the characters that published tokenizers report for each token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.small_text import questions
from tokenizers import Regex, pre_tokenizers

from megatron.bcd.data.sft.text import Rendered, tokenize_sample
from megatron.bcd.tokenizer import GPT2BPETokenizer

WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = {"gpt2": None, "llama3": WORD + r"\p{N}{1,3}" + REST, "qwen": WORD + r"\p{N}" + REST}
"""How each family splits text into words before byte-level BPE."""


def tokenizer_of(files: dict[str, Path], words: str | None) -> GPT2BPETokenizer:
    """Return a tokenizer with a GPT-2 vocabulary and a family's word splitting."""
    tokenizer = GPT2BPETokenizer(**{name: str(file) for name, file in files.items()})
    if words is not None:
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        split = pre_tokenizers.Split(Regex(words), "isolated")
        tokenizer.engine.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
    tokenizer.engine.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return tokenizer


def forms(question: str, answer: str) -> Iterator[tuple[str, str, str]]:
    """Yield prompt, answer and the rest, as templates produce them."""
    yield f"### Instruction:\n{question}\n\n### Response:", answer, ""
    start = "<|im_start|>"
    yield f"{start}user\n{question}<|im_end|>\n{start}assistant\n", f"{answer}<|im_end|>", f"\n{start}user"
    yield f"[INST] {question} [/INST]", f" {answer} ", "[INST] more [/INST]"
    yield f"USER: {question}\nASSISTANT: ", answer, "\nUSER: more"


@pytest.mark.parametrize("family", WORDS)
def test_learned_tokens_are_those_with_a_part_of_an_answer(family: str, bpe_files: dict[str, Path]) -> None:
    """A token is learned exactly if it has a part of an answer."""
    tokenizer = tokenizer_of(bpe_files, WORDS[family])
    for question, answer in questions():
        for before, learned, after in forms(question, answer) if answer else ():
            text, edges = before + learned + after, (len(before), len(before) + len(learned))
            tokens = tokenize_sample(Rendered(text=text, answers=(edges,), needs_end=False), tokenizer)
            for is_learned, (start, end) in zip(tokens.learned, tokenizer.engine.encode(text).offsets, strict=True):
                if start < end:  # otherwise a byte inside a character, which contains no character
                    assert is_learned == (min(end, edges[1]) > max(start, edges[0])), (text, text[start:end])
