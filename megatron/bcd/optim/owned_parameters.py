"""This rank's parameters, by the block that owns them."""

from __future__ import annotations

from collections.abc import Container

import torch

from megatron.bcd.blocks.ownership import ownership
from megatron.bcd.blocks.partition import Partition
from megatron.bcd.model.builder import unwrap_model

Parameters = dict[str, torch.nn.Parameter]
"""By GPTModel's names, in its order."""


class OwnedParameters:
    """The parameters of one pipeline stage.

    Raises:
        KeyError: the model has a parameter that no block owns.
    """

    def __init__(self, model: torch.nn.Module, *, partition: Partition, stage: int) -> None:
        self._parameters: Parameters = dict(unwrap_model(model).named_parameters())
        self._ownership = {name: ownership(name, partition=partition, stage=stage) for name in self._parameters}

    def of_block(self, block: int) -> Parameters:
        """Parameters that are active in the block's phases only."""
        return {
            name: self._parameters[name]
            for name, owned in self._ownership.items()
            if owned.block == block and not owned.is_always_active
        }

    def resting(self, block: int) -> Parameters:
        """Matrices that are updated without state in the block's phases (--bcd-resting-update)."""
        return {name: self._parameters[name] for name, owned in self._ownership.items() if owned.is_resting(block)}

    def matrices(self) -> Parameters:
        """Matrices of all layers of this stage."""
        return {name: self._parameters[name] for name, owned in self._ownership.items() if owned.is_matrix}

    def always_active(self) -> Parameters:
        """Parameters that are active in every phase (--bcd-always-active)."""
        return {name: self._parameters[name] for name, owned in self._ownership.items() if owned.is_always_active}

    def frozen(self) -> Parameters:
        """Parameters that require no gradient now."""
        return {name: parameter for name, parameter in self._parameters.items() if not parameter.requires_grad}

    def active(self) -> Parameters:
        """Parameters that require a gradient now."""
        return {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}

    def activate(self, block: int, *, without: Container[str] = ()) -> None:
        """Require gradients of the block's and of always-active parameters, and freeze the others and those in
        `without`."""
        for name, owned in self._ownership.items():
            self._parameters[name].requires_grad_(owned.is_active(block) and name not in without)
