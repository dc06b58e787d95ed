"""Records of fine-tuning, and a run's batches taken apart into them again."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.bcd.config import RunConfig
from support import worlds

END = 256
"""ByteLevelTokenizer's end-of-document token."""
SEQUENCE = 48


def questions(count: int, *, seed: int = 1) -> list[dict[str, str]]:
    """Prompts and completions of 4 to 40 bytes together, no two alike."""
    draw = random.Random(seed)
    records = []
    for number in range(count):
        prompt = f"{number}:" + "".join(draw.choices("abc ", k=draw.randint(1, 16))) + "?"
        records.append({"prompt": prompt, "completion": "".join(draw.choices("xyz ", k=draw.randint(1, 20)))})
    return records


def write_records(path: Path, records: Iterable[Mapping[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def config_of(path: str, **flags: Any) -> RunConfig:
    """A small run that fine-tunes on the file."""
    return worlds.run_config(
        **{"sft": True, "data_path": path, "seq_length": SEQUENCE, "max_position_embeddings": SEQUENCE} | flags
    )


def samples_of(batch: Mapping[str, torch.Tensor]) -> list[dict[str, list[Any]]]:
    """The samples in a microbatch of byte-level tokens, by position_ids; what only fills up is left out.

    `ids` of all tokens of a sample, and `learned` of those after the first.
    """
    found = []
    for row in range(len(batch["tokens"])):
        starts = [*torch.nonzero(batch["position_ids"][row] == 0).flatten().tolist(), batch["tokens"].size(1)]
        for start, end in zip(starts, starts[1:], strict=False):
            ids = [int(batch["tokens"][row, start]), *batch["labels"][row, start:end].tolist()]
            learned = batch["loss_mask"][row, start:end].tolist()
            if not all(token == END for token in ids):
                length = ids.index(END)  # the last sample of a sequence without packing is filled up
                found.append({"ids": ids[: length + 1], "learned": learned[:length]})
    return found


def text_of(ids: list[int]) -> str:
    return bytes(token for token in ids if token != END).decode()
