"""Compares runs by their metrics files: a short table, ratios, and one picture of the loss curves.

    python tools/report.py --run "BCD=out/bcd.jsonl" --run "full=out/full.jsonl" --figure out/loss.png

Bad input ends with one line on stderr and exit code 2; a picture or table is written aside and renamed.
"""

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from itertools import groupby, pairwise, takewhile
from pathlib import Path
from typing import Any, NoReturn

from _parser import STDOUT, add_json, leave_with
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

MIB = 2**20
NUM_RANKS_SHOWN = 4
FIGURE_FORMATS = ("png", "svg", "pdf")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One metrics file: its training lines, its validation lines and its last test line, in file order."""

    name: str
    file: str
    steps: tuple[dict[str, Any], ...]
    validations: tuple[dict[str, Any], ...]
    test: dict[str, Any] | None

    @property
    def num_blocks(self) -> int:
        return len({step["block"] for step in self.steps})

    @property
    def num_ranks(self) -> tuple[int, ...]:
        """Of the run, and of each of its resumptions on another number."""
        return tuple(number for number, _ in groupby(len(step["model_state_bytes"]) for step in self.steps))

    @property
    def last_ranks(self) -> tuple[dict[str, Any], ...]:
        """The steps on the last number of ranks: memory and time of different numbers are not comparable."""
        steps = takewhile(lambda step: len(step["model_state_bytes"]) == self.num_ranks[-1], reversed(self.steps))
        return tuple(reversed(list(steps)))


@dataclass(frozen=True, kw_only=True)
class Figures:
    """A row of the table; None where the run has no such lines."""

    run: str
    file: str
    iterations: int
    num_ranks: tuple[int, ...]
    """Of the run, and of each of its resumptions on another number; memory and time are of the last."""
    validation_iteration: int | None
    model_state_bytes: tuple[int, ...] | None
    """By rank, maximum over the phases."""
    mean_model_state_bytes: tuple[float, ...] | None
    """By rank, mean over the blocks."""
    step_time_ms: float | None
    tokens_per_second: float | None
    validation_loss: float | None
    validation_perplexity: float | None
    test_loss: float | None
    test_perplexity: float | None


def read_run(argument: str) -> Run:
    """The run of a --run NAME=FILE argument; raises ValueError naming the file (and line) that is wrong."""
    name, equals, path = argument.partition("=")
    if not (name.strip() and equals and path):
        raise ValueError(f'--run {argument}: give NAME=FILE, such as --run "BCD=out/bcd.jsonl"')
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        reason = f"{error.strerror}; give a file that a run wrote with --metrics-file"
        raise ValueError(f"--run {name}: {path}: {reason}") from None
    except UnicodeDecodeError:
        raise ValueError(f"--run {name}: {path}: not a text file; give one of --metrics-file") from None
    lines = [
        _parsed(line, where=f"--run {name}: {path}, line {number}")
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]
    steps = tuple(line for line in lines if "loss" in line)
    validations = tuple(line for line in lines if "validation_loss" in line)
    tests = [line for line in lines if "test_loss" in line]
    if not (steps or validations or tests):
        raise ValueError(f"--run {name}: {path}: empty, no line of training or evaluation in it")
    return Run(
        name=name.strip(),
        file=path,
        steps=steps,
        validations=validations,
        test=tests[-1] if tests else None,
    )


_NUMBERS = {
    "loss": ("iteration", "phase", "block", "step_time_ms", "tokens_per_second"),
    "validation_loss": ("iteration", "validation_perplexity"),
    "test_loss": ("iteration", "test_perplexity"),
}


def _parsed(line: str, *, where: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except ValueError:
        raise ValueError(f"{where}: not JSON; give a file that a run wrote with --metrics-file") from None
    if not isinstance(values, dict):
        raise ValueError(f"{where}: not a JSON object; give a file that a run wrote with --metrics-file")
    lost = values.pop("non_finite", {})
    if not (isinstance(lost, dict) and set(map(str, lost.values())) <= {"nan", "inf", "-inf"}):
        raise ValueError(f"{where}: non_finite does not name values that are nan, inf or -inf")
    # null is NaN or infinity: a diverged run can still be shown
    values.update({key: float(value) for key, value in lost.items()})
    for kind in _NUMBERS.keys() & values.keys():
        for key in (kind, *_NUMBERS[kind]):
            if not isinstance(values.get(key), int | float):
                raise ValueError(f"{where}: {key} is not a number")
    state = values.get("model_state_bytes")
    if "loss" in values and not (isinstance(state, list) and state and all(isinstance(n, int) for n in state)):
        raise ValueError(f"{where}: model_state_bytes is not a list of whole numbers")
    switches = values.get("switches", [])
    pairs = switches if isinstance(switches, list) else [switches]
    if not all(isinstance(pair, list) and [type(n) for n in pair] == [int, int] for pair in pairs):
        raise ValueError(f"{where}: switches is not a list of pairs of iteration and block")
    return values


def typical_step_ms(steps: Sequence[dict[str, Any]]) -> float:
    """Each block's median, averaged over all iterations: blocks differ, and one median would show one block.

    A line counts as often as it has iterations: the log interval may have changed at a resumption.
    """
    medians = {
        block: statistics.median(step["step_time_ms"] for step in steps if step["block"] == block)
        for block in {step["block"] for step in steps}
    }
    spans = [after["iteration"] - before["iteration"] for before, after in pairwise(steps)]
    return statistics.fmean((medians[step["block"]] for step in steps), weights=[*(spans[:1] or [1]), *spans])


def _over_ranks(steps: Sequence[dict[str, Any]], reduce: Callable[[Sequence[float]], float]) -> tuple[float, ...]:
    """Per rank: each block's largest model state, then `reduce` over the blocks."""
    by_block: dict[int, list[int]] = {}
    for step in steps:
        state = step["model_state_bytes"]
        largest = by_block.setdefault(step["block"], state)
        by_block[step["block"]] = [max(pair) for pair in zip(largest, state, strict=True)]
    return tuple(reduce(values) for values in zip(*by_block.values(), strict=True))


