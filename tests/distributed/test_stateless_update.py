"""Layers outside the active block are updated without optimizer state; Muon steps matrices of the block."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import resumed_runs, worlds
from support.dist import World
from support.pairwise import Combination, all_combinations, pairwise

Flags = Callable[..., dict[str, Any]]
RESTING: dict[str, Any] = {
    "bcd_layout": "strided",
    "bcd_resting_update": "orthogonal",
    "bcd_resting_grad_dtype": "fp32",
}
MUON: dict[str, Any] = {"optimizer": "muon", "muon_extra_scale_factor": 0.2, "muon_use_nesterov": True}
HOST: dict[str, Any] = {"bcd_optimizer_state": "host"}
METHODS: dict[str, dict[str, Any]] = {
    "adam": RESTING | HOST,
    "muon": RESTING | MUON | HOST,
    "no_block": RESTING | {"bcd_num_blocks": 0},
    "suffix": RESTING | {"bcd_resting_update": "normalized", "bcd_resting_layers": "suffix"},
    "sign": RESTING | {"bcd_resting_update": "sign"},
    "full_muon": MUON | {"bcd_num_blocks": 1},
    "muon_blocks": MUON | HOST | {"bcd_always_active": "norms,biases", "bcd_frozen": "embedding,head"},
}
CUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "pipeline2": {"world_size": 2, "pipeline_model_parallel_size": 2},
    "data2": {"world_size": 2},
    "tensor2": {"world_size": 2, "tensor_model_parallel_size": 2},
    "pipeline2_data2": {"world_size": 4, "pipeline_model_parallel_size": 2},
}
ITERATIONS = {"train_iters": 8, "bcd_steps_per_block": 2, "lr": 3e-3, "micro_batch_size": 4}


def plain_orthogonal(g: torch.Tensor) -> torch.Tensor:
    """Muon's Newton-Schulz iteration, written down again."""
    x = g / g.norm()
    x = x.T if g.shape[0] > g.shape[1] else x
    for _ in range(5):
        x = 3.4445 * x + (-4.7750 * x @ x.T + 2.0315 * x @ x.T @ x @ x.T) @ x
    return (x.T if g.shape[0] > g.shape[1] else x) * math.sqrt(max(g.shape))


class PlainLoop:
    """The whole method in plain PyTorch, on gradients that the run computed: AdamW for block and always-active
    parameters, momentum for Muon's, no state for the others."""

    def __init__(self, *, is_muon: bool) -> None:
        self._is_muon = is_muon
        self._weights: dict[str, torch.Tensor] = {}
        self._moments: dict[str, Any] = {}
        self.differences: list[float] = []

    def after_schedule(self, one: worlds.RecordedRun) -> None:
        named = dict(one.active.parameters._parameters)
        if not self._weights:
            self._weights = {name: parameter.detach().clone() for name, parameter in named.items()}
        gradients = {name: parameter.main_grad.clone() for name, parameter in named.items()}
        is_matrix = {name: "layers" in name and parameter.dim() == 2 for name, parameter in named.items()}
        active = one.partition.blocks[one.block].layers
        stateless = {name for name in named if is_matrix[name] and int(name.split(".")[2]) not in active}
        norm = math.sqrt(sum(float(gradients[name].square().sum()) for name in named if name not in stateless))
        lr = one.lr_scheduler.get_lr({})
        for name, weight in self._weights.items():
            g = gradients[name] if name in stateless else gradients[name] * min(1.0, 1.0 / (norm + 1e-6))
            weight.mul_(1 - lr * 0.01 * (weight.dim() == 2))
            if name in stateless:
                weight.sub_(0.2 * lr * self._orthogonal(name, g))
            elif self._is_muon and is_matrix[name]:
                m = self._moments.setdefault(name, torch.zeros_like(g)).mul_(0.95).add_(g)
                weight.sub_(0.2 * lr * self._orthogonal(name, g + 0.95 * m))
            else:
                m, v, steps = self._moments.get(name, (torch.zeros_like(g), torch.zeros_like(g), 0))
                m, v, steps = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g, steps + 1
                self._moments[name] = m, v, steps
                weight.sub_(lr * m / (1 - 0.9**steps) / ((v / (1 - 0.999**steps)).sqrt() + 1e-8))

    def _orthogonal(self, name: str, g: torch.Tensor) -> torch.Tensor:
        if "linear_qkv" not in name:
            return plain_orthogonal(g)
        rows = torch.arange(g.shape[0]).view(4, 3, 8)  # heads, of queries, keys and values
        found = torch.empty_like(g)
        for part in range(3):
            found[rows[:, part].flatten()] = plain_orthogonal(g[rows[:, part].flatten()])
        return found

    def after_step(self, one: worlds.RecordedRun) -> None:
        now = worlds.weights_of(one.model)
        self.differences.append(max(float((now[name] - self._weights[name]).abs().max()) for name in now))


