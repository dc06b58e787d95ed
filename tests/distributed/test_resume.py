"""A run that was saved and resumed equals the uninterrupted one, bit for bit.

The suite takes some combinations of the options below: each pair of values occurs (`pairwise`). All of them, and four
ranks, run with `--long`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import resumed_runs, worlds
from support.dist import World
from support.pairwise import Combination, all_combinations, pairwise

NUM_ITERATIONS, STEPS_PER_BLOCK, LOG_INTERVAL = 8, 3, 3
CUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "pipeline2": {"world_size": 2, "pipeline_model_parallel_size": 2},
    "data2": {"world_size": 2},
    "tensor2": {"world_size": 2, "tensor_model_parallel_size": 2},
    "pipeline2_data2": {"world_size": 4, "pipeline_model_parallel_size": 2},
}
BLOCKS: dict[str, dict[str, Any]] = {
    "spread": {},
    "stage": {"bcd_layout": "stage", "bcd_num_blocks": None},
    "submodel": {"bcd_layout": "submodel"},
    "one_block": {"bcd_num_blocks": 1},  # its moments go on where a phase ends
}
LENGTHS: dict[str, dict[str, Any]] = {
    "iterations": {"train_iters": NUM_ITERATIONS},
    "samples": {"train_iters": None, "train_samples": NUM_ITERATIONS * 8 + 3},
    "rampup": {"train_iters": NUM_ITERATIONS, "rampup_batch_size": (4, 4, 16)},
}
OTHERS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "sharded": {},
    "whole": {"no_use_distributed_optimizer": True},
    "sync": {},
    "async": {"async_save": True},
}
# The first step of a run and of a phase, a switch; inside a phase and inside a log interval
STOPS = {"stopped_1_4": (1, 4), "saved_at_5": 5, "saved_at_6": 6}
FACTORS = {
    "cut": [*CUTS][:4],
    "blocks": [*BLOCKS],
    "precision": ["fp32", "bf16"],
    "optimizer": ["sharded", "whole"],
    "writing": ["sync", "async"],
    "length": [*LENGTHS],
    "stops": [*STOPS],
}


def allowed(case: Combination) -> bool:
    return case["blocks"] != "stage" or case["cut"].startswith("pipeline2")


CASES = pairwise(FACTORS, allowed)
LONG_CASES = [case for case in all_combinations(FACTORS | {"cut": [*CUTS]}, allowed) if case not in CASES]


def by_name(cases: list[Combination]) -> pytest.MarkDecorator:
    cases = sorted(cases, key=lambda case: [*CUTS].index(case["cut"]))  # groups of ranks are kept from case to case
    return pytest.mark.parametrize("case", cases, ids=["-".join(case.values()) for case in cases])


def config_of(case: Combination, text_data: str, folder: Path, **more_flags: Any) -> Any:
    flags = {
        "data_path": text_data,
        "micro_batch_size": 2 if case["length"] == "rampup" else 4,
        "bcd_steps_per_block": STEPS_PER_BLOCK,
        "log_interval": LOG_INTERVAL,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "lr_warmup_fraction": 0.1,
        "eval_iters": 1,
        "eval_interval": 4,
        "save": folder,
    }
    options = [OTHERS[case[name]] for name in ("precision", "optimizer", "writing")]
    for more in (CUTS[case["cut"]], BLOCKS[case["blocks"]], LENGTHS[case["length"]], *options):
        flags |= more
    return worlds.run_config(**flags | more_flags)


def check(case: Combination, world: World, text_data: str, folder: Path) -> None:
    config, stops = config_of(case, text_data, folder), STOPS[case["stops"]]
    run = resumed_runs.stopped_and_resumed if isinstance(stops, tuple) else resumed_runs.saved_in_passing
    assert world.run(run, config, stops, str(folder)) == [[]] * world.size


@by_name(CASES)
def test_resumed_equals_uninterrupted(
    world1: World, world2: World, text_data: str, tmp_path: Path, case: Combination
) -> None:
    """Anything that a run has and a checkpoint lacks; a save that disturbs; weights that change while written."""
    check(case, world1 if case["cut"] == "one" else world2, text_data, tmp_path)


@pytest.mark.long
@by_name(LONG_CASES)
def test_resumed_equals_uninterrupted_in_all_combinations(
    world1: World, world2: World, world4: World, text_data: str, tmp_path: Path, case: Combination
) -> None:
    """Three options that break together what no two of them break."""
    check(case, {1: world1, 2: world2, 4: world4}[CUTS[case["cut"]].get("world_size", 1)], text_data, tmp_path)


def test_fp16_goes_on_with_its_loss_scale(world2: World, text_data: str, tmp_path: Path) -> None:
    """A loss scale, its growth counter or its count of overflows that starts anew: other gradients, other skips."""
    fp16 = {"fp16": True, "initial_loss_scale": 2**19, "min_loss_scale": 1, "loss_scale_window": 2, "hysteresis": 2}
    case = {"cut": "pipeline2", "blocks": "submodel", "length": "iterations", "precision": "fp32"}
    config = config_of(case | {"optimizer": "sharded", "writing": "sync"}, text_data, tmp_path, **fp16, train_iters=9)
    whole = world2.run(resumed_runs.one_part, config)[0]
    scales, skips = [step["loss_scale"] for step in whole["steps"]], [norm is None for norm in whole["grad_norms"]]
    assert skips[:2] == [True, True] and not skips[-1] and scales[1] < scales[0] > min(scales) < scales[-1], scales
    assert world2.run(resumed_runs.stopped_and_resumed, config, (1, 2, 6), str(tmp_path)) == [[], []]
