"""--adam-moments-dtype: runs whose moments have fewer bits."""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from support import resumed_runs, worlds
from support.dist import World
from support.pairwise import Combination, all_combinations, pairwise, thinned

from megatron.bcd.config import RunConfig
from megatron.bcd.optim import low_bit_adam

CUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "data2": {"world_size": 2},
    "whole": {"world_size": 2, "no_use_distributed_optimizer": True},
    "pipeline2": {"world_size": 2, "pipeline_model_parallel_size": 2},
}
DTYPES = ["bf16", "int8"]
FACTORS = {
    "cut": [*CUTS],
    "dtype": DTYPES,
    "policy": ["reset", "host"],
    "blocks": ["1", "3"],
    "precision": ["fp32", "bf16"],
    "always": ["none", "norms,embedding"],
    "stops": ["1_4", "8"],
}


def allowed(case: Combination) -> bool:
    return case["blocks"] == "3" or (case["policy"], case["always"]) == ("reset", "none")


CASES = pairwise(FACTORS, allowed)
LONG_CASES = [case for case in all_combinations(FACTORS, allowed) if case not in CASES]


def by_name(cases: list[Combination], *, keep_every: int = 1) -> pytest.MarkDecorator:
    cases = sorted(cases, key=lambda case: [*CUTS].index(case["cut"]))  # groups of ranks are kept from case to case
    return pytest.mark.parametrize(
        "case", thinned(cases, keep_every=keep_every), ids=lambda case: "-".join(case.values())
    )


def check(case: Combination, worlds_by_size: tuple[World, World], text_data: str, folder: Path) -> None:
    config = worlds.run_config(
        **CUTS[case["cut"]],
        data_path=text_data,
        micro_batch_size=4,
        bf16=case["precision"] == "bf16",
        bcd_num_blocks=int(case["blocks"]),
        bcd_steps_per_block=2,
        train_iters=11,
        bcd_optimizer_state=case["policy"],
        bcd_always_active=case["always"],
        adam_moments_dtype=case["dtype"],
    )
    world = worlds_by_size[CUTS[case["cut"]].get("world_size", 1) - 1]
    stops = tuple(int(stop) for stop in case["stops"].split("_"))
    assert world.run(resumed_runs.stopped_and_resumed, config, stops, str(folder)) == [[]] * world.size


@by_name(CASES, keep_every=2)
def test_resumed_equals_uninterrupted(
    world1: World, world2: World, text_data: str, tmp_path: Path, case: Combination
) -> None:
    """Codes, scales or steps that are not the same after a checkpoint in fp32, or chance that is drawn anew."""
    check(case, (world1, world2), text_data, tmp_path)


@pytest.mark.long
@by_name(LONG_CASES)
def test_resumed_equals_uninterrupted_in_all_combinations(
    world1: World, world2: World, text_data: str, tmp_path: Path, case: Combination
) -> None:
    """Three options that break together what no two of them break."""
    check(case, (world1, world2), text_data, tmp_path)


def small_run(text_data: str, dtype: str, **flags: Any) -> RunConfig:
    """30 steps of a model wide enough that padding hardly counts."""
    return worlds.run_config(
        **{
            "data_path": text_data,
            "adam_moments_dtype": dtype,
            "num_layers": 4,
            "hidden_size": 64,
            "train_iters": 30,
            "lr": 3e-3,
            "bcd_num_blocks": 2,
            "bcd_steps_per_block": 5,
        }
        | flags
    )


def trained(config: RunConfig) -> dict[str, Any]:
    """Losses; bytes of model state and of kept state, counted and as the banner tells."""
    with worlds.started(config) as one:
        one.train()
        last, summary = one.recorder.steps[-1], one.recorder.summary
        kinds = {
            str(tensor.dtype)
            for shard in one.active.own_shards().values()
            for tensor in shard.stored_moments().values()
        }
        return {
            "losses": [step["loss"] for step in one.results],
            "counted": list(last.model_state_bytes),
            "told": list(summary.blocks[one.active.block].model_state_bytes),
            "optimizer": max(one.active.state_bytes().optimizer_state, 0),
            "active": sum(shard.end - shard.start for shard in one.active.own_shards().values()),
            "host": max(last.host_state_bytes),
            "notes": [note for note in summary.notes if "kept in host memory" in note],
            "kinds": kinds,
            "training": summary.training,
        }  # fmt: skip


