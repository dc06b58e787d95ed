"""Flags of block coordinate descent (`--bcd-*`), their choices and defaults."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.bcd.config.option import option

DEFAULT_NUM_BLOCKS = 3
LAYOUTS = ("spread", "stage", "submodel")
SCHEDULES = ("bcd", "stock")
ORDERS = ("ascending", "descending", "random", "greedy")
SWITCHES = ("steps", "plateau")
OPTIMIZER_STATES = ("reset", "host")
ALWAYS_ACTIVE = ("norms", "embedding", "head")
CACHE_DTYPES = ("bf16", "fp32")


@dataclass(frozen=True, kw_only=True)
class BcdConfig:
    """Block coordinate descent (docs/concepts.md)."""

    bcd_num_blocks: int | None = option(
        None,
        "number of blocks M; each stage is cut into M submodels. 1 is ordinary full-parameter training. "
        f"Default {DEFAULT_NUM_BLOCKS}; with --bcd-layout stage it is the number of pipeline stages",
        type=int,
    )
    bcd_layout: str = option(
        "spread",
        "which submodels form a block: spread = the k-th of M submodels of every stage, stage = all of stage k, "
        "submodel = one submodel on one stage",
        choices=LAYOUTS,
    )
    bcd_steps_per_block: int = option(
        100, "training steps of one phase, after which the next block becomes active", type=int
    )
    bcd_order: str = option(
        "ascending",
        "in which order a cycle visits the blocks: random = an order of its own for each cycle, from --seed; greedy = "
        "the block with the largest gradient norm per parameter among those that the cycle has not visited yet",
        choices=ORDERS,
    )
    bcd_greedy_microbatches: int = option(
        4, "microbatches per data-parallel rank on which greedy order measures each block's gradient", type=int
    )
    bcd_switch: str = option(
        "steps",
        "what ends a phase: --bcd-steps-per-block, or a plateau of the training loss",
        choices=SWITCHES,
    )
    bcd_plateau_window: int = option(
        50,
        "steps over whose losses a mean is taken, and within which it has to improve, else the phase ends",
        type=int,
    )
    bcd_plateau_min_improvement: float = option(
        0.005, "least improvement of that mean that counts, relative to the best one", type=float
    )
    bcd_min_steps_per_block: int = option(1, "with --bcd-switch plateau: steps before which no phase ends", type=int)
    bcd_max_steps_per_block: int | None = option(
        None, "with --bcd-switch plateau: steps after which a phase ends anyway", type=int
    )
    bcd_stop_cycle_improvement: float | None = option(
        None,
        "end the run when a whole cycle improved the validation loss by less than this, relative to the cycle before "
        "(an evaluation follows each cycle)",
        type=float,
    )
    bcd_phase_warmup_steps: int = option(
        0, "steps at the beginning of each phase in which the learning rate rises to its full value", type=int
    )
    bcd_block_lr_multipliers: tuple[float, ...] | None = option(
        None, "a factor of the learning rate for each block", nargs="*", type=float, metavar="FACTOR"
    )
    bcd_optimizer_state: str = option(
        "reset",
        "what becomes of a block's optimizer state when its phase ends: reset = dropped, host = kept in host memory "
        "and brought back at the next visit",
        choices=OPTIMIZER_STATES,
    )
    bcd_always_active: str = option(
        "none",
        "parameters that are trained in every phase, beside the active block: none, or some of norms, embedding, head "
        "with commas in between",
        metavar="PARTS",
    )
    bcd_sample_ratio: float | None = option(
        None,
        "each phase draws a new subset of so much of one epoch of the training split, without replacement, and goes "
        "over it as often as its steps need; default: consecutive samples, as Megatron",
        type=float,
        metavar="RATIO",
    )
    bcd_prefix_cache: str | None = option(
        None,
        "folder in which the outputs of the layers before the active block are kept, so that a phase computes them "
        "once for each of its samples (needs --bcd-sample-ratio; a disk that all ranks share)",
    )
    bcd_prefix_cache_dtype: str = option("fp32", "precision of what is kept", choices=CACHE_DTYPES)
    bcd_prefix_cache_max_gib: float | None = option(
        None,
        "keep no more than so many GiB, all phases together; a phase that needs more computes; default: half of what "
        "is free on the disk",
        type=float,
        metavar="GIB",
    )
    bcd_schedule: str = option(
        "bcd",
        "pipeline schedule: bcd = stages before the first active layer run forward only and ahead, and no gradient is "
        "sent to them; stock = Megatron Core's own 1F1B, for comparison",
        choices=SCHEDULES,
    )
    bcd_run_ahead: int | None = option(
        None,
        "microbatches of the next iteration that forward-only stages compute while the others finish the present one "
        "(each costs one received activation on the first stage behind them); default: half as many as there "
        "are forward-only stages, a third where the last stage is the first active one",
        type=int,
    )

    @property
    def always_active(self) -> frozenset[str]:
        """Of ALWAYS_ACTIVE. Raises ValueError for anything else."""
        parts = self.bcd_always_active.split(",")
        if parts != ["none"] and not set(parts) <= set(ALWAYS_ACTIVE):
            raise ValueError(
                f"--bcd-always-active {self.bcd_always_active}: must be none, or some of {', '.join(ALWAYS_ACTIVE)} "
                "with commas in between"
            )
        return frozenset(parts) - {"none"}
