"""Tests of the planner: memory, time and cost of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planned import active_parameters

from megatron.bcd.config import LAYOUTS
from megatron.bcd.pipeline.build import build_plan
from megatron.bcd.pipeline.plan import PlanShape
from megatron.bcd.pipeline.simulate import simulate
from megatron.bcd.planner import step_time
from megatron.bcd.planner.estimate import Estimate, multiplier_of
from megatron.bcd.planner.memory import fits, host_bytes, rank_memory, saving_bytes
from megatron.bcd.planner.recipe import Recipe, make_recipe
from megatron.bcd.planner.search import candidates, compare, fewest_gpus, first_allowed, place, remedies, search
from megatron.bcd.planner.step_time import pass_seconds, phase_seconds
from megatron.bcd.planner.tables import Cluster, Model, read_table
from megatron.bcd.planner.tensors import build_buffer, stage_tensors

ROOT = Path(__file__).resolve().parents[2]
MODELS = read_table(ROOT / "examples" / "models.csv", Model)
CLUSTERS = read_table(ROOT / "examples" / "clusters.csv", Cluster)
SMALL = Model(
    name="small", form="gpt", layers=12, hidden=64, heads=4, groups=4, ffn=256, vocabulary=500, sequence=128,
    source="made up",
)  # fmt: skip


def recipe(model: str | Model = SMALL, gpu: str = "rtx4090", **fields: Any) -> Recipe:
    named = MODELS[model] if isinstance(model, str) else model
    return make_recipe(model=named, cluster=CLUSTERS[gpu], **({"num_gpus": 1, "precision": "fp32"} | fields))


def request(model: str, **fields: Any) -> dict[str, Any]:
    """Return a request on RTX 4090s that leaves all but `fields` open."""
    values = {"model": MODELS[model], "cluster": CLUSTERS["rtx4090"], "method": "bcd", "task": "pretrain"}
    return values | {"precision": "fp32"} | fields


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Small models in every layout."""
    stages, layout = draw(st.integers(1, 4)), draw(st.sampled_from(LAYOUTS))
    blocks = draw(st.integers(1, 4))
    model = Model(
        name="any",
        form=draw(st.sampled_from(("gpt", "llama"))),
        layers=draw(st.integers(stages * blocks, 24)),
        hidden=draw(st.integers(1, 9)) * 8,
        heads=4,
        groups=draw(st.sampled_from((1, 2, 4))),
        ffn=draw(st.integers(1, 90)),
        vocabulary=draw(st.integers(1, 300)),
        sequence=draw(st.sampled_from((16, 48))),
        source="",
    )
    data = draw(st.integers(1, 4))
    num_gpus = stages * data
    return make_recipe(
        model=model,
        cluster=replace(CLUSTERS["rtx4090"], gpus_per_node=num_gpus),
        num_gpus=num_gpus,
        pipeline_model_parallel_size=stages,
        bcd_num_blocks=None if layout == "stage" else blocks,
        bcd_layout=layout,
        precision=draw(st.sampled_from(("fp32", "bf16"))),
        micro_batch_size=draw(st.integers(1, 2)),
        global_batch_size=2 * data * draw(st.integers(1, 6)),
        recompute=draw(st.sampled_from(("none", "full"))),
    )


@pytest.mark.parametrize("num_ranks", [3, 5, 7])
def test_ranks_share_a_buffer(num_ranks: int) -> None:
    """Ranks share a buffer evenly, with every element once. Of two ranks: distributed/test_planned_bytes.py."""
    one = recipe()
    tensors = stage_tensors(one.shape, one.partition, 0, padded_vocabulary=one.padded_vocabulary)
    buffer = build_buffer(tensors, num_ranks=num_ranks)
    assert buffer.size % num_ranks == 0 and sum(buffer.stored) == sum(tensor.size for tensor in tensors)


