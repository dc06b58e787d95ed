"""A resumed run equals the uninterrupted one, bit for bit, with every policy of optimizer state (invariant 7).

As in `test_resume`, the suite takes some combinations, each pair of values at least once, and `--long` all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import resumed_runs
import worlds
from dist import World
from pairwise import Combination, all_combinations, pairwise

CUTS: dict[str, dict[str, Any]] = {
    "data2": {"world_size": 2},
    "pipeline2": {"world_size": 2, "pipeline_model_parallel_size": 2},
    "submodel": {"world_size": 2, "pipeline_model_parallel_size": 2, "bcd_layout": "submodel"},
    "tensor2": {"world_size": 2, "tensor_model_parallel_size": 2},
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True, "initial_loss_scale": 256},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "whole": {"no_use_distributed_optimizer": True},
    "sgd": {"optimizer": "sgd"},
}
ALWAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "norms": {"bcd_always_active": "norms"},
    "norms_embedding": {"bcd_always_active": "norms,embedding"},
}
# Inside a phase; at a switch, with and without a phase before it that kept something; in the second cycle
STOPS = {"stopped_1_2_5": (1, 2, 5), "stopped_4_7": (4, 7), "stopped_9": (9,)}
FACTORS = {
    "cut": [*CUTS],
    "policy": ["reset", "host"],
    "precision": [*PRECISIONS],
    "optimizer": [*OPTIMIZERS],
    "always": [*ALWAYS],
    "stops": [*STOPS],
}


def allowed(case: Combination) -> bool:
    return True


CASES = pairwise(FACTORS, allowed)
LONG_CASES = [case for case in all_combinations(FACTORS, allowed) if case not in CASES]


def by_name(cases: list[Combination]) -> pytest.MarkDecorator:
    cases = sorted(cases, key=lambda case: [*CUTS].index(case["cut"]))  # groups of ranks are kept from case to case
    return pytest.mark.parametrize("case", cases, ids=["-".join(case.values()) for case in cases])


def check(case: Combination, world: World, text_data: str, folder: Path) -> None:
    flags: dict[str, Any] = {
        "data_path": text_data,
        "num_layers": 4,
        "bcd_num_blocks": 2,
        "bcd_steps_per_block": 2,
        "train_iters": 11,
        "bcd_optimizer_state": case["policy"],
    }
    for more in (CUTS[case["cut"]], PRECISIONS[case["precision"]], OPTIMIZERS[case["optimizer"]]):
        flags |= more
    config = worlds.run_config(**flags, **ALWAYS[case["always"]])
    assert world.run(resumed_runs.stopped_and_resumed, config, STOPS[case["stops"]], str(folder)) == [[]] * world.size


@by_name(CASES)
def test_kept_state_is_resumed(world2: World, text_data: str, tmp_path: Path, case: Combination) -> None:
    """Moments of a frozen block, low bits of a master, a step count of always-active parameters that are lost."""
    check(case, world2, text_data, tmp_path)


@pytest.mark.long
@by_name(LONG_CASES)
def test_kept_state_is_resumed_in_all_combinations(
    world2: World, text_data: str, tmp_path: Path, case: Combination
) -> None:
    """Three options that break together what no two of them break."""
    check(case, world2, text_data, tmp_path)
