"""The tokens that are learned, compared with the characters that published tokenizers report for each token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.small_text import questions
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Engine

from megatron.bcd.data.sft.text import Rendered, tokenize_sample
from megatron.bcd.tokenizer import Tokenizer

WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = {"gpt2": None, "llama3": WORD + r"\p{N}{1,3}" + REST, "qwen": WORD + r"\p{N}" + REST}
"""How each family splits text into words before byte-level BPE."""


class WithSpans(Tokenizer):
    """A GPT-2 vocabulary with a family's word splitting."""

    def __init__(self, files: dict[str, Path], words: str | None) -> None:
        vocab = json.loads(files["vocab_file"].read_text())
        lines = files["merge_file"].read_text(encoding="utf-8").splitlines()[1:]
        self._engine = Engine(models.BPE(vocab, [(a, b) for a, b in map(str.split, filter(None, lines))]))
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)
        self._engine.pre_tokenizer = (
            whole if words is None else pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(words), "isolated"), whole])
        )
        self._engine.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        super().__init__(vocab_size=len(vocab) + 2, eod=0)

    def tokenize(self, text: str) -> list[int]:
        return list(self._engine.encode(text).ids)

    def detokenize(self, ids: object) -> str:
        raise NotImplementedError

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return the first character and the end of each token."""
        return list(self._engine.encode(text).offsets)


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
    tokenizer = WithSpans(bpe_files, WORDS[family])
    for question, answer in questions():
        for before, learned, after in forms(question, answer) if answer else ():
            text, edges = before + learned + after, (len(before), len(before) + len(learned))
            tokens = tokenize_sample(Rendered(text=text, answers=(edges,), needs_end=False), tokenizer)
            for is_learned, (start, end) in zip(tokens.learned, tokenizer.spans(text), strict=True):
                if start < end:  # otherwise a byte inside a character, which contains no character
                    assert is_learned == (min(end, edges[1]) > max(start, edges[0])), (text, text[start:end])
