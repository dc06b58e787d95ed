"""Bytes of this rank's model state, counted from live storages; a shared storage counts once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from megatron.bcd.optim.optimizer_params import all_optimizer_params


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes that this rank holds, by what they are."""

    model_state: int
    """Weights, gradients, main parameters and moments on the device."""
    gradients: int
    """Gradients on the device."""
    optimizer_state: int
    """Moments and main parameters on the device; in fp32 the main parameters are the weights and don't count."""
    offloaded: int
    """Main parameters, moments and gradients in host memory (--optimizer-cpu-offload)."""


def state_bytes(
    model: torch.nn.Module, wrapped: DistributedDataParallel | None, optimizer: MegatronOptimizer | None
) -> StateBytes:
    """Counted in one walk over the optimizer's state."""
    weights = list(model.parameters())
    buffers = [] if wrapped is None else wrapped.buffers
    parameter_buffers = [buffer.param_data for buffer in buffers if buffer.param_data is not None]
    gradients = [buffer.grad_data for buffer in buffers if buffer.grad_data is not None]
    on_device: list[torch.Tensor] = []
    on_host: list[torch.Tensor] = []
    for one in all_optimizer_params(optimizer):
        state = on_host if one.on_host else on_device
        state += [one.main_param, *(value for value in one.state.values() if torch.is_tensor(value))]
        if one.main_param.grad is not None:
            (on_host if one.on_host else gradients).append(one.main_param.grad)
    return StateBytes(
        model_state=storage_bytes([*weights, *parameter_buffers, *gradients, *on_device]),
        gradients=storage_bytes(gradients),
        optimizer_state=storage_bytes(on_device, without=weights),
        offloaded=storage_bytes(on_host),
    )


def storage_bytes(tensors: Iterable[torch.Tensor], *, without: Iterable[torch.Tensor] = ()) -> int:
    """Bytes of the tensors' storages, without those of other tensors."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    for tensor in without:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values())
