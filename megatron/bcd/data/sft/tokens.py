"""Records as token ids, and which of them are learned."""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import numpy.typing

from megatron.bcd.data.sft.records import Record
from megatron.bcd.data.sft.render import Rendered, Renderer
from megatron.bcd.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """One sample of N tokens."""

    ids: numpy.typing.NDArray[numpy.int32]
    """[N]"""
    learned: numpy.typing.NDArray[numpy.bool_]
    """[N]; whether the loss counts the prediction of the token."""


def tokens_of(record: Record, renderer: Renderer, tokenizer: Tokenizer) -> list[Tokens]:
    """Samples of a record, see `Renderer.samples`.

    Raises:
        ValueError: the record can't be rendered or tokenized; the message follows the record's place.
    """
    try:
        return [_tokenized(sample, tokenizer) for sample in renderer.samples(record)]
    except UnicodeError as error:
        raise ValueError(f"can't be tokenized ({error})") from error


def _tokenized(sample: Rendered, tokenizer: Tokenizer) -> Tokens:
    """The text is tokenized as a whole. A token of which a part belongs to an answer is learned."""
    ids = tokenizer.tokenize(sample.text)
    learned = numpy.zeros(len(ids) + sample.needs_end, dtype=bool)
    for start, end in sample.answers:
        last = len(ids) if end == len(sample.text) else _end_of(sample.text, end, ids, tokenizer)
        learned[_shared(tokenizer.tokenize(sample.text[:start]), ids) : last] = True
    if sample.needs_end:
        ids.append(tokenizer.eod)
        learned[-1] = True
    return Tokens(ids=numpy.array(ids, dtype=numpy.int32), learned=learned)


def _end_of(text: str, end: int, ids: list[int], tokenizer: Tokenizer) -> int:
    """Number of ids up to character `end` of the text, with the one that goes on behind it, if there is one.

    The ids that follow are those that the text behind `end` ends with when it stands alone.
    """
    before = tokenizer.tokenize(text[:end])
    shared = _shared(before, ids)
    if shared == len(before):
        return shared
    behind = _shared(tokenizer.tokenize(text[end:])[::-1], ids[::-1])
    return max(shared + 1, len(ids) - behind)


def _shared(left: list[int], right: list[int]) -> int:
    """Number of ids at the start that both have."""
    return next((i for i, (one, two) in enumerate(zip(left, right, strict=False)) if one != two), len(left))
