"""--use-precision-aware-optimizer: Transformer Engine's Adam holds main parameters and moments.

`support.precision_aware_adam` replaces Transformer Engine's Adam, behind Megatron Core's distributed optimizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import precision_aware_adam, worlds
from support.dist import World

from megatron.bcd.blocks.partition import partition_from_config
from megatron.bcd.config import RunConfig
from megatron.bcd.planner.run_state import model_state_of

HOST = {"bcd_optimizer_state": "host"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "moments_mixed": ("one", {"exp_avg_dtype": "bf16", "main_grads_dtype": "bf16"}),
    "always_active": ("data2", HOST | {"bcd_always_active": "norms,embedding", "exp_avg_dtype": "bf16"}),
    "one_block": ("data2", {"bcd_num_blocks": 1, "overlap_grad_reduce": True, "overlap_param_gather": True}),
}
RESUMED: dict[str, tuple[str, dict[str, Any]]] = {
    "moments_bf16": ("data2", HOST | {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}),
}


def config_of(cut: str, text_data: str, **flags: Any) -> RunConfig:
    """Return two cycles of two steps per block, as parsed with Transformer Engine present."""
    with precision_aware_adam.installed():
        return worlds.run_config(
            **{"data_path": text_data, "micro_batch_size": 4, "bf16": True, "bcd_steps_per_block": 2, "train_iters": 11}
            | worlds.CUTS[cut]
            | flags
        )


def planned(config: RunConfig, *, num_replicas: int) -> list[int]:
    """Return the model state of each pipeline stage in its largest phase, in bytes, as --dry-run reports it."""
    partition = partition_from_config(config)
    state = model_state_of(config, partition, padded_vocab_size=257, num_replicas=num_replicas)
    return [state.largest_bytes(stage) for stage in range(partition.num_stages)]


@pytest.mark.parametrize("case", RESUMED)
def test_resumed_equals_uninterrupted(world1: World, world2: World, text_data: str, tmp_path: Path, case: str) -> None:
    """A stopped and resumed run equals the uninterrupted run bit for bit."""
    cut, flags = RESUMED[case]
    config = config_of(cut, text_data, use_precision_aware_optimizer=True, **flags)
    world = (world1, world2)[worlds.CUTS[cut].get("world_size", 1) - 1]
    result = world.run(precision_aware_adam.stopped_and_resumed, config, [3], str(tmp_path))
    assert result == [[]] * world.size


@pytest.mark.parametrize("case", CASES)
def test_takes_the_steps_of_fp32_main_parameters(world1: World, world2: World, text_data: str, case: str) -> None:
    """The run takes the steps of fp32 main parameters, keeps its state across switches, stores the given dtypes, and
    saves the planned bytes.

    With fp32 moments the runs are equal to the bit: one weight that rounds in another way is enough to change losses by
    1e-3, because Adam and the orthogonal update amplify it.
    """
    cut, flags = CASES[case]
    moments = {name: flags.get(name, "fp32") for name in ("exp_avg_dtype", "exp_avg_sq_dtype")}
    logs = {"log_params_norm": True, "log_num_zeros_in_grad": True}
    config = config_of(cut, text_data, use_precision_aware_optimizer=True, **flags, **logs)
    other = {name: value for name, value in flags.items() if name not in (*moments, "main_grads_dtype")}
    bf16_gradients = {"grad_reduce_in_bf16": "main_grads_dtype" in flags}
    plain = config_of(cut, text_data, **other, **logs, **bf16_gradients)
    world = (world1, world2)[worlds.CUTS[cut].get("world_size", 1) - 1]
    names = {"fp32": "float32", "bf16": "bfloat16"}
    expected = {"exp_avg": names[moments["exp_avg_dtype"]], "exp_avg_sq": names[moments["exp_avg_sq_dtype"]]}
    states = [planned(run, num_replicas=2 if cut == "data2" else 1) for run in (plain, config)]
    saved = [whole - less for whole, less in zip(*states, strict=True)]
    is_rounded = "bf16" in moments.values()
    for rank, (actual, reference) in enumerate(
        zip(
            world.run(precision_aware_adam.train_run, config),
            world.run(precision_aware_adam.reference_run, plain),
            strict=True,
        )
    ):
        assert actual["dtypes"] == expected | {"master_param": "int16"}
        assert actual["changed"] == []
        assert actual["losses"] == pytest.approx(reference["losses"], rel=5e-3 if is_rounded else 0, abs=0)
        for ours, theirs in zip(actual["metrics"], reference["metrics"], strict=True):
            assert ours["params_norm"] == pytest.approx(theirs["params_norm"], rel=1e-3 if is_rounded else 0, abs=0)
            if not is_rounded:
                assert ours["grad_norm"] == theirs["grad_norm"]
                assert ours["num_zeros"] == theirs["num_zeros"]
        most = max(step[rank] for step in reference["model_state_bytes"])
        assert saved[0] > 0
        if "main_grads_dtype" in flags:  # the other run holds fp32 copies of its gradients too
            assert most - actual["model_state"] > saved[0]
        else:
            assert most - actual["model_state"] == pytest.approx(saved[0], rel=0.05)
