"""The samples of an evaluation: the next ones, --eval-fixed, --full-validation, and --skip-train afterwards."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import worlds
from support.dist import World

from megatron.bcd import data
from megatron.bcd.config import RunConfig

Flags = Callable[..., dict[str, Any]]
CUTS: dict[str, dict[str, Any]] = {
    **{name: worlds.CUTS[name] for name in ("one", "pipeline2", "data2")},
    "pipeline4": {"world_size": 4, "pipeline_model_parallel_size": 4, "bcd_num_blocks": 1},  # stages without data
}
STILL = {"lr": 1e-30, "weight_decay": 0.0, "eval_iters": 2, "eval_interval": 2, "split": "60,40,0"}
"""Weights that do not move, so that losses differ only by their samples."""


def records_of(run: worlds.RecordedRun) -> list[tuple[int, int, str, float, bool]]:
    records = run.recorder.evaluations
    return [(each.iteration, each.consumed_samples, each.split, each.loss, each.is_final) for each in records]


def evaluations(config: RunConfig) -> list[tuple[int, int, str, float, bool]]:
    """Return everything that this rank reports about a run's evaluations."""
    with worlds.started(config) as run:
        run.train()
        return records_of(run)


def evaluations_until_a_signal(config: RunConfig) -> list[tuple[int, int, str, float, bool]]:
    """Return the evaluations of a run that one rank is asked to stop in its second evaluation."""
    with worlds.started(config) as run:
        forward_backward = run.evaluator.forward_backward

        def ask(*args: Any) -> Any:
            if run.iteration == 4 and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
                signal.raise_signal(signal.SIGUSR1)
            return forward_backward(*args)

        run.evaluator.forward_backward = ask
        run.train()
        assert run.iteration == 4
        return records_of(run)


@pytest.mark.parametrize("is_fixed", [True, False])
def test_a_signal_during_an_evaluation(world2: World, text_data: str, tmp_path: Path, is_fixed: bool) -> None:
    """The resumed run repeats the evaluation that a signal stopped, also twice, and equals the undisturbed run."""
    flags = CUTS["pipeline2"] | {"data_path": text_data, "eval_iters": 2, "eval_interval": 2, "split": "60,40,0"}
    flags |= {"eval_fixed": is_fixed, "train_iters": 6}
    [whole, _] = world2.run(evaluations, worlds.run_config(**flags))
    [first, _] = world2.run(evaluations_until_a_signal, worlds.run_config(**flags, save=str(tmp_path)))
    again = worlds.run_config(**flags, save=str(tmp_path), load=str(tmp_path))
    assert world2.run(evaluations_until_a_signal, again) == [[], []]
    [rest, _] = world2.run(evaluations, worlds.run_config(**flags, load=str(tmp_path)))
    assert len(first) == 1 and first + rest == whole


def losses(config: RunConfig) -> list[float]:
    return [loss for *_, loss, _ in evaluations(config)]


def mean_over_split(config: RunConfig) -> tuple[float, int]:
    """Return the mean loss over the validation split, sample by sample, and the number of samples."""
    with worlds.started(config) as run, torch.no_grad():
        dataset, sums = run.splits.validation, torch.zeros(2, dtype=torch.float64)
        run.model.eval()
        for index in range(len(dataset)):
            batch = data.load_batch(dataset, [index], run.config)
            token_losses = run.model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
            sums += torch.stack([token_losses.double().sum(), torch.tensor(float(token_losses.numel()))])
        return float(sums[0] / sums[1]), len(dataset)


@pytest.fixture
def world_of(world1: World, world2: World, world4: World) -> Callable[[str], World]:
    return lambda cut: {1: world1, 2: world2, 4: world4}[CUTS[cut].get("world_size", 1)]


def test_fixed_samples(world_of: Callable[[str], World], initial_weights: Flags) -> None:
    """With --eval-fixed all evaluations use the same samples, for any length, interval and layout of the run."""
    flags = initial_weights(bcd_num_blocks=3) | STILL
    moving, fixed = (
        world_of("one").run(losses, worlds.run_config(**flags, eval_fixed=is_fixed))[0] for is_fixed in (False, True)
    )
    assert len(set(moving)) == 4 and len(fixed) == 4
    assert set(fixed) == {fixed[0]}
    longer = flags | {"train_iters": 3, "eval_interval": 1, "eval_fixed": True}
    assert set(world_of("one").run(losses, worlds.run_config(**longer))[0]) == {fixed[0]}
    for cut in ("pipeline2", "data2"):
        for mine in world_of(cut).run(losses, worlds.run_config(**flags | CUTS[cut], eval_fixed=True)):
            assert mine == pytest.approx(fixed, rel=1e-6)


@pytest.mark.parametrize("cut", ["data2", "pipeline4"])
def test_the_whole_split(world_of: Callable[[str], World], initial_weights: Flags, cut: str) -> None:
    """--full-validation averages over each sample of the split once, also if the last batch is not full, in every
    layout."""
    flags = initial_weights(bcd_num_blocks=3) | STILL | {"full_validation": True, "split": "98.5,1.5,0"}
    mean, num_samples = world_of("one").run(mean_over_split, worlds.run_config(**flags))[0]
    assert 16 < num_samples < 50 and num_samples % 8 and num_samples % 6, "the last batch must not be full"
    batches: list[dict[str, Any]] = [{"global_batch_size": 8}, {"micro_batch_size": 1, "global_batch_size": 6}]
    for batch in batches[1:] if cut == "pipeline4" else batches:
        for mine in world_of(cut).run(losses, worlds.run_config(**flags | batch | CUTS[cut])):
            assert mine == pytest.approx([mean] * 4, rel=1e-6)


def test_evaluation_of_a_checkpoint(world_of: Callable[[str], World], text_data: str, tmp_path: Path) -> None:
    """--skip-train evaluates a checkpoint on the samples of the run that wrote it, at its iteration, in every
    layout."""
    flags = {"data_path": text_data, "eval_iters": 2, "eval_interval": 3, "split": "60,40,0", "eval_fixed": True}
    saved = {"save": str(tmp_path), "exit_interval": 3}
    (first,) = world_of("one").run(evaluations, worlds.run_config(**flags | saved))[0]
    assert first[:3] == (3, 12, "validation")
    alone = flags | {"load": str(tmp_path), "skip_train": True, "train_iters": None, "lr": None}
    again = world_of("one").run(evaluations, worlds.run_config(**alone))[0]
    assert again == [(*first[:4], True)]
    for cut in ("pipeline2", "data2"):
        other = world_of(cut).run(evaluations, worlds.run_config(**alone | CUTS[cut]))
        assert other == [[(*first[:3], pytest.approx(first[3], rel=1e-6), True)]] * 2


def test_resuming_with_the_next_samples(world_of: Callable[[str], World], text_data: str, tmp_path: Path) -> None:
    """Evaluations with --eval-fixed do not count as consumed: a run that resumes without it evaluates the first
    samples."""
    flags = {"data_path": text_data, "eval_iters": 2, "eval_interval": 3, "split": "60,40,0"}
    whole = world_of("one").run(evaluations, worlds.run_config(**flags))[0]
    world_of("one").run(evaluations, worlds.run_config(**flags, eval_fixed=True, save=str(tmp_path), exit_interval=3))
    rest = world_of("one").run(evaluations, worlds.run_config(**flags, load=str(tmp_path)))[0]
    assert [record[0] for record in rest] == [6, 6] and len({record[3] for record in rest}) == 2
    assert rest[0][3] != whole[1][3], "its first evaluation is on the first samples"
