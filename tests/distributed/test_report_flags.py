"""What a run reports: its routers' losses, and flags for logs, profiles and memory that change no result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import worlds
from support.dist import RankError, World

from megatron.bcd import trainer
from megatron.bcd.model.builder import unwrap_model
from megatron.bcd.runtime import memory


def run_of(config: Any) -> dict[str, Any]:
    """Return a run, how often freed memory was returned after passes and steps, and how data files were read."""
    calls: list[str] = []
    with worlds.started(config) as run:
        release = mock.Mock(side_effect=lambda: calls.append("released"))
        with mock.patch.object(trainer.memory, "release_cached_memory", release):
            run.train()
        dataset = run.splits.train.dataset
        speeds = [(record.tflops_per_gpu, record.step_time_ms) for record in run.recorder.steps]
        results = {"released": len(calls), "reader": type(dataset.bin_reader).__name__, "speeds": speeds}
        return worlds.outcome(run) | results


def config_of(text_data: str, **flags: Any) -> Any:
    return worlds.run_config(data_path=text_data, train_iters=4, bcd_num_blocks=1, **flags)


def test_change_nothing(world1: World, text_data: str, tmp_path: Path) -> None:
    """Each of these flags has its effect and leaves the losses unchanged."""
    assert memory.release_cached_memory is trainer.memory.release_cached_memory
    [plain] = world1.run(run_of, config_of(text_data))
    assert (plain["released"], plain["reader"]) == (0, "_MMapBinReader")
    assert plain["metrics"][0]["params_norm"] is plain["metrics"][0]["num_zeros"] is None
    asked = {"no_mmap_bin_files": True, "empty_unused_memory_level": 1, "log_throughput": True}
    profile = {"profile": True, "use_pytorch_profiler": True, "profile_step_start": 1, "profile_step_end": 2}
    [result] = world1.run(run_of, config_of(text_data, tensorboard_dir=tmp_path, **asked, **profile))
    assert result["losses"] == plain["losses"]
    assert (result["released"], result["reader"]) == (4, "_FileBinReader")
    assert world1.run(run_of, config_of(text_data, empty_unused_memory_level=2))[0]["released"] == 8
    [trace] = tmp_path.glob("*.pt.trace.json")
    names = [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]
    assert "aten::matmul" in names and sum(name.startswith("Optimizer.step") for name in names) == 1
    for tflops, milliseconds in result["speeds"]:
        # 6 layers of width 32, sequences of 32, 264 tokens; Megatron-LM's formula with half of the causal mask
        layers, hidden, length, vocabulary = 6, 32, 32, 264
        share = 1 + length / (12 * hidden) + vocabulary / (12 * layers * hidden)
        flops = 72 * 4 * length * layers * hidden**2 * share
        assert tflops == pytest.approx(flops / milliseconds / 1e9, rel=1e-9)


def broken_run(config: Any, at: int) -> dict[str, Any]:
    """Run with one wrong bit on the second rank after step `at`."""

    def break_weight(run: worlds.RecordedRun) -> None:
        if run.iteration + 1 == at and torch.distributed.get_rank() == 1:
            weights = dict(unwrap_model(run.model).named_parameters())
            with torch.no_grad():
                weights["decoder.final_layernorm.weight"].view(torch.int32)[3] ^= 1

    with worlds.started(config, after_step=break_weight) as run:
        run.train()
        return worlds.outcome(run)


def test_replicas_are_compared(world2: World, text_data: str) -> None:
    """A wrong bit on one rank ends the run at the next comparison of replicas, and equal replicas pass."""
    config = config_of(text_data, world_size=2, check_weight_hash_across_dp_replicas_interval=2)
    assert world2.run(broken_run, config, 0)[0]["losses"] == world2.run(broken_run, config, 0)[1]["losses"]
    problem = "iteration 4: weights of data-parallel ranks differ"
    with pytest.raises(RankError, match=problem):
        world2.run(broken_run, config, 4)


def of_two_runs(first: Any, second: Any) -> list[Any]:
    """Train one run after the other on this rank, and return the router losses of the second."""
    worlds.train_run(first)
    return [step["router_losses"] for step in worlds.train_run(second)["metrics"]]


def test_a_run_after_one_with_fewer_layers(world1: World) -> None:
    """A run reports the losses of its routers only, also after a run with fewer layers in the same process."""
    flags = worlds.EXPERTS | {"mock_data": True, "split": None, "bcd_num_blocks": 2}
    small, large = (worlds.run_config(**flags, num_layers=number) for number in (2, 4))
    [after_large] = world1.run(of_two_runs, large, large)
    [after_small] = world1.run(of_two_runs, small, large)
    assert after_small == after_large and after_small[0]