def figures_of(run: Run) -> Figures:
    steps = run.last_ranks
    validation = run.validations[-1] if run.validations else {}
    test = run.test or {}
    last = [lines[-1]["iteration"] for lines in (steps, run.validations) if lines] + [test.get("iteration", 0)]
    step_ms = typical_step_ms(steps) if steps else None
    tokens_per_step = [step["tokens_per_second"] * step["step_time_ms"] for step in steps]
    return Figures(
        run=run.name,
        file=run.file,
        iterations=max(last),
        num_ranks=run.num_ranks,
        validation_iteration=validation.get("iteration"),
        model_state_bytes=tuple(int(n) for n in _over_ranks(steps, max)) if steps else None,
        mean_model_state_bytes=_over_ranks(steps, statistics.fmean) if steps else None,
        step_time_ms=step_ms,
        tokens_per_second=statistics.median(tokens_per_step) / step_ms if step_ms else None,
        validation_loss=validation.get("validation_loss"),
        validation_perplexity=validation.get("validation_perplexity"),
        test_loss=test.get("test_loss"),
        test_perplexity=test.get("test_perplexity"),
    )


def ratios_of(first: Figures, second: Figures) -> dict[str, Any]:
    """first / second for every figure that both have; model state by rank where the ranks are as many."""
    ratios: dict[str, Any] = {}
    for key in ("step_time_ms", "tokens_per_second", "validation_loss", "validation_perplexity"):
        mine, other = getattr(first, key), getattr(second, key)
        ratios[key] = mine / other if mine is not None and other else None
    for key in ("model_state_bytes", "mean_model_state_bytes"):
        mine, other = getattr(first, key) or (), getattr(second, key) or ()
        same = bool(mine) and len(mine) == len(other) and all(other)
        ratios[key] = tuple(a / b for a, b in zip(mine, other, strict=True)) if same else None
    return ratios


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _rank_cell(values: Sequence[float] | None, form: str) -> str:
    if not values:
        return "-"
    if len(values) > NUM_RANKS_SHOWN:
        return f"at most {form.format(max(values))}"
    return ", ".join(form.format(value) for value in values)


COLUMNS = ("run", "model state per rank", "ms per step", "tokens/s", "validation loss", "perplexity")


def table_rows(figures: Sequence[Figures]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (
            row.run,
            _rank_cell([n / MIB for n in row.model_state_bytes or ()], "{:,.1f}")
            + (" MiB" if row.model_state_bytes else ""),
            _cell(row.step_time_ms, "{:,.1f}"),
            _cell(row.tokens_per_second, "{:,.0f}"),
            _cell(row.validation_loss, "{:.4f}"),
            _cell(row.validation_perplexity, "{:,.2f}"),
        )
        for row in figures
    ]
    if len(figures) == 2:
        ratios = ratios_of(*figures)
        names = ("step_time_ms", "tokens_per_second", "validation_loss", "validation_perplexity")
        cells = (_cell(ratios[name], "{:.3f}") for name in names)
        label = f"{figures[0].run} / {figures[1].run}"
        rows.append((label, _rank_cell(ratios["model_state_bytes"], "{:.3f}"), *cells))
    return rows


