"""What this project's studies measured of each method, for plans: the loss beside full Adam's, and the learning rate.

A method's name is `Recipe.name`. A new method is a row of `FINE_TUNING` or `PRETRAINING`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from megatron.bcd.planner.adapters import ADAPTERS, SUFFIX_ADAPTERS
from megatron.bcd.planner.recipe import FACTORED, Recipe


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What training by a method led to, beside full Adam at equal epochs."""

    rate: float | None
    """The best learning rate, over full Adam's; None: by number of blocks (`_RATE_OF_BLOCKS`)."""
    adapter_rate: float | None = None
    """--bcd-low-rank-lr-ratio."""
    loss: str | None = None
    """By how much it ended above full Adam's, lowest to highest; None: not measured."""
    runs: str = ""
    """Where the loss was measured."""
    model: str
    source: str = ""
    """The page, if not the task's."""


FINE_TUNING = {
    "full": Finding(rate=1, model="SmolLM2-135M"),
    "muon": Finding(rate=3, model="pretraining of 3 M parameters"),
    "finetune": Finding(
        rate=None, loss="+1 to +31 %", runs="2 to 30 blocks, instructions; 6, a new language", model="SmolLM2-135M"
    ),
    FACTORED: Finding(
        rate=1,
        loss="-1.3 to -0.1 %",
        runs="a new language and instructions, one seed",
        model="SmolLM2-135M",
        source="studies/gpu_hour.md",
    ),
    "paper": Finding(rate=None, model="preset finetune on SmolLM2-135M"),
    "pretrain": Finding(
        rate=1,
        loss="+2.3 %",
        runs="the update of inactive layers in preset finetune",
        model="11 M parameters, one rate",
    ),
    "lora": Finding(
        rate=10, loss="-0.1 to +11 %", runs="rank 16, instructions and a new language", model="SmolLM2-135M"
    ),
    "finetune+lora": Finding(
        rate=1, adapter_rate=7, loss="+0.2 to +7 %", runs="rank 16, the same", model="SmolLM2-135M"
    ),
}
"""Of --task sft. Source: docs/fine_tuning.md, Side by side."""
PRETRAINING = {
    "full": Finding(rate=1, model="3 M parameters"),
    "muon": Finding(rate=3, model="3 M parameters: 2 for a LLaMA, 4 for a GPT"),
    "paper": Finding(rate=1, model="3 M parameters"),
    "pretrain": Finding(rate=3, model="3 M parameters: 2 for a LLaMA, 4 for a GPT"),
}
"""Of --task pretrain, of which `estimate.MULTIPLIERS` has the cost. Source: docs/learning.md, Headline studies."""
_RATE_OF_BLOCKS = {1: 1.0, 2: 2.0, 6: 3.0, 30: 8.0}
"""Over full Adam's, by number of blocks (docs/fine_tuning.md, A published model, three times the data)."""
_FULL_RATES = {11e6: 3e-4, 135e6: 1e-4}
"""Full Adam's best rate in fine-tuning, by number of parameters (docs/fine_tuning.md, Side by side)."""
_PRETRAINING_RATE = 1e-4
"""Full Adam's, not measured: models of 3 M parameters want 1.5e-3, and larger ones less."""


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """--lr of a plan."""

    flag: str
    text: str
    """Where it is from, and whether it is a guess, in one line."""


def finding(recipe: Recipe) -> Finding:
    """Return what was measured of the recipe's method. Adapters beside an always active part count as beside
    blocks."""
    name = {"offload": "full"}.get(recipe.name, recipe.name)
    if recipe.low_rank and (name != "lora" or recipe.partition.always_active - {ADAPTERS, SUFFIX_ADAPTERS}):
        name = "finetune+lora"
    return (PRETRAINING if recipe.task == "pretrain" and name in PRETRAINING else FINE_TUNING)[name]


def learning_rate(recipe: Recipe) -> LearningRate:
    """Return the rate of the recipe's method, number of blocks and size, to one digit."""
    found, number = finding(recipe), recipe.partition.num_blocks
    times, of_blocks = found.rate, ""
    if times is None:
        times, of_blocks = _rate_of_blocks(number), f" with {number} block{'s' * (number > 1)}"
    if recipe.task == "sft":
        page, (full, guess) = "docs/fine_tuning.md", _full_rate(recipe.shape.num_parameters)
    else:
        page, full = "docs/learning.md", _PRETRAINING_RATE
        guess = f", full Adam's {_short(full)} as is usual at larger sizes"
    flag = _short(times * full)
    return LearningRate(
        flag=flag,
        text=f"learning rate {flag}{', a guess' * bool(guess)}: {times:.2g} x full Adam's{of_blocks} ({found.model}, "
        f"{found.source or page}){guess}",
    )


def _full_rate(num_parameters: int) -> tuple[float, str]:
    """Return full Adam's rate in fine-tuning, and what it is a guess by: away from the measured sizes it falls with the
    root of the size, as it does between them."""
    size = min(_FULL_RATES, key=lambda known: abs(math.log(num_parameters / known)))
    if size / 1.5 < num_parameters < size * 1.5:
        return _FULL_RATES[size], ""
    rate = _FULL_RATES[size] * math.sqrt(size / num_parameters)
    return rate, f", full Adam's {_short(rate)} by size from 3e-4 at 11 M and 1e-4 at 135 M parameters"


def _rate_of_blocks(number: int) -> float:
    """Interpolate `_RATE_OF_BLOCKS` between logarithms."""
    known = [*_RATE_OF_BLOCKS]
    upper = min(max(1, bisect_left(known, number)), len(known) - 1)
    low, high = known[upper - 1], known[upper]
    share = min(1.0, math.log(number / low) / math.log(high / low))
    rate: float = _RATE_OF_BLOCKS[low] * (_RATE_OF_BLOCKS[high] / _RATE_OF_BLOCKS[low]) ** share
    return rate


def _short(rate: float) -> str:
    """1e-4."""
    return f"{rate:.0e}".replace("e-0", "e-")
