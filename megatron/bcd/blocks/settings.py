"""What a user asks of the phases, checked. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

ORDERS = ("ascending", "descending", "random", "greedy")
SWITCHES = ("steps", "plateau")


@dataclass(frozen=True, kw_only=True)
class BlockScheduleSettings:
    """Order, length, end and learning rate of the phases. Raises ValueError that names the flag of a bad value."""

    order: str = "ascending"
    """In which order a cycle visits the blocks. ``random``: an own order for each cycle, from ``seed``. ``greedy``: the
    block with the largest score among those that the cycle has not visited (Gauss-Southwell rule)."""
    switch: str = "steps"
    """What ends a phase: a number of ``steps``, or a ``plateau`` of the training loss."""
    steps_per_block: int = 100
    """Length of a phase in steps, with ``switch`` steps."""
    plateau_window: int = 50
    """Steps over whose training losses the mean is taken, and steps within which that mean has to improve. So no phase
    ends by a plateau before twice as many steps."""
    plateau_min_improvement: float = 0.005
    """The least improvement of the mean that counts, relative to the best mean; 0 takes any."""
    min_steps_per_block: int = 1
    """With ``switch`` plateau: steps before which no phase ends."""
    max_steps_per_block: int | None = None
    """With ``switch`` plateau: steps after which a phase ends anyway; None sets no bound."""
    stop_cycle_improvement: float | None = None
    """The run is over when a whole cycle improved the validation loss by less than this, relative to the loss at the
    end of the cycle before; None never ends it, 0 does when a cycle made it worse."""
    phase_warmup_steps: int = 0
    """Steps at the beginning of each phase in which the learning rate rises to its full value."""
    block_lr_multipliers: tuple[float, ...] = ()
    """A factor of the learning rate for each block; empty leaves it as it is."""
    seed: int = 1234
    """Of the random order."""

    def __post_init__(self) -> None:
        _check_choice("--bcd-order", self.order, ORDERS)
        _check_choice("--bcd-switch", self.switch, SWITCHES)
        _check_at_least("--bcd-steps-per-block", self.steps_per_block, 1)
        _check_at_least("--bcd-plateau-window", self.plateau_window, 1)
        _check_fraction("--bcd-plateau-min-improvement", self.plateau_min_improvement)
        _check_at_least("--bcd-min-steps-per-block", self.min_steps_per_block, 1)
        if self.max_steps_per_block is not None and self.max_steps_per_block < self.min_steps_per_block:
            raise ValueError(
                f"--bcd-max-steps-per-block {self.max_steps_per_block}: must be at least "
                f"--bcd-min-steps-per-block {self.min_steps_per_block}"
            )
        if self.stop_cycle_improvement is not None:
            _check_fraction("--bcd-stop-cycle-improvement", self.stop_cycle_improvement)
        self._check_warmup()
        for multiplier in self.block_lr_multipliers:
            if not (math.isfinite(multiplier) and multiplier > 0):
                raise ValueError(f"--bcd-block-lr-multipliers {multiplier}: each must be a finite number above 0")

    @property
    def least_steps(self) -> int:
        """Steps that every phase has at least, unless the run ends."""
        if self.switch == "steps":
            return self.steps_per_block
        least = max(self.min_steps_per_block, 2 * self.plateau_window)  # a best mean, and as long without a better one
        return least if self.max_steps_per_block is None else min(least, self.max_steps_per_block)

    def describe(self) -> str:
        """Order and length of the phases, for people."""
        if self.switch == "steps":
            length = f"{self.steps_per_block:,} step{'' if self.steps_per_block == 1 else 's'} per block"
        else:
            most = "" if self.max_steps_per_block is None else f" to {self.max_steps_per_block:,}"
            length = f"a block until its loss stops falling ({self.least_steps:,}{most or ' or more'} steps)"
        return f"{length}, {self.order} order"

    def _check_warmup(self) -> None:
        _check_at_least("--bcd-phase-warmup-steps", self.phase_warmup_steps, 0)
        if self.switch == "steps":
            flag, longest = "--bcd-steps-per-block", self.steps_per_block
        elif self.max_steps_per_block is not None:
            flag, longest = "--bcd-max-steps-per-block", self.max_steps_per_block
        else:
            return
        if self.phase_warmup_steps >= longest:
            raise ValueError(
                f"--bcd-phase-warmup-steps {self.phase_warmup_steps}: no phase would reach the full learning rate; "
                f"must be less than {flag} {longest}"
            )


def _check_choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{flag} {value}: must be one of {', '.join(choices)}")


def _check_at_least(flag: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{flag} {value}: must be at least {least}")


def _check_fraction(flag: str, value: float) -> None:
    if not 0 <= value < 1:  # false for NaN, too
        raise ValueError(f"{flag} {value}: must be at least 0 and less than 1 (0.01 is one percent)")