def test_context_parallel_costs_an_exchange() -> None:
    """Context parallelism costs an exchange of the other ranks' keys and values. Bytes:
    distributed/test_planned_bytes.py."""
    size = {"num_gpus": 4, "global_batch_size": 4, "seq_length": 8192, "context_parallel_size": 4}
    split = recipe("G-5.4B", precision="bf16", **size)
    gathered = 2 * 8192 * split.shape.key_value_size * 2
    forward, backward = split.model.layers, sum(split.partition.num_behind_prefix(0, 0))
    exchanged = 4 * (forward + backward) * gathered * 3 / 4 / (1e9 * split.cluster.link_gb_per_s)
    # the same work on each rank, but for what is exchanged
    work = phase_seconds(replace(split, cluster=replace(split.cluster, link_gb_per_s=1e12)), 0).pipeline
    assert phase_seconds(split, 0).pipeline - work == pytest.approx(exchanged, rel=1e-6)


def test_masks_of_packed_texts() -> None:
    """Packed records need no mask in bf16. In fp32 and with wide heads every layer saves an S x S mask in numbers."""
    wide = replace(SMALL, head_dim=256)
    for model, precision, element in ((SMALL, "bf16", 0), (SMALL, "fp32", 4), (wide, "bf16", 2)):
        packed, plain = (recipe(model, precision=precision, task=task, seq_length=64) for task in ("sft", "pretrain"))
        saved, alone = packed.memory.layer_bytes, plain.memory.layer_bytes
        mask = element * packed.micro_batch_size * 64 * 64
        assert saved.active - alone.active == saved.suffix - alone.suffix == mask


def test_offload_moves_the_optimizer_to_the_host() -> None:
    """Offload has the optimizer state in host memory only, and takes longer to step."""
    offload = recipe("G-1.6B", method="offload")
    full = recipe("G-1.6B", method="full")
    assert all(rank.optimizer == 0 for rank in rank_memory(offload))
    assert host_bytes(offload) == 16 * sum(
        tensor.size for tensor in stage_tensors(full.shape, full.partition, 0, padded_vocabulary=full.padded_vocabulary)
    )
    assert host_bytes(full) == 0
    assert phase_seconds(offload, 0).optimizer > phase_seconds(full, 0).optimizer


def test_host_memory_of_divided_experts() -> None:
    """Ranks share host memory only with ranks of the same experts, also for all other weights."""
    model = replace(SMALL, form="llama", experts=8, expert_ffn=64)
    fields: dict[str, Any] = {"method": "finetune", "precision": "bf16", "bcd_num_blocks": None, "num_gpus": 4}
    fields |= {"bcd_inactive_update": "factored", "bcd_schedule": "breadth-first", "bcd_layers_on": "host"}
    divided = [recipe(model, **fields, expert_model_parallel_size=size) for size in (1, 2, 4)]
    whole, halves, quarters = map(host_bytes, divided)
    others = sum(
        each.size
        for each in divided[0].state.tensors[0]
        if each.owned.layer is not None and ".local_experts." not in each.name
    )
    # bytes of a rank: its part of the experts once for each rank of the node with the same part, and so all others
    assert halves - whole == pytest.approx(4 * others / 4, rel=0.02)
    assert quarters - whole == pytest.approx(4 * others * 3 / 4, rel=0.02)
    assert saving_bytes(divided[2]) == pytest.approx(saving_bytes(divided[0]), rel=0.02)


def test_one_stage_does_one_thing_after_the_other() -> None:
    """One stage does one thing after the other: F everywhere, D behind the prefix, W in the block."""
    one = recipe(global_batch_size=3)
    layer, head, _ = pass_seconds(one)
    passes = [(12 + 12 + 4, 3), (12 + 8 + 4, 2), (12 + 4 + 4, 2)]  # the tied head is active with the embedding
    for block, (layers, heads) in enumerate(passes):
        phase = phase_seconds(one, block)
        assert phase.pipeline == pytest.approx(3 * (layers * layer + heads * head))
        assert phase.bubble == pytest.approx(0)
        assert phase.reductions == 0


