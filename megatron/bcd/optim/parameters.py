"""The parameters of one pipeline stage, selected by the block that owns them."""

from __future__ import annotations

from collections.abc import Callable, Container

import torch

from megatron.bcd.blocks.ownership import Ownership, ownership
from megatron.bcd.blocks.partition import Partition
from megatron.bcd.model.builder import unwrap_model

Parameters = dict[str, torch.nn.Parameter]
"""Parameters by GPTModel's names, in its order."""


class ParametersByBlock:
    """The parameters of one pipeline stage and their ownership.

    Raises:
        KeyError: the model has a parameter that no block owns.
    """

    def __init__(self, model: torch.nn.Module, *, partition: Partition, stage: int) -> None:
        self._parameters: Parameters = dict(unwrap_model(model).named_parameters())
        self._ownership = {
            name: ownership(name, partition=partition, stage=stage, num_axes=parameter.dim())
            for name, parameter in self._parameters.items()
        }

    def all(self) -> Parameters:
        """Return all parameters of the stage."""
        return self._parameters

    def ownership(self, name: str) -> Ownership:
        return self._ownership[name]

    def owned_by(self, block: int) -> Parameters:
        """Return the parameters that are active only in the phases of this block."""
        return self._where(lambda owned: owned.block == block and not owned.is_always_active)

    def always_active(self) -> Parameters:
        """Return the parameters that are active in every phase (--bcd-always-active)."""
        return self._where(lambda owned: owned.is_always_active)

    def matrices(self) -> Parameters:
        """Return the matrices that an inactive update may step: those of all layers, and `outside_layers`."""
        return self._where(lambda owned: owned.is_matrix)

    def inactive_updates_in(self, block: int) -> Parameters:
        """Return the layers' matrices that are updated without state in the phases of this block."""
        return self._where(lambda owned: owned.has_inactive_update(block) and owned.module == "layer")

    def outside_layers(self) -> Parameters:
        """Return the embedding and the head, if the rule `factored` steps them (--bcd-embedding-update)."""
        return self._where(lambda owned: owned.is_matrix and owned.module != "layer")

    def active(self) -> Parameters:
        """Return the parameters that require a gradient now."""
        return {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}

    def activate(self, block: int, *, without: Container[str] = ()) -> None:
        """Require gradients of the block's and of always-active parameters, except `without`. Freeze all others."""
        for name, owned in self._ownership.items():
            self._parameters[name].requires_grad_(owned.is_active(block) and name not in without)

    def _where(self, is_wanted: Callable[[Ownership], bool]) -> Parameters:
        return {name: self._parameters[name] for name, owned in self._ownership.items() if is_wanted(owned)}
