"""Records as inputs of the first active layer, read ahead by threads.

Tensor shapes: S sequence length, B micro-batch size, H hidden size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy
import torch

from megatron.bcd.prefix_cache.folders import Cache
from megatron.bcd.prefix_cache.store import Bytes, Slots
from megatron.bcd.runtime import device

NUM_THREADS = 2
MICROBATCHES_AHEAD = 4
_NUMPY = {"fp32": numpy.float32, "bf16": numpy.int16}  # numpy has no bf16: its bits
_TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16}


class DamagedRecord(RuntimeError):
    """A record was damaged during the phase that reads it."""


def to_records(hidden_states: torch.Tensor, dtype: str) -> list[Bytes]:
    """What enters the first active layer, [S, B, H], as one record of bytes [S, H] per sample."""
    by_sample = hidden_states.detach().transpose(0, 1).to(_TORCH[dtype]).contiguous().cpu()
    return [sample.view(torch.uint8).reshape(-1).numpy() for sample in by_sample]


def to_tensor(records: list[Bytes], cache: Cache, dtype: torch.dtype) -> torch.Tensor:
    """Records of some samples as [S, B, H] in host memory (page-locked where there is a GPU)."""
    kind, (length, hidden_size) = cache.key.dtype, cache.key.record_shape
    batch = torch.empty(length, len(records), hidden_size, dtype=dtype, pin_memory=device.has_cuda())
    of_records = batch if dtype == _TORCH[kind] else torch.empty(batch.shape, dtype=_TORCH[kind])
    places = of_records.view(torch.int16).numpy() if kind == "bf16" else of_records.numpy()
    for place, record in enumerate(records):
        places[:, place] = record.view(_NUMPY[kind]).reshape(length, hidden_size)
    return batch if of_records is batch else batch.copy_(of_records)


def read(cache: Cache, slots: Slots, dtype: torch.dtype) -> torch.Tensor:
    """The records of `slots` as [S, B, H] in `dtype`, in host memory.

    Raises:
        DamagedRecord: one of them is damaged; the message names the folder.
    """
    records = []
    for slot in slots.tolist():
        record = cache.store.read(slot)
        if record is None:
            raise DamagedRecord(
                f"prefix cache {cache.folder}: record {slot} has been damaged since the phase began (did another "
                "program write there?); start the run again, and what is damaged is computed anew"
            )
        records.append(record)
    return to_tensor(records, cache, dtype)


def read_ahead(cache: Cache, microbatches: Iterable[Slots], dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """`read` of each of the microbatches, in their order; threads work on the next MICROBATCHES_AHEAD.

    Checksums and copies release the GIL and run on idle cores. Close the iterator to end the threads.
    """
    coming = iter(microbatches)
    under_way: deque[Future[torch.Tensor]] = deque()
    threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="prefix-cache")
    try:
        while True:
            while len(under_way) < MICROBATCHES_AHEAD and (slots := next(coming, None)) is not None:
                under_way.append(threads.submit(read, cache, slots, dtype))
            if not under_way:
                return
            yield under_way.popleft().result()
    finally:
        threads.shutdown(wait=True, cancel_futures=True)
