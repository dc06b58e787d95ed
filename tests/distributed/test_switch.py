"""Properties that hold across switches: ranks decide alike (invariant 9), fp16's loss scale continues. The order of
blocks and their samples: end, subsets. Collectives over Python objects."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
from support import worlds
from support.dist import World

from megatron.bcd.blocks.subsets import PhaseSubset
from megatron.bcd.config import RunConfig
from megatron.bcd.runtime import collectives

# overflows at first, then grows after every third step that was taken
LOSS_SCALING = {"fp16": True, "initial_loss_scale": 2**20, "hysteresis": 1, "loss_scale_window": 3}


@pytest.mark.parametrize("cut", ["tensor2", "submodel"])
def test_every_rank_decides_alike(world2: World, text_data: str, cut: str) -> None:
    """All ranks take and skip the same steps and switch together, and fp16's loss scale follows its rule across
    switches."""
    flags = {"data_path": text_data, "bcd_steps_per_block": 4, "train_iters": 14} | LOSS_SCALING | worlds.CUTS[cut]
    config = worlds.run_config(**flags)
    first, second = world2.run(worlds.train_run, config)
    assert first["steps"] == second["steps"]
    assert first["switches"] == second["switches"] == [4, 8, 12]
    assert first["metrics"] == second["metrics"]
    assert any(step["grad_norm"] is None for step in first["steps"]), "no step was skipped: nothing is tested"
    assert_scale_follows_its_rule(first["steps"])
    scales = [step["loss_scale"] for step in first["steps"]]
    assert any(later > earlier for earlier, later in zip(scales, scales[1:], strict=False)), "it never grew"


def assert_scale_follows_its_rule(steps: list[dict[str, Any]]) -> None:
    """Check that a skipped step halves the scale and three successful steps double it, whatever the phases are."""
    scale, taken = float(LOSS_SCALING["initial_loss_scale"]), 0
    for step in steps:
        if step["grad_norm"] is None:
            scale, taken = scale / 2, 0
        else:
            taken += 1
            if taken == LOSS_SCALING["loss_scale_window"]:
                scale, taken = scale * 2, 0
        assert step["loss_scale"] == scale, step


def test_overlapped_communication_survives_switches(world4: World, text_data: str) -> None:
    """Overlapped reductions and gathers leave losses and evaluations unchanged across switches, within rounding."""
    flags = {"data_path": text_data, "bcd_layout": "submodel", "bf16": True, "train_iters": 8, "ddp_bucket_size": 3000}
    flags |= worlds.CUTS["pipeline2_data2"] | {"eval_iters": 1, "eval_interval": 3}
    plain = world4.run(worlds.train_run, worlds.run_config(**flags))
    overlapped = worlds.run_config(**flags, overlap_grad_reduce=True, overlap_param_gather=True)
    for mine, other in zip(world4.run(worlds.train_run, overlapped), plain, strict=True):
        assert mine["blocks"] == other["blocks"] and len(set(mine["blocks"])) == 6
        assert mine["losses"] == pytest.approx(other["losses"], rel=1e-2)
        losses, expected = ([loss for *_, loss in run["evaluations"]] for run in (mine, other))
        assert len(losses) == 3 and losses == pytest.approx(expected, rel=1e-2)


def two_ranks() -> AbstractContextManager[None]:
    return worlds.parallel(worlds.run_config(mock_data=True, split=None, world_size=2))


def long_on_rank_0(error: Exception | None) -> Any:
    """Return the result or error of a function that ends after three meetings of the ranks, and the meetings."""
    meetings = 0
    may_end = threading.Event()
    meet = collectives.on_rank_0

    def counted(function: Callable[[], Any]) -> Any:
        nonlocal meetings
        answer = meet(function)
        meetings += 1
        if meetings == 3:
            may_end.set()
        return answer

    def work() -> str:
        may_end.wait()
        if error is not None:
            raise error
        return f"done by rank {torch.distributed.get_rank()}"

    with two_ranks(), mock.patch.object(collectives, "on_rank_0", counted):
        try:
            answer = collectives.long_on_rank_0(work, pause=0.01)
        except Exception as raised:
            answer = str(raised)
        return answer, meetings > 3


def test_ranks_meet_while_rank_0_works(world2: World) -> None:
    """The ranks keep meeting while rank 0 works, and all get its result or its error."""
    assert world2.run(long_on_rank_0, None) == [("done by rank 0", True)] * 2
    assert world2.run(long_on_rank_0, ValueError("no space")) == [("no space", True)] * 2


def warnings_of(config: RunConfig) -> list[str]:
    with worlds.started(config) as run:
        run.train()
        return run.recorder.warnings


def test_blocks_without_a_phase(world1: World, text_data: str) -> None:
    """A run warns of blocks that it does not train, before it and after it. A run that trains all layers does not."""
    flags: dict[str, Any] = {"data_path": text_data, "train_iters": 8, "bcd_order": "random"}
    [warnings] = world1.run(warnings_of, worlds.run_config(**flags, bcd_steps_per_block=4))
    assert len(warnings) == 2 and all(warning.startswith("2 of 3 blocks are active") for warning in warnings)
    assert world1.run(warnings_of, worlds.run_config(**flags, bcd_steps_per_block=None)) == [[]]
    inactive = {"bcd_inactive_update": "orthogonal", "bcd_always_active": "norms,biases,embedding"}
    assert world1.run(warnings_of, worlds.run_config(**flags, **inactive, bcd_steps_per_block=4)) == [[]]


class Recording:
    """A dataset that records the requested samples."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.asked = dataset, list[int]()

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        return self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)


