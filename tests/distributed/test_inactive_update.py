"""Layers outside the active block are updated without optimizer state; Muon steps the block's matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import resumed_runs, worlds
from support.dist import World

INACTIVE: dict[str, Any] = {
    "bcd_layout": "strided",
    "bcd_inactive_update": "orthogonal",
    "bcd_inactive_grad_dtype": "fp32",
}
MUON: dict[str, Any] = {"optimizer": "muon", "muon_extra_scale_factor": 0.2, "muon_use_nesterov": True}
HOST: dict[str, Any] = {"bcd_optimizer_state": "host"}
FACTORED = INACTIVE | HOST | {"bcd_inactive_update": "factored"}
METHODS: dict[str, dict[str, Any]] = {
    "adam": INACTIVE | HOST,
    "muon": INACTIVE | MUON | HOST,
    "factored": FACTORED,
    "factored_embedding": FACTORED | MUON | {"bcd_embedding_update": "factored"},
    "factored_no_block": FACTORED | {"bcd_num_blocks": 0, "bcd_embedding_update": "factored"},
}
OUTSIDE = ("embedding.word_embeddings.weight", "output_layer.weight")
ITERATIONS = {"train_iters": 8, "bcd_steps_per_block": 2, "lr": 3e-3}


def plain_orthogonal(g: torch.Tensor, _: dict[str, Any]) -> torch.Tensor:
    """An independent version of Muon's Newton-Schulz iteration."""
    x = g / g.norm()
    x = x.T if g.shape[0] > g.shape[1] else x
    for _ in range(5):
        x = 3.4445 * x + (-4.7750 * x @ x.T + 2.0315 * x @ x.T @ x @ x.T) @ x
    return (x.T if g.shape[0] > g.shape[1] else x) * math.sqrt(max(g.shape))


