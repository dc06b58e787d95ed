"""The interface of an optimizer that steps parameters and owns their state.

`MatrixOptimizer` steps the matrices of layers, in a run with a rule for matrices. `CoreOptimizer` steps all other
parameters of the active block, and those that are always active, with Megatron Core's optimizer. `ActiveBlock`, the
switch check, the outer step and joining groups treat both alike. An owner without parameters has empty state, so
callers need not check.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

_SAMPLE_STRIDE = 4099
"""A sample has every 4099th element. The stride is prime, so that every column of a matrix has elements in it."""


def host_sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor in host memory that the switch check compares. The CPU reads slowly."""
    return tensor.detach().view(-1)[::_SAMPLE_STRIDE]


class StateOwner(ABC):
    """Steps some of a stage's parameters and owns their optimizer state.

    A phase lies between `begin` and `end`, which each owner defines for itself. Parameters have GPTModel's names.
    """

    @property
    @abstractmethod
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of this phase. The scheduler sets their `lr` and `weight_decay`."""

    @abstractmethod
    def block_param_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups that belong to the active block."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Set the gradient buffers to zero."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Inside the context, gradients are not reduced, because more microbatches follow."""

    @abstractmethod
    def start_reductions(self) -> None:
        """Start to reduce all gradients of this step. A collective."""

    @abstractmethod
    def step(self, *, norm: float, gradient_scale: float) -> None:
        """Clip by `norm`, the L2 norm of all clipped gradients, and step. A collective.

        `gradient_scale` multiplies gradients that were averaged over the ranks although the loss is a sum of tokens.
        """

    @abstractmethod
    def gradients(self) -> Iterator[torch.Tensor]:
        """Yield the gradients on the device."""

    @abstractmethod
    def device_state(self) -> Iterator[torch.Tensor]:
        """Yield the optimizer state on the device."""

    @abstractmethod
    def host_bytes(self) -> int:
        """Return the bytes of optimizer state in host memory."""

    @abstractmethod
    def stepped_tensors(self, *, is_of_block: bool) -> Iterator[torch.Tensor]:
        """Yield the tensors that this rank steps in this phase: those of the active block, or of inactive layers.

        Tensors in host memory are reduced to a `host_sample`.
        """

    @abstractmethod
    def main_param(self, name: str) -> torch.Tensor:
        """Return a whole main parameter, flat, in fp32. A collective over the ranks with the same weights."""

    @abstractmethod
    def set_main_param(self, name: str, value: torch.Tensor) -> None:
        """Set a weight and its main parameter to a whole flat fp32 value."""

    @abstractmethod
    def rank_state(self) -> Any:
        """Return copies in host memory of this rank's whole state, for the same rank of a replica group that joins."""

    @abstractmethod
    def load_rank_state(self, state: Any) -> None:
        """Load the `rank_state` of another group while no block is active. `begin` then restores the phase's state."""