def against_plain_loop(config: Any, *, is_muon: bool) -> list[float]:
    plain = PlainLoop(is_muon=is_muon)
    with worlds.started(config, after_schedule=plain.after_schedule, after_step=plain.after_step) as one:
        one.train()
    return plain.differences


@pytest.mark.parametrize("method", ["adam", "muon"])
def test_equals_a_plain_loop(world1: World, text_data: str, method: str) -> None:
    """A rate, a decay or a clip that reaches the wrong matrices; moments that do not wait for their block's turn."""
    config = worlds.run_config(data_path=text_data, **ITERATIONS | METHODS[method])
    [differences] = world1.run(against_plain_loop, config, is_muon=method == "muon")
    assert len(differences) == 8 and max(differences) < 2e-5, differences


@pytest.fixture(scope="module")
def one_rank(world1: World, initial_weights: Flags) -> dict[str, dict[str, Any]]:
    return {name: train(world1, "one", name, initial_weights) for name in METHODS}


def train(world: World, cut: str, method: str, initial_weights: Flags) -> dict[str, Any]:
    flags = initial_weights(**{"bcd_num_blocks": 3} | METHODS[method]) | CUTS[cut] | ITERATIONS
    return world.run(worlds.train_run, worlds.run_config(**flags | {"eval_iters": 1}))[-1]


# suffix and sign differ from adam in the rule of a layer alone, full_muon from muon in the number of blocks, and
# muon_blocks in what other layers do: each has one layout in the default suite
ONE_LAYOUT = {"no_block": "data2", "suffix": "pipeline2", "sign": "tensor2"} | dict.fromkeys(
    ("full_muon", "muon_blocks"), "data2"
)
LAYOUTS = [
    pytest.param(cut, method, marks=[pytest.mark.long] * (ONE_LAYOUT.get(method, cut) != cut))
    for cut in ("pipeline2", "data2", "tensor2")
    for method in METHODS
]


