"""The partition of a model into stages (also by stock Megatron-LM's flags) and blocks, the block that owns a parameter,
balanced cuts, and the least recomputation that fits."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from support.command_line import parse

from megatron.bcd.blocks.ownership import matrix_owners, ownership, sharing_group
from megatron.bcd.blocks.partition import Partition, divide, divide_into_chunks, partition, partition_from_config
from megatron.bcd.config import LAYOUTS
from megatron.bcd.model.implementation import Implementation
from megatron.bcd.model.transformer_config import build_transformer_config
from megatron.bcd.pipeline.cut import balanced_cut
from megatron.bcd.planner.activations import Recomputed, least_recomputation


@st.composite
def partitions(draw: st.DrawFn) -> Partition:
    """Draw any valid partition, with an even or another pipeline cut."""
    layout = draw(st.sampled_from(LAYOUTS))
    stages = draw(st.integers(1, 5))
    parts = 1 if layout == "stage" else draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(parts, parts + 6), min_size=stages, max_size=stages))
    is_own_cut, tied = draw(st.booleans()), draw(st.booleans())
    return partition(
        num_layers=sum(sizes),
        num_stages=stages,
        num_blocks=draw(st.sampled_from([None, stages])) if layout == "stage" else parts,
        layout=layout,
        tied=tied,
        layers_per_stage=tuple(sizes) if is_own_cut and layout != "interleaved" else None,
        head_phase=not tied and draw(st.booleans()),
    )


@given(partitions())
def test_every_part_has_one_owner(cut: Partition) -> None:
    """Every layer is in exactly one block. Embedding, final norm and head are active in one block each, a tied head in
    the embedding's."""
    assert sorted(chain.from_iterable(block.layers for block in cut.blocks)) == list(range(cut.num_layers))
    numbers = range(cut.num_blocks)
    assert [block for block in numbers if cut.embedding_active(block)] == [0]
    last = cut.num_blocks - 1
    if cut.num_blocks == cut.num_layer_blocks:
        last = next(block.index for block in cut.blocks if cut.num_layers - 1 in block.layers)
    assert [block for block in numbers if cut.final_norm_active(block)] == [last]
    assert [block for block in numbers if cut.head_active(block)] == [0 if cut.tied else last]


@given(partitions())
def test_the_prefix_is_what_lies_before_the_first_active_layer(cut: Partition) -> None:
    """The prefix is the layers before the first active one, and is empty if the embedding is active."""
    for block in cut.blocks:
        prefix = cut.prefix_layers(block.index)
        assert list(prefix) == list(range(min(block.layers, default=cut.num_layers)))
        assert not block.layers or block.layers[0] in cut.stage_layers(cut.first_trainable_stage(block.index))
        if cut.embedding_active(block.index):
            assert not prefix


def stage_active(cut: Partition, block: int, stage: int) -> bool:
    return any(cut.virtual_stage_active(block, chunk * cut.num_stages + stage) for chunk in range(cut.num_chunks))


def active_layers(cut: Partition, block: int, stage: int) -> tuple[int, ...]:
    return tuple(
        layer for layer in cut.stage_layers(stage) if cut.has_active_block and layer in cut.blocks[block].layers
    )


@given(partitions())
def test_stage_questions_agree_with_layers(cut: Partition) -> None:
    """A stage is active if it has active layers or an active head, and forward-only if its layers lie before them."""
    for block in cut.blocks:
        on_stages = [active_layers(cut, block.index, stage) for stage in range(cut.num_stages)]
        assert tuple(chain.from_iterable(on_stages)) == block.layers
        for stage, active in enumerate(on_stages):
            is_last = stage == cut.num_stages - 1
            has_head = is_last and cut.head_active(block.index)
            assert stage_active(cut, block.index, stage) == (bool(active) or has_head)
            is_prefix = stage < cut.first_trainable_stage(block.index)
            assert is_prefix == (
                cut.stage_layers(stage)[-1] < len(cut.prefix_layers(block.index))
                and (bool(block.layers) or not is_last)
            )
            assert not (is_prefix and stage_active(cut, block.index, stage))


