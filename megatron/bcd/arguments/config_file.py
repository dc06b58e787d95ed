"""--config and --print-config: flags in a YAML file.

A key is a flag's name without its leading dashes (``num-layers``, or ``num_layers``). The value of a switch is true or
false, that of a flag with several values a list.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from megatron.bcd.arguments.flags import Flag
from megatron.bcd.arguments.refusals import refusal
from megatron.bcd.arguments.rules import flattened
from megatron.bcd.arguments.stock import has_no_effect
from megatron.bcd.arguments.switch import Switch
from megatron.bcd.config import RunConfig
from megatron.bcd.config.yaml_file import read_yaml

COMMAND_LINE_ONLY = ("config", "dry_run", "dry_run_world_size", "print_config", "help")
"""Fields of flags that a file can't hold."""


def read_config_file(path: str, parser: argparse.ArgumentParser) -> tuple[dict[str, Any], dict[str, str]]:
    """The values in the file by field name, and the problems by flag; each begins with the file and the key.

    Raises:
        ValueError: it can't be read, or is no mapping.
    """
    content = read_yaml(path, instead="--config needs a YAML file, such as --print-config prints")
    if content is None:  # an empty file, or comments alone
        content = {}
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must be a mapping of flags, such as num-layers: 12")
    actions = {name: action for action in parser._actions for name in action.option_strings}
    values: dict[str, Any] = {}
    problems: dict[str, str] = {}
    set_by: dict[str, str] = {}
    for key, value in content.items():
        name = "--" + str(key).replace("_", "-")
        if f"--{key}" in actions:  # a name of stock with an underscore
            name = f"--{key}"
        try:
            found = _value(name, value, actions, parser)
            for field in found:
                if field in set_by:
                    raise ValueError(f"{set_by[field]} sets the same: leave one of them out")
                set_by[field] = str(key)
            values |= found
        except ValueError as error:
            problems[name] = f"{path}: {key}: {error}"
    return values, problems


def _value(
    name: str, value: Any, actions: Mapping[str, argparse.Action], parser: argparse.ArgumentParser
) -> dict[str, Any]:
    """By field name; empty for a flag of Megatron-LM without effect that is off. Raises ValueError."""
    action = actions.get(name)
    if action is None and has_no_effect(name, [str(value)]):
        return {} if value is False else {name: value}
    if action is None:
        raise ValueError(refusal(name, frozenset(actions)))
    if action.dest in COMMAND_LINE_ONLY:
        raise ValueError("belongs on the command line: leave it out")
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"{value!r}: must be true or false")
        if isinstance(action, Switch):
            return {action.dest: action.switched(name, value)}
        return {action.dest: action.const} if value else {}
    items = value if isinstance(value, list) else [value]
    for item in items:
        if item is None:
            raise ValueError("has no value: give one, or leave the key out")
        if isinstance(item, bool) or not isinstance(item, str | int | float):
            raise ValueError(f"{item!r}: must be a {'number' if action.type in (int, float) else 'text'}")
    if action.nargs is None:
        if isinstance(value, list):
            raise ValueError(f"{value}: takes one value, not a list")
        words = [f"{name}={value}"]  # one word: a value may begin with a dash
    else:
        words = [name, *map(str, items)]
        if any(word.startswith("--") for word in words[1:]):
            raise ValueError(f"{value}: a value can't begin with a dash")
    namespace, rest = parser.parse_known_args(words)
    if rest:
        raise ValueError(f"{rest[0]!r} is one value too many")
    return {field: tuple(found) if isinstance(found, list) else found for field, found in vars(namespace).items()}


def config_lines(
    config: RunConfig, *, flags: Iterable[Flag], given: Mapping[str, Any], world_size: int, prog: str
) -> list[str]:
    """A file for --config: the flags that were `given`, and as comments all others with their value in this run."""
    kept = {flag.names[0][2:]: given[flag.field] for flag in flags if flag.field in given}
    kept |= {name[2:]: value for name, value in given.items() if name.startswith("--")}
    run = vars(flattened(config))
    rest = {flag.names[0][2:]: run[flag.field] for flag in flags if flag.field in run and flag.field not in given}
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    return [
        f"# Flags for {prog} --config FILE; flags on the command line win.",
        *_yaml_lines(kept),
        f"# Not given: defaults, and what follows from the flags above on {ranks}.",
        *(f"# {line}" for line in _yaml_lines({name: value for name, value in rest.items() if value is not None})),
    ]


def _yaml_lines(values: Mapping[str, Any]) -> list[str]:
    if not values:
        return []
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=10**6).splitlines()
