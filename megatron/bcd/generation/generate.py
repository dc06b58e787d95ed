"""Continues a prompt, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron.bcd.generation.cached_model import CachedModel
from megatron.bcd.generation.load import LoadedModel
from megatron.bcd.generation.sampling import Sampling, next_tokens


def check_prompt(loaded: LoadedModel, prompt: Sequence[int]) -> None:
    """Whether `prompt` can be continued.

    Raises:
        ValueError: it has no tokens, or as many as the model has positions.
    """
    if not prompt:
        raise ValueError("the prompt has no tokens: give at least a word")
    if len(prompt) >= loaded.max_length:
        raise ValueError(
            f"the prompt has {len(prompt):,} tokens, and the model has {loaded.max_length:,} positions: give a shorter "
            "one"
        )


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """What came after a prompt."""

    tokens: tuple[int, ...]
    """Without an end token."""
    is_ended: bool
    """The model gave an end token; otherwise the limit was reached."""


def continuation(
    loaded: LoadedModel,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    seed: int = 0,
    stops: Callable[[Sequence[int]], bool] = lambda tokens: False,
) -> Continuation:
    """Continue `prompt` until the model gives an end token, `max_new_tokens` or all positions are used, or `stops` is
    true of the new tokens.

    Raises:
        ValueError: as `check_prompt`.
    """
    check_prompt(loaded, prompt)
    sampling = sampling or Sampling()
    generator = torch.Generator().manual_seed(seed)
    max_length = min(len(prompt) + max_new_tokens, loaded.max_length)
    cached = CachedModel(loaded.model, batch_size=1, max_length=max_length)
    tokens = torch.tensor([list(prompt)], device=loaded.device)
    ends = loaded.end_ids | loaded.turn_end_ids
    new: list[int] = []
    while len(prompt) + len(new) < max_length and not stops(new):
        logits = cached.append(tokens)[:, : loaded.num_ids]
        chosen = next_tokens(logits, sampling, generator)
        if int(chosen) in ends:
            return Continuation(tokens=tuple(new), is_ended=True)
        new.append(int(chosen))
        tokens = chosen[:, None]
    return Continuation(tokens=tuple(new), is_ended=False)


def text_of(loaded: LoadedModel, prompt: Sequence[int], new: Sequence[int]) -> str:
    """The text of `new` after `prompt`: what is added to the prompt's own, as tokens alone may lose a space."""
    tokenizer = loaded.known_tokenizer()
    before, whole = tokenizer.detokenize(list(prompt)), tokenizer.detokenize([*prompt, *new])
    return whole[len(before) :] if whole.startswith(before) else tokenizer.detokenize(list(new))
