"""Models, clusters and published numbers, read from CSV files that users can edit.

Lines that start with # are comments; the first other line names the columns.
"""

from __future__ import annotations

import csv
import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from megatron.bcd.planner.cost import ModelShape

FAMILY_DEFAULTS = ("gpt", "llama")
_BIASES = ("", "none", "qkv", "all")
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Model:
    """A row of the model table."""

    name: str
    form: str
    """gpt or llama."""
    layers: int
    hidden: int
    heads: int
    groups: int
    """Query groups of grouped-query attention; equal to ``heads`` without it."""
    ffn: int
    vocabulary: int
    """Unpadded."""
    sequence: int
    """Default tokens per sequence."""
    source: str
    head_dim: int = 0
    """Width of a head; 0: ``hidden`` / ``heads``."""
    tied: bool | None = None
    """Whether the head is the embedding; None: in form gpt."""
    biases: str = ""
    """Linear layers with a bias: none, qkv (queries, keys, values) or all; empty: all in form gpt, none in llama."""
    qk_norm: bool | None = None
    """Whether queries and keys are normalised."""
    positions: int = 0
    """Rows of a GPT's position table; 0: as many as a sequence has tokens."""

    def __post_init__(self) -> None:
        for name, choices in (("form", FAMILY_DEFAULTS), ("biases", _BIASES)):
            if getattr(self, name) not in choices:
                found, known = getattr(self, name), ", ".join(filter(None, choices))
                raise ValueError(f"model {self.name}: {name} {found} must be one of {known}")
        for name in ("layers", "hidden", "heads", "groups", "ffn", "vocabulary", "sequence"):
            if getattr(self, name) < 1:
                raise ValueError(f"model {self.name}: {name} {getattr(self, name)} must be at least 1")
        if self.head_dim < 0 or self.positions < 0:
            raise ValueError(f"model {self.name}: head_dim and positions must be at least 0")
        if not self.head_dim and self.hidden % self.heads:
            raise ValueError(f"model {self.name}: hidden {self.hidden} is not divisible by heads {self.heads}")
        if self.heads % self.groups:
            raise ValueError(f"model {self.name}: heads {self.heads} is not divisible by groups {self.groups}")

    def shape(self, sequence: int | None = None) -> ModelShape:
        """Sizes that determine the number of parameters, with sequences of ``sequence`` tokens."""
        is_gpt, width = self.form == "gpt", self.head_dim or self.hidden // self.heads
        return ModelShape(
            num_layers=self.layers,
            hidden_size=self.hidden,
            ffn_hidden_size=self.ffn,
            vocab_size=self.vocabulary,
            num_positions=(self.positions or sequence or self.sequence) if is_gpt else 0,
            tied=is_gpt if self.tied is None else self.tied,
            biases=self.biases == "all" or is_gpt and not self.biases,
            gated=not is_gpt,
            query_size=self.heads * width,
            key_value_size=self.groups * width,
            shifted_norms=is_gpt,
            qkv_bias=self.biases == "qkv",
            qk_norm_size=width if self.qk_norm else 0,
        )


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A row of the cluster table: one kind of GPU and its interconnect."""

    name: str
    gpu: str
    memory_gib: float
    fp32_tflops: float
    bf16_tflops: float
    memory_gb_per_s: float
    link_gb_per_s: float
    """GPU to GPU inside a node, one way."""
    network_gb_per_s: float
    """Node to node, one way."""
    gpus_per_node: int
    usd_per_gpu_hour: float
    compute_share: float
    """Share of the peak that matrix products achieve."""
    memory_share: float
    """Share of the memory bandwidth that element-wise work and the optimizer achieve."""
    framework_gib: float
    """Memory outside the run's tensors: driver context, workspaces, communication buffers, fragmentation."""
    host_gb_per_s: float
    """Rate at which an optimizer on the host processes model state, transfers included."""
    source: str

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"cluster {self.name}: {field.name} {value} must be a number, at least 0")
        for name in ("fp32_tflops", "bf16_tflops", "memory_gb_per_s", "link_gb_per_s", "network_gb_per_s",
                     "host_gb_per_s", "compute_share", "memory_share"):  # fmt: skip
            if getattr(self, name) == 0:
                raise ValueError(f"cluster {self.name}: {name} must be more than 0")
        for name in ("compute_share", "memory_share"):
            if getattr(self, name) > 1:
                raise ValueError(f"cluster {self.name}: {name} {getattr(self, name)} is a share, at most 1")
        if self.gpus_per_node < 1:
            raise ValueError(f"cluster {self.name}: gpus_per_node must be at least 1")

    def peak_flops_per_s(self, precision: str) -> float:
        """Peak of matrix products."""
        return 1e12 * (self.fp32_tflops if precision == "fp32" else self.bf16_tflops)

    def flops_per_s(self, precision: str) -> float:
        """Achieved rate of matrix products."""
        return self.peak_flops_per_s(precision) * self.compute_share

    @property
    def bytes_per_s(self) -> float:
        """Achieved memory bandwidth of element-wise work."""
        return 1e9 * self.memory_gb_per_s * self.memory_share


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A row of the method table: the default GPUs of a model and method."""

    method: str
    model: str
    cluster: str
    nodes: int
    gpus_per_node: int
    pipeline: int
    """Stages."""
    source: str

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node", "pipeline"):
            if getattr(self, name) < 1:
                raise ValueError(f"{self.method} {self.model}: {name} {getattr(self, name)} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Published:
    """A number published in the paper."""

    table: str
    row: str
    column: str
    value: str


Row = TypeVar("Row", Model, Cluster, Placement, Published)
_SWITCH = {"yes": True, "no": False}


def _switch(cell: str) -> bool:
    if cell not in _SWITCH:
        raise ValueError(f"{cell} must be yes or no")
    return _SWITCH[cell]


_CONVERTERS: Mapping[str, Callable[[str], Any]] = {"str": str, "int": int, "float": float, "bool | None": _switch}


def read_models(path: str | Path) -> dict[str, Model]:
    """By name. Raises ValueError with the file and line at fault."""
    return _by_name(path, _read(path, Model))


def read_clusters(path: str | Path) -> dict[str, Cluster]:
    """By name. Raises ValueError with the file and line at fault."""
    return _by_name(path, _read(path, Cluster))


def read_placements(path: str | Path) -> list[Placement]:
    """In the file's order. Raises ValueError with the file and line at fault."""
    return _read(path, Placement)


