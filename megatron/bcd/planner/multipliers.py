"""B-F multipliers: iterations of a method over those of full training to the same loss."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.bcd.config import DEFAULT_NUM_BLOCKS


@dataclass(frozen=True, kw_only=True)
class Multiplier:
    """A B-F multiplier at three blocks."""

    value: float
    source: str


PAPER = Multiplier(value=2.44, source="the paper's two GPT-2 runs")
"""Adam and three blocks, 2.78 and 2.09 (table 2)."""
PRETRAIN = Multiplier(value=0.53, source="models of 0.7 to 3.3 M parameters, docs/learning.md; none larger measured")
"""At most that, in steps to full Adam's loss (studies/gpt_10_minutes.md, studies/gpt_wikitext_small.md); at most 0.44
in studies/gpt_headline.md, and 0.50 in studies/llama_headline.md."""
FINETUNE = Multiplier(value=1.0, source="assumed: equal epochs, as BAdam, LISA and BREAD report")
"""arXiv 2404.02827, 2403.17919 and ICML 2025's BREAD fine-tune as many epochs as full Adam. Not confirmed here: in the
small comparisons of docs/fine_tuning.md full Adam's loss was not reached."""
FULL = Multiplier(value=1.0, source="full training")
_OF_METHOD = {"bcd": PAPER, "pretrain": PRETRAIN, "finetune": FINETUNE}


def multiplier_of(method: str, num_blocks: int, given: float | None = None) -> Multiplier:
    """Of a method at ``num_blocks``; ``given`` replaces its value at three blocks.

    Raises ValueError if ``given`` is out of range.
    """
    if given is not None and not 0 < given < 1e6:
        raise ValueError(f"--bf-multiplier {given:g}: must be more than 0 and less than 1e6")
    known = _OF_METHOD.get(method)
    if known is None:
        return FULL
    at_three = known if given is None else Multiplier(value=given, source="--bf-multiplier")
    if method == "bcd":
        return Multiplier(value=multiplier_at(num_blocks, at_three.value), source=at_three.source)
    if method == "finetune":
        return at_three
    if given is None and num_blocks != DEFAULT_NUM_BLOCKS:
        return Multiplier(value=known.value, source=f"{known.source}; taken from three blocks")
    return at_three


def multiplier_at(num_blocks: int, at_three: float) -> float:
    """The B-F multiplier at ``num_blocks`` of the paper's method; 1 for one block.

    Table 11 of the paper has 2.22, 2.78 and 3.33 at two, three and four blocks (Adam): (M + 2) / 5 of that at three.
    A small GPT here had 2.24, 2.89 and more than 5 at two, three and six; this gives 4.6 at six (docs/learning.md).
    """
    return 1.0 if num_blocks == 1 else at_three * (num_blocks + 2) / 5