@pytest.mark.parametrize("flags", [{}, {"num_kept": 5, "num_on_host": 4, "is_breadth_first": True}])
def test_one_stage_is_not_simulated(flags: dict[str, Any]) -> None:
    """The passes of one stage take the simulation's time, without one."""
    chunks = 4 if flags else 1
    active = (False, *[True] * (chunks - 1)) if flags else (True,)
    flags = flags | {"num_chunks": chunks, "active": active, "updated": active}
    shape = PlanShape(num_stages=1, num_microbatches=6, first_trainable=0, **flags)
    shapes = [shape, replace(shape, first_trainable=1)] if chunks > 1 else [shape]
    work = [(1 + chunk, 0.3 + 2 * chunk) for chunk in range(chunks)]
    exact = [simulate(build_plan(each), work).iteration_time for each in shapes]
    with mock.patch.object(step_time, "simulate", side_effect=AssertionError):
        alone = [step_time._pipeline_seconds(each, work, message=0.0) for each in shapes]
    assert alone == [(pytest.approx(seconds), 0) for seconds in exact]


def test_remedies_plan_nothing_twice() -> None:
    """A search for remedies asks for each plan once."""
    asked: list[frozenset[tuple[str, Any]]] = []

    def plan(**values: Any) -> Recipe:
        asked.append(frozenset(values.items()))
        return place(**values)

    assert remedies(request("G-10B", method="finetune", num_gpus=1, precision="bf16"), plan)
    assert len(asked) == len({*asked}) > 10


@pytest.mark.parametrize("layers_per_pass", [1, 3])
@pytest.mark.parametrize("number", [2, 8, 40])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_breadth_first_on_stages(stages: int, number: int, layers_per_pass: int) -> None:
    """All chunks but the last repeat their forward pass, and stages work side by side."""
    flags = {"method": "finetune", "bcd_inactive_update": "factored", "bcd_schedule": "breadth-first"}
    flags |= {"bcd_layers_per_pass": layers_per_pass, "precision": "bf16", "global_batch_size": number}
    one = recipe(**flags, num_gpus=stages, pipeline_model_parallel_size=stages)
    phase = phase_seconds(one, 0)
    layer, head, _ = pass_seconds(one)
    alone = number * ((4 * 12 - layers_per_pass) * layer + 3 * head)
    assert phase.pipeline * stages * (1 - phase.bubble) == pytest.approx(alone)
    if stages > 1 and number == 40:
        assert phase.pipeline < 1.3 * alone / stages and phase.bubble > 0
    if number < stages:
        assert phase.pipeline > 0.8 * alone / number


def test_time_of_inactive_updates_and_muon() -> None:
    """Inactive updates take W and an orthogonalisation that data-parallel ranks share, as fast in fp32; links carry
    matrices."""
    one = recipe(method="pretrain", bcd_num_blocks=3)
    full = phase_seconds(recipe(method="full"), 0)
    assert phase_seconds(one, 1).pipeline == pytest.approx(full.pipeline)
    # query, key, value and projection 64 x 64, two of 64 x 256
    operations = 12 * (4 * 30 * 64**3 + 2 * (20 * 64 * 64 * 256 + 10 * 64**3))
    by_hand = operations / (1e12 * 165.2 * one.cluster.compute_share)
    alone = phase_seconds(one, 1)
    assert alone.optimizer > by_hand and alone.reductions == 0
    faster = replace(one.cluster, bf16_tflops=2 * one.cluster.bf16_tflops)
    assert alone.optimizer - phase_seconds(replace(one, cluster=faster), 1).optimizer == pytest.approx(by_hand / 2)
    two = phase_seconds(replace(one, num_gpus=2), 1)
    assert by_hand / 2 < two.optimizer < alone.optimizer - by_hand / 2
    matrices = 12 * 12 * 64**2
    by_adam = active_parameters(one.shape, one.partition, 0, padded=512)[0] - matrices // 3
    exact = (matrices * (2 + 4) + by_adam * (4 + 4) / 2) / (1e9 * one.cluster.link_gb_per_s)
    assert two.reductions == pytest.approx(exact, rel=0.02)


