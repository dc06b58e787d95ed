"""The partition of a model into stages (also by stock Megatron-LM's flags) and blocks."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from support.command_line import parse

from megatron.bcd.blocks.partition import Partition, divide, partition, partition_from_config
from megatron.bcd.config import LAYOUTS
from megatron.bcd.model.implementation import Implementation
from megatron.bcd.model.transformer_config import build_transformer_config


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
def test_every_layer_is_in_exactly_one_block(cut: Partition) -> None:
    """Every layer is in exactly one block."""
    assert sorted(chain.from_iterable(block.layers for block in cut.blocks)) == list(range(cut.num_layers))


@given(partitions())
def test_embedding_norm_and_head_have_one_owner(cut: Partition) -> None:
    """Embedding, final norm and head are active in one block each, a tied head in the embedding's."""
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


@given(partitions())
def test_stage_questions_agree_with_layers(cut: Partition) -> None:
    """A stage is active if it has active layers or an active head, and forward-only if its layers lie before them."""
    for block in cut.blocks:
        on_stages = [cut.active_layers(block.index, stage) for stage in range(cut.num_stages)]
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
        {stage for stage in range(cut.num_stages) if cut.active_layers(block.index, stage)} for block in blocks
    ]
    if cut.layout == "spread":
        assert all(stages == set(range(cut.num_stages)) for stages in stages_of)
    elif cut.layout == "strided":
        for stage in range(cut.num_stages):
            layers = cut.stage_layers(stage)
            assert [cut.active_layers(block.index, stage) for block in blocks] == [
                tuple(layers[first :: len(blocks)]) for first in range(len(blocks))
            ]
    elif cut.layout == "interleaved":
        assert all(stages == set(range(cut.num_stages)) for stages in stages_of)
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
            result, others = set(cut.layers_updated_inactive(block.index)), set(range(layers)) - set(block.layers)
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
            assert tuple(chain.from_iterable(of_block)) == cut.active_layers(block.index, stage)
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


def test_uneven_blocks_name_an_even_number() -> None:
    """Blocks of clearly different sizes name the next numbers of blocks that divide the layers evenly."""
    sizes = {"num_stages": 1, "layout": "spread", "tied": True}
    said = partition(num_layers=4, num_blocks=3, **sizes).describe_uneven()
    assert said == "blocks of 2, 1, 1 layers: --bcd-num-blocks 2 or 4 divides them evenly"
    assert "--bcd-num-blocks 3 or 9 divides" in partition(num_layers=9, num_blocks=7, **sizes).describe_uneven()
    for layers, blocks in ((4, 2), (32, 3), (5, 1)):
        assert partition(num_layers=layers, num_blocks=blocks, **sizes).describe_uneven() == ""
