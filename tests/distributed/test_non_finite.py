"""A step whose loss or gradient is not finite is skipped on all ranks and counted; too many in a row end the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support import resumed_runs, worlds
from support.dist import World

from megatron.bcd.optim import step
from megatron.bcd.training.state import TrainingFailed

BAD_STEPS = (2, 3, 5)


def config_of(text_data: str, cut: str, **flags: Any) -> Any:
    base = {"data_path": text_data, "train_iters": 8, "bcd_steps_per_block": 4, "log_interval": 2}
    return worlds.run_config(**base | worlds.CUTS[cut] | flags)


class Spoiler:
    """Hooks that make steps fail on one rank, and compare weights and optimizer before and after each step."""

    def __init__(self, what: str, steps: tuple[int, ...], *, rank: int) -> None:
        self._what, self._steps = what, steps
        self._is_here = torch.distributed.get_rank() == rank
        self._original_loss = step.reduce_losses
        self._before: dict[str, torch.Tensor] = {}
        self.changed: list[list[str]] = []
        self.scheduler_steps: list[int] = []
        self.is_bad = False

    def hooks(self) -> dict[str, worlds.Hook]:
        return {"after_build": self.after_build, "before_step": self.before_step, "after_step": self.after_step}

    def after_build(self, run: worlds.RecordedRun) -> None:
        original = run.active.core.optimizer.prepare_grads

        def prepare_spoilt_grads() -> bool:
            if self.is_bad and self._what == "gradient":
                spoilt = next(p for p in run.active.parameters.active().values())
                spoilt.main_grad.view(-1)[0] = math.inf
            return original()

        run.active.core.optimizer.prepare_grads = prepare_spoilt_grads

    def before_step(self, run: worlds.RecordedRun) -> None:
        self.is_bad = run.iteration in self._steps and self._is_here
        is_loss = self.is_bad and self._what == "loss"
        step.reduce_losses = self._spoilt_losses if is_loss else self._original_loss
        self._before = self._state(run)

    def after_step(self, run: worlds.RecordedRun) -> None:
        step.reduce_losses = self._original_loss
        now = self._state(run)
        added = [name for name in now if name not in self._before]
        self.changed.append(added + worlds.same_bits({name: now[name] for name in self._before}, self._before))
        self.scheduler_steps.append(run.lr_scheduler.num_steps)

    def _spoilt_losses(self, reported: list[dict[str, torch.Tensor]], requests: Sequence[int]) -> Any:
        """Set the loss of one of this rank's microbatches to NaN before ranks are summed."""
        for losses in reported[:1]:
            losses["lm loss"][0] = math.nan
        return self._original_loss(reported, requests)

    @staticmethod
    def _state(run: worlds.RecordedRun) -> dict[str, torch.Tensor]:
        states = [
            (index, name, value.detach().clone().reshape(-1))
            for optimizer in run.active.core.optimizers()
            if not optimizer.is_stub_optimizer
            for index, state in enumerate(optimizer.optimizer.state.values())
            for name, value in state.items()
        ]
        return worlds.weights_of(run.model) | {f"{name} {index}": value for index, name, value in states}


def spoilt_run(config: Any, what: str, steps: tuple[int, ...], *, rank: int) -> dict[str, Any]:
    with worlds.parallel(config):
        spoiler = Spoiler(what, steps, rank=rank)
        run = worlds.RecordedRun(config, **spoiler.hooks())
        try:
            run.train()
            failed = None
        except TrainingFailed as error:
            failed = str(error)
        return {
            "failed": failed,
            "grad_norms": [step["grad_norm"] for step in run.results],
            "losses": [step["loss"] for step in run.results],
            "changed": spoiler.changed,
            "scheduler_steps": spoiler.scheduler_steps,
            "counted": [(record.iteration, record.skipped_iterations) for record in run.recorder.steps],
            "logged": [record.loss for record in run.recorder.steps],
            "weights": worlds.weights_of(run.model),
        }


@pytest.mark.parametrize(
    ("what", "cut", "rank", "precision"),
    [
        ("loss", "pipeline2", 1, {"bf16": True}),
        ("gradient", "data2", 1, {}),
    ],
)
def test_a_bad_step_is_skipped_everywhere(
    world2: World, text_data: str, what: str, cut: str, rank: int, precision: dict[str, Any]
) -> None:
    """If a loss or gradient is not finite on one rank, all ranks skip the step, change no weight or moment, and count
    it."""
    ranks = world2.run(spoilt_run, config_of(text_data, cut, **precision), what, BAD_STEPS, rank=rank)
    for mine in ranks:
        assert mine["failed"] is None
        assert [step for step, norm in enumerate(mine["grad_norms"]) if norm is None] == [*BAD_STEPS]
        assert [step for step, changed in enumerate(mine["changed"]) if not changed] == [*BAD_STEPS]
        assert mine["counted"] == [(1, 0), (2, 0), (4, 2), (6, 1), (8, 0)]
        good = [1, 2, 2, 2, 3, 3, 4, 5]
        assert mine["scheduler_steps"] == [4 * done for done in good]
        assert all(math.isfinite(mine["losses"][step]) for step in range(8) if step not in BAD_STEPS)
        assert math.isfinite(mine["logged"][3]), "the mean of the steps that were done"
        assert all(weight.isfinite().all() for weight in mine["weights"].values())


def test_too_many_in_a_row(world2: World, text_data: str, tmp_path: Path) -> None:
    """Too many skipped steps in a row end the run on all ranks, with an error that names the last checkpoint."""
    config = config_of(text_data, "pipeline2", save=tmp_path, save_interval=3, max_skipped_steps=3)
    for mine in world2.run(spoilt_run, config, "gradient", (1, 2, 4, 5, 6), rank=1):
        assert len(mine["losses"]) == 7
        assert mine["failed"].startswith("iteration 7")
        assert f"{tmp_path}/iter_0000006" in mine["failed"], mine["failed"]
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000003", "iter_0000006"]


def test_a_fixed_loss_scale_is_no_search(world1: World, text_data: str) -> None:
    """With a fixed loss scale in fp16, steps that overflow count and end the run."""
    config = worlds.run_config(data_path=text_data, fp16=True, loss_scale=1e12, max_skipped_steps=3)
    [mine] = world1.run(spoilt_run, config, "loss", (), rank=0)
    assert mine["grad_norms"] == [None] * 3
    assert mine["failed"].startswith("iteration 3")


def test_the_count_of_skipped_steps_is_resumed(world2: World, text_data: str, tmp_path: Path) -> None:
    """A resumed run continues the count of steps skipped in a row."""
    config = config_of(text_data, "data2", max_skipped_steps=4)
    saving = resumed_runs.with_checkpoints(config, save=str(tmp_path), exit_interval=3)
    assert [part["failed"] for part in world2.run(spoilt_run, saving, "loss", (1, 2, 3, 4, 5), rank=0)] == [None, None]
    loading = resumed_runs.with_checkpoints(config, load=str(tmp_path))
    for mine in world2.run(spoilt_run, loading, "loss", (1, 2, 3, 4, 5), rank=0):
        assert mine["failed"].startswith("iteration 5")


def test_no_check(world2: World, text_data: str) -> None:
    """With --no-check-for-nan-in-loss-and-grad no step is skipped, as in stock Megatron-LM."""
    config = config_of(text_data, "data2", no_check_for_nan_in_loss_and_grad=True)
    for mine in world2.run(spoilt_run, config, "loss", BAD_STEPS, rank=0):
        assert mine["failed"] is None and None not in mine["grad_norms"]
        assert [] not in mine["changed"]
