"""Flags of tools/plan.py that would have no effect beside others: they are refused by name."""

from __future__ import annotations

import argparse

from megatron.bcd.planner.recipe import PRESET_OF

_CHUNKS = "num_virtual_stages_per_pipeline_rank"
_OF_BLOCKS = ("bcd_layout", "bcd_frozen", _CHUNKS)
_SET_BY_PIPELINES = ("pipeline_model_parallel_size", "recompute", "pipeline_cut", "bcd_layout", _CHUNKS)
_DEFAULTS = (None, "none", "even")
"""Of these flags; --bcd-frozen none changes what a preset freezes."""


def refuse_unused(arguments: argparse.Namespace, method: str) -> None:
    """Raises ValueError naming a flag that nothing would read."""
    if arguments.pipelines:
        for name in _SET_BY_PIPELINES:
            if getattr(arguments, name) not in _DEFAULTS:
                raise ValueError(
                    f"{_shown(arguments, name)} cannot be combined with --pipelines, which sets it itself: leave it out"
                )
        return
    if method not in PRESET_OF:
        for name in _OF_BLOCKS:
            if getattr(arguments, name) is not None:
                raise ValueError(
                    f"{_shown(arguments, name)} cannot be combined with --method {method}, which has no blocks: "
                    "leave it out"
                )
    if getattr(arguments, _CHUNKS) is not None and arguments.bcd_layout != "interleaved":
        raise ValueError(f"{_shown(arguments, _CHUNKS)} needs --bcd-layout interleaved: give both, or leave it out")


def _shown(arguments: argparse.Namespace, name: str) -> str:
    return f"--{name.replace('_', '-')} {getattr(arguments, name)}"
