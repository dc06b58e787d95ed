"""Options of the training loop that must not change training, as recomputation, and those that must."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from filelock import Timeout, UnixFileLock
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from support import worlds
from support.dist import World

from megatron.bcd.config import RunConfig
from megatron.bcd.model.builder import unwrap_model

RECOMPUTATION: dict[str, dict[str, Any]] = {
    "uniform2": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "block1": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective"},
}
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
}


CUTS = {name: worlds.CUTS[name] for name in ("one", "pipeline2", "submodel")}
CASES = [("one", "dropout", "uniform2"), ("pipeline2", "bf16", "block1"), ("submodel", "fp32", "selective")]


def config_of(text_data: str, cut: str, kind: str, **recomputation: Any) -> RunConfig:
    num_blocks = 6 if cut == "submodel" else 3
    flags = {"data_path": text_data, "train_iters": num_blocks + 1} | CUTS[cut] | KINDS[kind]
    return worlds.run_config(**flags, **recomputation)


@pytest.mark.parametrize(("cut", "kind", "recomputation"), CASES)
def test_recomputation_changes_nothing(
    world1: World, world2: World, text_data: str, cut: str, kind: str, recomputation: str
) -> None:
    """Recomputation does not change losses, gradient norms or weights by a bit."""
    world = world1 if cut == "one" else world2
    config = config_of(text_data, cut, kind, **RECOMPUTATION[recomputation])
    plain = world.run(worlds.train_run, config_of(text_data, cut, kind))
    for mine, other in zip(world.run(worlds.train_run, config), plain, strict=True):
        assert mine["losses"] == other["losses"]
        assert mine["grad_norms"] == other["grad_norms"]
        assert worlds.same_bits(mine["weights"], other["weights"]) == []


def test_train_samples_is_train_iters(world1: World, text_data: str) -> None:
    """A length, warm-up and decay in samples lead to the steps of the same numbers in iterations. As in stock
    Megatron-LM, an incomplete last batch is not trained."""
    flags = {"data_path": text_data, "lr_decay_style": "cosine", "min_lr": 1e-3}
    by_iters = worlds.run_config(**flags, lr_warmup_iters=2)
    by_samples = worlds.run_config(
        **flags | {"train_iters": None, "train_samples": 27, "lr_warmup_samples": 8, "lr_decay_samples": 24}
    )
    left, right = (world1.run(worlds.train_run, config)[0] for config in (by_iters, by_samples))
    assert left["metrics"] == right["metrics"]
    assert [line["consumed_samples"] for line in left["metrics"]] == [4, 8, 12, 16, 20, 24]


def test_batch_size_ramp(world2: World, text_data: str) -> None:
    """The batch size grows along a ramp, consumed samples are its sum, and validation data last for all steps."""
    flags = {"data_path": text_data, "train_iters": None, "train_samples": 64, "rampup_batch_size": (2, 2, 24)}
    flags |= worlds.PIPELINE | {"eval_iters": 1, "eval_interval": 1, "global_batch_size": 8}
    outcome = world2.run(worlds.train_run, worlds.run_config(**flags))[0]
    sizes = [line["global_batch_size"] for line in outcome["metrics"]]
    assert sizes[0] == 2 and sizes[-1] == 8 and sizes == sorted(sizes) and set(sizes) == {2, 4, 6, 8}
    consumed = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    assert [line["consumed_samples"] for line in outcome["metrics"]] == consumed
    assert consumed[-1] <= 64
    assert len(outcome["evaluations"]) == len(sizes) + 1


def test_rates_on_a_ramp(world1: World, text_data: str) -> None:
    """On a ramp, warm-up and decay last the given numbers of iterations, though the ramp's batches have fewer
    samples."""
    flags = {"data_path": text_data, "train_iters": 12, "lr_warmup_iters": 4, "min_lr": 0.0}
    flags |= {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 3, "rampup_batch_size": (2, 2, 24)}
    [outcome] = world1.run(worlds.train_run, worlds.run_config(**flags))
    rates = [line["learning_rate"] for line in outcome["metrics"]]
    used = [step["learning_rate"] for step in outcome["steps"]]
    assert [line["step_learning_rate"] for line in outcome["metrics"]] == used and used[1:] == rates[:-1]
    assert max(rates[:3]) < 1e-2 and rates[3:9] == pytest.approx([1e-2] * 6), "warm after four iterations"
    assert 1e-2 > rates[9] > rates[10] > rates[11], "three of decay"


def test_evaluation_disturbs_nothing(world2: World, text_data: str) -> None:
    """Evaluations leave the losses of training unchanged, and each takes the next samples."""
    flags = {"data_path": text_data} | KINDS["dropout"] | worlds.PIPELINE
    without = world2.run(worlds.train_run, worlds.run_config(**flags))[0]
    evaluated = world2.run(worlds.train_run, worlds.run_config(**flags | {"eval_iters": 2, "eval_interval": 2}))[0]
    assert evaluated["losses"] == without["losses"]
    assert [iteration for iteration, *_ in evaluated["evaluations"]] == [2, 4, 6, 6]
    assert len({loss for *_, loss in evaluated["evaluations"]}) == 4, "each on the next samples"


def is_locked_while_built(config: RunConfig) -> list[bool]:
    """Return whether other jobs have to wait while the datasets are built, and afterwards."""
    others, is_locked = UnixFileLock(f"{config.data.data_cache_path}/.lock"), []
    build = BlendedMegatronDatasetBuilder.build

    def is_free() -> bool:
        with contextlib.suppress(Timeout), others.acquire(blocking=False):
            return True
        return False

    def built(self: BlendedMegatronDatasetBuilder) -> Any:
        is_locked.append(not is_free())
        return build(self)

    with mock.patch.object(BlendedMegatronDatasetBuilder, "build", built), worlds.started(config):
        return [*is_locked, not is_free()]


def test_one_job_at_a_time_writes_the_index_cache(world1: World, text_data: str, tmp_path: Path) -> None:
    """Two jobs on the same data do not read each other's incomplete files."""
    config = worlds.run_config(data_path=text_data, data_cache_path=tmp_path / "cache")
    assert world1.run(is_locked_while_built, config) == [[True, False]]


