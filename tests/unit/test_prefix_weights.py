"""The names of a prefix's weights."""

from __future__ import annotations

import pytest
import torch

from megatron.bcd.prefix_cache.weight_digests import bits_digest, tensor_digest


@pytest.mark.parametrize("digest", [bits_digest, tensor_digest])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_bit_and_any_place_count(digest: object, dtype: torch.dtype) -> None:
    """Weights that moved, were exchanged or changed sign, and whose cache is served all the same."""
    assert callable(digest)
    weights = torch.randn(40, 30, generator=torch.Generator().manual_seed(1)).to(dtype)
    changes = [weights.clone() for _ in range(6)]
    changes[1][3, 4] *= -1
    changes[2] = weights.roll(1, 0)
    changes[3][0], changes[3][1] = weights[1], weights[0]
    changes[4] = weights.t().contiguous().reshape(40, 30)
    changes[5].view(torch.int16)[39, -1] ^= 1
    digests = [digest(changed) for changed in changes]
    assert digests[0] == digest(weights) and len(set(digests)) == 6


def test_chunks_are_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places that are counted from the beginning of each chunk."""
    from megatron.bcd.prefix_cache import weight_digests

    tensor = torch.arange(1000, dtype=torch.float32)
    whole = bits_digest(tensor)
    monkeypatch.setattr(weight_digests, "_CHUNK", 300)
    assert bits_digest(tensor) == whole
