"""A checkpoint fits every parallel layout: the same weights, and the optimizer state if blocks hold the same layers.

There is no dropout, because random generators belong to the ranks that saved them, and other ranks are seeded again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import resumed_runs, worlds
from support.dist import World

CUTS: dict[str, dict[str, Any]] = {
    "one": {"bcd_num_blocks": 4},
    "pipeline2": {"world_size": 2, "pipeline_model_parallel_size": 2, "bcd_num_blocks": 2},
    "data2": {"world_size": 2, "bcd_num_blocks": 4},
    "tensor2": {"world_size": 2, "tensor_model_parallel_size": 2, "bcd_num_blocks": 4},
    "context2": {"world_size": 2, "context_parallel_size": 2, "bcd_num_blocks": 4},
    "expert2": {"world_size": 2, "bcd_num_blocks": 4} | worlds.EXPERT2,
}
PAIRS = [("pipeline2", "data2"), ("data2", "tensor2"), ("context2", "one"), ("expert2", "one")]
# What is saved under each: gate and up lie side by side on every tensor-parallel rank, main parameters have bits of
# their own, frozen blocks have moments, and what is always active has seen more steps than the block
MODELS: dict[str, dict[str, Any]] = {
    "pipeline2": {"bcd_optimizer_state": "host", "untie_embeddings_and_output_weights": True, "bcd_head_phase": True},
    "data2": {"bf16": True, "bcd_optimizer_state": "host", "bcd_always_active": "norms"},
    "context2": {"bf16": True, "bcd_optimizer_state": "host"},
    "expert2": {"bf16": True, "bcd_optimizer_state": "host"} | worlds.EXPERTS,
}
FACTORED = {"bcd_inactive_update": "factored", "bcd_embedding_update": "factored", "bcd_inactive_grad_dtype": "fp32"}
STEPS_PER_BLOCK = 2
IN_FIRST_BLOCK, IN_SECOND_BLOCK = 9, 7
"""Iterations inside a phase of a later cycle: the embedding's block with four blocks, the other one with two; inside
the head's phase where it has one."""


class Saved:
    """Runs that saved inside a phase, one per parallel layout, created on demand."""

    def __init__(self, worlds_by_size: dict[int, World], text_data: str, folder: Path) -> None:
        self._worlds, self._text_data, self._folder = worlds_by_size, text_data, folder
        self._whole: dict[str, tuple[dict[str, Any], str]] = {}

    def run(self, function: Any, cut: str, flags: dict[str, Any], *args: Any) -> dict[str, Any]:
        """Return rank 0's result of `function` in the world that `cut` needs."""
        base = {
            "num_layers": 4,
            "micro_batch_size": 2,
            "bcd_steps_per_block": STEPS_PER_BLOCK,
            "train_iters": 12,
            "data_path": self._text_data,
        }
        config = worlds.run_config(**base | CUTS[cut] | flags)
        return self._worlds[CUTS[cut].get("world_size", 1)].run(function, config, *args)[0]

    def under(self, cut: str, flags: dict[str, Any], stop: int) -> tuple[dict[str, Any], str]:
        """Return the outcome of a run, and the folder with its checkpoint after iteration `stop`."""
        key = repr((cut, flags))
        if key not in self._whole:
            root = str(self._folder / str(len(self._whole)))
            whole = self.run(resumed_runs.one_part, cut, flags | {"save": root, "save_interval": stop})
            resumed_runs.point_to(root, stop)
            self._whole[key] = whole, root
        return self._whole[key]

    def tensors(self, root: str) -> dict[str, torch.Tensor]:
        """Return the tensors of the oldest checkpoint in `root`."""
        return self._worlds[1].run(resumed_runs.tensors_of, str(min(Path(root).glob("iter_*"))))[0]


@pytest.fixture(scope="module")
def saved(
    world1: World, world2: World, world4: World, text_data: str, tmp_path_factory: pytest.TempPathFactory
) -> Saved:
    return Saved({1: world1, 2: world2, 4: world4}, text_data, tmp_path_factory.mktemp("saved"))


