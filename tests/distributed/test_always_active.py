"""--bcd-always-active: trained in every phase, with one optimizer state for the whole run."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support import switched_runs
from support.dist import World
from support.pairwise import thinned

PARTS = [",".join(some) for size in (1, 2, 3) for some in itertools.combinations(("norms", "embedding", "head"), size)]
UNTIED = {"untie_embeddings_and_output_weights": True}
# Every choice on one stage and on two in both layouts, with the rest in turn
CASES = [
    (cut, parts, kind, number % 2 == 0, number % 3 == 0)
    for number, ((cut, parts), kind) in enumerate(
        zip(
            itertools.product(("one", "pipeline2", "submodel"), PARTS),
            itertools.cycle(({}, {"bf16": True}, {"optimizer": "sgd"}, {"bf16": True})),
            strict=False,
        )
    )
]
CASES += [("data2", "norms,embedding", {"bf16": True}, False, True), ("data2", "norms,head", {}, True, False)]


def whole(ranks: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """Always-active state at one event of the run, parts of data-parallel ranks put together: steps and tensors."""
    state: dict[str, Any] = {}
    for rank in ranks:
        for name, (start, end, steps, tensors) in rank["told"][index]["always"].items():
            for key, tensor in tensors.items():
                state.setdefault((name, key), {})[start, end] = (steps, tensor)
    return {
        key: ({steps for steps, _ in parts.values()}, torch.cat([parts[where][1] for where in sorted(parts)]))
        for key, parts in state.items()
    }


@pytest.mark.parametrize(("cut", "parts", "kind", "is_host", "is_untied"), thinned(CASES, keep_every=3))
def test_one_state_for_the_whole_run(
    world1: World,
    world2: World,
    text_data: str,
    cut: str,
    parts: str,
    kind: dict[str, Any],
    is_host: bool,
    is_untied: bool,
) -> None:
    """Moments, a step count or a main parameter that a switch drops or mixes up; memory that the banner does not
    count."""
    policy = {"bcd_optimizer_state": "host"} if is_host else {}
    network = UNTIED if is_untied else {}
    ranks = switched_runs.run(
        world1, world2, cut, data_path=text_data, bcd_always_active=parts, **kind, **policy, **network
    )
    events = ranks[0]["told"]
    for index in range(1, len(events), 2):
        assert (events[index]["when"], events[index + 1]["when"]) == ("end", "begin")
        for stage in [[rank] for rank in ranks] if cut != "data2" else [ranks]:
            before, after = whole(stage, index), whole(stage, index + 1)
            assert before.keys() == after.keys()
            for key, (steps, tensor) in before.items():
                num_steps = 0 if "optimizer" in kind else (index + 1) // 2 * 2
                assert steps == after[key][0] == {num_steps}, key
                assert torch.equal(tensor.view(torch.int32), after[key][1].view(torch.int32)), key
    assert any(whole([rank], 1) for rank in ranks)
    banner = ranks[0]["banner"]
    for block, model_state, _ in ranks[0]["metrics"]:
        assert model_state == pytest.approx(banner[block], rel=0.02)