def plain_factored(g: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    """An independent version of Adafactor without momentum."""
    state["t"] = state.get("t", 0) + 1
    for name, dim in (("rows", 1), ("columns", 0)):
        state[name] = 0.99 * state.get(name, 0) + 0.01 * g.square().mean(dim)
    rows, columns = (state[name] / (1 - 0.99 ** state["t"]) for name in ("rows", "columns"))
    update = g / ((rows / rows.mean()).sqrt()[:, None] * columns.sqrt()).clamp(min=1e-12)
    return update / max(1.0, float(update.square().mean().sqrt()))


class PlainLoop:
    """The whole method in plain PyTorch, on gradients that the run computed.

    AdamW steps block and always-active parameters, Muon has momentum, and the other matrices have no state, or second
    moments by row and column.
    """

    def __init__(self, *, is_muon: bool, is_factored: bool) -> None:
        self._is_muon, self._is_factored = is_muon, is_factored
        self.weights: dict[str, torch.Tensor] = {}
        self._moments: dict[str, Any] = {}
        self.factors: dict[str, tuple[dict[str, Any], ...]] = {}
        self.differences: list[float] = []

    def after_schedule(self, run: worlds.RecordedRun) -> None:
        named = dict(run.active.parameters._parameters)
        if not self.weights:
            self.weights = {name: parameter.detach().clone() for name, parameter in named.items()}
        gradients = {name: parameter.main_grad.clone() for name, parameter in named.items()}
        is_matrix = {name: "layers" in name and parameter.dim() == 2 for name, parameter in named.items()}
        active = run.partition.blocks[run.block].layers if run.partition.has_active_block else ()
        inactive = {name for name in named if is_matrix[name] and int(name.split(".")[2]) not in active}
        if run.config.bcd.bcd_embedding_update == "factored":
            inactive |= {name for name in OUTSIDE if name in named}
        norm = math.sqrt(sum(float(gradients[name].square().sum()) for name in named if name not in inactive))
        lr = run.lr_scheduler.get_lr({})
        for name, weight in self.weights.items():
            g = gradients[name] if name in inactive else gradients[name] * min(1.0, 1.0 / (norm + 1e-6))
            weight.mul_(1 - lr * 0.01 * (weight.dim() == 2))
            if self._is_factored and name in inactive:
                weight.sub_(lr * self._by_part(name, g, plain_factored))
            elif name in inactive:
                weight.sub_(0.2 * lr * self._by_part(name, g, plain_orthogonal))
            elif self._is_muon and is_matrix[name]:
                m = self._moments.setdefault(name, torch.zeros_like(g)).mul_(0.95).add_(g)
                weight.sub_(0.2 * lr * self._by_part(name, g + 0.95 * m, plain_orthogonal))
            else:
                m, v, steps = self._moments.get(name, (torch.zeros_like(g), torch.zeros_like(g), 0))
                m, v, steps = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g, steps + 1
                self._moments[name] = m, v, steps
                weight.sub_(lr * m / (1 - 0.9**steps) / ((v / (1 - 0.999**steps)).sqrt() + 1e-8))

    def _by_part(self, name: str, g: torch.Tensor, rule: Callable[..., torch.Tensor]) -> torch.Tensor:
        states = self.factors.setdefault(name, ({}, {}, {}))
        if "linear_qkv" not in name:
            return rule(g, states[0])
        rows = torch.arange(g.shape[0]).view(4, 3, 8)  # heads, of queries, keys and values
        result = torch.empty_like(g)
        for part in range(3):
            result[rows[:, part].flatten()] = rule(g[rows[:, part].flatten()], states[part])
        return result

    def after_step(self, run: worlds.RecordedRun) -> None:
        now = worlds.weights_of(run.model)
        self.differences.append(max(float((now[name] - self.weights[name]).abs().max()) for name in now))


def against_plain_loop(config: Any) -> list[float]:
    is_factored = config.bcd.bcd_inactive_update == "factored"
    plain = PlainLoop(is_muon=config.is_muon, is_factored=is_factored)
    with worlds.started(config, after_schedule=plain.after_schedule, after_step=plain.after_step) as run:
        run.train()
    return plain.differences


@pytest.mark.parametrize("method", ["adam", "factored_embedding", "factored_no_block"])
def test_equals_a_plain_loop(world1: World, text_data: str, method: str) -> None:
    """After each step the weights are those of a plain loop, within 2e-5."""
    config = worlds.run_config(data_path=text_data, **ITERATIONS | METHODS[method])
    [differences] = world1.run(against_plain_loop, config)
    assert len(differences) == 8 and max(differences) < 2e-5, differences


def final_weights(config: Any) -> dict[str, torch.Tensor]:
    with worlds.started(config) as run:
        run.train()
        return worlds.weights_of(run.model)


def test_a_loss_that_is_a_sum(world2: World, text_data: str) -> None:
    """A loss that is a sum over tokens leads to the weights of a loss that is a mean. All tokens count here, so both
    kinds of loss have the same mean gradient."""
    ramp = {"train_iters": None, "train_samples": 40, "rampup_batch_size": (4, 4, 16), "global_batch_size": 12}
    flags = METHODS["factored_no_block"] | ramp | {"micro_batch_size": 2, "bcd_steps_per_block": 2, "lr": 3e-3}
    runs = [
        world2.run(final_weights, worlds.run_config(data_path=text_data, **flags, calculate_per_token_loss=is_sum))[0]
        for is_sum in (False, True)
    ]
    for name, weight in runs[0].items():
        torch.testing.assert_close(runs[1][name], weight, rtol=0, atol=2e-6, msg=name)


def plain_tensors(config: Any) -> dict[str, torch.Tensor]:
    """Return the matrices after the plain loop, and means of their squared gradients, by checkpoint name."""
    plain = PlainLoop(is_muon=config.is_muon, is_factored=True)
    with worlds.started(config, after_schedule=plain.after_schedule) as run:
        run.train()
    means = {
        f"optimizer.exp_avg_sq_{short}.{name}": states[0][kind].view(*([1, -1] if short == "col" else [-1]))
        for name, states in plain.factors.items()
        if "linear_qkv" not in name
        for kind, short in (("rows", "row"), ("columns", "col"))
    }
    return means | {
        name.removeprefix("decoder."): weight for name, weight in plain.weights.items() if weight.dim() == 2
    }


def test_stopped_runs_equal_the_plain_loop(
    world1: World, world2: World, initial_weights: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """A tensor-parallel run that stops and resumes has the plain loop's matrices and means of squared gradients."""
    network = {"untie_embeddings_and_output_weights": True, "swiglu": True}
    flags = ITERATIONS | METHODS["factored_embedding"] | initial_weights(**network)
    expected = world1.run(plain_tensors, worlds.run_config(**flags))[0]
    config = worlds.run_config(**flags | worlds.CUTS["tensor2"] | {"save": str(tmp_path)})
    world2.run(resumed_runs.one_part, resumed_runs.with_checkpoints(config, exit_interval=3))
    world2.run(resumed_runs.one_part, resumed_runs.with_checkpoints(config, load=str(tmp_path), finetune=False))
    actual = world1.run(resumed_runs.tensors_of, str(tmp_path / "iter_0000008"))[0]
    for name, tensor in expected.items():  # all layers of a kind lie in one tensor
        _, number, rest = name.split(".", 2) if name.startswith("layers.") else ("", "0", "")
        value = actual[f"decoder.layers.{rest}"][int(number)] if rest else actual[name]
        difference = float((value - tensor).abs().max() / tensor.abs().max())
        assert difference < 1e-4, (name, difference)


def spoilt_step(config: Any) -> list[list[str]]:
    """Return the names of weights that changed in each step; an inactive gradient overflows in the third, on rank 0."""
    before: dict[str, torch.Tensor] = {}
    changed: list[list[str]] = []

    def after_schedule(run: worlds.RecordedRun) -> None:
        before.update(worlds.weights_of(run.model))
        if run.iteration == 2 and torch.distributed.get_rank() == 0:
            run.active.matrices.stacks[0].gradient[0, 0, 0] = math.inf

    def after_step(run: worlds.RecordedRun) -> None:
        changed.append(worlds.same_bits(worlds.weights_of(run.model), before))

    with worlds.started(config, after_schedule=after_schedule, after_step=after_step) as run:
        run.train()
        return changed


def test_a_stateless_gradient_that_is_not_finite_skips_the_step(world2: World, text_data: str) -> None:
    """If an inactive gradient is not finite on one rank, all ranks skip the whole step."""
    config = worlds.run_config(data_path=text_data, **ITERATIONS | METHODS["adam"] | worlds.CUTS["pipeline2"])
    for changed in world2.run(spoilt_step, config):
        assert changed[2] == [] and all(changed[:2] + changed[3:])


def owners_of_matrices(config: Any) -> list[tuple[list[str], dict[str, int]]]:
    """Return, after each step, the matrices of Megatron Core's optimizer, and where each owner stores low bits."""
    seen = []

    def after_step(run: worlds.RecordedRun) -> None:
        core, matrices = run.active.core, run.active.matrices.matrices
        low_bits = {name: matrix.state["low_bits"].data_ptr() for name, matrix in matrices.items() if matrix.is_owner}
        seen.append((sorted(worlds.block_shards(core).keys() & matrices), low_bits))

    with worlds.started(config, after_step=after_step) as run:
        run.train()
        return seen


def test_a_matrix_has_one_owner_in_all_phases(world2: World, text_data: str) -> None:
    """Megatron Core's optimizer steps no matrix of a layer, and no low bits move at a switch. Each rank owns half of
    every block, because a phase has Adam's moments of its block alone."""
    flags = ITERATIONS | METHODS["adam"] | worlds.CUTS["data2"] | {"bf16": True, "bcd_num_blocks": 2, "num_layers": 4}
    ranks = world2.run(owners_of_matrices, worlds.run_config(**flags, data_path=text_data))
    for steps in ranks:
        assert [core for core, _ in steps] == [[]] * 8
        assert all(low_bits == steps[0][1] for _, low_bits in steps)
    owned = [[int(name.split(".")[2]) % 2 for name in steps[0][1]] for steps in ranks]
    assert all(blocks.count(0) == blocks.count(1) == 4 for blocks in owned), owned


def kinds_outside_the_block(config: Any) -> set[str]:
    """Return the kinds of state that matrices outside the last block have in the end, on any place."""
    with worlds.started(config) as run:
        run.train()
        ownership, block = run.active.parameters.ownership, run.active.block
        others = [each for name, each in run.active.matrices.matrices.items() if ownership(name).block != block]
        return {kind for matrix in others for kind in matrix.state | matrix.offloaded}


@pytest.mark.parametrize(("method", "kinds"), [("adam", {"exp_avg", "exp_avg_sq"}), ("muon", {"momentum_buffer"})])
def test_moments_end_with_the_phase(world1: World, text_data: str, method: str, kinds: set[str]) -> None:
    """Matrices of an earlier block keep moments with --bcd-optimizer-state host, and none by default."""
    flags = ITERATIONS | METHODS[method]
    for state, expected in (("host", kinds), ("reset", set())):
        config = worlds.run_config(data_path=text_data, **flags | {"bcd_optimizer_state": state})
        assert world1.run(kinds_outside_the_block, config) == [expected]


def change(config: Any) -> float:
    """Return the root mean square of the change of a matrix's fp32 value in a run."""
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    with worlds.started(config) as run:
        before = run.active.matrices.main_param(name).clone()
        run.train()
        return float((run.active.matrices.main_param(name) - before).square().mean().sqrt())


def test_small_updates_add_up_in_bf16(world1: World, text_data: str) -> None:
    """Updates below a bf16 weight's precision change its fp32 value as they do in fp32."""
    flags = ITERATIONS | METHODS["factored_no_block"] | {"lr": 1e-6}
    [[exact], [rounded]] = [
        world1.run(change, worlds.run_config(data_path=text_data, **flags, bf16=bf16)) for bf16 in (False, True)
    ]
    assert rounded == pytest.approx(exact, rel=0.05)
