"""What a partition must fulfil; each refusal is one line that names the flags. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.bcd.config import LAYOUTS

_TIED = frozenset({"embedding", "head"})


def with_tied_parts(parts: frozenset[str], *, tied: bool) -> frozenset[str]:
    """``parts`` with the embedding and a tied head, which is the same weight, both in it or neither."""
    return parts | _TIED if tied and parts & _TIED else parts


def check_sizes(*, layout: str, num_layers: int, num_stages: int) -> None:
    """The conditions of each value alone."""
    if layout not in LAYOUTS:
        raise ValueError(f"--bcd-layout {layout}: must be one of {', '.join(LAYOUTS)}")
    if num_layers < 1:
        raise ValueError(f"--num-layers {num_layers}: must be at least 1")
    if num_stages < 1:
        raise ValueError(f"--pipeline-model-parallel-size {num_stages}: must be at least 1")


def check_frozen(frozen: frozenset[str], *, always_active: frozenset[str], tied: bool) -> None:
    """The conditions of --bcd-frozen, with tied parts together."""
    both = sorted(frozen & with_tied_parts(always_active, tied=tied))
    if both:
        shared = " (a tied head is the embedding)" if tied and frozenset(both) & _TIED else ""
        raise ValueError(
            f"--bcd-frozen and --bcd-always-active both name {' and '.join(both)}{shared}: what is trained in every "
            "phase cannot be frozen; leave it out of one of them"
        )


def check_parts(num_parts: int, *, num_layers: int, num_stages: int, num_blocks: int) -> None:
    """The conditions of layout interleaved."""
    if num_parts < 1 or num_parts % num_blocks:
        raise ValueError(
            f"--bcd-layout interleaved with --bcd-num-blocks {num_blocks} and {num_parts} chunks of the model on every "
            "stage (--num-virtual-stages-per-pipeline-rank, --num-layers-per-virtual-pipeline-stage): the chunks must "
            "be a multiple of the blocks"
        )
    if num_layers < num_stages * num_parts:
        raise ValueError(
            f"--num-layers {num_layers} is too few: --bcd-layout interleaved with --pipeline-model-parallel-size "
            f"{num_stages} and {num_parts} chunks on every stage needs at least {num_stages * num_parts} layers; give "
            "more layers, fewer blocks or fewer stages"
        )


def check_all_rest(*, resting: str, always_active: frozenset[str], layout: str) -> None:
    """The conditions of --bcd-num-blocks 0."""
    if resting != "all":
        raise ValueError(
            "--bcd-num-blocks 0 trains all layers without optimizer state: give --bcd-resting-update orthogonal, with "
            "--bcd-resting-layers all"
        )
    if not always_active:
        raise ValueError(
            "--bcd-num-blocks 0: with --bcd-always-active none, or all of it in --bcd-frozen, no embedding, norm or "
            "head would be trained"
        )
    if layout not in ("spread", "strided"):
        raise ValueError(f"--bcd-num-blocks 0 has no blocks: leave out --bcd-layout {layout}")


def check_enough_layers(*, num_layers: int, num_stages: int, parts: int, layout: str) -> None:
    needed = num_stages * parts
    if num_layers >= needed:
        return
    if layout == "stage":
        asked, why = "", "one per pipeline stage"
    else:
        asked, why = f" and --bcd-num-blocks {parts}", "pipeline stages x blocks"
    if num_layers >= num_stages:
        remedy = f"give more layers or at most --bcd-num-blocks {num_layers // num_stages}"
        if layout in ("spread", "strided") and parts <= num_layers and parts % num_stages == 0:
            remedy += f", or --bcd-layout submodel --bcd-num-blocks {parts // num_stages}, which is {parts} blocks"
    else:
        remedy = "give more layers or fewer pipeline stages"
    raise ValueError(
        f"--num-layers {num_layers} is too few: --bcd-layout {layout} with --pipeline-model-parallel-size "
        f"{num_stages}{asked} needs at least {needed} layers ({why}); {remedy}"
    )


def check_stages(sizes: Sequence[int], *, num_layers: int, num_stages: int, parts: int, layout: str) -> None:
    if len(sizes) != num_stages or sum(sizes) != num_layers:
        raise ValueError(
            f"layers per pipeline stage {list(sizes)}: must be {num_stages} numbers "
            f"(--pipeline-model-parallel-size) with the sum {num_layers} (--num-layers)"
        )
    smallest = min(sizes)
    if smallest < parts:
        asked = "" if layout == "stage" else f" with --bcd-num-blocks {parts}"
        raise ValueError(
            f"pipeline stage {sizes.index(smallest)} holds too few layers ({smallest}): --bcd-layout {layout}"
            f"{asked} needs at least {parts} on every stage; cut the pipeline more evenly"
            + ("" if smallest < 1 or layout == "stage" else f" or give at most --bcd-num-blocks {smallest}")
        )