@given(partitions())
def test_number_of_blocks_by_layout(cut: Partition) -> None:
    """Layouts spread and interleaved have every block on every stage, submodel and stage on one, and strided takes
    every n-th layer."""
    blocks = cut.blocks[: cut.num_layer_blocks]
    stages_of = [
        {stage for stage in range(cut.num_stages) if active_layers(cut, block.index, stage)} for block in blocks
    ]
    if cut.layout in ("spread", "interleaved"):
        assert all(stages == set(range(cut.num_stages)) for stages in stages_of)
    elif cut.layout == "strided":
        for stage in range(cut.num_stages):
            layers = cut.stage_layers(stage)
            assert [active_layers(cut, block.index, stage) for block in blocks] == [
                tuple(layers[first :: len(blocks)]) for first in range(len(blocks))
            ]
    else:
        assert all(len(stages) == 1 for stages in stages_of)
    if cut.layout == "stage":
        assert [block.layers for block in blocks] == [tuple(cut.stage_layers(stage)) for stage in range(cut.num_stages)]
    assert [block.index for block in cut.blocks] == list(range(cut.num_blocks))


@given(layers=st.integers(4, 40), stages=st.integers(1, 4), blocks=st.integers(1, 4), data=st.data())
def test_stateless_layers_are_the_others(layers: int, stages: int, blocks: int, data: st.DataObject) -> None:
    """The inactive layers are all that are not active, on stages that get gradients; without inactive updates there
    are none."""
    assume(layers >= stages * blocks)
    layout = data.draw(st.sampled_from(["spread", "strided", "submodel"]))
    sizes: Any = {"num_layers": layers, "num_stages": stages, "num_blocks": blocks, "layout": layout, "tied": True}
    for has_updates in (False, True):
        cut = partition(**sizes, has_inactive_updates=has_updates)
        for block in cut.blocks:
            result = {layer for layer in range(layers) if cut.has_inactive_update(layer, block.index)}
            others = set(range(layers)) - set(block.layers)
            assert result == (others if has_updates else set())
            assert list(cut.prefix_layers(block.index)) == ([] if has_updates else list(range(min(block.layers))))
            for stage in range(stages):
                if result & set(cut.stage_layers(stage)):
                    assert stage_active(cut, block.index, stage)
                    assert stage >= cut.first_trainable_stage(block.index)


