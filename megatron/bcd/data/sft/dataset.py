"""Sequences of fine-tuning samples, as a dataset.

S sequence length.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from megatron.bcd.blocks.subsets import Permutation
from megatron.bcd.data.sft.packing import Packed
from megatron.bcd.data.sft.store import Samples


class FineTuningDataset(torch.utils.data.Dataset[Mapping[str, Any]]):
    """The sequences of a split, epoch after epoch, each epoch in an order of its own."""

    def __init__(
        self,
        samples: Samples,
        packed: Packed,
        *,
        num_sequences: int,
        seq_length: int,
        end_token: int,
        seed: int,
        has_segments: bool,
    ) -> None:
        """`num_sequences`: of all epochs together; `end_token`: fills up sequences, without a loss; `has_segments`:
        the model needs to know which tokens belong together."""
        self._samples, self._packed = samples, packed
        self._num_sequences, self._seq_length = num_sequences, seq_length
        self._end_token, self._seed, self._has_segments = end_token, seed, has_segments
        described = f"{samples.digest} {seq_length} {seed} {has_segments} {end_token}".encode()
        content = packed.samples.tobytes() + packed.bounds.tobytes()
        self.unique_description_hash = hashlib.sha256(described + content).hexdigest()

    def __len__(self) -> int:
        return self._num_sequences

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """`tokens`, `labels`, `position_ids` int64 [S], `loss_mask` float32 [S], and `segment_ids` int64 [S] if the
        model needs them. A sample of N tokens takes N - 1 positions; positions restart with each."""
        epoch, place = divmod(index, len(self._packed))
        order = Permutation(len(self._packed), f"{self._seed} fine-tuning epoch {epoch}")
        return self._sequence(self._packed.of_sequence(int(order.at(numpy.array([place]))[0])))

    def _sequence(self, samples: numpy.typing.NDArray[numpy.int64]) -> Mapping[str, Any]:
        length = self._seq_length
        tokens, labels = (numpy.full(length, self._end_token, dtype=numpy.int64) for _ in range(2))
        position_ids, segment_ids = (numpy.zeros(length, dtype=numpy.int64) for _ in range(2))
        loss_mask = numpy.zeros(length, dtype=numpy.float32)
        start = 0
        for number, sample in enumerate(samples.tolist()):
            first, last = self._samples.bounds[sample : sample + 2].tolist()
            last = min(last, first + length + 1)
            end = start + last - first - 1
            tokens[start:end] = self._samples.ids[first : last - 1]
            labels[start:end] = self._samples.ids[first + 1 : last]
            loss_mask[start:end] = self._samples.learned[first + 1 : last]
            position_ids[start:end] = numpy.arange(end - start)
            segment_ids[start:end] = number
            start = end
        position_ids[start:] = numpy.arange(length - start)
        segment_ids[start:] = len(samples)
        sequence = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": position_ids}
        return sequence | {"segment_ids": segment_ids} if self._has_segments else sequence