def different(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that are not equal bit for bit."""
    return [
        name
        for name in left
        if left[name].shape != right[name].shape or worlds.same_bits({"": left[name]}, {"": right[name]})
    ]


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_another_layout_goes_on_inside_the_phase(saved: Saved, tmp_path: Path, before: str, after: str) -> None:
    """Under another layout with the same blocks, a run resumes inside the phase with the same weights and optimizer
    state."""
    flags = {"bcd_layout": "submodel"} | MODELS[before]
    whole, root = saved.under(before, flags, IN_FIRST_BLOCK)
    resumed = saved.run(resumed_runs.resumed_and_saved_again, after, flags, root, str(tmp_path))
    assert (resumed["began_at"], resumed["began_in"]) == (IN_FIRST_BLOCK, (4, 1))
    first, second = saved.tensors(root), saved.tensors(str(tmp_path))
    assert first.keys() == second.keys()
    has_head_phase = "bcd_head_phase" in flags
    active = "output_layer" if has_head_phase else "embedding.word_embeddings"
    assert {f"optimizer.exp_avg.{active}.weight"} <= first.keys()
    assert different(first, second) == []
    assert resumed["losses"] == pytest.approx(whole["losses"][IN_FIRST_BLOCK:], rel=1e-2 if "bf16" in flags else 2e-5)
    assert resumed["blocks"] == whole["blocks"][IN_FIRST_BLOCK:] == ([4, 0, 0] if has_head_phase else [0, 1, 1])
    assert any("random generators are seeded anew" in line for line in resumed["warnings"]), resumed["warnings"]


def test_where_blocks_differ_the_cycle_begins_again(saved: Saved, tmp_path: Path) -> None:
    """Under a layout with other blocks, a run resumes with the same weights and no optimizer state, at the start of the
    cycle."""
    flags = {"bcd_layout": "spread", "bcd_num_blocks": 2}
    whole, root = saved.under("one", flags, IN_SECOND_BLOCK)
    resumed = saved.run(resumed_runs.resumed_and_saved_again, "pipeline2", flags, root, str(tmp_path))
    assert (resumed["began_at"], resumed["began_in"]) == (IN_SECOND_BLOCK, (2, 0))
    assert any("cycle 1 restarts" in line for line in resumed["warnings"]), resumed["warnings"]
    first, second = saved.tensors(root), saved.tensors(str(tmp_path))
    assert [name for name in first if name.startswith("optimizer.")]
    assert [name for name in second if name.startswith("optimizer.")] == []
    assert different(second, first) == []
    # the first loss depends only on the weights
    assert resumed["losses"][0] == pytest.approx(whole["losses"][IN_SECOND_BLOCK], rel=2e-5)
    assert resumed["blocks"] == [0, 0, 1, 1, 0]


def test_a_vocabulary_that_is_padded_further(saved: Saved, tmp_path: Path) -> None:
    """The same flags on two tensor-parallel ranks pad to twice the multiple: a run resumes with the same rows of all
    tokens."""
    flags = {"bcd_layout": "submodel", "make_vocab_size_divisible_by": 128} | FACTORED
    whole, root = saved.under("one", flags, IN_FIRST_BLOCK)
    resumed = saved.run(resumed_runs.resumed_and_saved_again, "tensor2", flags, root, str(tmp_path))
    first, second = saved.tensors(root), saved.tensors(str(tmp_path))
    padded = [name for name in first if first[name].shape != second[name].shape]
    assert {name.rpartition(".embedding.")[0] for name in padded} == {"", "optimizer.exp_avg_sq_row"}
    for name in padded:
        assert (len(first[name]), len(second[name])) == (384, 512)
        first[name], second[name] = first[name][:257], second[name][:257]
    assert different(first, second) == []
    assert resumed["losses"] == pytest.approx(whole["losses"][IN_FIRST_BLOCK:], rel=0.2), (
        "new padding joins the softmax"
    )


@pytest.mark.parametrize(
    ("before", "after", "network"),
    [("tensor2", "pipeline2", {"swiglu": True}), ("expert2", "tensor2", worlds.EXPERTS | {"moe_layer_freq": 2})],
)
def test_second_moments_fit_another_layout(
    saved: Saved, tmp_path: Path, before: str, after: str, network: dict[str, Any]
) -> None:
    """Under another layout, factored second moments and their counts of steps are the same for each matrix, slice and
    expert."""
    flags = {"bcd_layout": "submodel"} | network | {"untie_embeddings_and_output_weights": True} | FACTORED
    whole, root = saved.under(before, flags, IN_FIRST_BLOCK)
    resumed = saved.run(resumed_runs.resumed_and_saved_again, after, flags, root, str(tmp_path))
    first, second = saved.tensors(root), saved.tensors(str(tmp_path))
    assert first.keys() == second.keys()
    assert {f"optimizer.exp_avg_sq_{way}.output_layer.weight" for way in ("row", "col")} <= first.keys()
    assert different(first, second) == []
    assert resumed["losses"] == pytest.approx(whole["losses"][IN_FIRST_BLOCK:], rel=1e-4)
