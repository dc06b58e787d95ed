"""The results of this project's studies by method: loss relative to full Adam's, and learning rate.

A method's name is `Recipe.name`. To add a method, add a row to `FINE_TUNING` or `PRETRAINING`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from megatron.bcd.planner.recipe import Recipe

_PAGE = "studies/fine_tuning.md"
"""The results of --task sft."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The results of a method relative to full Adam at equal epochs."""

    rate: float | None
    """The best rate relative to full Adam's; None if it depends on the number of blocks (`_RATE_OF_BLOCKS`)."""
    loss: tuple[float, ...] = ()
    """Final loss above full Adam's in percent: lowest and highest, or a single number. Empty: not measured."""
    runs: str = ""
    """The runs with this loss."""
    parameters: float = 135e6
    """The size of their model."""
    tokens: tuple[int, ...] = (512, 1024)
    """Their tokens a step: least and most, or a single number."""
    model: str = "SmolLM2-135M"
    """The model of the learning rate, and of the loss."""

    @property
    def loss_text(self) -> str:
        """The loss as text, such as "+1 to +31 %"."""
        return f"{' to '.join(f'{number:+g}' for number in self.loss)} %"

    @property
    def place_text(self) -> str:
        """The size of the model and of the steps as text, such as "135M, 256 to 512 tokens a step"."""
        return f"{_size(self.parameters)}, {' to '.join(f'{number:,}' for number in self.tokens)} tokens a step"

    def describe_loss(self, recipe: Recipe) -> str:
        """Return the loss beside full training's, where it was measured, and the size of the recipe."""
        if not self.loss:
            return "not measured"
        yours = f"yours: {_size(recipe.num_parameters)}, {recipe.step_tokens:,}"
        return f"{self.loss_text} beside full training's, measured at {self.place_text} ({self.runs}; {_PAGE}); {yours}"


FINE_TUNING = {
    "full": Finding(rate=1),
    "muon": Finding(
        rate=1,
        loss=(-3.1, 0.4),
        runs="a new language, 500 steps, and instructions: one seed each",
    ),
    "finetune": Finding(
        rate=None,
        loss=(1, 31),
        runs="2 to 30 blocks, instructions; 6, a new language",
    ),
    "finetune, orthogonal": Finding(
        rate=2,
        loss=(-1.7, 2.2),
        runs="a new language, 500 steps, and instructions: one seed each",
    ),
    "finetune, factored": Finding(
        rate=1,
        loss=(-1.6, -0.2),
        runs="a new language, 200 steps, and instructions: three seeds each, at the best rate",
        tokens=(256, 512),
    ),
    "paper": Finding(rate=None, model="preset finetune on SmolLM2-135M"),
    "pretrain": Finding(
        rate=1,
        loss=(2.3,),
        runs="the update of inactive layers in preset finetune",
        parameters=11e6,
        tokens=(512,),
        model="11 M parameters, one rate",
    ),
}
"""The results of --task sft. Sources: studies/fine_tuning.md; docs/fine_tuning.md, Side by side."""
LARGE_STEP = 2048
"""Tokens a step from which LARGE_STEPS count."""
LARGE_STEPS = {
    name: Finding(
        rate=rate,
        loss=(loss,),
        runs="a new language, 125 steps, one seed",
        tokens=(4096,),
        model="SmolLM2-135M in steps of 4,096 tokens",
    )
    for name, rate, loss in (("muon", 4, -5.8), ("finetune, orthogonal", 8, -7.1), ("finetune, factored", 1, 0.8))
}
"""The results of --task sft with larger steps. Source: studies/fine_tuning.md, a_language_of_500_steps."""
PRETRAINING = {
    "full": Finding(rate=1, model="3 M parameters"),
    "muon": Finding(rate=3, model="3 M parameters: 2 for a LLaMA, 4 for a GPT"),
    "paper": Finding(rate=1, model="3 M parameters"),
    "pretrain": Finding(rate=3, model="3 M parameters: 2 for a LLaMA, 4 for a GPT"),
}
"""The results of --task pretrain; `estimate.MULTIPLIERS` has the costs. Source: docs/learning.md, Headline studies."""
_RATE_OF_BLOCKS = {1: 1.0, 2: 2.0, 6: 3.0, 30: 8.0}
"""The best rate over full Adam's, by number of blocks (studies/fine_tuning.md, one_epoch_of_1800_records)."""
_FULL_RATES = {11e6: 3e-4, 135e6: 1e-4}
"""Full Adam's best rate in fine-tuning, by number of parameters (docs/fine_tuning.md, Side by side)."""
_PRETRAINING_RATE = 1e-4
"""Full Adam's rate, not measured: models of 3 M parameters need 1.5e-3, and larger ones less."""
EXPERTS_TIME = 5.0
"""The measured time of a step with experts, layers in host memory, over that of the formulas, which count no launches
of kernels."""
EXPERTS_SOURCE = "as one H200 took for a quarter of Qwen3-30B-A3B; docs/experts.md, Speed"


def finding(recipe: Recipe) -> Finding:
    """Return the results of the recipe's method."""
    name = recipe.name.partition(", streamed")[0]
    name = "full" if name == "offload" else name
    if recipe.task == "pretrain" and name in PRETRAINING:
        return PRETRAINING[name]
    return (FINE_TUNING | (LARGE_STEPS if recipe.step_tokens >= LARGE_STEP else {}))[name]


def learning_rate(recipe: Recipe) -> tuple[str, str]:
    """Return --lr to one digit for the recipe's method, number of blocks and size, and a line about its source."""
    result, number = finding(recipe), recipe.partition.num_blocks
    times, with_blocks = result.rate, ""
    if times is None:
        times, with_blocks = _blocks_rate(number), f" with {number} block{'s' * (number > 1)}"
    if recipe.task == "sft":
        page, (full, guess) = _PAGE, _full_rate(recipe.num_parameters)
    else:
        page, full = "docs/learning.md", _PRETRAINING_RATE
        guess = f", full Adam's {_short(full)} as is usual at larger sizes"
    flag = _short(times * full)
    line = f"learning rate {flag}{', a guess' * bool(guess)}: {times:.2g} x full Adam's{with_blocks}"
    return flag, f"{line} ({result.model}, {page}){guess}"


def _full_rate(num_parameters: int) -> tuple[float, str]:
    """Return full Adam's rate in fine-tuning, and the reason if it is a guess."""
    # away from the measured sizes it falls with the root of the size, as it does between them
    size = min(_FULL_RATES, key=lambda known: abs(math.log(num_parameters / known)))
    if size / 1.5 < num_parameters < size * 1.5:
        return _FULL_RATES[size], ""
    rate = _FULL_RATES[size] * math.sqrt(size / num_parameters)
    return rate, f", full Adam's {_short(rate)} by size from 3e-4 at 11 M and 1e-4 at 135 M parameters"


def _blocks_rate(number: int) -> float:
    """Interpolate `_RATE_OF_BLOCKS` between logarithms."""
    known = [*_RATE_OF_BLOCKS]
    upper = min(max(1, bisect_left(known, number)), len(known) - 1)
    low, high = known[upper - 1], known[upper]
    share = min(1.0, math.log(number / low) / math.log(high / low))
    rate: float = _RATE_OF_BLOCKS[low] * (_RATE_OF_BLOCKS[high] / _RATE_OF_BLOCKS[low]) ** share
    return rate


def _size(parameters: float) -> str:
    """Return a number of parameters as text, such as 135M or 8.0B."""
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"


def _short(rate: float) -> str:
    """Return the rate as text, such as 1e-4."""
    return f"{rate:.0e}".replace("e-0", "e-")
