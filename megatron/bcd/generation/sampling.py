"""The next token from a model's logits.

Letters: B sequences, V rows of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen."""

    temperature: float = 0.0
    """0: the most likely token."""
    top_p: float = 1.0
    """Draw among the most likely tokens that have this much of the probability (nucleus sampling, arXiv 1904.09751)."""

    def __post_init__(self) -> None:
        """Raises ValueError for a value out of range, naming the tool's flag."""
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"--temperature {self.temperature:g}: must be 0 (the most likely token) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p {self.top_p:g}: must be more than 0, and at most 1")


def next_tokens(logits: Tensor, sampling: Sampling, generator: torch.Generator | None = None) -> Tensor:
    """One token for each row of `logits` [B, V], int64 [B]; `generator` is the CPU's, which draws alike on all."""
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    probabilities = torch.softmax(logits.double().cpu() / sampling.temperature, dim=-1)
    ordered, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    ordered[before >= sampling.top_p] = 0  # the first one always stays
    drawn = torch.multinomial(ordered, 1, generator=generator)
    return tokens.gather(-1, drawn).squeeze(-1).to(logits.device)
