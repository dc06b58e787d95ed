"""Matrices that are stepped chunk by chunk, compared with steps of all matrices at once and with plain PyTorch."""

from __future__ import annotations

import math
import time
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import worlds
from support.dist import World

from megatron.bcd.model.host_layers import LOW_BITS
from megatron.bcd.optim import update_rules
from megatron.bcd.optim.matrix import MatrixRule
from megatron.bcd.optim.matrix_optimizer import MatrixOptimizer
from megatron.bcd.optim.update_rules import MatrixLayout
from megatron.bcd.runtime import replicas

NUM_LAYERS, NUM_MICROBATCHES, NUM_STEPS = 3, 2, 3
SHAPES = {"qkv": ((12, 8), MatrixLayout(parts=(2, 1, 1))), "proj": ((8, 8), MatrixLayout())}
LR, WEIGHT_DECAY = 0.1, 0.3


class Case:
    """Weights, gradients and an optimizer, equal on every rank except for the gradients."""

    def __init__(
        self,
        *,
        rule: str,
        dtype: torch.dtype = torch.bfloat16,
        grad_dtype: torch.dtype = torch.float32,
        overlaps: bool = False,
        has_places: bool = False,
    ) -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.weights = {
            f"layers.{layer}.{name}": torch.nn.Parameter(self.random(shape).to(dtype))
            for layer in range(NUM_LAYERS)
            for name, (shape, _) in SHAPES.items()
        }
        next(iter(self.weights.values())).data[0, 0] = -0.0
        self.places = {weight: torch.zeros(weight.shape, dtype=torch.int16) for weight in self.weights.values()}
        self.optimizer = MatrixOptimizer(
            {name: (weight, SHAPES[name.split(".")[2]][1]) for name, weight in self.weights.items()},
            group=replicas.group(),
            has_signed_squares=rule == "adam",
            overlaps_reduction=overlaps,
            places={each: {LOW_BITS: place} for each, place in self.places.items()}
            if has_places and dtype == torch.bfloat16
            else None,
        )
        self.rule = MatrixRule(name=rule, scale=0.2, grad_dtype=grad_dtype, num_steps=5)
        if rule == "momentum":
            self.rule = replace(self.rule, name="orthogonal", momentum=0.9, nesterov=True)
        elif rule == "adam":
            adam = {"betas": (0.9, 0.99), "eps": 1e-8, "dtype": "fp32", "decoupled_weight_decay": True}
            self.rule = replace(self.rule, adam=adam)
        self.overlaps = overlaps

    def random(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def begin(self, *, by_chunk: bool) -> None:
        rules: Any = [(self.rule, list(self.weights), False)]
        streamed = set(self.places)
        self.optimizer.begin(rules, chunk_of if by_chunk else None, streamed=streamed if by_chunk else ())
        self.optimizer.param_groups[0].update(lr=LR, weight_decay=WEIGHT_DECAY)

    def draw(self) -> list[dict[str, torch.Tensor]]:
        """Return the gradients of a step by microbatch and name: this rank's."""
        drawn = [
            [{name: self.random(tuple(weight.shape)) for name, weight in self.weights.items()} for _ in range(2)]
            for _ in range(NUM_MICROBATCHES)
        ]
        return [by_rank[torch.distributed.get_rank()] for by_rank in drawn]

    def backward(self, microbatches: list[dict[str, torch.Tensor]], names: list[str]) -> None:
        for number, gradients in enumerate(microbatches):
            is_last = number == len(microbatches) - 1
            losses = [(self.weights[name].float() * gradients[name]).sum() for name in names]
            if is_last:
                torch.stack(losses).sum().backward()
            else:
                with self.optimizer.no_sync():
                    torch.stack(losses).sum().backward()

    def names_of(self, chunk: int) -> list[str]:
        return [name for name in self.weights if chunk_of(name) == chunk]

    def step(self, microbatches: list[dict[str, torch.Tensor]], *, by_chunk: bool) -> None:
        self.optimizer.zero_grad()
        if not by_chunk:
            self.backward(microbatches, list(self.weights))
        for chunk in reversed(range(NUM_LAYERS)) if by_chunk else ():
            self.optimizer.open_chunk(chunk)
            num_elements = sum(gradient.numel() for gradient in self.optimizer.gradients())
            assert num_elements == sum(self.weights[name].numel() for name in self.names_of(chunk))
            self.backward(microbatches, self.names_of(chunk))
            gradients = [weakref.ref(gradient) for gradient in self.optimizer.gradients()]
            gradients += [weakref.ref(self.weights[name].main_grad) for name in self.names_of(chunk)]
            self.optimizer.step_chunk(chunk)
            deadline = time.monotonic() + 5
            while any(gradient() is not None for gradient in gradients):  # gloo's threads still hold some
                assert time.monotonic() < deadline, "gradients outlive the step of their chunk"
        self.optimizer.reduce_gradients()
        norm, is_finite = self.optimizer.add_norm(0.0)
        assert is_finite and (0.0 < norm < math.inf) == self.rule.is_clipped
        self.optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        """Return copies of weights, low bits and factors by name."""
        state = {name: weight.detach().clone() for name, weight in self.weights.items()}
        for name, matrix in self.optimizer.matrices.items():
            for kind in ("low_bits", "factors", "momentum_buffer", "exp_avg", "exp_avg_sq"):
                if (tensor := matrix.get(kind)) is not None:
                    state[f"{name} {kind}"] = tensor.clone()
        return state


def chunk_of(name: str) -> int:
    return int(name.split(".")[1])


def world_of(size: int) -> Any:
    return worlds.parallel(worlds.run_config(mock_data=True, split=None, world_size=size))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(bits(tensor), bits(other[name])) for name, tensor in one.items()
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor
        if tensor.dtype == torch.int16
        else tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)
    )


