"""Submodels, and the blocks that they form (docs/concepts.md). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, kw_only=True)
class Submodel:
    """Consecutive layers inside one pipeline stage."""

    index: int
    """Place in depth order over the whole model."""
    stage: int
    """Pipeline stage that holds all of it."""
    layers: range
    """Layer numbers over the whole model; never empty."""
    first: bool
    """First submodel of the model: owns the embedding."""
    last: bool
    """Last submodel of the model: owns the final norm and an untied output head."""
    chunk: int = 0
    """In layout ``interleaved``: which chunk of the stage it is."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """The submodels that are updated together, in depth order."""

    index: int
    submodels: tuple[Submodel, ...]

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Layer numbers of the block, ascending."""
        return tuple(layer for submodel in self.submodels for layer in submodel.layers)

    @property
    def first_layer(self) -> int:
        """The first active layer while this block is active."""
        return self.submodels[0].layers.start

    @property
    def first_trainable_stage(self) -> int:
        """The pipeline stage that holds the first active layer."""
        return self.submodels[0].stage

    @property
    def owns_embedding(self) -> bool:
        """Whether the embedding (tied: and with it the head's copy) belongs to this block."""
        return self.submodels[0].first

    @property
    def owns_final_norm(self) -> bool:
        """Whether the final norm (untied: and the output head) belongs to this block."""
        return self.submodels[-1].last

    def layers_on_stage(self, stage: int) -> tuple[int, ...]:
        """Layer numbers of the block that pipeline stage ``stage`` holds; empty if it holds none."""
        held = (submodel for submodel in self.submodels if submodel.stage == stage)
        return tuple(layer for submodel in held for layer in submodel.layers)

    def on_stage(self, stage: int) -> bool:
        """Whether pipeline stage ``stage`` holds a submodel of the block."""
        return any(submodel.stage == stage for submodel in self.submodels)
