"""Transformer Engine's Adam for machines without it: the parts of its interface that Megatron Core and the project use.

It follows the documentation: it steps bf16 weights and stores the low 16 bits of main parameters as int16 remainders.
Moments in bf16 are rounded to nearest, those in fp16 have a scale per tensor. The code around it is the real one.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import megatron.core.optimizer as core_optimizer
import torch
from megatron.core import utils
from megatron.core.optimizer import distrib_optimizer
from packaging.version import Version

from megatron.bcd.config import RunConfig
from megatron.bcd.runtime import packages
from support import resumed_runs, worlds

_MAX_FP16 = torch.finfo(torch.float16).max / 2


class FusedAdam(torch.optim.Optimizer):
    """AdamW on weights with remainders, in plain PyTorch, tensor by tensor."""

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        *,
        adam_w_mode: bool = True,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        assert adam_w_mode and master_weights and use_decoupled_grad and master_weight_dtype == torch.float32
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.store_param_remainders = store_param_remainders
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        self.scales: dict[tuple[torch.Tensor, str], torch.Tensor] = {}

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        assert store_param_remainders and param.dtype == torch.bfloat16
        self.state[param]["master_param"] = torch.zeros_like(param, dtype=torch.int16)
        for name, dtype in self.dtypes.items():
            self.state[param][name] = torch.zeros_like(param, dtype=dtype)
            self.scales[param, name] = torch.ones(1)

    def get_unscaled_state(self, param: torch.Tensor, state_name: str) -> torch.Tensor:
        stored = self.state[param][state_name]
        if state_name == "master_param" or stored.dtype == torch.float32:
            return stored
        value = stored.float()
        return value.mul_(self.scales[param, state_name]) if stored.dtype == torch.float16 else value

    def set_scaled_state(self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor) -> None:
        stored = self.state[param][state_name]
        assert unscaled_state.dtype == (torch.int16 if state_name == "master_param" else torch.float32)
        if stored.dtype == torch.float16:
            scale = self.scales[param, state_name].copy_(unscaled_state.abs().max() / _MAX_FP16)
            unscaled_state = unscaled_state * torch.where(scale > 0, scale.reciprocal(), 0.0)
        stored.copy_(unscaled_state)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for weight in group["params"]:
                if not self.state[weight]:
                    self.initialize_state(weight, self.store_param_remainders)
                if getattr(weight, "decoupled_grad", None) is not None:
                    self._step(weight, group)

    def _step(self, weight: torch.Tensor, group: dict[str, Any]) -> None:
        remainder, (beta1, beta2), count = self.state[weight]["master_param"], group["betas"], group["step"]
        upper = weight.view(torch.int16) - (remainder < 0).to(torch.int16)  # undoes the rounding
        bits = (upper.to(torch.int32) << 16) | (remainder.to(torch.int32) & 0xFFFF)
        value, gradient = bits.view(torch.float32), weight.decoupled_grad.float()  # type: ignore[attr-defined]
        first = self.get_unscaled_state(weight, "exp_avg").lerp(gradient, 1 - beta1)
        second = self.get_unscaled_state(weight, "exp_avg_sq").mul(beta2).addcmul(gradient, gradient, value=1 - beta2)
        denominator = (second.sqrt() / (1 - beta2**count) ** 0.5).add_(group["eps"])
        value = value * (1 - group["lr"] * group["weight_decay"])  # in the order of torch's AdamW, to the bit
        bits = value.addcdiv(first, denominator, value=-group["lr"] / (1 - beta1**count)).view(torch.int32)
        low = (without_ties(bits) & 0xFFFF).to(torch.int32)
        remainder.copy_(torch.where(low >= 0x8000, low - 0x10000, low))
        weight.view(torch.int16).copy_((bits >> 16) + (remainder < 0).to(torch.int32))
        self.set_scaled_state(weight, "exp_avg", first)
        self.set_scaled_state(weight, "exp_avg_sq", second)


def without_ties(bits: torch.Tensor) -> torch.Tensor:
    """Set the lowest bit of values halfway between two of bf16: torch rounds them to even, remainders round up."""
    return bits.add_((bits & 0xFFFF) == 0x8000)


class AdamWithoutTies(torch.optim.AdamW):
    """Torch's AdamW on fp32 main parameters, which round to the same bf16 weights as this Adam's."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                without_ties(parameter.view(torch.int32))


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Make Megatron Core and this project use this Adam in place of Transformer Engine's."""
    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers")
    modules: dict[str, Any] = {name: types.ModuleType(name) for name in names}
    modules[names[-1]].FusedAdam = FusedAdam
    with (
        mock.patch.dict(sys.modules, modules),
        mock.patch.object(packages, "has_precision_aware_adam", lambda: True),
        mock.patch.object(core_optimizer, "Adam", FusedAdam),
        mock.patch.object(distrib_optimizer, "Adam", FusedAdam),
        mock.patch.object(core_optimizer, "USING_PYTORCH_OPTIMIZER", False),
        mock.patch.object(utils, "get_te_version", lambda: Version("2.1.0")),
    ):
        yield


def reference_run(config: RunConfig) -> dict[str, Any]:
    """Run `worlds.train_run` with `AdamWithoutTies`."""
    with mock.patch.object(torch.optim, "AdamW", AdamWithoutTies):
        return worlds.train_run(config)


def train_run(config: RunConfig) -> dict[str, Any]:
    """Run `worlds.train_run`. Also return how the optimizer stores its state, the peak of the model state, and blocks
    whose state at the start of a phase differs from that at the end of their previous one."""
    at_the_end: dict[int, dict[str, dict[str, torch.Tensor]]] = {}
    changed: list[tuple[int, str]] = []

    def remember(run: worlds.RecordedRun) -> None:
        at_the_end[run.block] = _state(run)

    def compare(run: worlds.RecordedRun) -> None:
        now = _state(run)
        for name, tensors in at_the_end.get(run.active.block, {}).items():  # type: ignore[arg-type]
            kept = config.bcd.bcd_optimizer_state == "host"
            names = {"master", *([*tensors] if kept else [])}
            changed.extend((run.active.block, f"{what} of {name}") for what in sorted(names)  # type: ignore[misc]
                           if not torch.equal(tensors[what], now[name].get(what, torch.zeros(0))))  # fmt: skip

    with installed(), worlds.started(config, after_step=remember, after_build=compare) as run:
        run.train()
        rank, steps = torch.distributed.get_rank(), run.recorder.steps
        states = [state for each in run.active.core.optimizers() if not each.is_stub_optimizer
                  for state in each.optimizer.state.values()]  # fmt: skip
        return worlds.outcome(run) | {
            "dtypes": {name: str(value.dtype)[len("torch.") :] for state in states for name, value in state.items()},
            "model_state": max(step.model_state_bytes[rank] for step in steps),
            "changed": changed,
        }


def _state(run: worlds.RecordedRun) -> dict[str, dict[str, torch.Tensor]]:
    """Return fp32 copies of the state of the block's parameters."""
    return {
        name: {what: shard.read(what).clone() for what in shard.names()}
        for name, shard in run.active.core.block_shards.items()
    }


def stopped_and_resumed(config: RunConfig, stops: list[int], root: str) -> list[str]:
    """Run `resumed_runs.stopped_and_resumed` with this Adam."""
    with installed():
        return resumed_runs.stopped_and_resumed(config, stops, root)