def stepped_both_ways(size: int, options: dict[str, Any]) -> tuple[bool, dict[str, torch.Tensor]]:
    with world_of(size):
        states = []
        for by_chunk in (False, True):
            case = Case(**options, has_places=by_chunk)
            case.begin(by_chunk=by_chunk)
            for _ in range(NUM_STEPS):
                case.step(case.draw(), by_chunk=by_chunk)
            case.optimizer.end(keeps_moments=False)
            if by_chunk:
                assert not any(LOW_BITS in matrix.state for matrix in case.optimizer.matrices.values())
            states.append(case.state())
        return same(*states), {name: states[1][name] for name in case.weights}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("rule", ["factored", "orthogonal", "adam"])
def test_chunks_step_as_a_whole(world1: World, world2: World, size: int, rule: str) -> None:
    """Steps by chunk equal steps of all matrices at once bit for bit, on every rank, and free the gradients of each
    chunk."""
    world = world1 if size == 1 else world2
    for dtype in (torch.float32, torch.bfloat16):
        for grad_dtype, overlaps in ((torch.float32, False), (torch.bfloat16, True)):
            options = {"rule": rule, "dtype": dtype, "grad_dtype": grad_dtype, "overlaps": overlaps}
            results = world.run(stepped_both_ways, size, options)
            assert all(is_same for is_same, _ in results), options
            assert all(same(weights, results[0][1]) for _, weights in results), "ranks have different weights"


def compared_with_plain(rule: str) -> list[float]:
    """Return the differences of fp32 weights to those of a plain loop."""
    with world_of(1):
        case = Case(rule=rule, dtype=torch.float32)
        plain = {name: weight.detach().clone() for name, weight in case.weights.items()}
        factors = {name: matrix.zero_factors()[None] for name, matrix in case.optimizer.matrices.items()}
        case.begin(by_chunk=True)
        for _ in range(NUM_STEPS):
            microbatches = case.draw()
            case.step(microbatches, by_chunk=True)
            for name, value in plain.items():
                gradient = sum(gradients[name] for gradients in microbatches)
                layout, rate = SHAPES[name.split(".")[2]][1], LR * case.rule.scale
                value *= 1 - LR * WEIGHT_DECAY
                if rule == "factored":
                    direction = update_rules.FactoredDirection(gradient[None], factors[name], layout)
                    direction.subtract_from(value[None], *direction.rows, rate=rate)
                else:
                    value -= rate * update_rules.orthogonal(gradient[None], layout)[0]
        return [float((plain[name] - weight).abs().max()) for name, weight in case.weights.items()]


@pytest.mark.parametrize("rule", ["factored", "orthogonal"])
def test_a_plain_loop_has_the_same_weights(world1: World, rule: str) -> None:
    """Steps by chunk lead to the weights of a plain loop over the rule's formula."""
    assert max(world1.run(compared_with_plain, rule)[0]) < 1e-6


def stepped_with_inf(rule: str) -> tuple[list[bool], int, bool]:
    """Return which layers changed, how many chunks were skipped, and whether the next step skips none."""
    with world_of(2):
        case = Case(rule=rule, has_places=True)
        case.begin(by_chunk=True)
        case.step(case.draw(), by_chunk=True)
        before, microbatches = case.state(), case.draw()
        if torch.distributed.get_rank() == 1:
            microbatches[0]["layers.1.proj"][3, 3] = torch.inf
        case.step(microbatches, by_chunk=True)
        after, skipped = case.state(), case.optimizer.skipped()
        for name in [name for name in before if name.endswith("factors")]:  # a skipped step counts, in all chunks alike
            assert after[name][-1] == before[name][-1] + 1
            before[name], after[name] = before[name][:-1], after[name][:-1]
        changed = [
            [not torch.equal(bits(before[name]), bits(after[name])) for name in before if chunk_of(name) == chunk]
            for chunk in range(NUM_LAYERS)
        ]
        assert all(len(set(layer)) == 1 for layer in changed), "a part of a layer was stepped"
        case.step(case.draw(), by_chunk=True)
        return [layer[0] for layer in changed], skipped, case.optimizer.skipped() == 0


