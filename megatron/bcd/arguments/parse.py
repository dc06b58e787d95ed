"""The command line as argparse reads it: ``--help``, refusals by name, and the assembled RunConfig."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import importlib.resources
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from megatron.bcd.arguments import flag_groups, megatron_flags, unsupported_flags
from megatron.bcd.arguments.derive import derive_values, derived_core_fields
from megatron.bcd.arguments.flags import CORE_SECTIONS, OWN_SECTIONS, Flag, dashed, generate_flags
from megatron.bcd.arguments.rules import flag_name
from megatron.bcd.arguments.validate import check_run_config
from megatron.bcd.config import DdpSettings, OptimizerSettings, RunConfig
from megatron.bcd.config.presets import preset_values


class _Parser(argparse.ArgumentParser):
    """Raises ValueError instead of exiting: every rank parses, and only one reports."""

    def print_help(self, file: Any = None) -> None:
        if os.environ.get("RANK", "0") == "0":  # once, not once per rank
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        raise ValueError(re.sub(r"^argument (--[\w-]+)(?:/--[\w-]+)*", r"\1", message))


class _Switch(argparse.Action):
    """Sets True for a spelling in `const` and False for any other."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, const: tuple[str, ...], **common: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, const=const, **common)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, option in self.const)


def _default_text(flag: Flag) -> str:
    if flag.default is True:
        return f" (default: on; {flag.off_names[0]} switches it off)"
    if flag.type is bool or flag.default in (None, "") or "default" in flag.help.lower():
        return ""
    is_whole = isinstance(flag.default, float) and flag.default.is_integer()
    return f" (default: {int(flag.default) if is_whole else flag.default})"


def _help_text(flag: Flag) -> str:
    required = " (required)" if flag.field in megatron_flags.REQUIRED else ""
    choices = ": " + ", ".join(map(str, flag.choices)) if flag.choices and flag.metavar else ""
    return (flag.help + choices + _default_text(flag) + required).replace("%", "%%")


def _add_flag(group: Any, flag: Flag) -> None:
    common: dict[str, Any] = {"dest": flag.field, "default": argparse.SUPPRESS}
    if flag.type is not bool:
        metavar = flag.metavar if flag.metavar or flag.choices else {int: "N", float: "X"}.get(flag.type, "TEXT")
        group.add_argument(
            flag.names[0],
            **common,
            help=_help_text(flag),
            type=flag.type,
            choices=flag.choices,
            nargs=flag.nargs,
            metavar=metavar,
        )
        for alias in flag.names[1:]:
            group.add_argument(alias, **common, help=argparse.SUPPRESS, type=flag.type, nargs=flag.nargs)
        return
    for names, text in ((flag.shown, _help_text(flag)), (flag.hidden, argparse.SUPPRESS)):
        if names:
            group.add_argument(*names, **common, help=text, action=_Switch, const=flag.names)


def _add_compatible_flag(group: Any, flag: unsupported_flags.CompatibleFlag) -> None:
    common: dict[str, Any] = {"dest": flag.name, "default": argparse.SUPPRESS, "help": flag.why}
    if not flag.values:
        group.add_argument(flag.name, **common, action="store_const", const=True)
    elif flag.values is unsupported_flags.ANY_NUMBER:
        group.add_argument(flag.name, **common, type=int, metavar="N")
    else:
        group.add_argument(flag.name, **common, choices=flag.values)


