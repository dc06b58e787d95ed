"""Read the tables of models, and of clusters with their prices.

They are CSV files that users can edit. Lines that start with # are comments; the first other line names the columns.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from megatron.bcd.config.measured import MeasuredModel

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Model:
    """A row of the model table."""

    name: str
    form: str  # gpt or llama
    layers: int
    hidden: int
    heads: int
    groups: int  # query groups of grouped-query attention; equal to `heads` without it
    ffn: int
    vocabulary: int  # unpadded
    sequence: int  # default tokens per sequence
    source: str
    head_dim: int = 0  # width of a head; 0: hidden / heads
    tied: bool | None = None  # whether the head is the embedding; None: in form gpt
    biases: str = ""  # linear layers with a bias: none, qkv or all; empty: all in form gpt, none in llama
    qk_norm: bool | None = None  # whether queries and keys are normalised
    positions: int = 0  # rows of a GPT's position table; 0: as many as a sequence has tokens
    experts: int = 0  # experts of every layer; 0 in a dense model
    experts_per_token: int = 2
    expert_ffn: int = 0  # inner width of an expert; 0: ffn
    measured: MeasuredModel | None = None  # no column: layers of transformers, in place of formulas

    @property
    def has_plain_head(self) -> bool:
        """Whether the loss can be computed without whole logits."""
        return self.measured is None or self.measured.has_plain_head

    def __post_init__(self) -> None:
        if self.form not in ("gpt", "llama"):
            raise ValueError(f"form {self.form}: must be gpt or llama")
        if self.biases not in ("", "none", "qkv", "all"):
            raise ValueError(f"biases {self.biases}: must be none, qkv or all")
        _check_positive(self, may_be_zero=("head_dim", "positions", "experts", "expert_ffn"))
        if not self.head_dim and self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is not divisible by heads {self.heads}")
        if self.heads % self.groups:
            raise ValueError(f"heads {self.heads} is not divisible by groups {self.groups}")

    @property
    def is_tied(self) -> bool:
        """Whether the output head is the embedding."""
        return self.form == "gpt" if self.tied is None else self.tied

    @property
    def can_pack(self) -> bool:
        """Whether fine-tuning puts several records into a sequence."""
        return self.measured is None or self.measured.can_pack

    def flags(self, sequence: int | None = None) -> dict[str, Any]:
        """Return the flags of the network with sequences of ``sequence`` tokens, by field name in RunConfig."""
        is_gpt, tokens = self.form == "gpt", self.sequence if sequence is None else sequence
        has_biases = self.biases == "all" or is_gpt and not self.biases
        experts = {"num_moe_experts": self.experts, "moe_router_topk": self.experts_per_token}
        experts |= {"moe_ffn_hidden_size": self.expert_ffn or self.ffn, "moe_layer_freq": 1}
        experts["moe_grouped_gemm"] = not has_biases  # the grouped product has none
        return (experts if self.experts else {}) | {
            "num_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "ffn_hidden_size": self.ffn,
            "seq_length": tokens,
            "num_query_groups": None if self.groups == self.heads else self.groups,
            "kv_channels": None if self.head_dim in (0, self.hidden // self.heads) else self.head_dim,
            "max_position_embeddings": is_gpt and self.positions or tokens,
            "position_embedding_type": "learned_absolute" if is_gpt else "rope",
            "untie_embeddings_and_output_weights": not self.is_tied,
            "add_bias_linear": has_biases,
            "add_qkv_bias": has_biases or self.biases == "qkv",
            "qk_layernorm": bool(self.qk_norm),
            "normalization": "LayerNorm" if is_gpt else "RMSNorm",
            "swiglu": not is_gpt,
        }


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A row of the cluster table: a kind of GPU, its interconnect and its price."""

    name: str
    gpu: str
    memory_gib: float
    fp32_tflops: float
    bf16_tflops: float
    memory_gb_per_s: float
    link_gb_per_s: float  # GPU to GPU inside a node, one way
    network_gb_per_s: float  # node to node, one way
    gpus_per_node: int
    usd_per_gpu_hour: float  # 0: not known
    compute_share: float  # part of the peak that matrix products achieve
    memory_share: float  # part of the memory bandwidth that element-wise work and the optimizer achieve
    framework_gib: float  # driver context, workspaces, communication buffers, fragmentation
    host_gb_per_s: float  # at which an optimizer on the host processes model state, transfers included
    source: str
    fp8_tflops: float = 0.0  # 0: the GPU has no FP8, or it is not known
    copy_gb_per_s: float = 24.0  # from page-locked host memory to one GPU: PCIe 4.0 with 16 lanes
    fp16_tflops: float = 0.0  # peak of --fp16-accumulation; 0: that of bf16

    def __post_init__(self) -> None:
        may_be_zero = ("memory_gib", "usd_per_gpu_hour", "framework_gib", "fp8_tflops", "fp16_tflops")
        _check_positive(self, may_be_zero=may_be_zero)
        for name in ("compute_share", "memory_share"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} {getattr(self, name)} is a share, at most 1")

    def flops_per_s(self, precision: str, *, fp16_accumulation: bool = False) -> float:
        """Return the rate that matrix products achieve."""
        half = fp16_accumulation and self.fp16_tflops or self.bf16_tflops
        peaks = {"fp32": self.fp32_tflops, "fp8": FP8_SHARE * self.fp8_tflops}
        return 1e12 * peaks.get(precision, half) * self.compute_share

    @property
    def bytes_per_s(self) -> float:
        """The memory bandwidth that element-wise work achieves."""
        return 1e9 * self.memory_gb_per_s * self.memory_share


