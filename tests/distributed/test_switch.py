"""Properties that hold across switches: ranks decide alike (invariant 9), tied copies agree, fp16's loss scale
continues. Collectives over Python objects have the same result or error on every rank."""

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


def embeddings_after_every_phase(config: RunConfig) -> list[dict[str, torch.Tensor]]:
    """Return this rank's word embedding and output head, if any, at the end of every phase."""
    phases: list[dict[str, torch.Tensor]] = []

    def look(run: worlds.RecordedRun) -> None:
        with run.active.whole_parameters():
            weights = worlds.weights_of(run.model)
        phases.append({name: weights[name] for name in weights if "word_embeddings" in name or "output" in name})

    with worlds.started(config, before_switch=look) as run:
        run.train()
    return phases


@pytest.mark.parametrize(("layout", "precision"), [("pipeline2", {}), ("stage", {"bf16": True})])
def test_tied_copies_stay_equal(world2: World, text_data: str, layout: str, precision: dict[str, Any]) -> None:
    """Copies of a tied embedding are equal after every phase, and change in the phases of the embedding's block
    only."""
    num_blocks = {"pipeline2": 3, "stage": 2}[layout]
    flags = {"data_path": text_data, "bcd_steps_per_block": 2, "train_iters": 2 * num_blocks + 5}
    config = worlds.run_config(**flags, **worlds.CUTS[layout], **precision, lr_warmup_iters=1)
    first, last = world2.run(embeddings_after_every_phase, config)
    assert len(first) == len(last) == num_blocks + 2
    before = None
    for phase, (embedding, head) in enumerate(zip(first, last, strict=True)):
        copies = [*embedding.values(), *head.values()]
        assert len(copies) == 2
        assert torch.equal(*copies), f"phase {phase}"
        if before is not None:
            is_block_of_embedding = phase % num_blocks == 0
            assert torch.equal(copies[0], before) != is_block_of_embedding
        before = copies[0]


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
