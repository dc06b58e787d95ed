"""Prompts that are continued at every evaluation (--eval-generate).

Every new token is a forward pass of the pipeline's evaluation schedule over whole sequences, all prompts together: that
works under every parallel layout, and without a cache. Tokens are the most likely ones, so that no random number is
drawn.

Tensor shapes: P prompts (filled up to whole microbatches), B micro-batch size, S sequence length, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron.bcd.config import RunConfig
from megatron.bcd.data.prompts import read_prompts
from megatron.bcd.data.sft.chat_template import end_of_answer
from megatron.bcd.data.sft.records import Record
from megatron.bcd.data.sft.render import Renderer
from megatron.bcd.metrics.reporter import Reporter
from megatron.bcd.runtime import collectives, device
from megatron.bcd.tokenizer import Tokenizer
from megatron.bcd.training.forward_backward import ForwardBackward


class EvaluationSamples:
    """Continues the prompts of a file with the model as it is, and reports the texts."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer: Tokenizer,
        forward_backward: ForwardBackward,
        reporter: Reporter,
        *,
        should_stop: Callable[[], bool],
    ) -> None:
        """Read the file. A collective. `should_stop` is a collective too; every rank gets the same from it.

        Raises:
            ValueError: it can't be read, is empty, or a prompt (named by its line) does not fit.
        """
        path = config.report.eval_generate
        assert path is not None
        self._tokenizer, self._forward_backward, self._reporter = tokenizer, forward_backward, reporter
        self._should_stop = should_stop
        self._max_new_tokens = config.report.eval_generate_tokens
        self._seq_length, self._micro_batch_size = config.model.seq_length, config.training.micro_batch_size
        self._prompts: list[str] = collectives.on_rank_0(lambda: read_prompts(path, flag="--eval-generate"))
        renderer = Renderer(tokenizer, config.data.sft_prompt_format) if config.data.sft else None
        ends = {tokenizer.eod, end_of_answer(tokenizer) if config.data.sft else None}
        self._end_ids = torch.tensor([end for end in ends if end is not None])
        self._encoded = [self._encode(prompt, renderer, path) for prompt in self._prompts]
        # an interleaved pipeline takes microbatches by the number of stages
        microbatches = math.ceil(len(self._prompts) / self._micro_batch_size)
        self._num_microbatches = math.ceil(microbatches / config.pipeline_size) * config.pipeline_size

    def _encode(self, prompt: str, renderer: Renderer | None, path: str) -> list[int]:
        text = prompt if renderer is None else renderer.prompt(Record(prompt=prompt, is_instruction=True))
        ids = self._tokenizer.tokenize(text)
        if not 0 < len(ids) < self._seq_length:
            raise ValueError(
                f"--eval-generate {path}: {prompt[:40]!r} has {len(ids):,} tokens, and must have 1 to "
                f"{self._seq_length - 1:,}, less than --seq-length"
            )
        return ids

    @torch.no_grad()
    def run(self, iteration: int) -> None:
        """Report a continuation of every prompt, or that a signal came first. A collective of all ranks."""
        module = self._forward_backward.module
        with self._forward_backward.active.whole_parameters():
            module.eval()
            answers = self._answers()
            module.train()
        if answers is None:
            self._reporter.note(f"the samples after iteration {iteration} were stopped")
            return
        for prompt, answer in zip(self._prompts, answers, strict=True):
            text = self._tokenizer.detokenize(answer)
            self._reporter.note(f"sample after iteration {iteration}: {prompt!r} -> {text!r}")

    def _answers(self) -> list[list[int]] | None:
        """New tokens of every prompt, without the end token; None if a signal came first."""
        rows = self._num_microbatches * self._micro_batch_size
        encoded = [self._encoded[row % len(self._encoded)] for row in range(rows)]
        tokens = torch.full((rows, self._seq_length), self._tokenizer.eod, dtype=torch.int64)
        for row, ids in zip(tokens, encoded, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        lengths = torch.tensor([len(ids) for ids in encoded])
        is_open = torch.ones(rows, dtype=torch.bool)
        for _ in range(self._max_new_tokens):
            is_open &= lengths < self._seq_length
            if not is_open.any():
                break
            if self._should_stop():
                return None
            chosen = self._next(tokens, lengths)
            is_open &= ~torch.isin(chosen, self._end_ids)
            tokens[is_open, lengths[is_open]] = chosen[is_open]
            lengths += is_open
        pairs = zip(tokens, lengths.tolist(), self._encoded, strict=False)
        return [row[len(ids) : length].tolist() for row, length, ids in pairs]

    def _next(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """The most likely token after the first `lengths` [P] of `tokens` [P, S]; int64 [P], on every rank's CPU."""
        target = device.current()
        positions = torch.arange(self._seq_length, device=target)
        batches = (
            {"tokens": part.to(target), "lengths": ends.to(target), "position_ids": positions.expand(len(part), -1)}
            for part, ends in zip(
                tokens.split(self._micro_batch_size), lengths.split(self._micro_batch_size), strict=True
            )
        )
        reported = self._forward_backward.pipeline(
            forward_step_func=self._forward_step,
            data_iterator=batches,
            model=self._forward_backward.module,
            num_microbatches=self._num_microbatches,
            seq_length=self._seq_length,
            micro_batch_size=self._micro_batch_size,
            decoder_seq_length=self._seq_length,
            forward_only=True,
        )
        chosen = torch.zeros(len(tokens), dtype=torch.int64, device=target)
        if parallel_state.is_pipeline_last_stage():
            chosen = torch.cat([one["chosen"] for one in reported])
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            torch.distributed.broadcast(
                chosen,
                src=parallel_state.get_pipeline_model_parallel_last_rank(),
                group=parallel_state.get_pipeline_model_parallel_group(),
            )
        return chosen.cpu()

    def _forward_step(
        self, batches: Iterator[dict[str, Tensor]], model: torch.nn.Module
    ) -> tuple[Tensor, Callable[[Tensor], Any]]:
        batch = next(batches)
        output = model(batch["tokens"], batch["position_ids"], None, runtime_gather_output=True)
        return output, partial(_chosen, batch["lengths"], self._tokenizer.vocab_size)


def evaluation_samples(
    config: RunConfig,
    tokenizer: Tokenizer,
    forward_backward: ForwardBackward,
    reporter: Reporter,
    *,
    should_stop: Callable[[], bool],
) -> EvaluationSamples | None:
    """Those of --eval-generate; None without it. A collective. Raises ValueError as `EvaluationSamples`."""
    if config.report.eval_generate is None:
        return None
    return EvaluationSamples(config, tokenizer, forward_backward, reporter, should_stop=should_stop)


def _chosen(lengths: Tensor, num_ids: int, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """In place of a loss: the most likely token at the end of each row of `logits` [B, S, V]."""
    rows = torch.arange(len(lengths), device=lengths.device)
    chosen = logits[rows, lengths - 1, :num_ids].argmax(dim=-1)
    nothing = torch.zeros((), device=logits.device)
    return nothing, torch.ones((), dtype=torch.int, device=logits.device), {"chosen": chosen}
