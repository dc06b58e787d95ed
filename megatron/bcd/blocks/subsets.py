"""Which samples a phase trains on (arXiv 2506.12037, section 3.2.3, tables 9 and 10). Pure but for numpy.

Each phase draws a new subset of the epoch without replacement, and repeats it, pass after pass in another order, as
often as its steps need. The epoch is shuffled and cut into subsets; when what is left is smaller than a subset, it is
shuffled anew. All is a function of seed, phase and position.
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
        if not 0 < self.ratio <= 1:  # false for NaN, too
            raise ValueError(f"--bcd-sample-ratio {self.ratio}: must be above 0 and at most 1")
        if self.size < 1:  # so it is where the split is empty
            raise ValueError(
                f"--bcd-sample-ratio {self.ratio}: less than one of the {self.num_samples} samples of an epoch"
            )

    @property
    def size(self) -> int:
        """Samples of a subset: ``ratio`` of the epoch, rounded."""
        return round(self.num_samples * self.ratio)

    def indices(self, phase: int) -> Indices:
        """Dataset indices of that phase's subset, each once."""
        return _indices(self, phase)

    def samples(self, phase: int, positions: Indices) -> Indices:
        """Dataset indices of the samples after so many samples of that phase. Pass p over the subset is positions
        p x ``size`` to (p + 1) x ``size``."""
        assert phase >= 0 and (positions >= 0).all(), f"phase {phase}, positions {positions}"
        passes, places = numpy.divmod(positions, self.size)
        found = numpy.empty_like(places)
        for number in numpy.unique(passes).tolist():
            chosen = passes == number
            found[chosen] = _pass(self, phase, number)[places[chosen]]
        return found

    def times_used(self, num_samples: int) -> float:
        """Passes over its subset of a phase that trains on ``num_samples`` (steps x global batch)."""
        return num_samples / self.size


@functools.lru_cache(maxsize=1)
def _indices(subset: PhaseSubset, phase: int) -> Indices:
    epoch, number = divmod(phase, subset.num_samples // subset.size)
    order = numpy.arange(subset.num_samples, dtype=numpy.int32 if subset.num_samples < 2**31 else numpy.int64)
    _generator(f"{subset.seed} epoch {epoch}").shuffle(order)
    chosen = order[number * subset.size : (number + 1) * subset.size]
    return chosen.astype(numpy.int64)  # a copy, without the rest of the epoch


@functools.lru_cache(maxsize=2)  # reading ahead, the next pass begins before this one ends
def _pass(subset: PhaseSubset, phase: int, number: int) -> Indices:
    return _generator(f"{subset.seed} phase {phase} pass {number}").permutation(_indices(subset, phase))


def _generator(key: str) -> numpy.random.RandomState:
    """NumPy never changes what RandomState draws; of its newer generators it says that it may."""
    return numpy.random.RandomState(numpy.frombuffer(hashlib.sha256(key.encode()).digest(), dtype="<u4"))
