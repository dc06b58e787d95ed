"""The pipeline schedule does not change a bit of training, compared with Megatron Core's schedule in the same run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from support import worlds
from support.dist import World

from megatron.bcd.blocks.partition import partition_from_config
from megatron.bcd.config import RunConfig
from megatron.bcd.pipeline.plan import PlanShape
from megatron.bcd.trainer import Trainer

STEPS_PER_BLOCK = 3  # the first of a phase begins with nothing done ahead, the last runs no more ahead
TINY: dict[str, Any] = {
    "seq_length": 16,
    "max_position_embeddings": 16,
    "bcd_num_blocks": 2,
    "bcd_steps_per_block": STEPS_PER_BLOCK,
}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
# number of stages, layout, number of microbatches
SCHEDULES = [(2, "spread", 1), (2, "submodel", 2), (4, "stage", 7)]
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
OVERLAP = {"overlap_grad_reduce": True, "ddp_bucket_size": 3000}
OVERLAP_BOTH = OVERLAP | {"overlap_param_gather": True}
PER_TOKEN = {"calculate_per_token_loss": True, "eod_mask_loss": True}
LAYERS_OF_LLAMA = {"position_embedding_type": "rope", "swiglu": True, "normalization": "RMSNorm"}
LAYERS_OF_LLAMA |= {"disable_bias_linear": True, "untie_embeddings_and_output_weights": True}
# by name: pipeline 2 and these
OPTIONS: dict[str, dict[str, Any]] = {
    "fp16_with_skipped_steps": {"fp16": True, "initial_loss_scale": 2**18, "hysteresis": 1},
    "recomputed_bf16": FULL | DROPOUT | {"bf16": True, "recompute_num_layers": 2},
    "as_llama_per_token_loss": LAYERS_OF_LLAMA | PER_TOKEN,
    "uneven_stages": {"num_layers": 7},
}
# by name: layout and flags
PARALLEL: dict[str, tuple[str, dict[str, Any]]] = {
    "data2_overlap_both_bf16": ("submodel", OVERLAP_BOTH | {"bf16": True}),
    "tensor2": ("submodel", {"tensor_model_parallel_size": 2} | DROPOUT),
}


def config_of(num_stages: int, layout: str, **flags: Any) -> RunConfig:
    """Return a tiny run on this many stages that visits every block once, unless the flags say otherwise."""
    values: dict[str, Any] = {"world_size": num_stages, "pipeline_model_parallel_size": num_stages}
    num_layers = num_stages if layout == "stage" else 2 * num_stages
    values |= {"num_layers": num_layers, "bcd_layout": layout} | TINY | flags
    if layout == "stage":
        values["bcd_num_blocks"] = None
    values.setdefault("train_iters", num_blocks_of(num_stages, layout) * values["bcd_steps_per_block"])
    return worlds.run_config(**values)


def num_blocks_of(num_stages: int, layout: str) -> int:
    return {"spread": 2, "stage": num_stages, "submodel": 2 * num_stages}[layout]


def first_trainable_stages(config: RunConfig) -> list[int]:
    cut = partition_from_config(config)
    return [cut.first_trainable_stage(block.index) for block in cut.blocks]


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return a digest of each tensor's bits."""
    return {
        name: hashlib.sha256(tensor.detach().reshape(-1).view(torch.uint8).numpy()).hexdigest()
        for name, tensor in tensors.items()
    }


