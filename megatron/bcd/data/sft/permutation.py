"""A random order of many indices, computed index by index."""

from __future__ import annotations

import hashlib
import math

import numpy
import numpy.typing

Indices = numpy.typing.NDArray[numpy.int64]

_ROUNDS = 8


class Permutation:
    """A random order of ``range(size)`` in constant time and memory: a reader opens any sequence of any epoch.

    A Feistel network over pairs (left, right) with sides of about the square root of ``size``, walked until it lands in
    the range again (J. Black, P. Rogaway: Ciphers with Arbitrary Finite Domains, 2002). ``key`` names the order, which
    never changes: a resumed run must have the same training and validation samples.
    """

    def __init__(self, size: int, key: str) -> None:
        self.size = size
        left = math.isqrt(size - 1) + 1 if size > 1 else 1
        self._sides = numpy.uint64(left), numpy.uint64(-(-size // left))
        self._keys = numpy.frombuffer(hashlib.sha512(key.encode()).digest(), dtype="<u8").astype(numpy.uint64)
        assert len(self._keys) == _ROUNDS

    def at(self, places: Indices) -> Indices:
        """What stands at ``places``."""
        found = self._network(places)
        outside = numpy.flatnonzero(found >= self.size)
        while len(outside):
            found[outside] = self._network(found[outside])
            outside = outside[found[outside] >= self.size]
        return found

    def _network(self, values: Indices) -> Indices:
        """One pass over the pairs: each round shifts one side by a hash of the other."""
        pair = list(numpy.divmod(values.astype(numpy.uint64), self._sides[1]))
        for step, key in enumerate(self._keys):
            side = step % 2
            pair[side] = (pair[side] + _mixed(pair[1 - side] + key) % self._sides[side]) % self._sides[side]
        found: Indices = (pair[0] * self._sides[1] + pair[1]).astype(numpy.int64)
        return found


def _mixed(values: numpy.typing.NDArray[numpy.uint64]) -> numpy.typing.NDArray[numpy.uint64]:
    """A hash of each value (the finalizer of SplitMix64); multiplication wraps."""
    values = (values ^ (values >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return values ^ (values >> numpy.uint64(31))
