"""A model for lm-evaluation-harness (PyPI `lm_eval`), which must be installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.model import LM

from megatron.bcd.generation.generate import continuation, text_of
from megatron.bcd.generation.likelihood import of_texts, score, start_of_document, windows
from megatron.bcd.generation.load import LoadedModel
from megatron.bcd.generation.sampling import Sampling

MAX_NEW_TOKENS = 256
"""Of a task that says nothing."""


class HarnessModel(LM):
    """`loglikelihood`, `loglikelihood_rolling` and `generate_until` of a loaded model.

    lm_eval.simple_evaluate(model=HarnessModel(loaded), tasks=["hellaswag"])
    """

    def __init__(self, loaded: LoadedModel, *, batch_size: int = 8) -> None:
        super().__init__()
        self._loaded, self._batch_size = loaded, batch_size

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Of (context, continuation): log-likelihood of the continuation, and whether it is the greedy one.

        Raises:
            ValueError: a continuation is longer than the model's positions.
        """
        asked = [of_texts(self._loaded, *request.args) for request in requests]
        found = score(self._loaded, asked, batch_size=self._batch_size)
        return [(one.log_likelihood, one.is_greedy) for one in found]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Of (text,): log-likelihood of the whole text, in windows without overlap.

        Raises:
            ValueError: as `start_of_document`.
        """
        loaded, totals = self._loaded, []
        for request in requests:
            tokens = [*start_of_document(loaded)[-1:], *loaded.tokenize(request.args[0])]
            parts = list(windows(tokens, length=loaded.max_length, stride=loaded.max_length))
            totals.append(sum(one.log_likelihood for one in score(loaded, parts, batch_size=self._batch_size)))
        return totals

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Of (context, settings): the answer before the first of the settings' stop texts (`until`).

        A context that leaves no room for the longest answer loses its first tokens, but keeps half of the model's
        positions; the answer's limit is lowered instead. The number of a request is the seed of its draws.
        """
        return [self._answer(*request.args, seed=number) for number, request in enumerate(requests)]

    def _answer(self, context: str, settings: dict[str, Any], *, seed: int) -> str:
        stops = settings.get("until") or []
        stops = [stops] if isinstance(stops, str) else list(stops)
        limit = int(settings.get("max_gen_toks", settings.get("max_new_tokens", MAX_NEW_TOKENS)))
        prompt, positions = self._loaded.encode(context), self._loaded.max_length
        limit = min(limit, max(positions - len(prompt), positions // 2))
        prompt = prompt[-(positions - limit) :]
        found = continuation(
            self._loaded,
            prompt,
            max_new_tokens=limit,
            sampling=_sampling(settings),
            seed=seed,
            stops=lambda new: any(stop in text_of(self._loaded, prompt, new) for stop in stops),
        )
        text = text_of(self._loaded, prompt, found.tokens)
        ends = [text.find(stop) for stop in stops if stop in text]
        return text[: min(ends)] if ends else text


def _sampling(settings: Mapping[str, Any]) -> Sampling:
    """As transformers reads a task's settings: `do_sample` decides, and without it the temperature."""
    draws, given = settings.get("do_sample"), settings.get("temperature")
    temperature = float(given) if given is not None else 1.0 if draws else 0.0
    return Sampling(temperature=0.0 if draws is False else temperature, top_p=float(settings.get("top_p") or 1.0))