@pytest.mark.parametrize(("dtype", "moments"), [("bf16", 4), ("int8", 2 + 8 / 256)])
def test_training_and_bytes(world1: World, text_data: str, dtype: str, moments: float) -> None:
    """Moments too coarse to train with; fp32 copies that stay; a banner that does not know; a kept state of 8 bytes."""
    flags = {"bcd_optimizer_state": "host"}
    (exact,) = world1.run(trained, small_run(text_data, "fp32", **flags))
    (found,) = world1.run(trained, small_run(text_data, dtype, **flags))
    assert found["losses"][0] == exact["losses"][0] and found["losses"] != exact["losses"]
    assert statistics.mean(found["losses"][-5:]) == pytest.approx(statistics.mean(exact["losses"][-5:]), rel=0.005)
    assert found["kinds"] == {"bf16": {"torch.bfloat16"}, "int8": {"torch.int8", "torch.uint8", "torch.float32"}}[dtype]
    assert found["optimizer"] == pytest.approx(moments * found["active"], rel=0.01)
    assert found["counted"] == pytest.approx(found["told"], rel=0.01)
    assert found["host"] == pytest.approx(exact["host"] * moments / 8, rel=0.01)
    told = int(re.findall(r"([0-9,]+) bytes", found["notes"][0])[0].replace(",", ""))
    assert found["host"] == pytest.approx(told, rel=0.01) and f"adam with {dtype} moments" in found["training"]


@pytest.mark.parametrize(
    "dtype, cut",
    [
        ("bf16", "data2"),
        ("int8", "pipeline2"),
        pytest.param("int8", "data2", marks=pytest.mark.long),
        pytest.param("bf16", "pipeline2", marks=pytest.mark.long),
        pytest.param("bf16", "pipeline2_data2", marks=pytest.mark.long),
        pytest.param("int8", "pipeline2_data2", marks=pytest.mark.long),
    ],
)
def test_layouts_take_the_same_steps(
    world1: World, world2: World, world4: World, initial_weights: Any, dtype: str, cut: str
) -> None:
    """A rank whose moments are decoded with the scales of another shard; a tied embedding and its copy that are
    rounded differently. In 8 bits shards are divided into other blocks, so that steps agree as far as moments do."""
    more = {"pipeline2_data2": {"world_size": 4, "pipeline_model_parallel_size": 2}} | CUTS
    if (dtype, cut) == ("int8", "pipeline2_data2"):
        more[cut]["no_use_distributed_optimizer"] = True
    flags = initial_weights(bcd_num_blocks=3) | {
        "adam_moments_dtype": dtype,
        "bcd_steps_per_block": 3,
        "train_iters": 9,
    }
    stages = more[cut].get("pipeline_model_parallel_size", 1)
    (one,) = world1.run(worlds.train_run, worlds.run_config(**flags), blocks_of_stages=stages)
    ranks = (world4 if cut == "pipeline2_data2" else world2).run(
        worlds.train_run, worlds.run_config(**flags | more[cut])
    )
    tolerance = {"bf16": 1e-4, "int8": 2e-3}[dtype] if cut == "data2" else 1e-4
    assert all(rank["losses"] == pytest.approx(one["losses"], rel=tolerance) for rank in ranks)
    if stages == 2:
        embedding, copy = ranks[0]["weights"], ranks[-1]["weights"]
        tied = embedding["embedding.word_embeddings.weight"], copy["output_layer.weight"]
        assert torch.equal(*(torch.as_tensor(weight) for weight in tied))