AUTO = {"recompute": "auto"}


def recomputed(config: RunConfig) -> list[tuple[int | None, int | None]]:
    """Return the block and the number of recomputed layers of each training pass."""
    told: list[tuple[int | None, int | None]] = []

    def tell(run: worlds.RecordedRun) -> None:
        told.append((run.active.block, unwrap_model(run.model).decoder.config.recompute_num_layers))

    with worlds.parallel(config):
        worlds.RecordedRun(config, after_schedule=tell).train()
    return told


def test_each_block_recomputes_its_own_number_of_layers(world1: World, text_data: str) -> None:
    """Every phase of a block recomputes the number of layers that was found for it."""
    [told] = world1.run(recomputed, worlds.run_config(data_path=text_data, recompute_memory_gib=1.1e-3, **AUTO))
    numbers = dict(told[:3])
    assert sorted(numbers) == [0, 1, 2] and len(set(numbers.values())) > 1, "blocks must differ"
    assert all(number == numbers[block] for block, number in told)


def test_the_full_batch_counts(world2: World, text_data: str) -> None:
    """On a ramp --recompute auto plans for the full batch from the first step on."""
    flags = {"data_path": text_data, "pipeline_model_parallel_size": 2, "world_size": 2, "bcd_num_blocks": 1} | AUTO
    flags |= {"recompute_memory_gib": 1.1e-3, "train_iters": 1, "micro_batch_size": 2, "global_batch_size": 16}
    configs = (worlds.run_config(**flags, **ramp) for ramp in ({}, {"rampup_batch_size": (2, 2, 64)}))
    whole, ramped = ([ranks[0] for ranks in world2.run(recomputed, config)] for config in configs)
    assert whole == ramped and any(number for _, number in whole)