def samples_of_phases(config: RunConfig) -> dict[str, Any]:
    """Return the samples that this rank trained on in each phase, and the run's messages about them."""
    phases: list[list[int]] = []
    with worlds.started(config) as run:
        recording = run.samples.dataset = Recording(run.splits.train)

        def after_step(run: worlds.RecordedRun) -> None:
            phase = run.state.phase_state.phase
            phases.extend([] for _ in range(phase + 1 - len(phases)))
            phases[phase] += recording.asked
            recording.asked.clear()

        run.hooks["after_step"] = after_step
        run.train()
        return {
            "phases": phases,
            "num_samples": run.samples.epoch_samples,
            "length": len(run.splits.train),
            "seen": [record.data_seen for record in run.recorder.steps],
            "notes": run.recorder.summary.notes,
        }


def test_each_phase_trains_on_its_own_subset(world2: World, text_data: str) -> None:
    """Each phase trains on another subset, each sample once per pass, in one order for all ranks."""
    paths, ratio = ("3", text_data, "1", text_data), 0.002
    flags = {"data_path": paths, "bcd_sample_ratio": ratio, "bcd_steps_per_block": 4, "train_iters": 12, "seed": 5}
    flags |= {"global_batch_size": 8}
    first, second = world2.run(samples_of_phases, worlds.run_config(**flags | worlds.CUTS["data2"]))
    assert first["num_samples"] <= first["length"]
    subset = PhaseSubset(num_samples=first["num_samples"], ratio=ratio, seed=5)
    assert 8 < subset.size < 32, "a subset of more than a step and less than a phase"
    for phase, (mine, others) in enumerate(zip(first["phases"], second["phases"], strict=True)):
        drawn = [
            sample for start in range(0, len(mine), 2) for rank in (mine, others) for sample in rank[start : start + 2]
        ]
        assert drawn == subset.samples(phase, torch.arange(len(drawn)).numpy()).tolist()
        assert sorted(drawn[: subset.size]) == sorted(subset.indices(phase).tolist())
    assert first["seen"][-1] == pytest.approx(3 * subset.size / subset.num_samples)
    assert any("each phase trains on" in note for note in first["notes"])
