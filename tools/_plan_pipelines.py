"""tools/plan.py --pipelines: layouts of blocks on one pipeline, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from _plan_output import LEARNING_NOTE, table

from megatron.bcd.planner.pipelines import LayoutTime


def show_pipelines(rows: Mapping[tuple[str, int], Sequence[LayoutTime]]) -> str:
    """A line for each layout of each model and number of stages."""
    first = next(iter(rows.values()))[0].recipe
    shown = [("model", "stages", "layout", "chunks", "cut", "recompute", "blocks", "to full", "GiB", "layers again")]
    for (model, stages), times in rows.items():
        for time in times:
            recipe = time.recipe
            shown.append(
                (
                    model,
                    str(stages),
                    time.name,
                    str(recipe.partition.num_chunks),
                    recipe.cut,
                    recipe.recompute,
                    str(recipe.partition.num_blocks),
                    f"{time.ratio:.3f}",
                    f"{time.peak_gib:.1f}{'' if time.fits else ' !'}",
                    f"{time.num_recomputed:.1f}",
                )
            )
    return "\n".join(
        [
            f"{first.cluster.gpu}, {first.precision}, sequence {first.tokens:,}, {first.num_microbatches} microbatches",
            table(shown, left=6),
            *_notes(first.cluster.memory_gib),
        ]
    )


def _notes(memory_gib: float) -> list[str]:
    """What the columns mean, and what changes learning."""
    return [
        "to full: iteration time, simulated, over full training's on as many stages (1F1B, even cut, nothing",
        "  recomputed, as if it fitted)",
        f"GiB: the largest rank's peak, of {memory_gib:g}; !: does not fit; layers again: recomputed, a phase's mean",
        LEARNING_NOTE,
    ]


def pipelines_as_list(rows: Mapping[tuple[str, int], Sequence[LayoutTime]]) -> list[dict[str, Any]]:
    """Plain values."""
    return [
        {
            "model": model,
            "stages": stages,
            "layout": time.name,
            "chunks": time.recipe.partition.num_chunks,
            "cut": time.recipe.cut,
            "recompute": time.recipe.recompute,
            "num_blocks": time.recipe.partition.num_blocks,
            "iteration_seconds": time.seconds,
            "ratio_to_full": time.ratio,
            "peak_gib": time.peak_gib,
            "fits": time.fits,
            "layers_recomputed": time.num_recomputed,
        }
        for (model, stages), times in rows.items()
        for time in times
    ]
