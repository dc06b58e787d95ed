"""Flags generated from dataclasses: those of ``config``, and the Megatron Core fields in ``megatron_flags.py``."""

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
from megatron.bcd.arguments import flag_groups, megatron_flags
from megatron.bcd.arguments.core_flag import FIELD, CoreFlag

with warnings.catch_warnings():
    # each import warns that Apex and Transformer Engine are absent; the run's banner shows what is used instead
    warnings.simplefilter("ignore")
    from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
    from megatron.core.optimizer.optimizer_config import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

OWN_SECTIONS: dict[str, tuple[Any, str]] = {
    "bcd": (config.BcdConfig, flag_groups.BCD),
    "model": (config.ModelConfig, flag_groups.NETWORK),
    "training": (config.TrainingConfig, flag_groups.TRAINING),
    "schedule": (config.ScheduleConfig, flag_groups.LEARNING_RATE),
    "data": (config.DataConfig, flag_groups.DATA),
    "tokenizer": (config.TokenizerConfig, flag_groups.TOKENIZER),
    "checkpoint": (config.CheckpointConfig, flag_groups.CHECKPOINTS),
    "report": (config.ReportConfig, flag_groups.REPORT),
}
CORE_SECTIONS: dict[str, tuple[Any, tuple[CoreFlag, ...]]] = {
    "transformer": (TransformerConfig, megatron_flags.TRANSFORMER_FLAGS),
    "optimizer": (OptimizerConfig, megatron_flags.OPTIMIZER_FLAGS),
    "ddp": (DistributedDataParallelConfig, megatron_flags.DDP_FLAGS),
}


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One command-line flag and the fields of RunConfig it sets."""

    field: str
    sections: tuple[str, ...]
    """Sections of RunConfig with the field; none for a flag that only other values are derived from."""
    group: str
    help: str
    default: Any
    type: Any
    """``bool`` for a switch, else a function from text to value."""
    names: tuple[str, ...]
    """Spellings that set the value, or switch it on."""
    off_names: tuple[str, ...] = ()
    """Spellings that switch it off."""
    choices: tuple[Any, ...] | None = None
    nargs: str | int | None = None
    metavar: str | tuple[str, ...] | None = None

    @property
    def shown(self) -> tuple[str, ...]:
        """The spellings that ``--help`` shows: the first, and the first that switches off where the default is on."""
        return (self.names[0], self.off_names[0]) if self.default is True else self.names[:1]

    @property
    def hidden(self) -> tuple[str, ...]:
        """The other spellings."""
        return tuple(name for name in (*self.names, *self.off_names) if name not in self.shown)


def dashed(field: str) -> str:
    """A field's name as a flag."""
    return "--" + field.replace("_", "-")