def _formatter(prog: str) -> argparse.HelpFormatter:
    width = shutil.get_terminal_size().columns - 2
    return argparse.HelpFormatter(prog, max_help_position=min(38, width // 2), width=width)


def _parser(prog: str, flags: Iterable[Flag]) -> _Parser:
    parser = _Parser(
        prog=prog,
        allow_abbrev=False,
        add_help=False,
        formatter_class=_formatter,
        usage=f"torchrun --nproc-per-node PROCESSES {prog} [flags]",
        description="Train with block coordinate descent on Megatron Core. Flags are Megatron-LM's, "
        "and --bcd-*; a flag of Megatron-LM that is not listed here is refused.",
    )
    groups = {
        title: parser.add_argument_group(title, flag_groups.DESCRIPTIONS.get(title)) for title in flag_groups.GROUPS
    }
    for flag in sorted(flags, key=lambda flag: flag.field not in megatron_flags.REQUIRED):
        _add_flag(groups[flag.group], flag)
    for row in unsupported_flags.COMPATIBLE_FLAGS:
        _add_compatible_flag(groups[flag_groups.COMPATIBILITY], row)
    parser.add_argument_group("help").add_argument("-h", "--help", action="help", help="show this text and exit")
    return parser


@functools.cache
def stock_flags() -> frozenset[str]:
    """Every flag of stock Megatron-LM, supported or not."""
    core_fields = [field for core, _ in CORE_SECTIONS.values() for field in dataclasses.fields(core)]
    names = {dashed(field.name) for field in core_fields if not field.name.startswith("_")}
    for field in core_fields:
        names.update(field.metadata.get("argparse_meta", {}).get("arg_names", ()))
    file = importlib.resources.files("megatron.bcd.arguments") / "megatron_flag_names.txt"
    listed = file.read_text(encoding="utf-8")
    names.update(name for line in listed.splitlines() if (name := line.split("#")[0].strip()))
    return frozenset(names)


def _positive(name: str) -> str:
    return re.sub(r"^--(?:no|disable)-", "--", name)


def _check_names(argv: Sequence[str], known: frozenset[str]) -> None:
    """Refuse, by name, every flag that this parser does not have."""
    known_to_stock = stock_flags()
    # both spellings of a switch are stock's, unless the switch itself is supported: then the other one is a typo
    fields_of_stock = {_positive(name) for name in known_to_stock} - {_positive(name) for name in known}
    for word in argv:
        name = word.split("=", 1)[0]
        if not name.startswith("--") or name in known:
            continue
        if name in known_to_stock or _positive(name) in fields_of_stock:
            starts = {name, _positive(name)}
            reason = next(
                (why for start, why in unsupported_flags.REFUSAL_REASONS if any(n.startswith(start) for n in starts)),
                "--help lists those it does",
            )
            raise ValueError(f"{name} is a Megatron-LM flag that Megatron-BCD does not support ({reason})")
        near = difflib.get_close_matches(name, sorted(known), n=1)
        raise ValueError(f"unknown flag {name}; " + (f"did you mean {near[0]}?" if near else "--help lists all flags"))


def _parse(argv: Sequence[str], *, prog: str, flags: tuple[Flag, ...]) -> dict[str, Any]:
    """The values on the command line by field name; flags that are absent have no entry."""
    parser = _parser(prog, flags)
    if not {"-h", "--help"} & set(argv):
        _check_names(argv, frozenset(name for action in parser._actions for name in action.option_strings))
    namespace, rest = parser.parse_known_args(list(argv))
    if rest:
        raise ValueError(f"unexpected argument {rest[0]!r}: every value belongs to a flag that starts with --")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in vars(namespace).items()}


def _assemble(flags: tuple[Flag, ...], values: Mapping[str, Any]) -> RunConfig:
    parts: dict[str, dict[str, Any]] = {section: {} for section in (*CORE_SECTIONS, *OWN_SECTIONS)}
    for flag in flags:
        value = values[flag.field]
        for section in flag.sections:
            if section in OWN_SECTIONS:
                parts[section][flag.field] = value
            elif value is not None:
                parts[section][flag.field] = list(value) if isinstance(value, tuple) else value
    for section, field, value in derived_core_fields(values):
        parts[section][field] = value
    own: dict[str, Any] = {section: kind(**parts[section]) for section, (kind, _) in OWN_SECTIONS.items()}
    return RunConfig(
        transformer=parts["transformer"],
        optimizer=OptimizerSettings(**parts["optimizer"]),
        ddp=DdpSettings(**parts["ddp"]),
        **own,
    )


def parse_run_config(
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    defaults: Mapping[str, object] | None = None,
    world_size: int | None = None,
) -> RunConfig:
    """The checked RunConfig of a command line.

    What one flag of stock Megatron-LM implies for another (its ``validate_args``) is filled in; what a Megatron Core
    dataclass derives itself is left to it.

    Args:
        argv: the flags; None for those of the process.
        prog: the script's name, for ``--help``.
        defaults: a script's own defaults by field name, e.g. ``{"swiglu": True}``.
        world_size: number of ranks; None for torchrun's ``WORLD_SIZE``, 1 without it.

    Raises:
        ValueError: one line that names the flag, what is wrong and what would be right.
        SystemExit: code 0, after ``--help``.
    """
    if world_size is None:
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
    flags = generate_flags(defaults)
    given = _parse(sys.argv[1:] if argv is None else argv, prog=prog, flags=flags)
    preset = given.get("bcd_preset")
    of_preset = {} if preset is None else preset_values(preset, given)
    values = {flag.field: flag.default for flag in flags} | of_preset | given
    derive_values(values, given=given, world_size=world_size)
    config = _assemble(flags, values)
    try:
        check_run_config(config, given=given, world_size=world_size)
    except ValueError as error:
        named = [flag_name(field) for field in of_preset if re.search(rf"{flag_name(field)}(?![\w-])", str(error))]
        hint = f" ({', '.join(named)} from --bcd-preset {preset}; flags that are given win)" if named else ""
        raise ValueError(f"{error}{hint}") from None
    return config