def record(config: RunConfig) -> dict[str, Any]:
    """Run `config`; return what a schedule must not change on this rank, and what the schedule did.

    `gradients`, by step: digests of the DDP buffers as the optimizer finds them. `ahead`, by iteration: its
    microbatches that were done ahead. `num_forwards`: calls of forward_step, including evaluations.
    """
    gradients: list[dict[str, str]] = []
    ahead: list[int] = []
    num_forwards = 0

    def after_schedule(run: worlds.RecordedRun) -> None:
        assert run.active.wrapped is not None
        gradients.append(digests({str(i): buffer.grad_data for i, buffer in enumerate(run.active.wrapped.buffers)}))

    def counting_forward_step(self: Trainer, batches: Iterator[Any], model: torch.nn.Module) -> Any:
        nonlocal num_forwards
        num_forwards += 1
        return original(self, batches, model)

    original = Trainer.forward_step
    Trainer.forward_step = counting_forward_step  # type: ignore[method-assign]
    try:
        with worlds.started(config, after_schedule=after_schedule) as run:
            execute = run.pipeline.execute

            def recording_execute(shape: PlanShape, model: torch.nn.Module, **arguments: Any) -> list[Any]:
                if shape.is_training:
                    ahead.append(shape.done_ahead)
                return execute(shape, model, **arguments)

            run.pipeline.execute = recording_execute  # type: ignore[method-assign]
            run.train()
            kept = worlds.outcome(run)
    finally:
        Trainer.forward_step = original  # type: ignore[method-assign]
    compared = {name: kept[name] for name in ("steps", "metrics", "evaluations", "switches")}
    compared |= {"gradients": gradients, "weights": digests(kept["weights"])}
    return {"compared": compared, "ahead": ahead, "num_forwards": num_forwards}


def compare(reference: RunConfig, others: list[RunConfig]) -> list[dict[str, Any]]:
    """Run `record` for all, with the reference first; `different` has the others' differences."""
    first = record(reference)
    records = [first]
    for other in others:
        mine = record(other)
        mine["different"] = [name for name, value in first["compared"].items() if mine["compared"][name] != value]
        records.append(mine)
    return records


def compare_far_ahead(reference: RunConfig, others: list[RunConfig]) -> list[dict[str, Any]]:
    """Run `compare` with forward-only stages that run ahead by the whole next iteration."""
    with mock.patch.object(PlanShape, "microbatches_ahead", property(lambda shape: 9 * (shape.first_trainable > 0))):
        return compare(reference, others)


def assert_same_as_stock(
    world: World, stock: RunConfig, others: list[RunConfig], run: Any = compare
) -> list[list[dict[str, Any]]]:
    """Check `compare` on each rank: no differences, and every step did something."""
    ranks = world.run(run, stock, others)
    for rank in ranks:
        assert [other["different"] for other in rank[1:]] == [[]] * len(others)
        assert all(record["num_forwards"] == rank[0]["num_forwards"] for record in rank)
    steps = len(ranks[0][0]["compared"]["steps"])
    gradients_of_a_step = {str([rank[0]["compared"]["gradients"][step] for rank in ranks]) for step in range(steps)}
    taken = [step for step in ranks[0][0]["compared"]["steps"] if step["grad_norm"] is not None]
    assert len(taken) > steps / 2 and len(gradients_of_a_step) >= len(taken), "no gradients are compared"
    return ranks


@pytest.mark.parametrize(("num_stages", "layout", "num_microbatches"), SCHEDULES)
def test_every_block_learns_as_with_the_stock_schedule(
    world2: World, world4: World, text_data: str, num_stages: int, layout: str, num_microbatches: int
) -> None:
    """Every block trains as with the stock schedule bit for bit, and forward-only stages run ahead."""
    world = world2 if num_stages == 2 else world4
    flags = {"data_path": text_data, "global_batch_size": 2 * num_microbatches}
    flags |= DROPOUT if num_microbatches in (2, 7) else {}
    if layout == "spread":  # its first trainable stage is the first: no stage can run ahead
        flags["bcd_steps_per_block"] = 1
    stock = config_of(world.size, layout, bcd_schedule="stock", **flags)
    ranks = assert_same_as_stock(world, stock, [config_of(world.size, layout, **flags)])
    expected: list[int] = []
    for first_trainable in first_trainable_stages(stock):
        expected += [0] + [first_trainable > 0] * (stock.bcd.bcd_steps_per_block - 1)
    assert all(rank[1]["ahead"] == expected for rank in ranks)


@pytest.mark.parametrize("option", OPTIONS)
def test_options(world2: World, text_data: str, option: str) -> None:
    """With these options a run equals that of the stock schedule bit for bit."""
    flags = {"data_path": text_data} | OPTIONS[option]
    stock = config_of(2, "submodel", bcd_schedule="stock", **flags)
    ranks = assert_same_as_stock(world2, stock, [config_of(2, "submodel", **flags)])
    assert max(ranks[0][1]["ahead"]) == 1
    if option == "fp16_with_skipped_steps":
        assert any(step["grad_norm"] is None for step in ranks[0][1]["compared"]["steps"])


