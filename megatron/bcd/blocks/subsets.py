"""Which samples a phase trains on (arXiv 2506.12037, section 3.2.3, tables 9 and 10). Pure but for numpy.

Each phase draws a new subset of the epoch without replacement, and repeats it as often as its steps need. Everything
is a function of seed, phase and position, in constant memory: orders are computed index by index, never stored.

The epoch is put in a new random order again and again, and consecutive slices of that row are the subsets. A slice
that crosses from one order to the next must not hold a sample twice, so the next order is changed where it would. That
takes constant time for slices of at most half an epoch; a larger subset is therefore an epoch without a slice, and the
row is of the samples left out. Either way, after every phase the draws of any two samples differ by one at most.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy
import numpy.typing

Indices = numpy.typing.NDArray[numpy.int64]

_ROUNDS = 8
_CHUNK = 1 << 18
"""Indices computed at once: temporary arrays stay within a processor's cache."""


class Permutation:
    """A random order of ``range(size)``: index by place and place by index, in constant time and memory.

    A Feistel network over pairs (left, right) with sides of about the square root of ``size``, walked until it lands in
    the range again (J. Black, P. Rogaway: Ciphers with Arbitrary Finite Domains, 2002). ``key`` names the order.
    """

    def __init__(self, size: int, key: str) -> None:
        self.size = size
        self._left = math.isqrt(size - 1) + 1 if size > 1 else 1
        self._right = -(-size // self._left)
        digest = hashlib.sha512(key.encode()).digest()
        self._keys = numpy.frombuffer(digest, dtype="<u8").astype(numpy.uint64)
        assert len(self._keys) == _ROUNDS

    def at(self, places: Indices) -> Indices:
        """What stands at ``places``."""
        return self._walk(places, inverse=False)

    def place_of(self, values: Indices) -> Indices:
        """Where ``values`` stand."""
        return self._walk(values, inverse=True)

    def _walk(self, values: Indices, *, inverse: bool) -> Indices:
        found = self._network(values, inverse=inverse)
        outside = numpy.flatnonzero(found >= self.size)
        while len(outside):
            found[outside] = self._network(found[outside], inverse=inverse)
            outside = outside[found[outside] >= self.size]
        return found

    def _network(self, values: Indices, *, inverse: bool) -> Indices:
        """One pass over the pairs: each round shifts one side by a hash of the other."""
        sizes = (numpy.uint64(self._left), numpy.uint64(self._right))
        sides = list(numpy.divmod(values.astype(numpy.uint64), sizes[1]))
        for step in reversed(range(_ROUNDS)) if inverse else range(_ROUNDS):
            side = step % 2
            shift = _mixed(sides[1 - side] + self._keys[step]) % sizes[side]
            sides[side] = (sides[side] + (sizes[side] - shift if inverse else shift)) % sizes[side]
        found: Indices = (sides[0] * sizes[1] + sides[1]).astype(numpy.int64)
        return found


def _mixed(values: numpy.typing.NDArray[numpy.uint64]) -> numpy.typing.NDArray[numpy.uint64]:
    """A hash of each value (the finalizer of SplitMix64); multiplication wraps."""
    values = (values ^ (values >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return values ^ (values >> numpy.uint64(31))


class _Row:
    """Epoch after epoch, each in an order of its own, cut into slices of ``size`` (at most half an epoch).

    ``size`` x number is where a slice begins. A slice that crosses from one epoch to the next holds the ``tail`` of the
    one and the ``head`` of the other. Where the order of the other puts samples of the tail into the head, they are
    exchanged for samples from the ``tail`` places behind the head, the nth sample of the tail with the nth of these
    places, and on from there while that is a sample of the tail, too. So only the first ``size`` places of an epoch
    differ from its order, and the tail, further back, is known without the epoch before it.
    """

    def __init__(self, num_samples: int, size: int, seed: int) -> None:
        assert 2 * size <= num_samples
        self.num_samples, self.size, self.seed = num_samples, size, seed

    def at(self, places: Indices) -> Indices:
        """The samples at ``places`` of the whole row."""
        epochs, places = numpy.divmod(places, self.num_samples)
        found = numpy.empty_like(places)
        for epoch in numpy.unique(epochs).tolist():
            chosen = epochs == epoch
            found[chosen] = self.at_epoch(epoch, places[chosen])
        return found

    def at_epoch(self, epoch: int, places: Indices) -> Indices:
        """The samples at ``places`` of that epoch."""
        found = self._order(epoch).at(places)
        border = self._border(epoch)
        if border is not None:
            is_head, is_behind = places < border.head, (places >= border.head) & (places < self.size)
            found[is_head] = border.not_of_tail(places[is_head])
            found[is_behind] = border.behind_head(places[is_behind])
        return found

    def other_than_slice(self, number: int, ranks: Indices) -> Indices:
        """The samples of an epoch that a slice does not hold, by their ``ranks`` (0 to epoch less slice)."""
        epoch, start = divmod(number * self.size, self.num_samples)
        if start + self.size <= self.num_samples:
            return self.at_epoch(epoch, ranks + self.size * (ranks >= start))
        border = self._border(epoch + 1)
        assert border is not None
        return border.not_of_tail(ranks + self.size)

    def _order(self, epoch: int) -> Permutation:
        return Permutation(self.num_samples, f"{self.seed} epoch {epoch}")

    def _border(self, epoch: int) -> _Border | None:
        """Where a slice crosses into that epoch, else None."""
        tail = epoch * self.num_samples % self.size if self.size else 0
        return _Border(self._order(epoch - 1), self._order(epoch), tail, self.size - tail) if tail else None


@dataclass(frozen=True)
class _Border:
    """The exchange at the border of two epochs (see ``_Row``)."""

    before: Permutation
    after: Permutation
    tail: int
    head: int

    def not_of_tail(self, places: Indices) -> Indices:
        """The samples for ``places`` of the head, or behind the slice. Each is of its own, and none is of the tail."""
        found = self.after.at(places)
        tail_start = self.before.size - self.tail
        unsettled = numpy.arange(len(found))
        while len(unsettled):
            ranks = self.before.place_of(found[unsettled]) - tail_start
            unsettled, ranks = unsettled[ranks >= 0], ranks[ranks >= 0]
            found[unsettled] = self.after.at(self.head + ranks)
        return found

    def behind_head(self, places: Indices) -> Indices:
        """The samples for ``places`` from the head to the slice's end: the tail's where an exchange passed them."""
        own, comes_from = self._of_tail(places), places
        unsettled = numpy.arange(len(places))
        was_exchanged = numpy.zeros(len(places), dtype=bool)
        while len(unsettled):
            comes_from = self.after.place_of(self._of_tail(comes_from))
            was_exchanged[unsettled] = comes_from < self.head
            # a chain of exchanges that returns to its own place started nowhere in the head
            goes_on = (
                (comes_from >= self.head) & (comes_from < self.head + self.tail) & (comes_from != places[unsettled])
            )
            unsettled, comes_from = unsettled[goes_on], comes_from[goes_on]
        return numpy.where(was_exchanged, own, self.after.at(places))

    def _of_tail(self, places: Indices) -> Indices:
        """The sample of the tail that belongs to a place behind the head."""
        return self.before.at(self.before.size - self.tail + places - self.head)


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
        if self.num_samples < 1:
            raise ValueError(f"--bcd-sample-ratio {self.ratio}: the train split has no samples")
        if self.size < 1:
            raise ValueError(
                f"--bcd-sample-ratio {self.ratio}: less than one of the {self.num_samples} samples of an epoch; "
                f"give at least {1 / self.num_samples:.3g}"
            )

    @property
    def size(self) -> int:
        """Samples of a subset: ``ratio`` of the epoch, rounded."""
        return round(self.num_samples * self.ratio)

    def indices(self, phase: int, start: int = 0, stop: int | None = None) -> Indices:
        """Dataset indices of that phase's subset, each once; ``start`` and ``stop`` cut out a part of them.

        8 bytes each: read a large subset in parts.
        """
        ranks = range(self.size)[start:stop]
        return self._members(phase, numpy.arange(ranks.start, ranks.stop))

    def sample(self, phase: int, position: int) -> int:
        """Dataset index of the sample after ``position`` samples of that phase."""
        return int(self.samples(phase, numpy.array([position]))[0])

    def samples(self, phase: int, positions: Indices) -> Indices:
        """``sample`` for many positions at once: far quicker than one by one.

        Pass p over the subset is positions p x ``size`` to (p + 1) x ``size``, each pass in an order of its own.
        """
        assert phase >= 0 and (positions >= 0).all(), f"phase {phase}, positions {positions}"
        passes, ranks = numpy.divmod(positions.astype(numpy.int64), self.size)
        found = numpy.empty_like(ranks)
        for number in numpy.unique(passes).tolist():
            chosen = passes == number
            order = Permutation(self.size, f"{self.seed} phase {phase} pass {number}")
            found[chosen] = self._members(phase, _in_chunks(order.at, ranks[chosen]))
        return found

    def times_used(self, num_samples: int) -> float:
        """Passes over its subset of a phase that trains on ``num_samples`` (steps x global batch)."""
        return num_samples / self.size

    def share_seen(self, phase: int) -> float:
        """Share of the epoch that the phases up to and including this one have drawn."""
        return min(1.0, (phase + 1) * self.size / self.num_samples)

    def _members(self, phase: int, ranks: Indices) -> Indices:
        """The samples of the subset by their ``ranks`` (0 to ``size``), in the order of the row."""
        left_out = self.num_samples - self.size
        row = _Row(self.num_samples, min(self.size, left_out), self.seed)
        if self.size <= left_out:
            return _in_chunks(row.at, phase * self.size + ranks)
        return _in_chunks(partial(row.other_than_slice, phase), ranks)


def _in_chunks(function: Callable[[Indices], Indices], values: Indices) -> Indices:
    found = numpy.empty_like(values)
    for start in range(0, len(values), _CHUNK):
        found[start : start + _CHUNK] = function(values[start : start + _CHUNK])
    return found
