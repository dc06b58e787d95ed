"""Parse the command line into a RunConfig: ``--help``, ``--dry-run``, and all problems at once."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

from megatron.bcd.arguments import files, run_plan, stock
from megatron.bcd.arguments.derive import derive_values
from megatron.bcd.arguments.flags import OWN_SECTIONS, Flag, flag_name, generate_flags
from megatron.bcd.arguments.validate import find_problems
from megatron.bcd.config import RunConfig
from megatron.bcd.config.presets import preset_values


class ConfigurationError(ValueError):
    """The problems of a command line. The text is one line, also for several problems."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        listed = " ".join(f"({number}) {text}" for number, text in enumerate(self.problems, start=1))
        super().__init__(f"{len(problems)} problems: {listed}" if len(problems) > 1 else problems[0])


class _Parser(argparse.ArgumentParser):
    """A parser that raises ValueError instead of exiting: every rank parses, and only one reports."""

    def print_help(self, file: Any = None) -> None:
        if os.environ.get("RANK", "0") == "0":
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        raise ValueError(re.sub(r"^argument (--[\w-]+)(?:/--[\w-]+)*", r"\1", message))

    @property
    def actions(self) -> dict[str, argparse.Action]:
        return {name: action for action in self._actions for name in action.option_strings}


def _parser(prog: str, flags: tuple[Flag, ...]) -> _Parser:
    parser = _Parser(
        prog=prog,
        allow_abbrev=False,
        add_help=False,
        usage=f"torchrun --nproc-per-node PROCESSES {prog} [flags]",
        description="Train with block coordinate descent on Megatron Core. Flags are Megatron-LM's, "
        "and --bcd-*; what other flags of Megatron-LM do is in docs/flags.md.",
    )
    groups = {title: parser.add_argument_group(title) for title in dict.fromkeys(flag.group for flag in flags)}
    for flag in sorted(flags, key=lambda flag: flag.field not in stock.REQUIRED):
        _add_flag(groups[flag.group], flag)
    last = parser.add_argument_group("help")
    common: dict[str, Any] = {"default": argparse.SUPPRESS}
    last.add_argument("-h", "--help", action="help", help="show this text and exit")
    text = "check the flags, print what would run, and exit"
    last.add_argument("--dry-run", action="store_true", help=text, **common)
    last.add_argument("--dry-run-world-size", type=int, metavar="N", help="as on N ranks, without torchrun", **common)
    return parser


def _add_flag(group: Any, flag: Flag) -> None:
    text = flag.help
    if flag.choices and flag.metavar:
        text += ": " + ", ".join(map(str, flag.choices))
    if flag.default is True:
        text += f" (default: on; {flag.shown} switches it off)"
    elif flag.type is not bool and flag.default not in (None, "") and "default" not in text.lower():
        text += f" (default: {flag.default})"
    if flag.field in stock.REQUIRED:
        text += " (required)"
    text = text.replace("%", "%%")
    for name in (*flag.names, *flag.off_names):
        shown: dict[str, Any] = {"help": text if name == flag.shown else argparse.SUPPRESS}
        shown |= {"dest": flag.field, "default": argparse.SUPPRESS}
        if flag.type is bool:
            group.add_argument(name, action="store_false" if name in flag.off_names else "store_true", **shown)
            continue
        kind = {int: "N", float: "X"}.get(flag.type, flag.field.rpartition("_")[2].upper())
        metavar = flag.metavar if flag.metavar or flag.choices else kind
        group.add_argument(name, type=flag.type, choices=flag.choices, nargs=flag.nargs, metavar=metavar, **shown)


def _unknown(name: str, known: Iterable[str]) -> str:
    """Return why a flag is not accepted."""
    if name in stock.REMOVED:
        return stock.REMOVED[name]
    reason = stock.why_unsupported(name)
    if reason is not None:
        return f"{name} is a Megatron-LM flag that Megatron-BCD does not support ({reason})"
    nearest = difflib.get_close_matches(name, sorted({*known, *stock.stock_flags()}), n=1, cutoff=0.8)
    return f"unknown flag {name}; " + (f"did you mean {nearest[0]}?" if nearest else "--help lists all flags")


def _parse(argv: Sequence[str], parser: _Parser) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values on the command line by field name, and the problems by flag.

    Absent flags have no entry. Flags of stock without effect are among the values by their own names.
    """
    values: dict[str, Any] = {}
    problems: dict[str, str] = {}
    if {"-h", "--help"} & set(argv):
        parser.parse_known_args(["--help"])
    by_flag: list[list[str]] = []
    for word in argv:
        if word.startswith("--") or not by_flag:
            by_flag.append([])
        by_flag[-1].append(word)
    for words in by_flag:
        name, *joined = words[0].split("=", 1)
        if name.startswith("--") and name not in parser.actions:
            given = [*joined, *words[1:]]
            if stock.has_no_effect(name, given):
                values[name] = given[0] if len(given) == 1 else given or True
            else:
                problems[name] = _unknown(name, parser.actions)
            continue
        try:
            if joined == ["--"]:  # argparse would set an empty list
                raise ValueError(f"{name}: '--' is not a value. Give one.")
            namespace, rest = parser.parse_known_args(words)
            if rest:
                raise ValueError(f"unexpected argument {rest[0]!r} after {name}: every value belongs to a flag")
        except ValueError as error:
            problems[name] = str(error)
        else:
            values |= vars(namespace)
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}, problems


_ALSO_IN = {
    "transformer": ("bias_activation_fusion", "disable_parameter_transpose_cache"),
    "optimizer": ("fp16", "bf16", "muon_use_nesterov", "overlap_param_gather"),
    "ddp": ("check_for_nan_in_grad",),
}
"""Fields of Megatron Core's classes without a flag, or whose flag sets a field of another class."""


