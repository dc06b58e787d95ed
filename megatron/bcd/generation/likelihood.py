"""Log-likelihoods of texts: of a continuation after its context, and of a whole text in windows.

Letters: B sequences, S tokens, V rows of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron.bcd.generation.cached_model import whole_logits
from megatron.bcd.generation.load import LoadedModel

DEFAULT_WINDOW = 4096
"""Most tokens of a window unless another length is given: a window's logits take as many times the vocabulary."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Tokens, of which the last `num_scored` are scored, each given those before it."""

    tokens: tuple[int, ...]
    num_scored: int

    def __post_init__(self) -> None:
        assert 0 < self.num_scored < len(self.tokens), "the first token has nothing before it"


@dataclass(frozen=True, kw_only=True)
class Score:
    """Of a request."""

    log_likelihood: float
    """Sum over the scored tokens, natural logarithm."""
    is_greedy: bool
    """Each scored token is the most likely one."""


@torch.no_grad()
def score(loaded: LoadedModel, requests: Sequence[Request], *, batch_size: int = 8) -> list[Score]:
    """In the order of `requests`, none longer than the model's positions plus 1; those of like length run together."""
    order = sorted(range(len(requests)), key=lambda index: -len(requests[index].tokens))
    found: dict[int, Score] = {}
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        found |= zip(indices, _score_batch(loaded, [requests[index] for index in indices]), strict=True)
    return [found[index] for index in range(len(requests))]


def _score_batch(loaded: LoadedModel, requests: Sequence[Request]) -> list[Score]:
    longest = max(len(request.tokens) for request in requests) - 1
    assert longest <= loaded.max_length, "the caller cuts long texts"
    tokens = torch.zeros(len(requests), longest, dtype=torch.int64)
    for row, request in zip(tokens, requests, strict=True):
        row[: len(request.tokens) - 1] = torch.tensor(request.tokens[:-1])
    logits = whole_logits(loaded.model, tokens.to(loaded.device))
    scores = []
    for row, request in zip(logits, requests, strict=True):
        last = len(request.tokens) - 1
        # padding follows the text, so nothing of the text sees it
        own = row[last - request.num_scored : last].float()
        targets = torch.tensor(request.tokens[-request.num_scored :], device=own.device)
        chosen = own.log_softmax(dim=-1).gather(-1, targets[:, None]).double()
        is_greedy = bool((own[:, : loaded.num_ids].argmax(dim=-1) == targets).all())
        scores.append(Score(log_likelihood=float(chosen.sum()), is_greedy=is_greedy))
    return scores


def after_context(loaded: LoadedModel, context: Sequence[int], continuation: Sequence[int]) -> Request:
    """The request for `continuation` after `context`, whose first tokens are left out where both are too long.

    An empty context stands for the start of a document: the model's begin token, else its end token.

    Raises:
        ValueError: the continuation is empty or alone too long, or nothing says what starts a document.
    """
    if not continuation:
        raise ValueError("a continuation without tokens has no likelihood")
    if len(continuation) > loaded.max_length:
        raise ValueError(
            f"a continuation of {len(continuation):,} tokens is longer than the model's {loaded.max_length:,} positions"
        )
    tokens = [*(context or start_of_document(loaded)), *continuation]
    return Request(tokens=tuple(tokens[-(loaded.max_length + 1) :]), num_scored=len(continuation))


def of_texts(loaded: LoadedModel, context: str, continuation: str) -> Request:
    """The request for one text after another, tokenized as one.

    White space between them belongs to the continuation, as its first token usually has it.

    Raises:
        ValueError: as `after_context`.
    """
    bare = context.rstrip()
    tail = context[len(bare) :] + continuation
    if not bare:
        return after_context(loaded, [], loaded.tokenize(tail))
    before, whole = loaded.encode(bare), loaded.encode(bare + tail)
    rest = whole[len(before) :]
    if not rest:  # the context's last token took the continuation in: score from where the two differ
        shared = next((i for i, (one, two) in enumerate(zip(before, whole, strict=False)) if one != two), len(whole))
        before, rest = whole[:shared], whole[shared:]
    return after_context(loaded, before, rest)


def start_of_document(loaded: LoadedModel) -> list[int]:
    """Tokens before a text that nothing precedes. Raises ValueError if nothing says which, or the model lacks it."""
    if loaded.begin_ids:
        return loaded.begin_ids
    if loaded.end_ids:
        return loaded.checked([min(loaded.end_ids)])
    if loaded.tokenizer is None:
        raise ValueError("nothing says which token starts a document: give --tokenizer-type")
    return loaded.checked([loaded.tokenizer.eod])


def windows(tokens: Sequence[int], *, length: int, stride: int) -> Iterator[Request]:
    """Requests that score every token but the first once.

    A window has up to `length` tokens before its last one, and moves on by `stride`; the first scores all of its
    tokens, each later one its last `stride`, which so have at least ``length - stride`` tokens before them.
    """
    done = 1
    while done < len(tokens):
        stop = min(len(tokens), length + 1 if done == 1 else done + stride)
        yield Request(tokens=tuple(tokens[max(0, stop - length - 1) : stop]), num_scored=stop - done)
        done = stop


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """Of a text."""

    log_likelihood: float
    num_tokens: int
    """Scored."""
    num_words: int
    """Between white space."""
    num_bytes: int
    """In UTF-8."""

    @property
    def loss(self) -> float:
        """Mean per token, natural logarithm: the training scripts' loss."""
        return -self.log_likelihood / self.num_tokens

    @property
    def per_token(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def per_word(self) -> float:
        """Comparable between tokenizers."""
        return math.exp(min(-self.log_likelihood / max(self.num_words, 1), 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Comparable between tokenizers."""
        return -self.log_likelihood / math.log(2) / max(self.num_bytes, 1)


def perplexity(
    loaded: LoadedModel, text: str, *, length: int | None = None, stride: int | None = None, batch_size: int = 8
) -> Perplexity:
    """Of `text` as one document, in `windows` of `length` tokens that move by `stride` (None: by `length`). Its first
    token follows the start of a document. `length` None: the model's positions, at most `DEFAULT_WINDOW`.

    Raises:
        ValueError: `length` or `stride` is out of range, or the text is empty; one line.
    """
    length = min(loaded.max_length, DEFAULT_WINDOW) if length is None else length
    stride = length if stride is None else stride
    if not 1 <= length <= loaded.max_length:
        raise ValueError(f"--seq-length {length}: must be 1 to {loaded.max_length:,}, the model's positions")
    if not 1 <= stride <= length:
        raise ValueError(f"--stride {stride}: must be 1 to {length:,}, the length of a window")
    tokens = loaded.tokenize(text)
    if not tokens:
        raise ValueError("the text is empty")
    requests = list(windows([*start_of_document(loaded)[-1:], *tokens], length=length, stride=stride))
    total = math.fsum(one.log_likelihood for one in score(loaded, requests, batch_size=batch_size))
    return Perplexity(
        log_likelihood=total,
        num_tokens=len(tokens),
        num_words=len(text.split()),
        num_bytes=len(text.encode("utf-8", errors="replace")),
    )