@settings(max_examples=25)
@given(recipes(), st.integers(1, 60))
def test_many_microbatches_go_on_as_some(one: Recipe, number: int) -> None:
    """Many microbatches take the time that is extrapolated from some, within 3 %."""
    one = one.changed(global_batch_size=number * one.micro_batch_size * one.data_size)
    for block in range(one.partition.num_blocks if one.partition.num_chunks == 1 else 0):
        phase = phase_seconds(one, block)
        with mock.patch.object(step_time, "_SIMULATED_ROUNDS", number):
            exact = phase_seconds(one, block)
        assert phase.pipeline == pytest.approx(exact.pipeline, rel=0.03)
        assert phase.bubble == pytest.approx(exact.bubble, abs=0.02)


def test_what_makes_an_iteration_slow() -> None:
    """Recomputation and a slow network cost time, more microbatches shrink the bubble, and data parallelism adds
    reductions."""
    base = recipe("G-5.4B", num_gpus=8, pipeline_model_parallel_size=8, method="full")
    plain, more = Estimate(recipe=base), Estimate(recipe=base.changed(global_batch_size=256))
    assert Estimate(recipe=replace(base, recompute="full")).iteration_seconds > 1.25 * plain.iteration_seconds
    slow = replace(base.cluster, gpus_per_node=4, network_gb_per_s=0.1)
    assert Estimate(recipe=replace(base, cluster=slow)).iteration_seconds > plain.iteration_seconds
    assert more.bubble < plain.bubble
    shorter = Estimate(recipe=base.changed(pipeline_model_parallel_size=4))
    assert shorter.phases[0].reductions > 0 == plain.phases[0].reductions


