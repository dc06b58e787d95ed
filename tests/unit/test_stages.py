"""How the layers of a model are divided over pipeline stages by stock Megatron-LM's flags."""

from __future__ import annotations

import pytest
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from support.command_line import parse

from megatron.bcd.blocks.stages import layers_per_stage, partition_from_config
from megatron.bcd.model.implementation import Implementation
from megatron.bcd.model.transformer_config import build_transformer_config

ONE_BLOCK = ("--bcd-num-blocks", "1")
LOCAL = Implementation(layers="local", attention="", norm="PyTorch LayerNorm", optimizer="")
GOOD = {
    "--num-layers 10 --pipeline-model-parallel-size 4": (3, 3, 2, 2),
    "--num-layers 10 --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1": (1, 3, 3, 3),
    "--num-layers 10 --pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 1": (3, 3, 3, 1),
    "--num-layers 10 --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2 "
    "--decoder-last-pipeline-num-layers 4": (2, 2, 2, 4),
    "--num-layers 6 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 2 "
    "--decoder-last-pipeline-num-layers 4": (2, 4),
    "--num-layers 10 --pipeline-model-parallel-size 4 --account-for-embedding-in-pipeline-split "
    "--account-for-loss-in-pipeline-split": (2, 3, 3, 2),
    "--num-layers 11 --pipeline-model-parallel-size 4 --account-for-embedding-in-pipeline-split": (2, 3, 3, 3),
    "--num-layers 11 --pipeline-model-parallel-size 4 --account-for-loss-in-pipeline-split": (3, 3, 3, 2),
    "--num-layers 6 --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et|(t|)*2,t*3L": (1, 1, 1, 3),
    "--num-layers 6 --pipeline-model-parallel-size 1 --pipeline-model-parallel-layout Et*6L": (6,),
}
TWO = "--pipeline-model-parallel-size 2"
BAD = {
    "--decoder-first-pipeline-num-layers 2": "--pipeline-model-parallel-size",
    f"{TWO} --decoder-first-pipeline-num-layers 6": "layers",
    f"{TWO} --decoder-first-pipeline-num-layers 7": "--decoder-first-pipeline-num-layers",
    "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2": "--decoder-first-pipeline-num-layers",
    f"{TWO} --account-for-loss-in-pipeline-split": "--account-for-loss-in-pipeline-split",
    f"{TWO} --account-for-loss-in-pipeline-split --decoder-first-pipeline-num-layers 2": "--account-for-loss",
    f"{TWO} --pipeline-model-parallel-layout Ettt|ttL": "--pipeline-model-parallel-layout",
    f"{TWO} --pipeline-model-parallel-layout tttE|tttL": "--pipeline-model-parallel-layout",
    f"{TWO} --pipeline-model-parallel-layout Ett|tt|tt|L": "--pipeline-model-parallel-layout",
    f"{TWO} --pipeline-model-parallel-layout Et*6|L": "layers",
    f"{TWO} --pipeline-model-parallel-layout Ettt|tttmL": "--pipeline-model-parallel-layout",
    f"{TWO} --pipeline-model-parallel-layout Et*99999999999999999999|L": "--pipeline-model-parallel-layout",
    f"{TWO} --pipeline-model-parallel-layout ((t*999)*999)*999": "--pipeline-model-parallel-layout",
}


@pytest.mark.parametrize("words", GOOD)
def test_split(words: str) -> None:
    """A stage of another size than the flags say, and than Megatron Core would build."""
    ranks = int(words.split("--pipeline-model-parallel-size ")[1].split()[0])
    config = parse(*words.split(), *ONE_BLOCK, world_size=ranks)
    assert layers_per_stage(config) == partition_from_config(config).layers_per_stage == GOOD[words]
    layout = build_transformer_config(config, LOCAL).pipeline_model_parallel_layout
    if len(set(GOOD[words])) > 1:
        counts = [[kind.name for kind in stage].count("decoder") for [stage] in layout.layout]
        assert tuple(counts) == GOOD[words]
    if "layout" in words:
        stages = PipelineParallelLayerLayout.parse_str_to_list(words.split()[-1])
        assert tuple([kind.name for kind in stage].count("decoder") for stage in stages) == GOOD[words]


@pytest.mark.parametrize("words", BAD)
def test_bad_split(words: str) -> None:
    """Layers that are left over or counted twice, or a layout that fills the memory, told in one line."""
    ranks = int(words.split("--pipeline-model-parallel-size ")[1].split()[0]) if "--pipeline-" in words[:11] else 1
    with pytest.raises(ValueError, match=BAD[words]):
        parse(*words.split(), *ONE_BLOCK, world_size=ranks)
