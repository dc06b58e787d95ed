"""Invariant 4: a step changes the active block and nothing else, and the run's own check detects violations."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import resumed_runs, worlds
from support.dist import World

from megatron.bcd.config import RunConfig
from megatron.bcd.model.builder import unwrap_model
from megatron.bcd.optim import switch_check

CUTS = worlds.CUTS | {"norms": worlds.PIPELINE | {"bcd_always_active": "norms"}}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True, "initial_loss_scale": 256},
}
CASES = [("one", "fp32"), ("data2", "bf16"), ("submodel", "fp16")]


def changes_of_every_step(config: RunConfig) -> list[dict[str, Any]]:
    """Return the names that each step changed, and the main parameters that changed and that exist."""
    before: dict[str, Any] = {}
    steps = []

    def remember(run: worlds.RecordedRun) -> None:
        before["weights"] = worlds.weights_of(run.model)
        before["main parameters"] = [main_param.detach().clone() for main_param in worlds.masters_of(run)]

    def compare(run: worlds.RecordedRun) -> None:
        main_params = worlds.masters_of(run)
        changed = [not torch.equal(*pair) for pair in zip(main_params, before["main parameters"], strict=True)]
        named = dict(unwrap_model(run.model).named_parameters())
        steps.append(
            {
                "block": run.results[-1]["block"],
                "changed": worlds.same_bits(worlds.weights_of(run.model), before["weights"]),
                "active": [name for name, parameter in named.items() if parameter.requires_grad],
                "frozen": [name for name, parameter in named.items() if not parameter.requires_grad],
                "main parameters": len(main_params),
                "changed_masters": sum(changed),
            }
        )
        remember(run)

    with worlds.started(config, after_build=remember, after_step=compare) as run:
        run.train()
    return steps


@pytest.mark.parametrize(("cut", "precision"), CASES)
def test_only_the_active_block_changes(world1: World, world2: World, text_data: str, cut: str, precision: str) -> None:
    """A step changes all main parameters of the active block, and no frozen weight."""
    num_blocks = {"stage": 2, "submodel": 6}.get(cut, 3)
    lengths = {"bcd_steps_per_block": 2, "train_iters": 2 * num_blocks + 2, "weight_decay": 0.1}
    flags = {"data_path": text_data} | lengths | CUTS[cut] | PRECISIONS[precision]
    ranks = (world2 if "world_size" in flags else world1).run(changes_of_every_step, worlds.run_config(**flags))
    for steps in ranks:
        assert [step["block"] for step in steps] == [i // 2 % num_blocks for i in range(len(steps))]
        for step in steps:
            assert set(step["changed"]).isdisjoint(step["frozen"])
            assert step["changed_masters"] == step["main parameters"]
            assert bool(step["changed"]) == bool(step["active"])
            if precision == "fp32":
                assert step["changed"] == step["active"]
    for at_once in zip(*ranks, strict=True):
        assert any(step["active"] for step in at_once)
    trained = [{name for step in steps for name in step["active"]} for steps in ranks]
    assert trained == [set(steps[0]["active"] + steps[0]["frozen"]) for steps in ranks], "a weight is never trained"


def run_with_a_fault(config: RunConfig, fault: str, rank: int) -> str:
    """Train, and from phase 1 on skip that rank's optimizer step or change a frozen weight; return how the run
    ended."""

    def provoke(run: worlds.RecordedRun) -> None:
        if run.state.phase_state.phase == 0 or torch.distributed.get_rank() != rank:
            return
        if fault == "idle":
            worlds.stop_block(run)
        else:
            frozen = [parameter for parameter in run.model.parameters() if not parameter.requires_grad]
            with torch.no_grad():
                frozen[-1].view(-1)[-1] += 1e-2

    with worlds.started(config, before_step=provoke) as run:
        try:
            run.train()
        except RuntimeError as error:
            return str(error)
    return "the run saw nothing"


@pytest.mark.parametrize(
    ("cut", "fault", "rank", "precision"),
    [
        ("pipeline2", "idle", 1, "bf16"),
        ("norms", "idle", 1, "fp32"),  # norms step, and the block does not
        ("stage", "thaw", 0, "bf16"),
    ],
)
def test_the_run_stops_at_a_switch_that_failed(
    world1: World, world2: World, text_data: str, cut: str, fault: str, rank: int, precision: str
) -> None:
    """All ranks stop with the same error if one rank's block does not step or a frozen weight changes after a
    switch."""
    flags = {"data_path": text_data} | CUTS[cut] | PRECISIONS[precision]
    world = world2 if "world_size" in flags else world1
    first, *others = world.run(run_with_a_fault, worlds.run_config(**flags), fault, rank)
    assert first.startswith("iteration 2, phase 1: block 1 ") and set(others) <= {first}
    assert ("stage(s)" if fault == "idle" else "rank(s)") + f" [{rank}]" in first


def test_the_check_after_a_resume(world1: World, text_data: str, tmp_path: Path) -> None:
    """After a resume, a first step without an update stops the run: loaded main parameters do not count as a change."""
    flags = {"data_path": text_data, "bcd_steps_per_block": 3, "bf16": True}
    config = worlds.run_config(**flags)
    world1.run(resumed_runs.one_part, resumed_runs.with_checkpoints(config, save=str(tmp_path), exit_interval=4))
    resumed = resumed_runs.with_checkpoints(config, load=str(tmp_path))
    [error] = world1.run(run_with_a_fault, resumed, "idle", 0)
    assert error.startswith("iteration 5, phase 1: block 1 ")


def checks_of_a_run(config: RunConfig, zero_gradient_at: list[int]) -> list[int]:
    """Return the iterations after whose step the run compared its weights."""
    checked: list[int] = []

    def zero_gradient(run: worlds.RecordedRun) -> None:
        if run.iteration + 1 not in zero_gradient_at:
            return
        model_config = run.active._model_config
        reduce = model_config.finalize_model_grads_func

        def reduce_and_zero(*args: Any, **kwargs: Any) -> None:
            reduce(*args, **kwargs)
            for gradients in run.active.core.gradients():
                gradients.zero_()
            model_config.finalize_model_grads_func = reduce

        model_config.finalize_model_grads_func = reduce_and_zero

    with worlds.started(config, before_step=zero_gradient) as run:
        check = switch_check.problem

        def counted(*args: Any) -> str | None:
            checked.append(run.iteration)
            return check(*args)

        with mock.patch.object(switch_check, "problem", counted):
            run.train()
    return checked


def test_the_check_waits_for_a_step_that_must_change_something(world1: World, text_data: str) -> None:
    """The check runs once a phase, after the first step whose learning rate and gradient are not zero."""
    flags = {"data_path": text_data, "bcd_steps_per_block": 3, "train_iters": 9, "lr_warmup_iters": 2}
    checked = world1.run(checks_of_a_run, worlds.run_config(**flags), [4, 5])[0]
    assert checked == [2, 6, 7], "the first step of the run has learning rate 0, steps 4 and 5 a gradient of 0"