FP8_SHARE = 0.92
"""What FP8 products achieve of bf16's share of the peak: an assumption."""
Row = TypeVar("Row", bound=Any)
"""A dataclass of numbers, texts and switches."""


def _check_positive(row: Model | Cluster, *, may_be_zero: tuple[str, ...] = ()) -> None:
    for field in fields(row):
        value = getattr(row, field.name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if not (math.isfinite(value) and (value > 0 or value == 0 and field.name in may_be_zero)):
            raise ValueError(f"{field.name} {value}: must be more than 0")


def _switch(cell: str) -> bool:
    if cell not in ("yes", "no"):
        raise ValueError(f"{cell} must be yes or no")
    return cell == "yes"


_CONVERTERS: Mapping[str, Callable[[str], Any]] = {"str": str, "int": int, "float": float, "bool | None": _switch}


def choose(known: Mapping[str, Row], name: str, *, flag: str) -> Row:
    """Return the row of that name, or the only GPU whose name contains it. Case, blanks and punctuation are ignored."""
    wanted, plain = _plain(name), {_plain(key): row for key, row in known.items()}
    if wanted in plain:
        return plain[wanted]
    # "4090" means one card; a part of a model's name could mean several models
    cards = [row for row in known.values() if isinstance(row, Cluster) and wanted in _plain(row.name + row.gpu)]
    if len(cards) == 1 and len(wanted) > 2:
        return cards[0]
    is_cluster = any(isinstance(row, Cluster) for row in known.values())
    remedy = ". tools/check_machine.py --calibrate writes a row of this machine." if is_cluster else ""
    raise ValueError(f"{flag} {name}: must be one of {', '.join(known)}{remedy}")


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def read_table(path: str | Path, kind: type[Row]) -> dict[str, Row]:
    """Read the rows of a table of models or clusters by name. Raises ValueError with the file and line at fault."""
    rows = read_rows(path, kind)
    named = {row.name: row for row in rows}
    if not rows or len({name.lower() for name in named}) < len(rows):
        raise ValueError(f"{path}: " + ("contains a name twice" if rows else "has no row"))
    return named


def read_rows(path: str | Path, kind: type[Row]) -> list[Row]:
    """Read the rows of a table. Raises ValueError with the file and line at fault."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip() and line[0] != "#"]
    table = csv.reader(line for _, line in lines)
    columns = next(table, [])
    known = [field for field in fields(kind) if str(field.type) in _CONVERTERS]
    converters = {field.name: _CONVERTERS[str(field.type)] for field in known}
    optional = {field.name for field in known if field.default is not MISSING}
    if len(set(columns)) < len(columns) or not converters.keys() - optional <= set(columns) <= converters.keys():
        raise ValueError(f"{path}: its columns must be {', '.join(converters)}")
    rows = []
    for (number, _), cells in zip(lines[1:], table, strict=False):
        try:
            texts = {name: cell.strip() for name, cell in zip(columns, cells, strict=True)}
            present = {name: text for name, text in texts.items() if text or name not in optional}
            rows.append(kind(**{name: converters[name](text) for name, text in present.items()}))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    return rows