def second_moments(config: RunConfig) -> dict[str, tuple[int, torch.Tensor]]:
    """After one step, this rank's shards as they are stored: index of the first element, and the elements."""
    with worlds.started(config) as one:
        one.train()
        return {n: (shard.start, shard.stored_moments()["exp_avg_sq"]) for n, shard in one.active.own_shards().items()}


def test_chance_is_that_of_the_whole_parameter(world1: World, world2: World, initial_weights: Any) -> None:
    """A shard that draws as if it were the start of its parameter: tied embeddings whose shards differ drift apart.
    Gradients are summed in another order, so that few elements are rounded otherwise."""
    flags = initial_weights(bcd_num_blocks=3) | {"adam_moments_dtype": "bf16", "train_iters": 1}
    (whole,) = world1.run(second_moments, worlds.run_config(**flags))
    shards = [
        each for rank in world2.run(second_moments, worlds.run_config(world_size=2, **flags)) for each in rank.items()
    ]
    assert any(start for _, (start, _) in shards)
    same = [stored == whole[name][1][start : start + stored.numel()] for name, (start, stored) in shards]
    assert torch.cat(same).double().mean() > 0.99


MATRICES: dict[str, dict[str, Any]] = {
    "muon": {"optimizer": "muon"},
    "resting": {"bcd_resting_update": "orthogonal"},
    "no_block": {"bcd_num_blocks": 0, "bcd_resting_update": "orthogonal", "bcd_always_active": "norms,embedding,head"},
}


@pytest.mark.parametrize("kind", MATRICES)
def test_resumed_beside_a_matrix_optimizer(world2: World, text_data: str, tmp_path: Path, kind: str) -> None:
    """What Adam steps beside Muon and inactive layers: moments in fp32 all the same, or not resumed."""
    flags = {"world_size": 2, "data_path": text_data, "adam_moments_dtype": "int8", "bcd_optimizer_state": "host"}
    config = worlds.run_config(**flags | MATRICES[kind], train_iters=6, bcd_steps_per_block=2)
    for found in world2.run(trained, config):
        assert found["kinds"] == {"torch.int8", "torch.uint8", "torch.float32"} or kind == "no_block"
        assert found["counted"] == pytest.approx(found["told"], rel=0.03)
    assert world2.run(resumed_runs.stopped_and_resumed, config, (1, 5), str(tmp_path)) == [[], []]


def resumed_moments(config: RunConfig, folder: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Second moments of a run that resumes, before its first step, beside those of its checkpoint in fp32."""
    with worlds.started(resumed_runs.with_checkpoints(config, load=folder)) as one:
        return {name: shard.moments()["exp_avg_sq"] for name, shard in one.active.own_shards().items()}


def test_a_resumed_run_may_store_moments_otherwise(world1: World, text_data: str, tmp_path: Path) -> None:
    """A checkpoint of fp32 moments that an 8-bit run starts without, or a checkpoint in codes that fp32 reads as
    numbers."""
    flags = {"data_path": text_data, "bcd_steps_per_block": 9}
    exact, coarse = (worlds.run_config(**flags, adam_moments_dtype=dtype) for dtype in ("fp32", "int8"))
    for config, folder in ((exact, str(tmp_path / "fp32")), (coarse, str(tmp_path / "int8"))):
        world1.run(resumed_runs.one_part, resumed_runs.with_checkpoints(config, save=folder, exit_interval=3))
    (of_fp32,) = world1.run(resumed_moments, exact, str(tmp_path / "fp32"))
    (rounded,) = world1.run(resumed_moments, coarse, str(tmp_path / "fp32"))
    (of_int8,) = world1.run(resumed_moments, coarse, str(tmp_path / "int8"))
    (as_fp32,) = world1.run(resumed_moments, exact, str(tmp_path / "int8"))
    for name, moment in of_fp32.items():
        expected = low_bit_adam.decode(low_bit_adam.encode({"exp_avg_sq": moment}, "int8"))["exp_avg_sq"]
        assert torch.equal(rounded[name], expected) and bool(moment.any())
        assert torch.equal(as_fp32[name], of_int8[name])
