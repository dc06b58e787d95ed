"""What tools/compare_runs.py compares of two runs: metrics files and last checkpoints, bit for bit."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

IGNORED_FIELDS = frozenset(
    {"step_time_ms", "switch_time_ms", "switches", "tokens_per_second"}
    | {"peak_memory_bytes", "reserved_memory_bytes", "run"}
)
"""Fields of a metrics file that differ from one run to the next: times, and memory that the allocator or the
operating system counts; the run's name, which depends on the flags that a version has; and switches, which older
versions lack and the blocks of the steps show. Everything else is compared,
fields that are added later too."""
ABSENT = "absent"
LATEST = "latest_checkpointed_iteration.txt"

Record = Mapping[str, str]
"""A field's name and its value as text: two floats have the same text only if they are the same bits."""


class NoRecords(RuntimeError):
    """A run left nothing to compare: one line."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first place where two runs are not the same."""

    where: str
    field: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.where}, {self.field}: {self.before} before, {self.after} after"


def read_metrics(path: Path) -> list[Record]:
    """The lines of a metrics file, without the ignored fields. Floats keep the text that they were written with.

    Raises:
        NoRecords: the file is absent, empty or no metrics file.
    """
    try:
        with open(path, encoding="utf-8") as file:
            records = [_record(json.loads(line, parse_float=_Literal)) for line in file]
    except FileNotFoundError:
        raise NoRecords("wrote no metrics file") from None
    except (ValueError, AttributeError):
        raise NoRecords(f"wrote a metrics file that is none: {path}") from None
    if not records:
        raise NoRecords("wrote an empty metrics file")
    return records


class _Literal(str):
    """A number as the file spells it; -0.0 and 0.0 are equal as floats, and so are 1 and 1.0."""


def _record(values: dict[str, Any]) -> Record:
    # null is a figure that was not asked for, which an older version may not know
    return {name: _text(value) for name, value in values.items() if name not in IGNORED_FIELDS and value is not None}


def _text(value: object) -> str:
    if isinstance(value, _Literal):
        return str(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_text(value[key])}' for key in sorted(value))}}}"
    return json.dumps(value)


def read_checkpoint(folder: Path) -> Record:
    """A hash of each tensor in the newest checkpoint below ``folder``: weights, optimizer state, random generators.

    Raises:
        NoRecords: there is no checkpoint, or it can't be read.
    """
    try:
        iteration = int((folder / LATEST).read_text())
        latest = folder / f"iter_{iteration:07d}"
        hashes = _tensor_hashes(latest)
        files = sorted(latest.glob("*.safetensors"))
        hashes |= {file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files}
    except Exception as error:  # whatever torch raises for a damaged file
        reason = " ".join(str(error).split()) or type(error).__name__
        raise NoRecords(f"left no checkpoint that can be read: {reason}") from None
    return {"iteration": str(iteration)} | hashes


def _tensor_hashes(folder: Path) -> dict[str, str]:
    import torch  # takes seconds, which --list and bad flags need not wait for
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is enough to read
        stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        tensors = {
            name: torch.zeros(entry.size, dtype=entry.properties.dtype)
            for name, entry in stored.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return {name: _tensor_text(tensor) for name, tensor in sorted(tensors.items())}


def _tensor_text(tensor: Any) -> str:
    import torch

    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind}{list(tensor.shape)} {hashlib.sha256(content).hexdigest()[:16]}"


def record_difference(where: str, before: Record, after: Record) -> Difference | None:
    """The first field that is not the same in both, in the order of ``before``; None where they are equal."""
    for field in [*before, *(name for name in after if name not in before)]:
        one, two = before.get(field, ABSENT), after.get(field, ABSENT)
        if one != two:
            return Difference(where=where, field=field, before=one, after=two)
    return None


def metrics_difference(before: Sequence[Record], after: Sequence[Record]) -> Difference | None:
    """The first difference of two metrics files; None where all lines are equal."""
    for one, two in zip(before, after, strict=False):
        found = record_difference(f"iteration {one.get('iteration', '?')}", one, two)
        if found is not None:
            return found
    if len(before) != len(after):
        return Difference(where="whole run", field="lines", before=str(len(before)), after=str(len(after)))
    return None


def run_difference(before: Path, after: Path) -> Difference | None:
    """Of two folders that a run wrote: ``metrics.jsonl``, then the newest of ``checkpoints``.

    Raises:
        NoRecords: one of them has nothing to compare, with the side's name before the reason.
    """
    sides = {"before": before, "after": after}
    metrics, last = {}, {}
    for side, folder in sides.items():
        try:
            metrics[side] = read_metrics(folder / "metrics.jsonl")
            last[side] = read_checkpoint(folder / "checkpoints")
        except NoRecords as error:
            raise NoRecords(f"{side} {error}") from None
    found = metrics_difference(metrics["before"], metrics["after"])
    return found or record_difference("last checkpoint", last["before"], last["after"])
