"""tools/recipe.py: where a recipe runs, what it refuses, and what it says would fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import recipe

from megatron.bcd.planner.memory import fits
from megatron.bcd.planner.recipe import Recipe

SMALL = ("G-5.4B", "bcd", "rtx4090")


def planned_for(words: Sequence[str], environment: Mapping[str, str]) -> Recipe:
    """The recipe that these words and variables come to."""
    return recipe.request_of(words, environment)[0]


@pytest.mark.parametrize(
    ("environment", "nodes", "per_node"),
    [
        ({"NUM_GPUS": "4", "NNODES": "2"}, 2, 2),
        ({"NUM_GPUS": "8", "GPUS_PER_NODE": "2"}, 4, 2),
        ({"NNODES": "2"}, 2, 8),
    ],
)
def test_two_numbers_give_the_third(environment: dict[str, str], nodes: int, per_node: int) -> None:
    """Two numbers give the third, and a cluster's default fills in one that is missing."""
    found = planned_for(SMALL, environment)
    assert (found.num_nodes, found.gpus_per_node, found.num_gpus) == (nodes, per_node, nodes * per_node)


def test_where_a_recipe_runs() -> None:
    """A recipe takes the GPUs of its row in the method table, otherwise those that its flags need, and recomputes where
    memory is short."""
    for words, nodes, per_node in (
        (("G-20B", "bcd", "rtx4090"), 2, 8),
        (("L-8.0B", "full", "rtx4090"), 2, 6),
        (("G-5.4B", "offload", "rtx4090"), 1, 4),
    ):
        for environment in ({}, {"NNODES": str(nodes), "GPUS_PER_NODE": str(per_node)}):
            found = planned_for(words, environment)
            assert (found.num_nodes, found.gpus_per_node, found.pipeline_size) == (nodes, per_node, nodes * per_node)
    for words, recompute in ((SMALL, "none"), (("G-5.4B", "full", "rtx4090"), "auto")):
        found = planned_for(words, {"PRECISION": "fp32"})
        assert fits(replace(found, recompute="none")) and found.recompute == recompute
    by_stage = ("--bcd-layout", "stage")
    for words, num_gpus, stages in (
        (("G-1.6B", "bcd", "a100", *by_stage), 2, 2),
        (("G-1.6B", "bcd", "rtx4090", *by_stage), 2, 2),
        (("G-1.6B", "bcd", "a100", *by_stage, "--bcd-num-blocks", "3"), 3, 3),
        (("G-1.6B", "bcd", "a100", "--pipeline-model-parallel-size", "4"), 4, 4),
    ):
        found = planned_for(words, {})
        assert (found.num_gpus, found.pipeline_size, fits(found)) == (num_gpus, stages, True), words
        tiny = recipe.scaled_down(found)
        assert tiny.partition.num_blocks == (2 if "stage" in words else 3)
    assert recipe.scaled_down(planned_for(SMALL, {"NNODES": "4", "GPUS_PER_NODE": "1"})).num_nodes == 1


def test_recipes_are_in_bf16() -> None:
    """A recipe is in bf16 unless PRECISION names fp32, as the comparison with the paper does."""
    for words in (SMALL, ("L-11B", "full", "rtx4090"), ("LLaMA-7B", "finetune", "rtx4090", "--num-gpus", "1")):
        assert planned_for(words, {}).precision == "bf16"
        made = recipe.as_bash(*recipe.request_of(words, {}))
        assert " --bf16" in next(line for line in made.splitlines() if line.startswith("LAYOUT_ARGS="))
    assert planned_for(SMALL, {"PRECISION": "fp32"}).precision == "fp32"


FINE_TUNING = ("LLaMA-7B", "finetune", "rtx4090")


@pytest.mark.parametrize(
    ("words", "flag"),
    [(SMALL, "--kv-channels"), (SMALL, "--optimizer"), (FINE_TUNING, "--data-path"), (FINE_TUNING, "--save")],
)
def test_flags_that_the_recipe_sets(words: Sequence[str], flag: str) -> None:  # some of the tables in tools/recipe.py
    """A flag that the recipe sets is refused by name."""
    with pytest.raises(ValueError, match=flag):
        recipe.request_of([*words, f"{flag}=1"], {})


def test_flags_that_fine_tuning_leaves_to_the_user() -> None:
    """The tokenizer, records for validation and the metrics file are left to the user."""
    flags = ("--tokenizer-type", "HuggingFaceTokenizer", "--valid-data-path", "v.jsonl", "--split", "90,10,0")
    assert recipe.request_of([*FINE_TUNING, *flags], {})[2] == [*flags]
    assert recipe.request_of([*SMALL, "--metrics-file", "m"], {})[2] == ["--metrics-file", "m"]
