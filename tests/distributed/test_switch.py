"""Properties that hold across switches: ranks decide alike (invariant 9), tied copies agree, fp16's loss scale
continues."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import worlds
from support.dist import World
from support.pairwise import Combination, all_combinations, thinned

from megatron.bcd.config import RunConfig

# overflows at first, then grows after every third step that was taken
LOSS_SCALING = {"fp16": True, "initial_loss_scale": 2**20, "hysteresis": 1, "loss_scale_window": 3}


@pytest.mark.parametrize("cut", ["data2", "tensor2", "pipeline2", "stage", "submodel"])
def test_every_rank_decides_alike(world2: World, text_data: str, cut: str) -> None:
    """All ranks take and skip the same steps and switch together, and fp16's loss scale follows its rule across
    switches."""
    flags = {"data_path": text_data, "bcd_steps_per_block": 4, "train_iters": 22} | LOSS_SCALING | worlds.CUTS[cut]
    config = worlds.run_config(no_use_distributed_optimizer=cut in ("tensor2", "stage"), **flags)
    first, second = world2.run(worlds.train_run, config)
    assert first["steps"] == second["steps"]
    assert first["switches"] == second["switches"] == [4, 8, 12, 16, 20]
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


@pytest.mark.parametrize(
    ("layout", "precision"), [("pipeline2", {}), ("stage", {"bf16": True}), ("submodel", {"bf16": True})]
)
def test_tied_copies_stay_equal(world2: World, text_data: str, layout: str, precision: dict[str, Any]) -> None:
    """Copies of a tied embedding are equal after every phase, and change in the phases of the embedding's block
    only."""
    num_blocks = {"pipeline2": 3, "stage": 2, "submodel": 6}[layout]
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


OVERLAP_FACTORS = {"cut": ["data2", "pipeline2_data2"], "layout": ["spread", "submodel"], "precision": ["fp32", "bf16"]}
OVERLAPS = all_combinations(OVERLAP_FACTORS, lambda case: True)


@pytest.mark.parametrize("case", thinned(OVERLAPS, keep_every=7), ids=lambda case: "-".join(case.values()))
def test_overlapped_communication_survives_switches(
    world2: World, world4: World, text_data: str, case: Combination
) -> None:
    """Overlapped reductions and gathers leave losses and evaluations unchanged across switches, within rounding."""
    is_bf16 = case["precision"] == "bf16"
    cut = {"world_size": 2} if case["cut"] == "data2" else {"world_size": 4, "pipeline_model_parallel_size": 2}
    flags = {"data_path": text_data, "bcd_steps_per_block": 2, "train_iters": 14, "bcd_layout": case["layout"]}
    flags |= {"bf16": is_bf16} | cut
    evaluation = {"eval_iters": 1, "eval_interval": 3, "ddp_bucket_size": 3000}
    world = world2 if case["cut"] == "data2" else world4
    plain = world.run(worlds.train_run, worlds.run_config(**flags, **evaluation))
    for overlap in ({"overlap_grad_reduce": True}, {"overlap_grad_reduce": True, "overlap_param_gather": True}):
        config = worlds.run_config(**flags, **evaluation, **overlap)
        for mine, other in zip(world.run(worlds.train_run, config), plain, strict=True):
            assert mine["blocks"] == other["blocks"]
            assert mine["losses"] == pytest.approx(other["losses"], rel=1e-2 if is_bf16 else 2e-5)
            assert len(mine["evaluations"]) == 5
            assert [loss for *_, loss in mine["evaluations"]] == pytest.approx(
                [loss for *_, loss in other["evaluations"]], rel=1e-2 if is_bf16 else 2e-5
            )
