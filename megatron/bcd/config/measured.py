"""The layers of a model of transformers in numbers (`huggingface.measure`), for formulas that know no family. Pure."""

from __future__ import annotations

from dataclasses import dataclass

Parameters = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes."""


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """One kind of layer. Bytes and products are those of a token in bf16, in sequences of the measured length."""

    active: float
    """Bytes that the layer saves for its backward pass if it is trained, its output included."""
    suffix: float
    """The same if it is frozen."""
    active_working: float
    """Bytes of temporary memory of the backward pass; of the frozen layer's; of a forward pass without a graph."""
    suffix_working: float
    forward_working: float
    weight_working: int
    """Bytes of the backward pass that do not depend on the number of tokens: gradients of weights."""
    matrices: int
    """Products of weights in a forward pass."""
    core: int
    """Other products in a forward pass, as those of attention's scores."""


@dataclass(frozen=True, kw_only=True)
class MeasuredModel:
    """The layers of a model."""

    kinds: tuple[LayerKind, ...]
    layers: tuple[int, ...]
    """The kind of each layer."""
    parameters: Parameters
    """All parameters by GPTModel's names; layers have their numbers in the whole model."""
    has_plain_head: bool = True
    """See `Skeleton.has_plain_head`."""
    attends_by_text: bool = False
    """See `Skeleton.attends_by_text`."""
    can_pack: bool = True
    """Whether no layer carries one text of a sequence into the next."""

    @property
    def relative_costs(self) -> list[float]:
        """The products of each layer, relative to the mean layer's."""
        mean = self.mean("matrices") + self.mean("core")
        return [(self.kinds[kind].matrices + self.kinds[kind].core) / mean for kind in self.layers]

    def mean(self, field: str) -> float:
        """Return the mean of a field over the layers."""
        return float(sum(getattr(self.kinds[kind], field) for kind in self.layers) / len(self.layers))

    def largest(self, field: str) -> float:
        """Return the largest value of a field among the layers."""
        return float(max(getattr(kind, field) for kind in self.kinds))