def test_bill() -> None:
    """Days and dollars follow from time, tokens and the multiplier, which is 1 for full training and the paper's for
    blocks."""
    one = recipe("G-1.6B", bcd_num_blocks=4)
    plan = Estimate(recipe=one, tokens=1e9)
    assert plan.cost.multiplier == pytest.approx(2.44 * 6 / 5)
    assert plan.cost.iterations == -int(-2.44e9 * 6 / 5 // (64 * 1024))
    hours = plan.cost.iterations * plan.iteration_seconds / 3600
    assert plan.cost.days == pytest.approx(hours / 24)
    assert plan.cost.dollars == pytest.approx(0.29 * hours)
    assert Estimate(recipe=one.changed(method="full", bcd_num_blocks=None)).cost.multiplier == 1
    for num_blocks, epochs in ((2, 40), (3, 50), (4, 60)):  # table 11 of the paper
        assert multiplier_of("bcd", num_blocks)[0] / 2.44 == pytest.approx(epochs / 50)
    assert Estimate(recipe=one).cost.tokens == 20 * one.num_parameters


def test_search_finds_the_cheapest() -> None:
    """A search finds the cheapest layout within 1 %, in order of price, and keeps a given number of blocks."""
    base = request("G-1.6B", num_gpus=2, global_batch_size=8)
    found = search(base)
    every = [Estimate(recipe=each) for each in candidates(base) if fits(each)]
    assert found[0].cost.dollars <= 1.01 * min(plan.cost.dollars for plan in every)
    dollars = [plan.cost.dollars for plan in found]
    assert dollars == pytest.approx(sorted(dollars))
    assert {plan.recipe.partition.num_blocks for plan in search(base | {"bcd_num_blocks": 3})} == {3}


def test_search_cuts_the_pipeline_by_memory_too() -> None:
    """A search moves layers from a stage that would recompute, which is faster than a cut by work."""
    full = {"method": "full", "adam_moments_dtype": "int8", "pipeline_model_parallel_size": 8, "recompute": "auto"}
    base = request("L-8.0B", num_gpus=8, micro_batch_size=1) | full
    best, cuts = search(base)[0], [make_recipe(**base | {"pipeline_cut": cut}) for cut in ("even", "auto")]
    assert best.recipe.flag("pipeline_model_parallel_layout")
    assert best.iteration_seconds < min(Estimate(recipe=each).iteration_seconds for each in cuts if fits(each))


def test_fp16_accumulation_is_faster_on_geforce_cards() -> None:
    """Products in fp16 are planned at the rate of fp16 accumulation where the cluster table has one."""
    for gpu, is_faster in (("rtx4090", True), ("h100", False)):
        recipe = make_recipe(**request("L-1.5B", num_gpus=1, precision="fp16", cluster=CLUSTERS[gpu]))
        times = [pass_seconds(each)[1] for each in (recipe, recipe.changed(fp16_accumulation=True))]
        assert (times[1] < 0.7 * times[0]) == is_faster


def test_fewest_gpus_fit() -> None:
    """The fewest GPUs are enough, half of them are not, and their number need not be a power of two."""
    base = request("G-10B", num_gpus=2)
    assert search(base) == []
    number = fewest_gpus(base)
    assert number is not None and search(base | {"num_gpus": number}) and not search(base | {"num_gpus": number // 2})
    little = base | {"model": MODELS["G-5.4B"], "cluster": replace(CLUSTERS["rtx4090"], memory_gib=20.0)}
    number = fewest_gpus(little)
    assert number is not None and number & (number - 1), "no power of two"
    assert any(map(fits, candidates(little | {"num_gpus": number})))


def test_what_fits_is_the_shortest_pipeline_and_the_largest_micro_batch() -> None:
    """The largest micro-batch fits and twice as many samples do not; the shortest pipeline that fits is chosen."""
    one = recipe("G-1.6B")
    largest = Estimate(recipe=one).largest_micro_batch
    assert largest is not None and fits(one.changed(micro_batch_size=largest))
    assert not fits(one.changed(micro_batch_size=2 * largest))
    assert Estimate(recipe=recipe("G-10B")).largest_micro_batch is None
    eight = request("G-5.4B", precision="bf16", num_gpus=8)
    chosen = place(**eight, is_open=False)
    assert fits(chosen)
    suited = candidates(eight | {"micro_batch_size": 1, "bcd_num_blocks": 3}, is_open=False)
    assert not any(fits(each) for each in suited if each.pipeline_size < chosen.pipeline_size)
    refused = first_allowed(eight | {"bcd_num_blocks": 40})
    assert "--bcd-num-blocks" in str(refused.fault) and not fits(refused)


@pytest.mark.parametrize(
    "change, message",
    [
        (("hidden,", "width,"), "models.csv"),
        (("30,2048,16,16", "30,2048,15,16"), "line 9: .*heads 15"),
        (("G-1.6B,gpt,30", "G-1.6B,gpt,many"), "line 9"),
        (("G-5.4B", "G-1.6B"), "models.csv"),
        (("G-1.6B,gpt,", "G-1.6B,"), "line 9"),
    ],
)
def test_a_broken_table_names_its_line(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    """A broken table is refused, and the error names the file or the line."""
    text = (ROOT / "examples" / "models.csv").read_text()
    (tmp_path / "models.csv").write_text(text.replace(*change, 1))
    with pytest.raises(ValueError, match=message):
        read_table(tmp_path / "models.csv", Model)


@pytest.mark.parametrize(
    "field, value", [("compute_share", 1.2), ("memory_share", 0.0), ("gpus_per_node", 0), ("memory_gib", float("nan"))]
)
def test_a_cluster_that_cannot_be(field: str, value: float) -> None:
    """A cluster with an impossible value is refused by the field's name."""
    with pytest.raises(ValueError, match=field):
        replace(CLUSTERS["a100"], **{field: value})


@pytest.mark.parametrize(
    "find", [lambda values: place(**values), lambda values: remedies(values, place), search, compare, fewest_gpus]
)
@pytest.mark.parametrize("mistake", ["search.fits", "recipe.partition_from_config"])
def test_a_mistake_in_a_formula_is_no_refusal(find: Callable[[dict[str, Any]], object], mistake: str) -> None:
    """A mistake of the planner itself ends a search: it is not taken for a layout that the run refuses."""
    values = recipe(task="sft", method="finetune", bcd_inactive_update="none", num_gpus=2).values
    wrong = mock.patch(f"megatron.bcd.planner.{mistake}", side_effect=ValueError("zip() argument 2 is shorter"))
    with wrong, pytest.raises(ValueError, match="zip"):
        find(values)
