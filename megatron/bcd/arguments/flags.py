"""Generate flags from dataclasses: those of ``config``, and the fields of Megatron Core's that ``stock.py`` lists."""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import inspect
import re
import textwrap
import typing
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any

from megatron.bcd import config
from megatron.bcd.arguments import stock
from megatron.bcd.config.sections import AT_LEAST_0, AT_LEAST_1, REPORT, Range, dashed

with warnings.catch_warnings():
    # each import warns that Apex and Transformer Engine are absent; the run summary shows what is used instead
    warnings.simplefilter("ignore")
    from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
    from megatron.core.optimizer.optimizer_config import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

DATA, TOKENIZER, CHECKPOINTS = "data", "tokenizer", "checkpoints"
BCD = "block coordinate descent"
REPLICA_GROUPS = "replica groups"
OWN_SECTIONS: dict[str, tuple[Any, str]] = {
    "bcd": (config.BcdConfig, BCD),
    "model": (config.ModelConfig, stock.NETWORK),
    "training": (config.TrainingConfig, stock.TRAINING),
    "schedule": (config.ScheduleConfig, stock.LEARNING_RATE),
    "data": (config.DataConfig, DATA),
    "tokenizer": (config.TokenizerConfig, TOKENIZER),
    "checkpoint": (config.CheckpointConfig, CHECKPOINTS),
    "groups": (config.GroupsConfig, REPLICA_GROUPS),
    "report": (config.ReportConfig, REPORT),
}
CORE_SECTIONS: dict[str, tuple[Any, Mapping[str, str]]] = {
    "transformer": (TransformerConfig, stock.TRANSFORMER_FIELDS),
    "optimizer": (OptimizerConfig, stock.OPTIMIZER_FIELDS),
    "ddp": (DistributedDataParallelConfig, stock.DDP_FIELDS),
}


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One command-line flag and the field that it sets."""

    field: str
    section: str
    """The section of RunConfig with the field; empty if only other values are derived from it."""
    group: str
    help: str
    default: Any
    type: Any
    """``bool`` for a switch, otherwise a function from text to value."""
    names: tuple[str, ...]
    """Spellings that set the value, or switch it on."""
    off_names: tuple[str, ...] = ()
    """Spellings that switch it off."""
    choices: tuple[Any, ...] | None = None
    nargs: str | int | None = None
    metavar: str | tuple[str, ...] | None = None
    range: Range | None = None
    """The numbers that the flag accepts."""

    @property
    def shown(self) -> str:
        """The spelling that changes the default, which ``--help`` shows."""
        return self.off_names[0] if self.default is True else self.names[0]


def _switch_names(field: str, stock_name: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the spellings that switch a field on and off. Both are needed, because defaults differ between scripts."""
    if stock_name is None:
        name = dashed(field)[2:]
        return (f"--{name}",), (f"--no-{name}", f"--disable-{name}")
    if "-no-" in stock_name:
        return (stock_name.replace("-no-", "-", 1),), (stock_name,)
    if stock_name.startswith("--disable-") and field != stock_name[2:].replace("-", "_"):
        return (dashed(field),), (stock_name,)
    return (stock_name,), ("--no-" + stock_name[2:],)


def _parse_annotation(annotation: Any) -> tuple[Any, tuple[Any, ...] | None, str | None]:
    """Return the function from text to value, choices and nargs that a field's annotation asks for."""
    if typing.get_origin(annotation) in (typing.Union, UnionType):
        annotation = next(option for option in typing.get_args(annotation) if option is not type(None))
    if typing.get_origin(annotation) is typing.Literal:
        choices = typing.get_args(annotation)
        return type(choices[0]), choices, None
    if typing.get_origin(annotation) in (list, tuple):
        return typing.get_args(annotation)[0], None, "+" if typing.get_origin(annotation) is list else "*"
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return str, tuple(member.name for member in annotation), None
    return annotation, None, None


