"""The command line as argparse reads it: ``--help``, refusals by name, and the assembled RunConfig."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from megatron.bcd.arguments import (
    config_file,
    dry_run,
    flag_groups,
    megatron_flags,
    model_folder,
    precision_aware,
    without_effect,
)
from megatron.bcd.arguments.checkpoint_flags import positions_of_checkpoint, take_checkpoint_flags
from megatron.bcd.arguments.data_files import read_data_files
from megatron.bcd.arguments.derive import derive_values, derived_core_fields, has_no_evaluation
from megatron.bcd.arguments.flags import CORE_SECTIONS, OWN_SECTIONS, Flag, generate_flags
from megatron.bcd.arguments.pipeline_cut import with_balanced_cut
from megatron.bcd.arguments.refusals import RefusedFlags, refusal
from megatron.bcd.arguments.rules import flag_name
from megatron.bcd.arguments.stock import REPLACED, has_no_effect
from megatron.bcd.arguments.switch import Switch
from megatron.bcd.arguments.validate import find_problems
from megatron.bcd.config import DdpSettings, OptimizerSettings, RunConfig
from megatron.bcd.config.presets import preset_values


class _Parser(argparse.ArgumentParser):
    """Raises ValueError instead of exiting: every rank parses, and only one reports."""

    def print_help(self, file: Any = None) -> None:
        if os.environ.get("RANK", "0") == "0":  # once, not once per rank
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        raise ValueError(re.sub(r"^argument (--[\w-]+)(?:/--[\w-]+)*", r"\1", message))


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
            group.add_argument(*names, **common, help=text, action=Switch, const=flag.names)


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
        "and --bcd-*; what other flags of Megatron-LM do is in docs/flags.md.",
    )
    groups = {title: parser.add_argument_group(title) for title in flag_groups.GROUPS}
    for flag in sorted(flags, key=lambda flag: flag.field not in megatron_flags.REQUIRED):
        _add_flag(groups[flag.group], flag)
    last = parser.add_argument_group("help and files of flags")
    last.add_argument("-h", "--help", action="help", help="show this text and exit")
    last.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="read flags from a YAML file (num-layers: 12); those on the command line win",
    )
    common: dict[str, Any] = {"action": "store_true", "default": argparse.SUPPRESS}
    last.add_argument("--dry-run", help="check the flags, print what would run, and exit", **common)
    last.add_argument(
        "--dry-run-world-size", type=int, default=argparse.SUPPRESS, metavar="N", help="as on N ranks, without torchrun"
    )
    last.add_argument("--print-config", help="check the flags, print a file for --config, and exit", **common)
    return parser


def _words_by_flag(argv: Sequence[str]) -> list[list[str]]:
    """Each flag with its values; words before the first flag come first."""
    groups: list[list[str]] = []
    for word in argv:
        if word.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(word)
    return groups


def _parse(argv: Sequence[str], parser: _Parser) -> tuple[dict[str, Any], dict[str, str]]:
    """The values on the command line by field name (flags that are absent have no entry), and the problems by flag.

    Stock's flags that set nothing here are among the values by their own names.
    """
    known = frozenset(name for action in parser._actions for name in action.option_strings)
    values: dict[str, Any] = {}
    problems: dict[str, str] = {}
    if {"-h", "--help"} & set(argv):
        parser.parse_known_args(["--help"])
    for words in _words_by_flag(argv):
        name = words[0].split("=", 1)[0]
        if name.startswith("--") and name not in known:
            given = [*words[0].split("=", 1)[1:], *words[1:]]
            if has_no_effect(name, given):
                values[name] = given[0] if len(given) == 1 else given or True
            else:
                problems[name] = refusal(name, known)
            continue
        if words[0].endswith("=--"):  # argparse would set an empty list
            problems[name] = f"{name}: '--' is not a value"
            continue
        try:
            namespace, rest = parser.parse_known_args(words)
        except ValueError as error:
            problems[name] = str(error)
            continue
        values |= vars(namespace)
        if rest:
            problems[name] = (
                f"unexpected argument {rest[0]!r} after {name}: every value belongs to a flag that starts with --"
            )
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}, problems


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandLine:
    """What a command line asks for."""

    config: RunConfig
    notes: tuple[str, ...] = ()
    """Lines of the run summary about flags that were accepted."""


def _notes(
    given: Mapping[str, Any], config: RunConfig, *, taken_back: Mapping[str, str], chunks: int | None
) -> tuple[str, ...]:
    """Lines of the run summary about flags that were accepted.

    `taken_back`: flags that have no effect, by field; `chunks`: those of a pipeline stage that were asked for.
    """
    ignored = [f"{name} ({REPLACED[name]})" if name in REPLACED else name for name in given if name.startswith("--")]
    ignored += taken_back.values()
    has_precision_aware = config.optimizer.use_precision_aware_optimizer or config.training.main_grads_dtype != "fp32"
    if given.get("use_precision_aware_optimizer") and not has_precision_aware:
        ignored.append(precision_aware.SWITCH)
    if given.get("sequence_parallel") and not config.transformer["sequence_parallel"]:
        ignored.append("--sequence-parallel (one tensor parallel rank)")
    is_gathered = config.ddp.overlap_param_gather or "overlap_param_gather" in taken_back
    if given.get("overlap_param_gather") and not is_gathered:
        ignored.append("--overlap-param-gather (chunks are gathered after the step)")
    if config.report.log_timers_to_tensorboard and not config.report.timing_log_level:
        ignored.append("--log-timers-to-tensorboard (--timing-log-level 0)")
    kind = config.transformer.get("cp_comm_type")
    if kind is not None and config.context_size == 1:
        ignored.append(f"--cp-comm-type {kind} (one context parallel rank)")
    if config.data.mock_data and config.data.split:
        ignored.append(f"--split {config.data.split} (mock data are not split)")
    notes = [f"without effect here: {', '.join(ignored)}"] if ignored else []
    if has_no_evaluation(vars(config.data)) and not config.data.mock_data:
        notes.append(f"--split {config.data.split} leaves no data to evaluate on: there is no evaluation")
    rounded = config.bcd.num_virtual_stages_per_pipeline_rank
    if chunks is not None and chunks != rounded:
        notes.append(f"{rounded} chunks on every pipeline stage in place of {chunks}: a multiple of the blocks")
    return tuple(notes)


def _checked(
    flags: tuple[Flag, ...],
    given: Mapping[str, Any],
    problems: Mapping[str, str],
    *,
    world_size: int,
    reads_files: bool,
) -> CommandLine:
    """What these values ask for. Raises RefusedFlags with `problems` and every rule that the values break.

    `reads_files`: whether there are files to read, and to write to.
    """
    asked = given
    preset = given.get("bcd_preset")
    of_preset = {} if preset is None else preset_values(preset, given)
    of_model: dict[str, Any] = {}
    if given.get("load_hf") is not None:
        try:
            fixed, of_model = model_folder.values_of_model(given, flags)
        except ValueError as error:  # without the network nothing else can be checked
            raise RefusedFlags([*problems.values(), str(error)]) from error
        given = {**fixed, **given}
    values = {flag.field: flag.default for flag in flags} | of_model | of_preset | dict(given)
    found = list(problems.values())
    readers = [lambda: read_data_files(values)] if reads_files else []
    if values["use_checkpoint_args"]:
        readers.append(lambda: take_checkpoint_flags(values, flags, given=given))
    for read in readers:
        try:
            read()
        except ValueError as error:
            found.append(str(error))
    if reads_files and values["max_position_embeddings"] is None:
        values["max_position_embeddings"] = positions_of_checkpoint(values)
    taken_back = without_effect.take_back(values, {flag.field: flag for flag in flags}, given=asked)
    given = {field: value for field, value in given.items() if field not in taken_back}
    chunks = derive_values(values, given=given, world_size=world_size)
    config = _assemble(flags, values)
    for text in find_problems(config, given=given, world_size=world_size, writes=reads_files, is_partial=bool(found)):
        named = [flag_name(field) for field in of_preset if re.search(rf"{flag_name(field)}(?![\w-])", text)]
        hint = f" ({', '.join(named)} from --bcd-preset {preset}; flags that are given win)" if named else ""
        # what follows from a flag that is refused anyway says nothing new
        if not any(re.search(rf"{re.escape(name)}(?![\w-])", text) for name in problems):
            found.append(text + hint)
    if found:
        raise RefusedFlags(found)
    try:
        config = with_balanced_cut(config, reads_files=reads_files)
    except ValueError as error:  # the tokenizer's files
        raise RefusedFlags([str(error)]) from error
    return CommandLine(config=config, notes=_notes(asked, config, taken_back=taken_back, chunks=chunks))


def read_command_line(
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    defaults: Mapping[str, object] | None = None,
    world_size: int | None = None,
) -> CommandLine:
    """The checked RunConfig of a command line, and what the banner says of its flags.

    What one flag of stock Megatron-LM implies for another (its ``validate_args``) is filled in; what a Megatron Core
    dataclass derives itself is left to it.

    Args:
        argv: the flags; None for those of the process.
        prog: the script's name, for ``--help``.
        defaults: a script's own defaults by field name, e.g. ``{"swiglu": True}``.
        world_size: number of ranks; None for torchrun's ``WORLD_SIZE``, 1 without it.

    Raises:
        ValueError: one line that names the flags, what is wrong and what would be right.
        SystemExit: code 0, after ``--help``; 0 or 2 after ``--dry-run``, which prints every problem on its own line.
    """
    if world_size is None:
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
    words = sys.argv[1:] if argv is None else argv
    has_file = any(word.split("=")[0] == "--config" for word in words)
    flags = generate_flags(defaults, has_file=has_file)
    parser = _parser(prog, flags)
    given, problems = _parse(words, parser)
    if "config" in given:
        from_file, problems_of_file = config_file.read_config_file(given["config"], parser)
        given = from_file | given
        problems = problems_of_file | problems
    is_dry = not {"dry_run", "dry_run_world_size", "print_config"}.isdisjoint(given)
    world_size = given.get("dry_run_world_size", world_size)
    if world_size < 1:
        problems["--dry-run-world-size"] = f"--dry-run-world-size {world_size}: must be at least 1"
    try:
        command = _checked(flags, given, problems, world_size=world_size, reads_files=not is_dry)
    except RefusedFlags as error:
        if not is_dry:
            raise
        dry_run.leave(2, [f"{prog}: error: {text}" for text in error.problems])
    config, notes = command.config, command.notes
    if is_dry:
        if "print_config" in given:
            lines = config_file.config_lines(config, flags=flags, given=given, world_size=world_size, prog=prog)
            dry_run.leave(0, lines)
        dry_run.leave(0, dry_run.plan_lines(config, world_size=world_size, notes=notes))
    return command


def parse_run_config(
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    defaults: Mapping[str, object] | None = None,
    world_size: int | None = None,
) -> RunConfig:
    """The RunConfig of `read_command_line`."""
    return read_command_line(argv, prog=prog, defaults=defaults, world_size=world_size).config