@pytest.mark.parametrize("cut", PARALLEL)
def test_with_tensor_and_data_parallel(world4: World, text_data: str, cut: str) -> None:
    """With tensor and data parallelism a run equals that of the stock schedule bit for bit."""
    layout, more = PARALLEL[cut]
    flags = {"data_path": text_data, "world_size": 4, "global_batch_size": 8} | more
    stock = config_of(2, layout, bcd_schedule="stock", **flags)
    assert_same_as_stock(world4, stock, [config_of(2, layout, **flags)])


def test_the_batch_size_ramp(world2: World, text_data: str) -> None:
    """On a ramp, stages run ahead by up to the next iteration's number of microbatches, which may be larger."""
    ramp = {"train_iters": None, "train_samples": 94, "rampup_batch_size": (2, 2, 48), "bcd_steps_per_block": 4}
    ramp["global_batch_size"] = 8
    flags, num_stages, layout = {"data_path": text_data} | ramp, 2, "submodel"
    stock = config_of(num_stages, layout, bcd_schedule="stock", **flags)
    ranks = assert_same_as_stock(world2, stock, [config_of(num_stages, layout, **flags)], compare_far_ahead)
    sizes = [line["global_batch_size"] for line in ranks[0][0]["compared"]["metrics"]]
    assert set(sizes) == {2, 4, 6, 8}
    # with all of the next iteration done ahead, the number is that iteration's
    ahead = ranks[0][1]["ahead"]
    begins_phase = [iteration % 4 == 0 for iteration in range(len(sizes))]
    of_blocks = first_trainable_stages(stock)
    pivot_of = [of_blocks[iteration // 4 % len(of_blocks)] for iteration in range(len(sizes))]
    expected = [
        0 if begins or not first_trainable else size // 2
        for size, begins, first_trainable in zip(sizes, begins_phase, pivot_of, strict=True)
    ]
    assert ahead == expected
    assert any(0 < before < size // 2 for before, size in zip(ahead, sizes[1:], strict=False))


def weights_saved(config: RunConfig) -> dict[str, str]:
    """Return digests of the weights that `config` loads."""
    return digests(worlds.initial_weights(config))


def test_evaluations_checkpoints_and_the_end(world2: World, text_data: str, tmp_path: Any) -> None:
    """Stages do not run ahead into an evaluation, a checkpoint, the next phase or beyond the end, and the run equals
    that of the stock schedule."""
    num_stages, layout = 2, "submodel"
    num_blocks, in_phase, evaluated, saved, num_microbatches = num_blocks_of(num_stages, layout), 5, 4, 7, 3
    iterations = num_blocks * in_phase + 2
    flags = {"data_path": text_data, "bcd_steps_per_block": in_phase, "train_iters": iterations} | DROPOUT
    flags |= {"eval_iters": 1, "eval_interval": evaluated, "save_interval": saved, "global_batch_size": 6}
    stock = config_of(num_stages, layout, bcd_schedule="stock", save=str(tmp_path / "stock"), **flags)
    bcd = config_of(num_stages, layout, save=str(tmp_path / "bcd"), **flags)
    ranks = assert_same_as_stock(world2, stock, [bcd])

    evaluations = iterations // evaluated + 1
    expected = []
    for iteration in range(iterations):
        first_trainable = first_trainable_stages(bcd)[iteration // in_phase % num_blocks]
        interrupted = iteration % in_phase == 0 or iteration % evaluated == 0 or iteration % saved == 0
        expected.append(0 if interrupted else first_trainable)
    for rank in ranks:
        assert rank[1]["ahead"] == expected
        assert rank[1]["num_forwards"] == (iterations + evaluations) * num_microbatches
        assert len(rank[1]["compared"]["evaluations"]) == evaluations
    assert len({loss for *_, loss in ranks[0][1]["compared"]["evaluations"]}) == evaluations

    loads = [
        config_of(num_stages, layout, data_path=text_data, load=str(tmp_path / name), finetune=True)
        for name in ("stock", "bcd")
    ]
    kept = [world2.run(weights_saved, load) for load in loads]
    assert kept[0] == kept[1] == [rank[1]["compared"]["weights"] for rank in ranks]
