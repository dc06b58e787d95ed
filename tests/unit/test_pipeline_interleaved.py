"""Interleaved plans: every plan passes its check, the check finds what is wrong, and full training is stock's order."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.unit_costs import unit_chunk_costs

from megatron.bcd.pipeline.actions import Action, Kind
from megatron.bcd.pipeline.chunk_shape import ChunkShape, chunk_shape, evaluation_chunk_shape, max_graphs, stock_order
from megatron.bcd.pipeline.interleaved import ChunkPlan, build_chunk_plan
from megatron.bcd.pipeline.simulate_interleaved import simulate_chunk_plan
from megatron.bcd.pipeline.validate import PlanError
from megatron.bcd.pipeline.validate_interleaved import validate_chunk_plan

BACKWARD = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


def shape_of(
    stages: int = 4, chunks: int = 3, microbatches: int = 8, *, blocks: int | None = None, block: int = 0
) -> ChunkShape:
    return chunk_shape(
        num_stages=stages,
        num_chunks=chunks,
        num_microbatches=microbatches,
        num_blocks=chunks if blocks is None else blocks,
        block=block,
    )


def sweep(stages: range, chunks: tuple[int, ...], microbatches: range) -> Iterator[ChunkShape]:
    for num_stages, num_chunks, num_microbatches in itertools.product(stages, chunks, microbatches):
        sizes = {"num_stages": num_stages, "num_chunks": num_chunks, "num_microbatches": num_microbatches}
        yield evaluation_chunk_shape(**sizes)
        for num_blocks in range(1, num_chunks + 1):
            for block in range(num_blocks if num_chunks % num_blocks == 0 else 0):
                yield (shape := chunk_shape(**sizes, num_blocks=num_blocks, block=block))
                if block:
                    yield replace(shape, is_prefix_served=True)


def check(shapes: Iterator[ChunkShape]) -> None:
    for shape in shapes:
        plan = build_chunk_plan(shape)
        try:
            validate_chunk_plan(plan)
        except PlanError as error:
            raise AssertionError(f"{shape}: {error}") from None
        timeline = simulate_chunk_plan(plan, unit_chunk_costs(shape, message=0.3))
        assert len({len(spans) for spans in timeline.spans} | {0}) > 1


def test_every_plan_is_valid() -> None:
    """An order that hangs for some number of microbatches, chunks or stages, or loses one of them."""
    check(sweep(range(2, 5), (1, 2, 3), range(1, 8)))
    check(sweep(range(5, 6), (4,), range(6, 8)))


def test_plans_of_fine_tuning_are_valid() -> None:
    """As above, with as many blocks as fine-tuning takes."""
    for sizes in ((2, 32, 3), (4, 8, 8)):
        check(shape_of(*sizes, block=block) for block in (0, sizes[1] // 2, sizes[1] - 1))


@pytest.mark.long
def test_more_plans_are_valid() -> None:
    """As above, with more of everything."""
    check(sweep(range(2, 9), (1, 2, 3, 4, 6), range(1, 20)))


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), [(2, 2, 4), (4, 3, 8), (3, 6, 9), (8, 2, 16)])
def test_full_training_is_stocks_order(stages: int, chunks: int, microbatches: int) -> None:
    """A baseline whose warm-up or order of chunks is not Megatron Core's."""
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    table = schedules.get_schedule_table(microbatches, chunks, stages)
    shape = shape_of(stages, chunks, microbatches, blocks=1)
    for stage in range(stages):
        group = SimpleNamespace(rank=lambda stage=stage: stage, size=lambda: stages)
        *_, num_warm_up, _ = schedules.get_pp_rank_microbatches(
            microbatches, chunks, stages, p2p_communicator=SimpleNamespace(
                pp_group=group, virtual_pipeline_model_parallel_size=chunks, config=None
            )
        )  # fmt: skip
        actions = [action for action in build_chunk_plan(shape).stages[stage] if action.kind.computes]
        forward = [(action.microbatch, action.chunk) for action in actions if action.kind is Kind.FORWARD]
        backward = [(action.microbatch, chunks - 1 - action.chunk) for action in actions if action.kind in BACKWARD]
        assert forward == list(table) and backward == list(table)
        kinds = [action.kind for action in actions]
        assert kinds.index(Kind.BACKWARD) == min(num_warm_up + 1, len(table))
        steady = kinds[num_warm_up : 2 * len(table) - num_warm_up]
        assert steady == [Kind.FORWARD, Kind.BACKWARD] * (len(steady) // 2)


def test_every_stage_has_the_same_share_of_the_work() -> None:
    """A stage behind the first that runs backward through its prefix, or an active chunk that is missed."""
    busy: Counter[int] = Counter()
    for block in range(3):
        shape = shape_of(block=block)
        plan = build_chunk_plan(shape)
        for stage, actions in enumerate(plan.stages):
            kinds = Counter((action.chunk, action.kind) for action in actions if action.kind.computes)
            expected = Counter({(chunk, Kind.FORWARD_ONLY): 8 for chunk in range(block)})
            expected += Counter({(chunk, Kind.FORWARD): 8 for chunk in range(block, 3)})
            expected += Counter({(block, Kind.BACKWARD): 8})
            expected += Counter({(chunk, Kind.BACKWARD_INPUT): 8 for chunk in range(block + 1, 3)})
            assert kinds == expected
            busy[stage] += round(simulate_chunk_plan(plan, unit_chunk_costs(shape)).busy_times[stage])
    assert set(busy.values()) == {2 * 3 * 3 * 8}  # two thirds of full training, three phases


def test_a_served_prefix_is_left_out_on_every_stage() -> None:
    """A stage that computes though its output is read, or waits for a message that nobody sends."""
    busy: Counter[int] = Counter()
    for block in range(3):
        shape = replace(shape_of(block=block), is_prefix_served=True)
        plan = build_chunk_plan(shape)
        assert all(action.chunk >= block for actions in plan.stages for action in actions)
        assert not any(action.kind is Kind.RECEIVE_FORWARD and action.chunk == block for action in plan.stages[0])
        for stage, time in enumerate(simulate_chunk_plan(plan, unit_chunk_costs(shape)).busy_times):
            busy[stage] += round(time)
    assert set(busy.values()) == {5 * 3 * 8}, "five ninths of full training, three phases"


def test_iteration_times() -> None:
    """An order that is valid and slow: a cool-down that waits for prefix passes, groups that serialise."""

    def time(shape: ChunkShape, message: float = 0.0) -> float:
        return simulate_chunk_plan(build_chunk_plan(shape), unit_chunk_costs(shape, message=message)).iteration_time

    assert time(shape_of(blocks=1)) == (8 * 3 + 3) * 3  # stock's: the bubble is one of a third of a stage
    assert [time(shape_of(block=block)) for block in range(3)] == [65, 59, 49]
    assert time(shape_of(block=1), message=0.1) < 1.06 * 59
    # 32 microbatches over what full training takes without chunks
    means = [
        sum(time(shape_of(stages, 3, 32, block=block)) for block in range(3)) / 3 / ((32 + stages - 1) * 9)
        for stages in (4, 8)
    ]
    assert means == pytest.approx([0.656, 0.632], abs=5e-4)


def test_activations_are_bounded() -> None:
    """A stage that runs forward without end while its gradients are late."""
    for shape in sweep(range(2, 5), (3,), range(7, 9)):
        for stage, actions in enumerate(build_chunk_plan(shape).stages):
            stock = replace(shape, first_trainable=0, active=(True,) * shape.num_virtual)
            assert max_graphs(actions) <= shape.max_graphs(stage) <= max_graphs(stock_order(stock, stage))
    last = shape_of(block=2)
    kept = [max_graphs(actions) for actions in build_chunk_plan(last).stages]
    assert kept == [8, 7, 4, 1]


def test_evaluation_runs_forward_only() -> None:
    """An evaluation that waits for gradients."""
    shape = evaluation_chunk_shape(num_stages=2, num_chunks=3, num_microbatches=5)
    for actions in build_chunk_plan(shape).stages:
        assert {action.kind for action in actions} == {Kind.FORWARD_ONLY, Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD}


def test_what_is_wrong_is_found() -> None:
    """A check that lets a plan pass which hangs, loses a message, or uses what is not there."""
    rng, plan = random.Random(7), build_chunk_plan(shape_of(3, 2, 4, block=0))
    validate_chunk_plan(plan)
    found: Counter[str] = Counter()
    for _ in range(300):
        stage = rng.randrange(3)
        actions = list(plan.stages[stage])
        place, name = rng.randrange(len(actions)), rng.choice(("drop", "repeat", "kind", "chunk", "microbatch"))
        changed = _changed(actions, place, name, rng)
        if changed == actions:
            continue
        with pytest.raises(PlanError):
            validate_chunk_plan(_with_stage(plan, stage, changed))
        found[name] += 1
    assert min(found.values()) > 20 and len(found) == 5


def _changed(actions: list[Action], place: int, name: str, rng: random.Random) -> list[Action]:
    one = actions[place]
    other = {
        "drop": [],
        "repeat": [one, one],
        "kind": [replace(one, kind=rng.choice(list(Kind)))],
        "chunk": [replace(one, chunk=1 - one.chunk)],
        "microbatch": [replace(one, microbatch=one.microbatch + 1)],
    }[name]
    return actions[:place] + other + actions[place + 1 :]


def _with_stage(plan: ChunkPlan, stage: int, actions: list[Action]) -> ChunkPlan:
    return replace(plan, stages=(*plan.stages[:stage], tuple(actions), *plan.stages[stage + 1 :]))


def test_crossed_messages_are_found() -> None:
    """Two messages between the same stages in another order at one end: a hang on one communicator, in silence."""
    plan = build_chunk_plan(shape_of(2, 2, 4, blocks=1))
    num_found = 0
    for stage, actions in enumerate(plan.stages):
        for place, (one, two) in enumerate(itertools.pairwise(actions)):
            if not (one.kind.computes or two.kind.computes):
                swapped = [*actions[:place], two, one, *actions[place + 2 :]]
                with pytest.raises(PlanError, match="another message|deadlock"):
                    validate_chunk_plan(_with_stage(plan, stage, swapped))
                num_found += 1
    assert num_found > 5


@pytest.mark.parametrize("changes", [{"num_stages": 1}, {"num_blocks": 2}, {"block": 3}, {"num_microbatches": 0}])
def test_shapes_that_contradict_themselves(changes: dict[str, int]) -> None:
    """Numbers that give an empty or half a plan."""
    sizes = {"num_stages": 2, "num_chunks": 3, "num_microbatches": 4, "num_blocks": 3, "block": 0}
    with pytest.raises(ValueError):
        chunk_shape(**sizes | changes)