def _assemble(flags: Iterable[Flag], values: Mapping[str, Any]) -> RunConfig:
    core = {
        section: {field: values[field] for field in (*(flag.field for flag in flags if flag.section == section), *more)}
        for section, more in _ALSO_IN.items()
    }
    transformer = {field: value for field, value in core["transformer"].items() if value is not None}
    sections: dict[str, Any] = {
        name: kind(**{field.name: values[field.name] for field in dataclasses.fields(kind)})
        for name, (kind, _) in OWN_SECTIONS.items()
    }
    return RunConfig(
        transformer={name: list(value) if isinstance(value, tuple) else value for name, value in transformer.items()},
        optimizer=SimpleNamespace(**core["optimizer"]),
        ddp=SimpleNamespace(**core["ddp"]),
        **sections,
    )


def _check(
    flags: tuple[Flag, ...],
    given: Mapping[str, Any],
    problems: Mapping[str, str],
    *,
    world_size: int,
    starts: bool,
) -> tuple[RunConfig, tuple[str, ...]]:
    """Check the values of a command line, and return what `read_command_line` does.

    Args:
        given: values by field name.
        problems: what is wrong with single flags, by flag.
        starts: the run is going to start, so its files are read and must be writable.

    Raises:
        ConfigurationError: with `problems` and every rule that the values break.
    """
    asked = given
    preset = given.get("bcd_preset")
    model_values, model_notes = dict[str, Any](), list[str]()
    if given.get("load_hf") is not None:
        try:
            fixed, model_values, model_notes = files.model_values(given, flags)
        except ValueError as error:  # without the network nothing else can be checked
            raise ConfigurationError([*problems.values(), str(error)]) from error
        given = {**fixed, **given}
    preset_defaults = {} if preset is None else preset_values(preset, asked, {**model_values, **given})
    values = {flag.field: flag.default for flag in flags} | model_values | preset_defaults
    values |= {field: value for field, value in given.items() if field in values}
    all_problems = list(problems.values())
    try:
        if values["use_checkpoint_args"]:
            files.take_checkpoint_flags(values, flags, given=given)
    except ValueError as error:
        all_problems.append(str(error))
    notes = derive_values(values, flags, asked=asked, given=given, world_size=world_size)
    config = _assemble(flags, values)
    for text in find_problems(
        config, values, given=given, world_size=world_size, starts=starts, is_partial=bool(all_problems)
    ):
        # a rule about a flag that is wrong anyway adds nothing
        if not any(_names(text, name) for name in problems):
            preset_flags = [flag_name(field) for field in preset_defaults if _names(text, flag_name(field))]
            hint = f" ({', '.join(preset_flags)} from --bcd-preset {preset}; flags that are given win)"
            all_problems.append(text + hint if preset_flags else text)
    if all_problems:
        raise ConfigurationError(all_problems)
    try:
        config = run_plan.with_balanced_cut(config, reads_files=starts)
    except ValueError as error:  # the tokenizer can't be read
        raise ConfigurationError([str(error)]) from error
    return config, (*model_notes, *notes)


def _names(text: str, flag: str) -> bool:
    return re.search(rf"{re.escape(flag)}(?![\w-])", text) is not None


def read_command_line(
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    defaults: Mapping[str, object] | None = None,
    world_size: int | None = None,
) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the checked RunConfig of a command line, and lines about its flags for the run summary.

    Fills in values that flags imply, like ``validate_args`` of stock Megatron-LM. Values that a dataclass of Megatron
    Core derives itself stay open.

    Args:
        argv: the flags; None means those of the process.
        prog: the name of the script, for ``--help``.
        defaults: the defaults of the script by field name, e.g. ``{"swiglu": True}``.
        world_size: number of ranks; None means torchrun's ``WORLD_SIZE``, or 1 without it.

    Raises:
        ValueError: one line that names the flags, what is wrong and what would be right.
        SystemExit: code 0, after ``--help``; 0 or 2 after ``--dry-run``, which prints every problem on its own line.
    """
    if world_size is None:
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
    flags = generate_flags(defaults)
    parser = _parser(prog, flags)
    given, problems = _parse(sys.argv[1:] if argv is None else argv, parser)
    is_dry = not {"dry_run", "dry_run_world_size"}.isdisjoint(given)
    world_size = given.get("dry_run_world_size", world_size)
    if world_size < 1:
        problems["--dry-run-world-size"] = f"--dry-run-world-size {world_size}: must be at least 1"
    try:
        config, notes = _check(flags, given, problems, world_size=world_size, starts=not is_dry)
    except ConfigurationError as error:
        if not is_dry:
            raise
        run_plan.exit_with([], [f"{prog}: error: {text}" for text in error.problems])
    if is_dry:
        lines = run_plan.describe_run(config, world_size=world_size, notes=notes)
        about_data, problem = run_plan.describe_data(config)
        run_plan.exit_with([*lines, *about_data], [f"{prog}: error: {' '.join(problem.split())}"] if problem else [])
    return config, notes


def parse_run_config(
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    defaults: Mapping[str, object] | None = None,
    world_size: int | None = None,
) -> RunConfig:
    """Return the RunConfig of `read_command_line`."""
    return read_command_line(argv, prog=prog, defaults=defaults, world_size=world_size)[0]
