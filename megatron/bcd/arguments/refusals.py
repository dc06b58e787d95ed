"""Why a flag is refused, and what to give instead."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from megatron.bcd.arguments.stock import reason_of

_SIMILAR = 0.8
"""Similarity (difflib) from which another flag's name is worth suggesting."""
_OTHER_NAMES = {
    "--num-hidden-layers": "--num-layers",
    "--intermediate-size": "--ffn-hidden-size",
    "--num-key-value-heads": "--num-query-groups",
    "--rope-theta": "--rotary-base",
    "--learning-rate": "--lr",
    "--max-grad-norm": "--clip-grad",
    "--max-steps": "--train-iters",
    "--warmup": "--lr-warmup-fraction",
    "--batch-size": "--micro-batch-size",
    "--per-device-train-batch-size": "--micro-batch-size",
    "--gradient-accumulation-steps": "--global-batch-size",
    "--checkpoint-activations": "--recompute-granularity",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--zero-stage": "--use-distributed-optimizer",
    "--deepspeed": "--use-distributed-optimizer",
    "--output-dir": "--save",
    "--model-name-or-path": "--load-hf",
}
"""Flags of transformers, DeepSpeed and older Megatron-LM whose names are not similar to those here."""


class RefusedFlags(ValueError):
    """What is wrong with a command line; as text one line, also for several problems."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        listed = " ".join(f"({number}) {text}" for number, text in enumerate(self.problems, start=1))
        super().__init__(f"{len(problems)} problems: {listed}" if len(problems) > 1 else problems[0])


def refusal(name: str, known: frozenset[str]) -> str:
    """Why the flag is refused: it is not one of `known`."""
    reason = reason_of(name)
    if reason is not None:
        return f"{name} is a Megatron-LM flag that Megatron-BCD does not support ({reason})"
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=_SIMILAR)
    nearest = _OTHER_NAMES.get(name) or next(iter(near), None)
    return f"unknown flag {name}; " + (f"did you mean {nearest}?" if nearest else "--help lists all flags")