def notes(figures: Sequence[Figures]) -> list[str]:
    """What the reader of the table must know to compare its rows."""
    lines = [
        f"{row.run}: resumed on another number of ranks ({', then '.join(map(str, row.num_ranks))}); state and time are"
        " of the last"
        for row in figures
        if len(row.num_ranks) > 1
    ]
    ends = {row.run: row.validation_iteration for row in figures if row.validation_iteration is not None}
    if len(set(ends.values())) > 1:
        places = ", ".join(f"{name} {iteration:,}" for name, iteration in ends.items())
        lines.append(f"validation is of different iterations: {places}")
    return lines


def print_table(rows: Sequence[tuple[str, ...]], *, num_runs: int) -> None:
    """A ruled table on a terminal, aligned columns without wrapping or control characters elsewhere."""
    on_terminal = sys.stdout.isatty()
    table = Table(box=box.SIMPLE_HEAD if on_terminal else None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if index else "left", no_wrap=not on_terminal)
    for index, row in enumerate(rows):
        cells = [Text(cell) for cell in row]  # a run's name is no markup
        table.add_row(*cells, style="" if index < num_runs else "bold", end_section=index + 1 == num_runs)
    if on_terminal:
        Console(force_terminal=True, highlight=False).print(table)
        return
    text = StringIO()
    Console(file=text, force_terminal=False, width=1000, highlight=False).print(table)
    print("\n".join(line.rstrip() for line in text.getvalue().splitlines()))


def write_aside(path: str, write: Callable[[str], None], *, flag: str) -> None:
    """Calls `write` with a temporary name and renames; raises ValueError naming `flag`."""
    aside = f"{path}.{os.getpid()}.tmp"
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        write(aside)
        os.replace(aside, path)
    except OSError as error:
        reason = f"{error.strerror}; give a file that can be written"
        raise ValueError(f"{flag} {path}: {reason}") from None
    finally:
        if os.path.exists(aside):
            os.remove(aside)


def as_json(figures: Sequence[Figures]) -> str:
    """{"runs": [...], "ratios": {...} or null}; what is not finite becomes null."""

    def strict(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    runs = [{key: strict(value) for key, value in asdict(row).items()} for row in figures]
    ratios = {k: strict(v) for k, v in ratios_of(*figures).items()} if len(figures) == 2 else None
    return json.dumps({"runs": runs, "ratios": ratios}, indent=2, allow_nan=False)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="report.py",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="ms per step is each block's median, averaged over the iterations; model state is per rank the"
        " maximum over the phases; validation figures are the last ones.",
    )
    parser.add_argument(
        "--run", action="append", required=True, metavar="NAME=FILE", help="a run; may be given several times"
    )
    parser.add_argument("--figure", metavar="FILE", help="draw the loss curves (.png, .svg or .pdf)")
    add_json(parser)
    return parser.parse_args(argv)


def report(arguments: argparse.Namespace) -> None:
    """Reads everything before it writes anything; raises ValueError for a user's mistake."""
    if arguments.figure and os.path.splitext(arguments.figure)[1][1:].lower() not in FIGURE_FORMATS:
        endings = ", ".join(f".{name}" for name in FIGURE_FORMATS)
        raise ValueError(f"--figure {arguments.figure}: unknown kind of picture; end it in one of {endings}")
    runs = [read_run(argument) for argument in arguments.run]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise ValueError(f"--run: two runs have the same name ({', '.join(names)}); give each its own")
    figures = [figures_of(run) for run in runs]
    written = []
    if arguments.json not in (None, STDOUT):
        text = f"{as_json(figures)}\n"
        write_aside(arguments.json, lambda name: Path(name).write_text(text, encoding="utf-8"), flag="--json")
        written.append(arguments.json)
    if arguments.figure:
        from report_figure import draw  # matplotlib takes a second to import

        kind = os.path.splitext(arguments.figure)[1][1:].lower()
        write_aside(arguments.figure, lambda name: draw(name, kind, runs, figures), flag="--figure")
        written.append(arguments.figure)
    if arguments.json == STDOUT:
        print(as_json(figures))
        return
    print_table(table_rows(figures), num_runs=len(runs))
    for line in notes(figures):
        print(line)
    for path in written:
        print(f"wrote {path}")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    try:
        report(arguments)
    except ValueError as error:
        print(f"report.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    leave_with(main)
