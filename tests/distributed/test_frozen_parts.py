"""--bcd-frozen: parameters that no phase trains; one layer per block; --bcd-main-params."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import resumed_runs, worlds
from support.dist import World

from megatron.bcd.config import RunConfig
from megatron.bcd.model.builder import unwrap_model

UNTIED = {"untie_embeddings_and_output_weights": True}


def is_named(name: str, parts: set[str]) -> bool:
    """Return True if the parameter is in one of these parts."""
    return (
        ("embedding" in parts and name.startswith("embedding."))
        or ("head" in parts and name.startswith("output_layer."))
        or ("norms" in parts and "layernorm" in name)
    )


def what_there_is(config: RunConfig) -> dict[str, Any]:
    """Return by step: the block, the changed names, the names with a gradient buffer; and the sizes of all
    parameters."""
    steps: list[dict[str, Any]] = []
    first: dict[str, torch.Tensor] = {}

    def look(run: worlds.RecordedRun) -> None:
        named = dict(unwrap_model(run.model).named_parameters())
        steps.append(
            {
                "block": run.results[-1]["block"],
                "changed": worlds.same_bits(worlds.weights_of(run.model), first),
                "buffered": [name for name, item in named.items() if hasattr(item, "main_grad")],
                "stepped": sum(main_param.numel() for main_param in worlds.masters_of(run)),
            }
        )

    with worlds.started(
        config, after_build=lambda run: first.update(worlds.weights_of(run.model)), after_step=look
    ) as run:
        run.train()
        sizes = {name: parameter.numel() for name, parameter in unwrap_model(run.model).named_parameters()}
        return {"steps": steps, "sizes": sizes}


@pytest.mark.parametrize(("parts", "precision"), [("embedding,head", "bf16"), ("norms", "fp32")])
def test_frozen_parts_have_no_gradient_and_no_state(world1: World, text_data: str, parts: str, precision: str) -> None:
    """Frozen parts have no gradient and no optimizer state, and do not change; all other parts are trained."""
    flags = {"num_layers": 3, "train_iters": 3, "bf16": precision == "bf16", "weight_decay": 0.1} | UNTIED
    result = world1.run(what_there_is, worlds.run_config(data_path=text_data, bcd_frozen=parts, **flags))[0]
    frozen = {name for name in result["sizes"] if is_named(name, set(parts.split(",")))}
    trained: set[str] = set()
    for step in result["steps"]:
        assert frozen.isdisjoint(step["buffered"]) and set(step["changed"]) <= set(step["buffered"])
        assert step["stepped"] == sum(result["sizes"][name] for name in step["buffered"])
        trained |= set(step["buffered"])
    assert trained == set(result["sizes"]) - frozen and frozen


def inputs_with_a_gradient(config: RunConfig) -> list[tuple[int, list[int], int]]:
    """Return by step: the block, layers whose input receives a gradient, and bytes that autograd saved."""
    layers: set[int] = set()
    steps: list[tuple[int, list[int]]] = []

    def look(run: worlds.RecordedRun) -> None:
        steps.append((run.results[-1]["block"], sorted(layers)))
        layers.clear()

    with worlds.started(config, after_step=look) as run:
        for number, layer in enumerate(unwrap_model(run.model).decoder.layers):

            def note(_: Any, args: Any, kwargs: dict[str, Any], number: int = number) -> None:
                states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
                if states.requires_grad and not states.is_leaf:
                    states.register_hook(lambda _: layers.add(number))

            layer.register_forward_pre_hook(note, with_kwargs=True)
        run.meters = True
        run.train()
        saved = [*map(max, run.saved_activation_bytes)]
    return [(*step, size) for step, size in zip(steps, saved, strict=True)]


def test_backward_ends_at_the_lowest_active_layer(world1: World, text_data: str) -> None:
    """The backward pass ends at the lowest active parameter, also in the head's phase."""
    flags = {"num_layers": 4, "bcd_num_blocks": 4, "train_iters": 4, "bcd_order": "descending"}
    runs = {
        parts: world1.run(inputs_with_a_gradient, worlds.run_config(data_path=text_data, bcd_frozen=parts, **flags))[0]
        for parts in ("embedding", "none")
    }
    assert [step[:2] for step in runs["embedding"]] == [(block, [*range(block + 1, 4)]) for block in (3, 2, 1, 0)]
    assert [step[:2] for step in runs["none"]] == [(3, []), (2, [3]), (1, [2, 3]), (0, [0, 1, 2, 3])]
    sizes = {parts: [size for *_, size in steps] for parts, steps in runs.items()}
    # the tied head, frozen in each phase, keeps no input: in block 0's that is a difference
    assert sizes["embedding"][:3] == sizes["none"][:3] and sizes["embedding"][3] < sizes["none"][3]
    flags |= UNTIED | {"bcd_head_phase": True, "train_iters": 1}
    [(block, layers, size)] = world1.run(inputs_with_a_gradient, worlds.run_config(data_path=text_data, **flags))[0]
    assert (block, layers) == (4, []) and size < sizes["embedding"][0]


INACTIVE = {"bcd_inactive_update": "factored", "bcd_always_active": "none"}


@pytest.mark.parametrize(
    ("before", "after"),
    [({"bcd_frozen": "embedding"}, {}), ({}, INACTIVE)],
    ids=["no_longer_frozen", "inactive"],
)
def test_resumed_with_another_set(
    world1: World, text_data: str, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    """A run that resumes with other frozen or inactive parameters warns and restarts the cycle."""
    flags = {"data_path": text_data, "train_iters": 4, "bf16": True}
    flags |= {} if INACTIVE in (before, after) else {"bcd_optimizer_state": "host"}
    first, second = (worlds.run_config(**flags, **more) for more in (before, after))
    world1.run(resumed_runs.one_part, resumed_runs.with_checkpoints(first, save=str(tmp_path), exit_interval=2))
    result = world1.run(resumed_runs.one_part, resumed_runs.with_checkpoints(second, load=str(tmp_path)))[0]
    assert result["blocks"] == [0, 1] and result["iteration"] == 4, "the cycle starts again"
    assert result["warnings"]


def host_bytes_and_start(config: RunConfig) -> tuple[list[int], list[bool]]:
    """Return the host memory by step, and by phase of the second cycle whether main parameters start as their
    weights."""
    starts: list[bool] = []

    def compare(run: worlds.RecordedRun) -> None:
        shards = worlds.block_shards(run.active.core).values()
        starts.append(all(torch.equal(shard.main_param.flatten(), shard.weight.float()) for shard in shards))

    with worlds.started(config, after_build=compare) as run:
        run.train()
        return [step.host_state_bytes[0] for step in run.recorder.steps], starts[3:]


def test_main_params_that_are_dropped(world1: World, text_data: str) -> None:
    """Low bits are kept in host memory between phases; with --bcd-main-params drop they are not, and phases start from
    the weights."""
    flags = {"data_path": text_data, "num_layers": 3, "bf16": True, "train_iters": 6, "bcd_frozen": "embedding"}
    kept, starts = world1.run(host_bytes_and_start, worlds.run_config(**flags))[0]
    assert min(kept[3:]) > 0 and not any(starts)
    kept, starts = world1.run(host_bytes_and_start, worlds.run_config(**flags, bcd_main_params="drop"))[0]
    assert set(kept) == {0} and len(starts) == 3 and all(starts)