@pytest.mark.parametrize("rule", ["factored", "orthogonal", "momentum", "adam"])
def test_a_chunk_that_is_not_finite_stays(world2: World, rule: str) -> None:
    """All ranks skip a chunk whose gradient is not finite on one rank, count it once in that step only, and step the
    others."""
    assert world2.run(stepped_with_inf, rule) == [([True, False, True], 1, True)] * 2


def gradients_left() -> tuple[int, int]:
    """Return the number of gradients after a chunk is closed, and after a step that was given up in a chunk."""
    with world_of(1):
        case = Case(rule="factored")
        case.begin(by_chunk=True)
        before, gradients, counts = case.state(), case.draw(), []
        for gives_up in (False, True):
            case.optimizer.zero_grad()
            case.optimizer.open_chunk(1)
            case.backward(gradients, case.names_of(1))
            if not gives_up:
                case.optimizer.close_chunk(1)
                counts.append(len(list(case.optimizer.gradients())))
        case.optimizer.zero_grad()
        counts.append(len(list(case.optimizer.gradients())))
        assert same(before, case.state()), "weights changed without a step"
        return counts[0], counts[1]


def test_gradients_of_a_chunk_are_freed(world1: World) -> None:
    """The gradients of a chunk are freed when it is closed without a step, and after a step that was given up."""
    assert world1.run(gradients_left) == [(0, 0)]


def phases_in_both_places(has_places: bool) -> tuple[dict[str, torch.Tensor], bool]:
    """Train through phases whose low bits are on the device or in host memory, and through a joining group.

    Return the main parameters, and whether only owners wrote to places.
    """
    with world_of(2):
        case = Case(rule="factored", has_places=has_places)
        for phase, by_chunk in enumerate((False, True, False, True)):
            case.begin(by_chunk=by_chunk)
            case.step(case.draw(), by_chunk=by_chunk)
            case.optimizer.end(keeps_moments=False)
            if phase == 2:
                joined = Case(rule="factored", has_places=not has_places)
                joined.generator = case.generator
                for name, weight in joined.weights.items():
                    weight.data.copy_(case.weights[name])
                joined.optimizer.load_rank_state(case.optimizer.rank_state())
                case = joined
        owned = {id(matrix.parameter) for matrix in case.optimizer.matrices.values() if matrix.is_owner}
        wrote = [id(weight) in owned or not place.any() for weight, place in case.places.items()]
        assert any(place.any() for place in case.places.values()) == (not has_places)
        return {name: case.optimizer.main_param(name) for name in case.weights}, all(wrote)


def test_low_bits_move_between_places(world2: World) -> None:
    """Low bits move between device and host memory without loss, and only a matrix's owner writes its place."""
    (expected, _), *_ = world2.run(phases_in_both_places, False)
    for values, only_owners_wrote in world2.run(phases_in_both_places, True):
        assert only_owners_wrote and same(values, expected)


def tied_gradient(overlaps: bool, has_last: bool) -> list[float]:
    """Return the gradient of a tied embedding after the last chunk, and before the step of its chunk."""
    with world_of(2):
        case = Case(rule="factored", overlaps=overlaps)
        tied = "layers.0.proj"
        case.weights[tied].zero_out_wgrad = True  # type: ignore[attr-defined]
        if not has_last:  # the last layer is active
            case.weights = {name: weight for name, weight in case.weights.items() if chunk_of(name) < NUM_LAYERS - 1}
        case.begin(by_chunk=True)
        ones = [{name: torch.ones_like(weight.data) for name, weight in case.weights.items()}] * NUM_MICROBATCHES
        seen = []
        for chunk in reversed(range(NUM_LAYERS)):
            case.optimizer.open_chunk(chunk)
            if chunk != 1:
                case.backward(ones, [tied])
                seen.append(float(case.weights[tied].main_grad[0, 0]))  # type: ignore[attr-defined]
            case.optimizer.step_chunk(chunk)
        assert not hasattr(case.weights[tied], "main_grad")
        case.optimizer.open_chunk(NUM_LAYERS - 1)
        case.optimizer.close_chunk(NUM_LAYERS - 1)
        assert not list(case.optimizer.gradients()), "the passes end, so no chunk closes the embedding"
        return seen


@pytest.mark.parametrize(("overlaps", "has_last"), [(False, True), (True, True), (False, False)])
def test_a_tied_embedding_is_open_from_the_head_on(world2: World, overlaps: bool, has_last: bool) -> None:
    """The gradient of a tied embedding keeps the head's part until the embedding's chunk has added its own."""
    assert world2.run(tied_gradient, overlaps, has_last) == [[2.0, 4.0]] * 2