@given(
    stages=st.integers(1, 6),
    blocks=st.integers(1, 4),
    times=st.integers(1, 2),
    more=st.integers(0, 9),
    tied=st.booleans(),
)
def test_interleaved(stages: int, blocks: int, times: int, more: int, tied: bool) -> None:
    """Interleaved blocks have the same layers as on one stage, and stages differ by at most one layer."""
    parts = blocks * times
    arguments = {"num_layers": parts * stages + more, "num_blocks": blocks, "tied": tied, "num_parts": parts}
    cut = partition(num_stages=stages, layout="interleaved", **arguments)
    alone = partition(num_stages=1, layout="interleaved", **arguments)
    assert [block.layers for block in cut.blocks] == [block.layers for block in alone.blocks]
    if times == 1:
        assert [block.layers for block in cut.blocks] == [tuple(item) for item in divide(cut.num_layers, blocks)]
    assert max(cut.layers_per_stage) - min(cut.layers_per_stage) <= 1
    assert cut.num_chunks == (parts if stages > 1 else 1) and alone.num_chunks == 1
    for stage in range(stages if stages > 1 else 0):
        chunks = [cut.chunk_layers(stage, chunk) for chunk in range(parts)]
        assert list(chain.from_iterable(chunks)) == list(cut.stage_layers(stage))
        for block in cut.blocks:
            of_block = [chunks[chunk] for chunk in range(block.index, parts, blocks)]
            assert tuple(chain.from_iterable(of_block)) == active_layers(cut, block.index, stage)
    for block in cut.blocks if stages > 1 else ():
        first = cut.first_trainable_virtual_stage(block.index)
        assert first == block.index * stages
        active = [cut.virtual_stage_active(block.index, virtual) for virtual in range(cut.num_virtual_stages)]
        expected = [virtual // stages % blocks == block.index for virtual in range(cut.num_virtual_stages)]
        expected[-1] |= tied and block.index == 0  # the embedding's copy
        assert active == expected


ONE_BLOCK = ("--bcd-num-blocks", "1")
LOCAL = Implementation(layers="local", attention="", norm="PyTorch LayerNorm", optimizer="")
GOOD = {
    "--num-layers 10 --pipeline-model-parallel-size 4": (3, 3, 2, 2),
    "--num-layers 10 --pipeline-model-parallel-size 4 --account-for-embedding-in-pipeline-split "
    "--account-for-loss-in-pipeline-split": (2, 3, 3, 2),
    "--num-layers 11 --pipeline-model-parallel-size 4 --account-for-embedding-in-pipeline-split": (2, 3, 3, 3),
    "--num-layers 11 --pipeline-model-parallel-size 4 --account-for-loss-in-pipeline-split": (3, 3, 3, 2),
    "--num-layers 6 --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et|(t|)*2,t*3L": (1, 1, 1, 3),
    "--num-layers 6 --pipeline-model-parallel-size 1 --pipeline-model-parallel-layout Et*6L": (6,),
}
TWO = "--pipeline-model-parallel-size 2"
BAD = {
    f"{TWO} --decoder-first-pipeline-num-layers 2": "--pipeline-model-parallel-layout",
    f"{TWO} --account-for-loss-in-pipeline-split": "--account-for-loss-in-pipeline-split",
    f"{TWO} --account-for-loss-in-pipeline-split --pipeline-model-parallel-layout Ettt|tttL": "--account-for-loss",
    f"{TWO} --pipeline-model-parallel-layout Ettt|ttL": "--pipeline-model-parallel-layout",
    f"{TWO} --pipeline-model-parallel-layout Ett|tt|tt|L": "--pipeline-model-parallel-layout",
    f"{TWO} --pipeline-model-parallel-layout Et*6|L": "layers",
    f"{TWO} --pipeline-model-parallel-layout ((t*999)*999)*999": "--pipeline-model-parallel-layout",
}


@pytest.mark.parametrize("words", GOOD)
def test_split(words: str) -> None:
    """The stages have the sizes that the flags say, and that Megatron Core builds."""
    ranks = int(words.split("--pipeline-model-parallel-size ")[1].split()[0])
    config = parse(*words.split(), *ONE_BLOCK, world_size=ranks)
    assert partition_from_config(config).layers_per_stage == GOOD[words]
    layout = build_transformer_config(config, LOCAL).pipeline_model_parallel_layout
    if len(set(GOOD[words])) > 1:
        counts = [[kind.name for kind in stage].count("decoder") for [stage] in layout.layout]
        assert tuple(counts) == GOOD[words]
    if "layout" in words:
        stages = PipelineParallelLayerLayout.parse_str_to_list(words.split()[-1])
        assert tuple([kind.name for kind in stage].count("decoder") for stage in stages) == GOOD[words]


@pytest.mark.parametrize("words", BAD)
def test_bad_split(words: str) -> None:
    """A split that does not fit the layers or the stages is refused, and the error says what is wrong."""
    ranks = int(words.split("--pipeline-model-parallel-size ")[1].split()[0]) if "--pipeline-" in words[:11] else 1
    with pytest.raises(ValueError, match=BAD[words]):
        parse(*words.split(), *ONE_BLOCK, world_size=ranks)


# ---- the owner of a parameter

LAYER = ("self_attention.linear_qkv.weight", "input_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
LAYER += ("self_attention.q_layernorm.weight",)


def names_of(cut: Partition, stage: int) -> list[str]:
    names: list[str] = []
    for chunk in range(cut.num_chunks):
        virtual = chunk * cut.num_stages + stage
        numbers = range(len(cut.chunk_layers(stage, chunk)))
        chunk_names = [f"decoder.layers.{index}.{name}" for index in numbers for name in LAYER]
        if virtual == 0:
            chunk_names = ["embedding.word_embeddings.weight", "embedding.position_embeddings.weight", *chunk_names]
        if virtual == cut.num_virtual_stages - 1:
            chunk_names += ["decoder.final_layernorm.weight", "output_layer.weight"]
        names += [f"chunks.{chunk}.{name}" for name in chunk_names] if cut.num_chunks > 1 else chunk_names
    return names


def two_stages(layout: str, **parts: Any) -> Partition:
    num_blocks = None if layout == "stage" else 2
    return partition(num_layers=8, num_stages=2, num_blocks=num_blocks, layout=layout, **parts)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("always_active", [(), ("norms",), ("embedding",), ("head",), ("norms", "embedding", "head")])
def test_agrees_with_the_partition(layout: str, tied: bool, always_active: tuple[str, ...]) -> None:
    """The owner of each parameter agrees with the partition in every phase."""
    cut = two_stages(layout, tied=tied, always_active=frozenset(always_active))
    for stage in range(2):
        for name in names_of(cut, stage):
            owned = ownership(name, partition=cut, stage=stage)
            for block in range(cut.num_blocks):
                expected = {
                    "embedding": cut.embedding_active(block),
                    "head": cut.head_active(block),
                    "final_norm": cut.final_norm_active(block),
                    "layer": owned.layer in active_layers(cut, block, stage)
                    or ("norms" in cut.always_active and "norm" in name),
                }
                assert owned.is_active(block) == expected[owned.module], (name, block)
                assert owned.is_always_active or owned.is_active(block) == (block == owned.block)


def test_experts_belong_to_their_layer() -> None:
    """Experts, routers and shared experts are trained in the phase of their layer, and updated without state in others.

    Their matrices are those of separate modules, or of Transformer Engine's grouped layers."""
    cut = partition(num_layers=4, num_stages=2, num_blocks=2, layout="spread", tied=True, has_inactive_updates=True)
    experts = ("experts.local_experts.3.linear_fc1.weight", "experts.linear_fc2.weight2")
    for name in (*experts, "router.weight", "shared_experts.linear_fc1.weight", "shared_experts.gate_weight"):
        owned = ownership(f"decoder.layers.1.mlp.{name}", partition=cut, stage=1)
        assert (owned.layer, owned.block, owned.inactive_updates_in) == (3, 1, {0}), name
        assert owned.is_matrix and not owned.is_always_active, name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("frozen", ["embedding", "head", "norms", "embedding,head"])
def test_no_phase_trains_what_is_frozen(layout: str, tied: bool, frozen: str) -> None:
    """A frozen part, also a tied one, is active in no phase, and every other parameter in exactly one."""
    cut = two_stages(layout, tied=tied, frozen=frozenset(frozen.split(",")))
    parts = set(frozen.split(",")) | ({"embedding", "head"} if tied and frozen != "norms" else set())
    for stage in range(2):
        for name in names_of(cut, stage):
            owned = ownership(name, partition=cut, stage=stage)
            is_frozen = ("norms" if owned.is_norm else owned.module) in parts
            assert owned.is_frozen == is_frozen
            assert sum(owned.is_active(block) for block in range(cut.num_blocks)) == (not is_frozen), name
    for block in range(cut.num_blocks):
        assert not ("embedding" in parts and cut.embedding_active(block))
        assert not ("head" in parts and cut.head_active(block))
        assert not ("norms" in parts and cut.final_norm_active(block))


def test_unknown_name() -> None:
    """A parameter of an unknown module is refused by name."""
    cut = partition(num_layers=6, num_stages=1, num_blocks=3, layout="spread", tied=False)
    with pytest.raises(KeyError, match="mtp"):
        ownership("mtp.layers.0.weight", partition=cut, stage=0)


@pytest.mark.parametrize(
    ("name", "num_axes", "is_matrix"),
    [
        ("mlp.experts.gate_up_proj", 3, True),
        ("mlp.experts.gate_up_proj_bias", 2, False),
        ("mlp.router.weight", 2, True),
        ("linear_attn.conv1d.weight", 3, False),
        ("linear_attn.A_log", 1, False),
    ],
)
def test_matrices_of_transformers(name: str, num_axes: int, *, is_matrix: bool) -> None:
    """Parameters of experts with three axes are matrices; their biases and convolutions count as biases."""
    cut = partition(num_layers=2, num_stages=1, num_blocks=2, layout="spread", tied=True, has_inactive_updates=True)
    owned = ownership(f"decoder.layers.1.{name}", partition=cut, stage=0, num_axes=num_axes)
    assert owned.is_matrix == is_matrix


# ---- balanced cuts and recomputation


def even_cut(**changes: Any) -> Partition:
    sizes = {"num_layers": 28, "num_stages": 4, "num_blocks": 3, "layout": "spread", "tied": False}
    return partition(**sizes | changes)


def slowest(one: Partition, sizes: tuple[int, ...], head: float) -> float:
    """Work of the slowest stage of layout spread, summed over the phases, counted layer by layer."""
    total = 0.0
    for block in range(one.num_blocks):
        work = []
        for stage, size in enumerate(sizes):
            parts = [len(part) for part in divide(size, one.num_layer_blocks)]
            is_head = block == len(parts)
            backward = [part for place, part in enumerate(parts) if not is_head and (stage or place >= block)]
            is_last = stage == len(sizes) - 1
            is_active = block == (0 if one.tied else one.num_blocks - 1)
            active = 0 if is_head else parts[block]
            work.append(size + sum(backward) + active + is_last * head * (2 + is_active))
        total += max(work)
    return total


@pytest.mark.parametrize(("tied", "head_phase"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize(("layers", "stages", "head"), [(28, 4, 1.0), (13, 4, 3.0), (64, 8, 0.5), (12, 4, 40.0)])
def test_no_slower_than_an_even_cut(layers: int, stages: int, head: float, tied: bool, head_phase: bool) -> None:
    """A balanced cut is no slower than an even one, and faster where a layer can move away from the head."""
    one = even_cut(num_layers=layers, num_stages=stages, tied=tied, head_phase=head_phase)
    sizes = balanced_cut(one, head=head)
    even = tuple(len(part) for part in divide(layers, stages))
    assert sum(sizes) == layers and len(sizes) == stages and min(sizes) >= one.num_layer_blocks
    assert slowest(one, sizes, head) <= slowest(one, even, head)
    if layers > stages * one.num_layer_blocks + 1:
        assert sizes[-1] < sizes[0] and slowest(one, sizes, head) < slowest(one, even, head)


@pytest.mark.parametrize("head", [0.0, 1.0, 5.0, 20.0])
def test_two_stages_are_cut_as_well_as_they_can_be(head: float) -> None:
    """The cut of two stages is the fastest of all cuts."""
    one = even_cut(num_layers=24, num_stages=2)
    best = min(slowest(one, (24 - last, last), head) for last in range(one.num_blocks, 24 - one.num_blocks + 1))
    assert slowest(one, balanced_cut(one, head=head), head) == best


def test_costly_layers_count_more() -> None:
    """A stage of layers that cost three times as much gets fewer of them."""
    one = even_cut(num_layers=12, num_stages=2, num_blocks=1)
    assert balanced_cut(one, head=0, layers=[1.5] * 6 + [0.5] * 6) == (4, 8)


@pytest.mark.parametrize("head_phase", [False, True])
@pytest.mark.parametrize("num_chunks", [3, 6])
def test_chunks_keep_their_layers(num_chunks: int, head_phase: bool) -> None:
    """A cut keeps the layers of each chunk, and the last stage has the fewest."""
    sizes = balanced_cut(even_cut(layout="interleaved", num_parts=num_chunks, head_phase=head_phase), head=1.0)
    even = divide_into_chunks(28, parts=num_chunks, stages=4)
    for first in range(0, len(sizes), 4):
        mine, chunks = sizes[first : first + 4], even[first : first + 4]
        assert sum(mine) == sum(map(len, chunks)) and min(mine) >= 1
    held = [sum(sizes[stage::4]) for stage in range(4)]
    assert held[-1] == min(held)


@pytest.mark.parametrize("needed", range(8))
def test_least_recomputation(needed: int) -> None:
    """Recomputation takes the least number of layers that fits, from the first chunks on."""
    numbers = (0, 2, 3)

    def fits(choice: Recomputed) -> bool:
        return sum(choice.layers) >= needed

    choice = least_recomputation(numbers, fits, core_share=0.1)
    expected = {0: (), 1: (0, 1, 0), 2: (0, 2, 0), 3: (0, 2, 1), 4: (0, 2, 2)}.get(needed, numbers)
    assert choice.layers == expected
    assert choice.granularity == ("full" if needed else "none")


@pytest.mark.parametrize(("core_share", "expected"), [(0.1, "selective"), (0.3, "full")])
def test_the_core_of_attention_is_cheaper_or_not(core_share: float, expected: str) -> None:
    """Attention alone is recomputed only if that is less work than whole layers."""
    choice = least_recomputation((5,), lambda one: one != Recomputed(), core_share=core_share)
    assert choice.granularity == expected


@pytest.mark.parametrize(("num_ranks", "most"), [(2, 7), (4, 4)])
def test_ranks_share_each_chunk(num_ranks: int, most: int) -> None:
    """Ranks own the same number of elements in all, and in breadth-first order the best shares of each layer."""
    cut = partition(num_layers=8, num_stages=1, num_blocks=1, layout="spread", tied=True)
    kinds = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    sizes = [3, 1, 4, 4]
    names = [f"decoder.layers.{layer}.{kind}.weight" for layer in range(8) for kind in kinds]
    for passes in (cut.in_passes(1), None):
        owned = [ownership(name, partition=cut, stage=0) for name in names]
        groups = [sharing_group(each, passes, has_moments=False) for each in owned]
        loads = torch.zeros(8, num_ranks)
        for index, rank in enumerate(matrix_owners(sizes * 8, num_ranks, groups)):
            loads[index // 4, rank] += sizes[index % 4]
        assert loads.sum(0).eq(12 * 8 / num_ranks).all() and (passes is None or loads.amax(1).eq(most).all())
