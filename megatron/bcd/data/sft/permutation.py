"""A random order of many indices that is computed index by index."""

from __future__ import annotations

import hashlib
import math

import numpy
import numpy.typing

Indices = numpy.typing.NDArray[numpy.int64]

_ROUNDS = 8


class Permutation:
    """A random order of ``range(size)`` that needs constant time per index and no memory.

    A reader can thus open any sequence of any epoch. It is a Feistel network over pairs (left, right), each of about
    sqrt(size) values. Results outside the range pass through the network again until they are inside (J. Black, P.
    Rogaway: Ciphers with Arbitrary Finite Domains, 2002). ``key`` determines the order. The algorithm must not change,
    because a resumed run must have the same training and validation samples.
    """

    def __init__(self, size: int, key: str) -> None:
        self.size = size
        left = math.isqrt(size - 1) + 1 if size > 1 else 1
        self._sides = numpy.uint64(left), numpy.uint64(-(-size // left))
        self._keys = numpy.frombuffer(hashlib.sha512(key.encode()).digest(), dtype="<u8").astype(numpy.uint64)
        assert len(self._keys) == _ROUNDS

    def at(self, places: Indices) -> Indices:
        """Return the elements at positions ``places`` of the order."""
        values = self._network(places)
        outside = numpy.flatnonzero(values >= self.size)
        while len(outside):
            values[outside] = self._network(values[outside])
            outside = outside[values[outside] >= self.size]
        return values

    def _network(self, values: Indices) -> Indices:
        """Run the network once: each round shifts one side of the pair by a hash of the other."""
        pair = list(numpy.divmod(values.astype(numpy.uint64), self._sides[1]))
        for step, key in enumerate(self._keys):
            side = step % 2
            pair[side] = (pair[side] + _mix(pair[1 - side] + key) % self._sides[side]) % self._sides[side]
        result: Indices = (pair[0] * self._sides[1] + pair[1]).astype(numpy.int64)
        return result


def _mix(values: numpy.typing.NDArray[numpy.uint64]) -> numpy.typing.NDArray[numpy.uint64]:
    """Return a hash of each value (the finalizer of SplitMix64). Multiplication wraps around."""
    values = (values ^ (values >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return values ^ (values >> numpy.uint64(31))
