"""What must be equal in a cache and the run that reads it. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

FORMAT = 1
"""Incremented with every change of the files' meaning."""
_OF_ONE_CACHE = ("prefix", "samples", "num_records")


@dataclass(frozen=True, kw_only=True)
class CacheKey:
    """Two caches with the same key hold the same records. Plain values, as JSON has them."""

    prefix: tuple[str, ...]
    """Digests of the weights: of the embedding, then of each layer of the prefix."""
    samples: str
    """Digest of the samples' dataset indices."""
    num_records: int
    record_shape: tuple[int, int]
    """Sequence length, hidden size."""
    dtype: str
    """Of the records: bf16 or fp32."""
    data: str
    """Which dataset the indices are of."""
    network: Mapping[str, Any]
    """Everything beside the weights that decides what the prefix computes."""
    format: int = FORMAT

    @property
    def num_layers(self) -> int:
        """Layers of the prefix."""
        return len(self.prefix) - 1

    @property
    def record_bytes(self) -> int:
        """Of one sample."""
        return self.record_shape[0] * self.record_shape[1] * (2 if self.dtype == "bf16" else 4)

    @property
    def name(self) -> str:
        """The cache's folder, from everything that the key holds."""
        return f"prefix_{sha256(self.to_json().encode()).hexdigest()[:32]}"

    def can_start_from(self, other: CacheKey) -> bool:
        """Whether records of `other` enter a layer of this prefix: the same run but for samples, and a prefix that is
        the beginning of this one, or all of it."""
        mine, theirs = (
            {name: value for name, value in json.loads(one.to_json()).items() if name not in _OF_ONE_CACHE}
            for one in (self, other)
        )
        return mine == theirs and self.prefix[: len(other.prefix)] == other.prefix

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> CacheKey:
        """What `to_json` wrote. Raises ValueError for anything else."""
        values = json.loads(text)
        if not isinstance(values, dict) or set(values) != set(cls.__dataclass_fields__):
            raise ValueError("not the manifest of a prefix cache")
        try:
            key = cls(
                **{
                    **values,
                    "prefix": tuple(values["prefix"]),
                    "record_shape": tuple(map(int, values["record_shape"])),
                }
            )
        except TypeError as error:
            raise ValueError("not the manifest of a prefix cache") from error
        if len(key.record_shape) != 2 or type(key.num_records) is not int or not key.prefix:
            raise ValueError("not the manifest of a prefix cache")
        return key


def digest_of(parts: Sequence[str | bytes]) -> str:
    """One digest of several parts, in their order."""
    whole = sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        whole.update(len(content).to_bytes(8, "little") + content)
    return whole.hexdigest()
