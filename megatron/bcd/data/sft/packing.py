"""Which samples are in which split, and which share a sequence. Pure but for numpy; the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import numpy.typing

from megatron.bcd.blocks.subsets import Permutation

Indices = numpy.typing.NDArray[numpy.int64]


def divide(num_samples: int, shares: Sequence[float]) -> list[Indices]:
    """Indices of each split, in a random order, drawn without a seed: every run has the same validation samples.

    `shares` need not sum to 1.
    """
    order = Permutation(max(1, num_samples), "splits of fine-tuning samples").at(numpy.arange(num_samples))
    bounds = numpy.rint(numpy.cumsum([0.0, *shares]) / sum(shares) * num_samples).astype(int).tolist()
    return [order[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]


def divide_by_record(records: numpy.typing.NDArray[numpy.int64], shares: Sequence[float]) -> list[Indices]:
    """As `divide`, but of records: the samples of one are in one split, side by side.

    `records` [R, k]: names the record of each sample; samples of one record follow each other.
    """
    is_first = numpy.any(records[1:] != records[:-1], axis=1)
    numbers = numpy.cumsum([0, *is_first])[: len(records)]
    num_records = int(numbers[-1]) + 1 if len(numbers) else 0
    found = []
    for split in divide(num_records, shares):
        places = numpy.full(num_records, -1)
        places[split] = numpy.arange(len(split))
        members = numpy.flatnonzero(places[numbers] >= 0)
        found.append(members[numpy.argsort(places[numbers[members]], kind="stable")])
    return found


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Samples, sequence by sequence."""

    samples: Indices
    """Of the first sequence, then of the second, ..."""
    bounds: Indices
    """[number of sequences + 1]; where in `samples` each sequence begins, and where the last one ends."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def of_sequence(self, index: int) -> Indices:
        """The samples that share a sequence."""
        return self.samples[self.bounds[index] : self.bounds[index + 1]]


def one_each(samples: Indices) -> Packed:
    """Every sample has a sequence of its own."""
    return Packed(samples=samples, bounds=numpy.arange(len(samples) + 1))


def pack(samples: Indices, lengths: numpy.typing.NDArray[numpy.integer], capacity: int) -> Packed:
    """Put each sample, in the order given, into the sequence with the least room that is enough (online best fit).

    `lengths`: of the samples, each at most `capacity`. Sequences are numbered by their first samples.
    """
    sequences: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r is set where a sequence has room r: the lowest bit from a length on is the best fit
    for sample, length in zip(samples.tolist(), lengths.tolist(), strict=True):
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            number = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
            sequences[number].append(sample)
        else:
            room, number = capacity, len(sequences)
            sequences.append([sample])
        by_room[room - length].append(number)
        rooms |= 1 << (room - length)
    counts = [len(sequence) for sequence in sequences]
    flat = [sample for sequence in sequences for sample in sequence]
    return Packed(samples=numpy.array(flat, dtype=numpy.int64), bounds=numpy.cumsum([0, *counts]))
