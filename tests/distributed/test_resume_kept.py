"""A resumed run equals the uninterrupted one, bit for bit, with every policy of optimizer state (invariant 7).

As in `test_resume`, the suite takes some combinations, each pair of values at least once, and `--long` all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import resumed_runs, worlds
from support.dist import World
from support.pairwise import Combination, all_combinations, pairwise

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
STOPS = {"stopped_1_4": (1, 4), "stopped_2_7": (2, 7), "stopped_9": (9,)}
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
        "micro_batch_size": 4,
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
    """Moments of a frozen block, low bits of a main parameter, a step count of always-active parameters that are
    lost."""
    check(case, world2, text_data, tmp_path)


@pytest.mark.long
@by_name(LONG_CASES)
def test_kept_state_is_resumed_in_all_combinations(
    world2: World, text_data: str, tmp_path: Path, case: Combination
) -> None:
    """Three options that break together what no two of them break."""
    check(case, world2, text_data, tmp_path)


def kept_after_resuming(config: Any, root: str, **options: Any) -> dict[int, set[str]]:
    """What there is of each block before the first step: names of tensors, of a parameter of any stage."""
    with worlds.started(resumed_runs.with_checkpoints(config, load=root, **options)) as one:
        one.active.dispose()
        held: list[dict[int, set[str]]] = [{}, {}]
        mine = {
            block: set().union(*(part.names() for part in kept.values()))
            for block, kept in one.active.kept.blocks.items()
        }
        torch.distributed.all_gather_object(held, mine)
        return {block: set().union(*(rank.get(block, set()) for rank in held)) for block in held[0] | held[1]}


def test_what_is_taken_of_what_was_kept(world2: World, text_data: str, tmp_path: Path) -> None:
    """--no-load-optim that takes a frozen block's moments all the same; a run with another policy that takes them."""
    flags = CUTS["submodel"] | {"data_path": text_data, "bf16": True, "num_layers": 4, "bcd_num_blocks": 2}
    host, reset = (worlds.run_config(**flags, train_iters=6, bcd_optimizer_state=one) for one in ("host", "reset"))
    stopping = resumed_runs.with_checkpoints(host, save=str(tmp_path), exit_interval=3)  # blocks 0, 1 and 2 are done
    world2.run(resumed_runs.one_part, stopping)
    moments, main_param = {"exp_avg", "exp_avg_sq"}, {"master"}
    everything = moments | main_param
    found = world2.run(kept_after_resuming, host, str(tmp_path))[0]
    assert found == {0: everything, 1: everything, 2: everything, 3: main_param}
    assert world2.run(kept_after_resuming, reset, str(tmp_path))[0] == dict.fromkeys(range(4), main_param)
    assert world2.run(kept_after_resuming, host, str(tmp_path), load_optim=False)[0] == {3: main_param}
