"""Random command lines of both scripts and all tools give a plan, or one line and exit code 2, never a traceback."""

from __future__ import annotations

import functools
import importlib
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.command_line import BASE, read_flags

from megatron.bcd.arguments import FAMILY_DEFAULTS, read_command_line
from megatron.bcd.arguments.flags import Flag, generate_flags
from megatron.bcd.arguments.stock import stock_flags

NUMBERS = ("0", "1", "2", "3", "4", "6", "8", "16", "64", "1000", "0.5", "1e-3", "1000")
HOSTILE = ("-1", "-0", "nan", "inf", "-inf", "1e400", "9" * 20, "9" * 400, "-" + "9" * 30, "1e3", "0x10", "1_000", "٣",
           "", " ", "é", "\u202e", "\ud800", "a\nb", "%s", "%(prog)s", "{}", "--", "-", "=", "None", "True", "[]", "'",
           "1,2", "95,5,0", "x" * 5000, "../..", "/proc/absent", "(t*9)*9", "t*99999999", "E|t|L")  # fmt: skip
ONLY_COMPUTE = ("plan", "recipe", "show_schedule")
"""Tools that are run as a whole; of the others only the command line is parsed."""
SCRIPTS = ("gpt", "llama")


def _values(draw: random.Random, flag: Flag) -> list[str]:
    """Draw values, mostly of the flag's type."""
    if flag.type is bool:
        return [] if draw.random() < 0.97 else [draw.choice(HOSTILE)]
    number = flag.nargs if isinstance(flag.nargs, int) else draw.randint(0, 4) if flag.nargs else 1
    number += draw.random() < 0.01
    number -= draw.random() < 0.01
    pool: Sequence[Any] = flag.choices or NUMBERS
    return [str(draw.choice(pool if draw.random() < 0.8 else HOSTILE)) for _ in range(number)]


def script_words(draw: random.Random, flags: Sequence[Flag], stock: Sequence[str]) -> list[str]:
    """Draw a small valid command line with up to twelve changes."""
    words = [word for pair in BASE.items() if draw.random() > 0.005 for word in pair]
    for _ in range(draw.choice((1, 1, 2, 3, 6, 12))):
        kind = draw.random()
        if kind < 0.9:
            flag = draw.choice(flags)
            name, values = draw.choice((*flag.names, *flag.off_names)), _values(draw, flag)
        elif kind < 0.97:
            name, values = draw.choice(stock), [draw.choice(NUMBERS)] * draw.randint(0, 1)
        else:
            name, values = draw.choice(HOSTILE), [draw.choice(HOSTILE)]
        joins = len(values) == 1 and draw.random() < 0.1
        words += [f"{name}={values[0]}"] if joins else [name, *values]
    return words


def tool_words(draw: random.Random, names: Sequence[str]) -> list[str]:
    words: list[str] = []
    for _ in range(draw.randint(0, 8)):
        words.append(draw.choice(names) if draw.random() < 0.95 else draw.choice(HOSTILE))
        words += [draw.choice(NUMBERS if draw.random() < 0.6 else HOSTILE) for _ in range(draw.choice((0, 1, 1, 1, 2)))]
    return words


def code_of(call: Callable[[], object]) -> int:
    """Return the exit code; a ValueError counts as one line and code 2, because the callers report it so."""
    try:
        code = call()
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else 1
    except ValueError as error:
        assert str(error)
        return 2
    return code if isinstance(code, int) else 0


@pytest.fixture
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repo_root: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    return repo_root


def seeds(first: int, longer: int, number: int) -> pytest.MarkDecorator:
    """Return seed 1 with few command lines; with --long more seeds with more of them."""
    more = [pytest.param(seed, longer, marks=pytest.mark.long) for seed in range(2, 2 + number)]
    return pytest.mark.parametrize(("seed", "number"), [(1, first), *more])


@seeds(60, 750, 4)
def test_scripts(in_empty_folder: Path, seed: int, number: int) -> None:
    """A random command line of a script ends with code 0 or 2, never with a traceback."""
    draw = random.Random(seed)
    by_form = {form: generate_flags(FAMILY_DEFAULTS[form]) for form in SCRIPTS}
    stock = sorted(stock_flags())
    passed = 0
    for _ in range(number):
        form = draw.choice(SCRIPTS)
        words = script_words(draw, by_form[form], stock)
        words += draw.choice((["--dry-run"], ["--dry-run-world-size", draw.choice(NUMBERS)], []))
        ranks = draw.choice((1, 2, 4, 8, 256))
        defaults = FAMILY_DEFAULTS[form]
        read = functools.partial(read_command_line, words, prog="test", defaults=defaults, world_size=ranks)
        try:
            code = code_of(read)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} of {words} on {ranks} ranks") from error
        assert code in (0, 2), words
        passed += code == 0
    assert passed > number // 50  # else it tests refusals only


@seeds(150, 1000, 2)
def test_tools(in_empty_folder: Path, seed: int, number: int) -> None:
    """A random command line of a tool ends with code 0, 1 or 2, never with a traceback."""
    draw = random.Random(seed)
    tools = []
    for name in (*ONLY_COMPUTE, "benchmark", "compare_runs", "preprocess_data", "report"):
        source = (in_empty_folder / "tools" / f"{name}.py").read_text("utf-8")
        names = sorted(set(re.findall(r'"(--[a-z][\w-]+)"', source)))
        whole = importlib.import_module(name).main
        tools.append((name, names, whole if name in ONLY_COMPUTE else functools.partial(read_flags, name)))
    for _ in range(number):
        name, names, read = draw.choice(tools)
        words = tool_words(draw, names)
        if name == "recipe":
            words.insert(0, draw.choice(("whole", "tiny=1", "here=2", "here=", *HOSTILE)))
        try:
            code = code_of(lambda read=read, words=words: read(words))
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} of tools/{name}.py {words}") from error
        assert code in (0, 1, 2), (name, words)
