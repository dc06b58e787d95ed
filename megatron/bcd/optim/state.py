"""The optimizer state of a stage: named tensors of parameters.

`MatrixOptimizer` steps the matrices of layers, in a run with a rule for matrices. `CoreOptimizer` steps all other
parameters of the active block, and those that are always active, with Megatron Core's optimizer. Both list their state
as `ParamState`: checkpoints, joining groups and the switch check read nothing else. An owner without parameters has
empty state, so callers need not check.

A checkpoint stores the state in groups, under these keys: `N` for moments and main parameters of block N, `always` for
those of always-active parameters, `matrices` for the main parameters of matrices, `momentum N` for Muon's momenta,
`factored N` for the means of the rule `factored`, and `outer` for the momenta of replica groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

ALWAYS = "always"
"""Group of always-active parameters."""
MAIN_PARAM, MOMENTUM, OUTER_MOMENTUM = "master", "momentum_buffer", "outer"
"""Names of tensors in checkpoints, beside Adam's moments."""
ROW_MEANS, COLUMN_MEANS = "exp_avg_sq_row", "exp_avg_sq_col"
"""Names of the second moments of the rule `factored` in checkpoints."""


@dataclass(frozen=True, kw_only=True)
class ParamState:
    """The state of one parameter in one group.

    Ranks with the same weights list the same states in the same order, also those of which they store nothing.
    """

    group: str
    """Key in checkpoints. The parameters of a group are stepped together, and their tensors have the same names."""
    block: int | None = None
    """The block in whose phases alone the state is stepped; None if no block is special."""
    name: str
    parameter: torch.nn.Parameter
    set: Callable[..., None]
    """Sets this rank's share before a block is built, from tensors by name and the number of steps. The tensors are
    whole, unless a third argument says that they are this rank's `tensors`, and what their `start` is."""
    tensors: Mapping[str, Callable[[], torch.Tensor]]
    """Functions that return what this rank stores, in fp32, by name. They stay valid while the phase trains, unless it
    changes the state or the weight."""
    value: tuple[torch.Tensor, ...] = ()
    """The stored tensors that together have this rank's share of the parameter's value."""
    start: int = 0
    """First element of this rank's shard of the flat parameter."""
    num_steps: int | torch.Tensor = 0
    is_divided: bool = False
    """Whether each replica stores a shard. Otherwise the `saver` reads all of it."""
    saver: int
    """The replica that writes the state to checkpoints."""
    is_resting: bool = False
    """Whether the present phase does not step the state."""
    shapes: Mapping[str, torch.Size] | None = None
    """Shapes of all tensors that it can have; None for any names, with the shape of the parameter."""

    def shapes_of(self, names: Iterable[str]) -> dict[str, torch.Size]:
        """Return the shapes of the tensors that it can have, given the names of the group's tensors."""
        if self.shapes is None:
            return dict.fromkeys(names, self.parameter.shape)
        return {name: self.shapes[name] for name in names if name in self.shapes}
