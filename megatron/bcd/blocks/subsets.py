"""Select the samples of a phase (arXiv 2506.12037, section 3.2.3, tables 9 and 10). Pure except for numpy.

Each phase draws a new subset of the epoch without replacement. It repeats the subset as often as its steps need, each
pass in another order. The epoch is shuffled and cut into subsets, and shuffled again when less than a subset is left.
Everything is a function of seed, phase and position.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import numpy
import numpy.typing

Indices = numpy.typing.NDArray[numpy.int64]


@dataclass(frozen=True, kw_only=True)
class PhaseSubset:
    """The subsets of all phases of a run."""

    num_samples: int
    """Samples of one epoch of the train split."""
    ratio: float
    """Size of a subset as a share of the epoch, above 0 and at most 1."""
    seed: int

    def __post_init__(self) -> None:
        if self.size < 1:  # also if the split is empty
            raise ValueError(
                f"--bcd-sample-ratio {self.ratio}: less than one of the {self.num_samples} samples of an epoch"
            )

    @property
    def size(self) -> int:
        """Number of samples in a subset: ``ratio`` of the epoch, rounded."""
        return round(self.num_samples * self.ratio)

    def indices(self, phase: int) -> Indices:
        """Return the dataset indices of a phase's subset, each once."""
        return _indices(self, phase)

    def samples(self, phase: int, positions: Indices) -> Indices:
        """Return the dataset indices of the samples at these positions in a phase.

        Pass p over the subset has the positions p x ``size`` to (p + 1) x ``size``.
        """
        assert phase >= 0 and (positions >= 0).all(), f"phase {phase}, positions {positions}"
        passes, places = numpy.divmod(positions, self.size)
        indices = numpy.empty_like(places)
        for number in numpy.unique(passes).tolist():
            is_in_pass = passes == number
            indices[is_in_pass] = _pass(self, phase, number)[places[is_in_pass]]
        return indices


@functools.lru_cache(maxsize=1)
def _indices(subset: PhaseSubset, phase: int) -> Indices:
    epoch, number = divmod(phase, subset.num_samples // subset.size)
    order = numpy.arange(subset.num_samples, dtype=numpy.int32 if subset.num_samples < 2**31 else numpy.int64)
    _generator(f"{subset.seed} epoch {epoch}").shuffle(order)
    indices = order[number * subset.size : (number + 1) * subset.size]
    return indices.astype(numpy.int64)  # a copy, without the rest of the epoch


@functools.lru_cache(maxsize=2)  # reading ahead, the next pass begins before this one ends
def _pass(subset: PhaseSubset, phase: int, number: int) -> Indices:
    return _generator(f"{subset.seed} phase {phase} pass {number}").permutation(_indices(subset, phase))


def _generator(key: str) -> numpy.random.RandomState:
    """Return a generator whose numbers never change: NumPy promises this for RandomState, not for newer generators."""
    return numpy.random.RandomState(numpy.frombuffer(hashlib.sha256(key.encode()).digest(), dtype="<u4"))