def _switch_names(field: str, stock_name: str | None, *, can_be_on: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Spellings that switch a field on, and off.

    Stock Megatron-LM has ``--a-b`` for a default of False, and ``--no-a-b`` and ``--disable-a-b`` for True. The
    opposite is accepted too where it can change anything: a script may have other defaults, and a file of --config
    switch on what the command line switches off.
    """
    if stock_name is None:
        on, off = dashed(field), (f"--no-{dashed(field)[2:]}", f"--disable-{dashed(field)[2:]}")
        return (on,), off if can_be_on else ()
    if stock_name.startswith("--no-"):
        return ("--" + stock_name.removeprefix("--no-"),), (stock_name,)
    if "-no-" in stock_name:
        return (stock_name.replace("-no-", "-"),), (stock_name,)
    if stock_name.startswith("--disable-"):
        return (dashed(field),), (stock_name,)
    return (stock_name,), ("--no-" + stock_name[2:],) if can_be_on else ()


def _plain_type(annotation: Any) -> tuple[Any, tuple[Any, ...] | None, str | None]:
    """(function from text to value, choices, nargs) of a dataclass field's annotation."""
    if typing.get_origin(annotation) in (typing.Union, UnionType):
        annotation = next(option for option in typing.get_args(annotation) if option is not type(None))
    if typing.get_origin(annotation) is typing.Literal:
        choices = typing.get_args(annotation)
        return type(choices[0]), choices, None
    if typing.get_origin(annotation) in (list, tuple):
        return typing.get_args(annotation)[0], None, "+"
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return str, tuple(member.name for member in annotation), None
    return annotation, None, None


@functools.cache
def docstrings(core: Any) -> Mapping[str, str]:
    """The docstring under each field of a dataclass, inherited fields included, each on one line."""
    texts: dict[str, str] = {}
    kinds: list[Any] = [kind for kind in core.__mro__ if dataclasses.is_dataclass(kind)]
    for kind in reversed(kinds):
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
        assert isinstance(tree, ast.ClassDef)
        for above, below in zip(tree.body, tree.body[1:], strict=False):
            if (
                isinstance(above, ast.AnnAssign)
                and isinstance(above.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                texts[above.target.id] = " ".join(str(below.value.value).split())
    return texts


def _help_from(docstring: str) -> str:
    """The first sentence, without a leading "If true" and the like."""
    sentence = re.split(r"\.(?:\s|$)", docstring)[0]
    sentence = re.sub(r"^(?:If (?:set to )?true|When set to true|Whether to),? ?", "", sentence, flags=re.IGNORECASE)
    first_word = sentence.split(" ", 1)[0]
    return sentence if not first_word.istitle() else sentence[:1].lower() + sentence[1:]


def _core_flag(
    section: str, core: Any, row: CoreFlag, hints: Mapping[str, Any], default: Any, *, has_file: bool
) -> Flag:
    field = next(field for field in dataclasses.fields(core) if field.name == row.field)
    if default is FIELD:
        default = field.default if row.default is FIELD else row.default
    if isinstance(default, enum.Enum):
        default = default.name
    kind, choices, nargs = _plain_type(hints[row.field])
    if kind is bool:
        names, off_names = _switch_names(row.field, row.name, can_be_on=has_file or default is True)
    else:
        names, off_names = (row.name or dashed(row.field),), ()
    return Flag(
        field=row.field,
        sections=(section, *row.also),
        group=row.group,
        default=default,
        type=row.type or kind,
        help=row.help or _help_from(docstrings(core)[row.field]),
        names=names,
        off_names=off_names,
        choices=row.choices or choices,
        nargs=nargs,
        metavar=flag_groups.METAVARS.get(row.field),
    )


def _own_flag(section: str, field: dataclasses.Field[Any], group: str, default: Any, *, has_file: bool) -> Flag:
    default = field.default if default is FIELD else default
    is_switch = isinstance(field.default, bool)
    if is_switch:
        names, off_names = _switch_names(field.name, None, can_be_on=has_file or default is True)
    else:
        names, off_names = (dashed(field.name),), ()
    names += megatron_flags.ALIASES.get(field.name, ())
    return Flag(
        field=field.name,
        sections=(section,),
        group=flag_groups.FIELD_GROUPS.get(field.name, group),
        help=field.metadata["help"],
        default=default,
        type=bool if is_switch else field.metadata["type"] or str,
        names=names,
        off_names=off_names,
        choices=field.metadata["choices"],
        nargs=field.metadata["nargs"],
        metavar=field.metadata["metavar"] or flag_groups.METAVARS.get(field.name),
    )


def generate_flags(defaults: Mapping[str, object] | None = None, *, has_file: bool = False) -> tuple[Flag, ...]:
    """Every supported flag; ``defaults`` are a script's own by field name, e.g. ``{"swiglu": True}``. With
    ``has_file``, a file of flags is read too, and every switch has a spelling that switches it off.

    Raises:
        ValueError: a default is for a field that no flag sets.
    """
    defaults = defaults or {}
    flags: list[Flag] = []
    for section, (core, rows) in CORE_SECTIONS.items():
        hints = typing.get_type_hints(core)
        flags += [
            _core_flag(section, core, row, hints, defaults.get(row.field, FIELD), has_file=has_file) for row in rows
        ]
    for row in megatron_flags.DERIVED_FLAGS:
        default = bool(defaults.get(row.field, row.default))
        names, off_names = _switch_names(row.field, None, can_be_on=has_file or default)
        flags.append(
            Flag(
                field=row.field,
                sections=(),
                group=row.group,
                help=row.help,
                default=default,
                type=bool,
                names=names,
                off_names=off_names,
            )
        )
    for section, (own, group) in OWN_SECTIONS.items():
        for field in dataclasses.fields(own):
            own_default = defaults.get(field.name, FIELD)
            flags.append(_own_flag(section, field, group, own_default, has_file=has_file))
    unknown = set(defaults) - {flag.field for flag in flags}
    if unknown:
        raise ValueError(f"defaults for {', '.join(sorted(unknown))}: no flag sets such a field")
    return tuple(flags)
