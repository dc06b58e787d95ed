"""The configuration that a version of the code makes of each command line (tools/compare_runs.py starts it twice).

    python tools/_resolved_configurations.py LINES.json RESULT.json     # PYTHONPATH names the version

LINES.json: {name: [script, number of ranks, [flag, ...]]}. RESULT.json: {name: {flag: value as --print-config has it}},
or {name: the error}. It uses what every version has: `read_command_line` and --print-config.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

Resolved = dict[str, object] | str
"""Values by flag, or one error."""
REPLACED = ("eval-generate", "eval-generate-tokens")
"""Flags whose place something else has taken: accepted by both versions, and a value by one only."""


def resolve(script: str, world_size: int, words: list[str]) -> Resolved:
    """What `script` makes of the flags, by the version that is imported."""
    from megatron.bcd.arguments import FAMILY_DEFAULTS, read_command_line

    defaults = FAMILY_DEFAULTS["llama"] if "llama" in script else None
    printed, errors = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            read_command_line([*words, "--print-config"], prog=script, world_size=world_size, defaults=defaults)
    except ValueError as error:
        return str(error)
    except SystemExit as end:
        if end.code:
            return errors.getvalue() or printed.getvalue()
    # comment lines hold what was not given
    lines = [line.removeprefix("# ") for line in printed.getvalue().splitlines()]
    return dict(yaml.safe_load("\n".join(line for line in lines if not line.startswith(("Flags for", "Not given")))))


def first_difference(before: Mapping[str, Resolved], after: Mapping[str, Resolved]) -> str | None:
    """Of the lines that the version before accepts; a flag that only one version has counts unless it is off there, or
    something else took its place."""
    for name, values in before.items():
        now = after[name]
        if isinstance(values, str):
            continue
        if isinstance(now, str):
            return f"{name} is refused: {now.strip()}"
        for flag in values | now:
            if flag not in REPLACED and (values.get(flag) or None) != (now.get(flag) or None):
                return f"{name}: {flag} was {values.get(flag)}, is {now.get(flag)}"
    return None


if __name__ == "__main__":
    lines = json.loads(Path(sys.argv[1]).read_text())
    found = {name: resolve(*line) for name, line in lines.items()}
    Path(sys.argv[2]).write_text(json.dumps(found, default=str))
