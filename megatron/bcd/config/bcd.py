"""Flags of block coordinate descent (`--bcd-*`), their choices and defaults."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.bcd.config.option import option

DEFAULT_NUM_BLOCKS = 3
LONGEST_PHASES = {None: 100, "paper": 100, "pretrain": 50, "finetune": 50}
"""By --bcd-preset: steps of a phase at most where --bcd-steps-per-block is not given."""
LAYOUTS = ("spread", "strided", "stage", "submodel", "interleaved")
SCHEDULES = ("bcd", "stock")
ORDERS = ("ascending", "descending", "random", "greedy")
SWITCHES = ("steps", "plateau")
OPTIMIZER_STATES = ("reset", "host")
ALWAYS_ACTIVE = ("norms", "biases", "embedding", "head")
FROZEN = ("embedding", "head", "norms")
MAIN_PARAMS = ("host", "drop")
RESTING_UPDATES = ("none", "orthogonal", "normalized", "sign")
RESTING_LAYERS = ("all", "suffix")
CACHE_DTYPES = ("bf16", "fp32")


@dataclass(frozen=True, kw_only=True)
class BcdConfig:
    """Block coordinate descent (docs/concepts.md). A field's name is its flag's name."""

    bcd_preset: str | None = option(
        None,
        "a method: paper = block coordinate descent as published; pretrain = resting layers are updated too, blocks by "
        "Muon, measured on small models only (docs/learning.md); finetune = one layer a block, embedding frozen, "
        "an untied head always active (docs/fine_tuning.md). It sets flags that are not given, and the banner lists "
        "them",
        choices=("paper", "pretrain", "finetune"),
    )
    bcd_num_blocks: int | None = option(
        None,
        "number of blocks M; each stage is divided into M submodels. 1 is ordinary full-parameter training; 0 has no "
        "active block, only --bcd-resting-update and --bcd-always-active. "
        f"Default {DEFAULT_NUM_BLOCKS}; with --bcd-layout stage it is the number of pipeline stages",
        type=int,
    )
    bcd_layout: str = option(
        "spread",
        "which layers form a block: spread = the k-th of M submodels of every stage, strided = every M-th layer of "
        "every stage, stage = all of stage k, submodel = one submodel on one stage, interleaved = the k-th part of the "
        "model, of which every stage holds a piece (a virtual pipeline)",
        choices=LAYOUTS,
    )
    num_virtual_stages_per_pipeline_rank: int | None = option(
        None,
        "chunks of the model on every pipeline stage, a multiple of the blocks; more than 1 imply --bcd-layout "
        "interleaved, whose default is the number of blocks",
        type=int,
    )
    num_layers_per_virtual_pipeline_stage: int | None = option(
        None, "the same as layers of a chunk; must divide the layers of a pipeline stage", type=int
    )
    bcd_steps_per_block: float | None = option(
        None,
        "training steps of one phase, after which the next block becomes active. Default: as many as visit every block "
        f"equally often, at least twice, and at most {LONGEST_PHASES[None]} ({LONGEST_PHASES['finetune']} with preset "
        "finetune or pretrain)",
        type=int,
    )
    # derived, it is the mean of phases that differ by one step
    bcd_order: str = option(
        "ascending",
        "order in which a cycle visits the blocks: random = a new order for each cycle, from --seed; greedy = "
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
        "steps of the mean loss, and steps within which that mean must improve, else the phase ends",
        type=int,
    )
    bcd_plateau_min_improvement: float = option(
        0.005, "smallest improvement of that mean that counts, relative to the best one", type=float
    )
    bcd_min_steps_per_block: int = option(1, "with --bcd-switch plateau: least steps of a phase", type=int)
    bcd_max_steps_per_block: int | None = option(None, "with --bcd-switch plateau: most steps of a phase", type=int)
    bcd_stop_cycle_improvement: float | None = option(
        None,
        "end the run when a whole cycle improved the validation loss by less than this, relative to the cycle before; "
        "adds an evaluation after each cycle",
        type=float,
    )
    bcd_phase_warmup_steps: int = option(
        0, "steps at the start of each phase over which the learning rate rises to its full value", type=int
    )
    bcd_block_lr_multipliers: tuple[float, ...] | None = option(
        None, "one factor of the learning rate per block", nargs="*", type=float, metavar="FACTOR"
    )
    bcd_optimizer_state: str = option(
        "reset",
        "a block's optimizer state when its phase ends: reset = freed, host = kept in host memory and restored at "
        "the next visit",
        choices=OPTIMIZER_STATES,
    )
    bcd_main_params: str = option(
        "host",
        "with --bf16 or --fp16, a block's fp32 main parameters when its phase ends: host = what the weights lack of "
        "them is kept in host memory (2 bytes per parameter in bf16, 4 in fp16) and restored at the next visit, drop = "
        "the next visit starts from the rounded weights",
        choices=MAIN_PARAMS,
    )
    bcd_always_active: str | None = option(
        None,
        "parameters trained in every phase, beside the active block: none, or a comma-separated list of norms, biases "
        "(those of the layers), embedding, head. Default none; with --bcd-resting-update all of them, and none with "
        "--bcd-resting-layers suffix",
        metavar="PARTS",
    )
    bcd_frozen: str = option(
        "none",
        "parameters that no phase trains: none, or a comma-separated list of embedding, head, norms (all of them). "
        "They have no gradient and no optimizer state. A tied head and the embedding are frozen together",
        metavar="PARTS",
    )
    bcd_resting_update: str = option(
        "none",
        "rule without optimizer state that updates the layer matrices outside the active block: none = they are "
        "frozen; orthogonal = orthogonalised gradients (Newton-Schulz), normalized = each row of the gradient divided "
        "by its root mean square, sign = its sign. All but none compute every weight gradient",
        choices=RESTING_UPDATES,
    )
    bcd_resting_lr_ratio: float = option(
        0.2, "learning rate of resting layers over that of the active block; their updates have RMS 1", type=float
    )
    bcd_resting_layers: str = option(
        "all",
        "layers that --bcd-resting-update updates: all outside the block, or suffix = those after its first layer, so "
        "that stages before it still run forward only",
        choices=RESTING_LAYERS,
    )
    bcd_resting_grad_dtype: str = option(
        "bf16", "precision in which gradients of resting layers are accumulated and reduced", choices=CACHE_DTYPES
    )
    muon_momentum_dtype: str = option("fp32", "precision of Muon's momentum", choices=CACHE_DTYPES)
    muon_grad_dtype: str = option(
        "fp32",
        "precision in which gradients of matrices that Muon steps are accumulated and reduced",
        choices=CACHE_DTYPES,
    )
    bcd_sample_ratio: float | None = option(
        None,
        "each phase draws a new subset, this share of one epoch of the training split, without replacement, and "
        "repeats it as often as its steps need; default: consecutive samples, as Megatron-LM",
        type=float,
        metavar="RATIO",
    )
    bcd_prefix_cache: str | None = option(
        None,
        "folder for the outputs of the layers before the active block, so that a phase computes them once per sample "
        "(needs --bcd-sample-ratio, and a disk that all ranks share)",
    )
    bcd_prefix_cache_dtype: str = option("fp32", "precision of the stored outputs", choices=CACHE_DTYPES)
    bcd_prefix_cache_max_gib: float | None = option(
        None,
        "size limit in GiB, all phases together; a phase beyond it is computed as usual; default: half of the free "
        "disk space",
        type=float,
        metavar="GIB",
    )
    bcd_schedule: str = option(
        "bcd",
        "pipeline schedule: bcd = stages before the first active layer run forward only and ahead, and receive no "
        "gradient; stock = Megatron Core's own 1F1B, for comparison",
        choices=SCHEDULES,
    )
    bcd_run_ahead: int | None = option(
        None,
        "microbatches of the next iteration that forward-only stages compute while the others finish the current one "
        "(each costs one received activation on the first trainable stage); default: half the number of forward-only "
        "stages, a third if the last stage is the first trainable one",
        type=int,
    )

    @property
    def mean_steps(self) -> float:
        """Steps of a phase, on average; the most that they may be while the length of the run is not known."""
        steps = self.bcd_steps_per_block
        return LONGEST_PHASES[self.bcd_preset] if steps is None else steps

    @property
    def num_parts(self) -> int:
        """Chunks of every stage in layout interleaved."""
        num_blocks = DEFAULT_NUM_BLOCKS if self.bcd_num_blocks is None else self.bcd_num_blocks
        return self.num_virtual_stages_per_pipeline_rank or max(num_blocks, 1)

    @property
    def always_active(self) -> frozenset[str]:
        """The entries of --bcd-always-active, or its default, of which --bcd-frozen has none.

        Raises ValueError for one not in ALWAYS_ACTIVE.
        """
        if self.bcd_always_active is None:
            is_all = self.bcd_resting_update != "none" and self.bcd_resting_layers == "all"
            return frozenset(ALWAYS_ACTIVE if is_all else ()) - self.frozen
        return _parts("--bcd-always-active", self.bcd_always_active, ALWAYS_ACTIVE)

    @property
    def frozen(self) -> frozenset[str]:
        """The entries of --bcd-frozen. Raises ValueError for one not in FROZEN."""
        return _parts("--bcd-frozen", self.bcd_frozen, FROZEN)


def _parts(flag: str, value: str, choices: tuple[str, ...]) -> frozenset[str]:
    parts = value.split(",")
    if parts != ["none"] and not set(parts) <= set(choices):
        raise ValueError(f"{flag} {value}: must be none, or a comma-separated list of {', '.join(choices)}")
    return frozenset(parts) - {"none"}