def _core_help(core: Any) -> Mapping[str, str]:
    """Return the first sentence of the docstring under each field of a dataclass, including inherited fields."""
    texts: dict[str, str] = {}
    kinds: list[Any] = [kind for kind in reversed(core.__mro__) if dataclasses.is_dataclass(kind)]
    for kind in kinds:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
        assert isinstance(tree, ast.ClassDef)
        for above, below in zip(tree.body, tree.body[1:], strict=False):
            if (
                isinstance(above, ast.AnnAssign)
                and isinstance(above.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                text = " ".join(str(below.value.value).split())
                texts[above.target.id] = re.split(r"\.(?:\s|$)", text)[0]
    return texts


def _flag(section: str, field: dataclasses.Field[Any], annotation: Any, group: str, help: str = "") -> Flag:
    """Build a flag: the annotation comes first, then Megatron Core's metadata or ours, then stock's differences."""
    core = field.metadata.get("argparse_meta", {})
    ours = {name: value for name, value in field.metadata.items() if name != "argparse_meta" and value is not None}
    differs = ours | stock.DIFFERENCES.get(field.name, {})
    kind, choices, nargs = _parse_annotation(annotation)
    kind = differs.get("type", kind)
    stock_name = differs.get("name", next(iter(core.get("arg_names", ())), None))
    names: tuple[str, ...] = (stock_name or dashed(field.name),)
    off_names: tuple[str, ...] = ()
    if kind is bool:
        names, off_names = _switch_names(field.name, stock_name)
    # Megatron Core's whole numbers may be negative
    whole = (AT_LEAST_1 if field.default != 0 else AT_LEAST_0) if kind is int and section in OWN_SECTIONS else None
    default = differs.get("default", core.get("default", field.default))
    return Flag(
        field=field.name,
        section=section,
        group=differs.get("group", group),
        help=differs.get("help", help),
        default=default.name if isinstance(default, enum.Enum) else default,
        type=kind,
        names=(*names, *stock.ALIASES.get(field.name, ())),
        off_names=off_names,
        choices=differs.get("choices", choices),
        nargs=differs.get("nargs", nargs),
        metavar=differs.get("metavar"),
        range=differs.get("range", stock.CORE_RANGES.get(field.name, whole)),
    )


@functools.cache
def _flags() -> tuple[Flag, ...]:
    flags = []
    for section, (kind, group) in {**OWN_SECTIONS, "": (stock.StockSwitches, stock.NETWORK)}.items():
        hints = typing.get_type_hints(kind)
        flags += [_flag(section, field, hints[field.name], group) for field in dataclasses.fields(kind)]
    for section, (core, groups) in CORE_SECTIONS.items():
        hints, helps = typing.get_type_hints(core), _core_help(core)
        by_name = {field.name: field for field in dataclasses.fields(core)}
        for group, names in groups.items():
            flags += [_flag(section, by_name[name], hints[name], group, helps[name]) for name in names.split()]
    return tuple(flags)


def generate_flags(defaults: Mapping[str, object] | None = None) -> tuple[Flag, ...]:
    """Return every supported flag. ``defaults`` are those of a script by field name, e.g. ``{"swiglu": True}``.

    Raises:
        ValueError: a default is for a field that no flag sets.
    """
    defaults = defaults or {}
    unknown = set(defaults) - {flag.field for flag in _flags()}
    if unknown:
        raise ValueError(f"defaults for {', '.join(sorted(unknown))}: no flag sets such a field")
    return tuple(dataclasses.replace(flag, default=defaults.get(flag.field, flag.default)) for flag in _flags())


@functools.cache
def flags_by_field() -> Mapping[str, Flag]:
    """Return the flags with stock's defaults."""
    return {flag.field: flag for flag in _flags()}


def flag_name(field: str) -> str:
    """Return the flag that sets a field, or switches it on."""
    return flags_by_field()[field].names[0]


@functools.cache
def _by_name() -> Mapping[str, tuple[Flag, bool]]:
    on = {name: (flag, True) for flag in _flags() for name in flag.names}
    return on | {name: (flag, False) for flag in _flags() for name in flag.off_names}


def holds(values: Mapping[str, Any], condition: str) -> bool:
    """Return whether `values`, by field name, meet a condition.

    Conditions are ``--bf16``, ``--no-bf16``, ``--optimizer=adam``, ``--eval-iters!=0``. ``--save`` alone, of a flag
    with a value, means any value but the default.
    """
    name, _, wanted = condition.replace("!=", "=").partition("=")
    flag, is_on = _by_name()[name]
    value = values[flag.field]
    if wanted:
        return (value == flag.type(wanted)) != ("!=" in condition)
    return value is is_on if flag.type is bool else value not in (None, flag.default, ())
