"""Bytes of this rank's model state, counted from live storages; a shared storage counts once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from megatron.bcd.optim.optimizer_params import all_optimizer_params


def model_state_bytes(
    model: torch.nn.Module, wrapped: DistributedDataParallel | None, optimizer: MegatronOptimizer | None
) -> int:
    """Weights, gradients, main parameters and moments on the device."""

    def tensors() -> Iterator[torch.Tensor]:
        yield from model.parameters()
        if wrapped is not None:
            yield from (buffer.param_data for buffer in wrapped.buffers if buffer.param_data is not None)
        yield from _gradients(wrapped, optimizer)
        yield from _optimizer_state(optimizer, on_host=False)

    return storage_bytes(tensors())


def gradient_bytes(wrapped: DistributedDataParallel | None, optimizer: MegatronOptimizer | None) -> int:
    """Gradients on the device."""
    return storage_bytes(_gradients(wrapped, optimizer))


def optimizer_state_bytes(model: torch.nn.Module, optimizer: MegatronOptimizer | None) -> int:
    """Moments and main parameters on the device; in fp32 the main parameters are the weights and don't count."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    return storage_bytes(
        tensor
        for tensor in _optimizer_state(optimizer, on_host=False)
        if tensor.untyped_storage().data_ptr() not in weights
    )


def offloaded_bytes(optimizer: MegatronOptimizer | None) -> int:
    """Main parameters, moments and gradients in host memory (--optimizer-cpu-offload)."""
    gradients = (
        one.main_param.grad
        for one in all_optimizer_params(optimizer)
        if one.on_host and one.main_param.grad is not None
    )
    return storage_bytes([*_optimizer_state(optimizer, on_host=True), *gradients])


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors' storages."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())


def _gradients(wrapped: DistributedDataParallel | None, optimizer: MegatronOptimizer | None) -> Iterator[torch.Tensor]:
    for buffer in wrapped.buffers if wrapped is not None else ():
        if buffer.grad_data is not None:
            yield buffer.grad_data
    for one in all_optimizer_params(optimizer):
        if not one.on_host and one.main_param.grad is not None:
            yield one.main_param.grad


def _optimizer_state(optimizer: MegatronOptimizer | None, *, on_host: bool) -> Iterator[torch.Tensor]:
    for one in all_optimizer_params(optimizer):
        if one.on_host == on_host:
            yield one.main_param
            yield from (value for value in one.state.values() if torch.is_tensor(value))