def read_published(path: str | Path) -> list[Published]:
    """In the file's order. Raises ValueError with the file and line at fault."""
    return _read(path, Published)


def choose(known: Mapping[str, Row], name: str, *, flag: str) -> Row:
    """The row of that name, or for a GPU of a part of it, without regard to case, blanks and punctuation.

    Raises ValueError with the list of names, and the nearest.
    """
    asked, plain = _plain(name), {_plain(key): key for key in known}
    if asked in plain:
        return known[plain[asked]]
    # rtx 4090, 4090: a card's number has one meaning, while a part of a model's name says nothing about its family
    cards = [
        key
        for key, row in known.items()
        if isinstance(row, Cluster) and len(asked) > 2 and any(asked in _plain(text) for text in (key, row.gpu))
    ]
    if len(cards) == 1:
        return known[cards[0]]
    near = [plain[word] for word in difflib.get_close_matches(asked, plain, n=3)]
    hint = f"; did you mean {' or '.join(cards or near)}?" if cards or near else ""
    raise ValueError(f"{flag} {name}: must be one of {', '.join(known)}{hint}")


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def _by_name(path: str | Path, rows: list[Any]) -> dict[str, Any]:
    named = {row.name: row for row in rows}
    if not rows or len({name.lower() for name in named}) < len(rows):
        raise ValueError(f"{path}: " + ("contains a name twice" if rows else "has no row"))
    return named


def columns_of(kind: type[Row]) -> str:
    """The columns of a table, those in brackets optional."""
    return ",".join(field.name if field.default is MISSING else f"[{field.name}]" for field in fields(kind))


def _read(path: str | Path, kind: type[Row]) -> list[Row]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip() and line[0] != "#"]
    table = csv.reader(line for _, line in lines)
    columns = next(table, [])
    converters = {field.name: _CONVERTERS[str(field.type)] for field in fields(kind)}
    optional = {field.name for field in fields(kind) if field.default is not MISSING}
    if len(set(columns)) < len(columns) or not converters.keys() - optional <= set(columns) <= converters.keys():
        raise ValueError(f"{path}: its columns must be {columns_of(kind)}")
    rows = []
    for (number, _), cells in zip(lines[1:], table, strict=False):
        try:
            if len(cells) != len(columns):
                raise ValueError(f"{len(cells)} cells instead of {len(columns)}")
            texts = {name: cell.strip() for name, cell in zip(columns, cells, strict=True)}
            given = {name: text for name, text in texts.items() if text or name not in optional}
            rows.append(kind(**{name: converters[name](text) for name, text in given.items()}))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    return rows