@pytest.mark.parametrize(("cut", "method"), LAYOUTS)
def test_layouts_take_the_same_steps(
    world2: World, initial_weights: Flags, one_rank: dict[str, dict[str, Any]], cut: str, method: str
) -> None:
    """A gradient that one rank keeps to itself, an update of a slice alone, weights that an owner does not pass on."""
    found, expected = train(world2, cut, method, initial_weights), one_rank[method]
    tolerance = 2e-3 if method == "sign" else 2e-4  # the sign of a gradient near zero depends on its last bit
    assert found["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    assert found["evaluations"][-1][-1] == pytest.approx(expected["evaluations"][-1][-1], rel=tolerance)


def test_pipeline_with_data_parallel(
    world4: World, initial_weights: Flags, one_rank: dict[str, dict[str, Any]]
) -> None:
    """Owners that are counted over all ranks in place of one stage's replicas."""
    found, expected = train(world4, "pipeline2_data2", "adam", initial_weights), one_rank["adam"]
    assert found["losses"] == pytest.approx(expected["losses"], rel=2e-4)


def train_overlapped(config: Any) -> tuple[dict[str, Any], list[bool]]:
    """The run, and by step whether the reductions of all stateless gradients had begun when the passes were over."""
    begun: list[bool] = []

    def after_schedule(one: worlds.RecordedRun) -> None:
        begun.append(all(stack.is_reducing for stack in one.active.matrices.stacks))

    with worlds.started(config, after_schedule=after_schedule) as one:
        one.train()
        return worlds.outcome(one), begun


@pytest.mark.parametrize("cut", ["data2", "pipeline2_data2"])
@pytest.mark.parametrize("method", ["adam", "muon"])
def test_overlapped_reductions_change_nothing(
    world2: World, world4: World, text_data: str, cut: str, method: str
) -> None:
    """Gradients of inactive layers that are reduced after the passes, or before their last microbatch, or twice."""
    world = world4 if cut == "pipeline2_data2" else world2
    flags = ITERATIONS | METHODS[method] | CUTS[cut] | {"data_path": text_data, "micro_batch_size": 1}
    plain = world.run(train_overlapped, worlds.run_config(**flags))
    overlapped = world.run(train_overlapped, worlds.run_config(**flags, overlap_grad_reduce=True))
    for (expected, begun_late), (found, begun) in zip(plain, overlapped, strict=True):
        assert found["losses"] == expected["losses"] and found["grad_norms"] == expected["grad_norms"]
        assert worlds.same_bits(found["weights"], expected["weights"]) == []
        assert begun == [True] * 8 and begun_late == [False] * 8


FACTORS = {
    "method": [*METHODS],
    "cut": ["one", "pipeline2", "data2", "tensor2"],
    "precision": ["fp32", "bf16"],
    "state": ["reset", "host"],
    "momentum": ["fp32", "bf16"],
    "stops": ["1", "3", "2_4"],
}


def allowed(case: Combination) -> bool:
    return ONE_LAYOUT.get(case["method"], case["cut"]) == case["cut"]


CASES = pairwise(FACTORS, allowed)
LONG_CASES = [case for case in all_combinations(FACTORS, lambda case: True) if case not in CASES]


def by_name(cases: list[Combination]) -> pytest.MarkDecorator:
    cases = sorted(cases, key=lambda case: case["cut"])  # groups of ranks are kept from case to case
    return pytest.mark.parametrize("case", cases, ids=lambda case: "-".join(case.values()))


@by_name(CASES)
def test_resumed_equals_uninterrupted(
    world1: World, world2: World, text_data: str, tmp_path: Path, case: Combination
) -> None:
    """A momentum or 16 low bits of a weight that a checkpoint lacks, or that come back to the wrong block."""
    check_resumed(case, world1, world2, text_data, tmp_path)


@pytest.mark.long
@by_name(LONG_CASES)
def test_resumed_equals_uninterrupted_in_all_combinations(
    world1: World, world2: World, text_data: str, tmp_path: Path, case: Combination
) -> None:
    """Three options that break together what no two of them break."""
    check_resumed(case, world1, world2, text_data, tmp_path)


def check_resumed(case: Combination, world1: World, world2: World, text_data: str, tmp_path: Path) -> None:
    flags = ITERATIONS | {"data_path": text_data, "save": tmp_path}
    flags |= METHODS[case["method"]] | CUTS[case["cut"]]
    flags |= {"bcd_optimizer_state": case["state"], "bf16": case["precision"] == "bf16"}
    if "optimizer" in flags:
        flags |= {"muon_momentum_dtype": case["momentum"], "muon_grad_dtype": case["momentum"]}
    world = world1 if case["cut"] == "one" else world2
    stops = tuple(map(int, case["stops"].split("_")))
    config = worlds.run_config(**flags)
    assert world.run(resumed_runs.stopped_and_resumed, config, stops, str(tmp_path)) == [[]] * world.size


def test_resumed_momenta_take_no_more_host_memory(world1: World, text_data: str, tmp_path: Path) -> None:
    """Momenta in bf16 that come back from a checkpoint in fp32, twice as large until their block's next phase."""
    flags = ITERATIONS | METHODS["muon"] | {"data_path": text_data, "save": tmp_path, "muon_momentum_dtype": "bf16"}
    whole, resumed = world1.run(resumed_runs.host_bytes_at_end, worlds.run_config(**flags), 7, str(tmp_path))[0]
    assert sum(whole) > 0 and resumed == whole


# fp32 for the two methods with moments of their own, bf16 for all
BANNERS = [pytest.param(method, "fp32", marks=[pytest.mark.long] * (method in ONE_LAYOUT)) for method in METHODS]


@pytest.mark.parametrize(("method", "precision"), [*BANNERS, *((method, "bf16") for method in METHODS)])
def test_banner_counts_what_is_held(world2: World, text_data: str, method: str, precision: str) -> None:
    """Gradients, momenta or low bits that the banner forgets, or that stay behind after a phase."""
    flags = ITERATIONS | {"data_path": text_data} | CUTS["data2"] | METHODS[method] | {"bf16": precision == "bf16"}
    for rank in world2.run(bytes_by_block, worlds.run_config(**flags)):
        for block, found, expected in rank:
            assert found == pytest.approx(expected, rel=0.04), block


def bytes_by_block(config: Any) -> list[tuple[int, int, int]]:
    with worlds.started(config) as one:
        one.train()
        blocks = one.recorder.summary.blocks
        return [
            (step.block, sum(step.model_state_bytes), sum(blocks[step.block].model_state_bytes))
            for step in one.recorder.steps
        ]


def spoilt_step(config: Any) -> list[list[str]]:
    """Names of weights that changed in each step; a stateless gradient overflows in the third, on rank 0."""
    before: dict[str, torch.Tensor] = {}
    changed: list[list[str]] = []

    def after_schedule(one: worlds.RecordedRun) -> None:
        before.update(worlds.weights_of(one.model))
        if one.iteration == 2 and torch.distributed.get_rank() == 0:
            next(iter(one.active.matrices.held)).parameter.main_grad[0, 0] = math.inf

    def after_step(one: worlds.RecordedRun) -> None:
        changed.append(worlds.same_bits(worlds.weights_of(one.model), before))

    with worlds.started(config, after_schedule=after_schedule, after_step=after_step) as one:
        one.train()
        return changed


@pytest.mark.parametrize("cut", ["data2", "pipeline2"])
def test_a_resting_gradient_that_is_not_finite_skips_the_step(world2: World, text_data: str, cut: str) -> None:
    """A step that is skipped for the block and done for inactive layers, or skipped on one rank alone."""
    config = worlds.run_config(data_path=text_data, **ITERATIONS | METHODS["adam"] | CUTS[cut])
    for changed in world2.run(spoilt_step, config):
        assert changed[2] == [] and all(changed[:2] + changed[3:])


def test_prefix_stages_stay_forward_only_with_suffix(world2: World, text_data: str) -> None:
    """--bcd-resting-layers suffix that sends gradients in front of the block."""
    flags = METHODS["suffix"] | {"bcd_layout": "submodel", "bcd_num_blocks": 3} | CUTS["pipeline2"]
    config = worlds.run_config(data_path=text_data, **ITERATIONS | flags | {"train_iters": 12})
    ranks = world2.run(messages_by_block, config)
    assert {block: count > 0 for block, count in ranks[0]} == dict.fromkeys(range(3), True) | dict.fromkeys(
        (3, 4, 5), False
    )


def messages_by_block(config: Any) -> list[tuple[int, int]]:
    with worlds.started(config) as one:
        one.train()
        return [(step.block, sum(step.backward_messages)) for step in one.recorder.steps]
