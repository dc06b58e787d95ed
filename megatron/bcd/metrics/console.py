"""The console: a live progress line on a terminal, plain single lines in a log file."""

import sys
import time

from rich import box
from rich.console import Console, Group
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from megatron.bcd.metrics.lines import bytes_by_rank, format_left, highest_by_rank, listed
from megatron.bcd.metrics.schema import RunSummary, StepMetrics

_BLOCK_STYLES = ("cyan", "magenta", "green", "yellow", "blue", "red")
_REFRESH_SECONDS = 0.1


def banner_facts(summary: RunSummary) -> list[tuple[str, str]]:
    """Label and value of everything in the banner except the table of blocks."""
    stages = listed(summary.parameters_per_stage, lambda n: f"{n:,}", "stages")
    blocks = f"{len(summary.blocks)} block{'' if len(summary.blocks) == 1 else 's'}"
    return [
        ("model", summary.model),
        ("parameters", f"{summary.total_parameters:,} (by pipeline stage: {stages})"),
        ("parallel", summary.parallel),
        ("training", summary.training),
        ("layout", f"{summary.layout}, {blocks}, {summary.phases}"),
        *(("note", note) for note in summary.notes),
        *(("warning", warning) for warning in summary.warnings),
    ]


def banner_blocks(summary: RunSummary) -> list[tuple[str, str, str, str]]:
    """Rows of (name, contents, share of the parameters, model state by rank); full training last."""
    rows = [
        (f"block {block.index}", block.contents, f"{block.share:.1%}", bytes_by_rank(block.model_state_bytes))
        for block in summary.blocks
    ]
    highest, full = highest_by_rank(summary.blocks), summary.full_model_state_bytes
    ratios = [mine / whole for mine, whole in zip(highest, full, strict=True) if whole]
    ratio = f" ({listed(ratios, '{:.1%}'.format, 'ranks')} of full)" if ratios else ""
    rows.append(("BCD", "maximum over the blocks", "", bytes_by_rank(highest) + ratio))
    rows.append(("full", "full-parameter training", "100.0%", bytes_by_rank(full)))
    return rows


def _banner_panel(summary: RunSummary) -> Panel:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    for label, value in banner_facts(summary):
        facts.add_row(label, Text(value))
    blocks = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for header, justify in (("", "left"), ("holds", "left"), ("parameters", "right")):
        blocks.add_column(header, justify=justify)  # type: ignore[arg-type]
    blocks.add_column("model state by rank (estimated)")
    rows = banner_blocks(summary)
    for index, row in enumerate(rows):
        is_block = index < len(summary.blocks)
        style = _BLOCK_STYLES[index % len(_BLOCK_STYLES)] if is_block else "bold"
        end_section = index + 1 == len(summary.blocks)
        blocks.add_row(Text(row[0], style=style), *map(Text, row[1:]), end_section=end_section)
    title = "[bold]Block coordinate descent on Megatron Core[/bold]"
    return Panel(Group(facts, blocks), title=title, title_align="left", border_style="blue", expand=False)


def _banner_lines(summary: RunSummary) -> list[str]:
    lines = ["Block coordinate descent on Megatron Core"]
    lines += [f"{label:<11} {value}" for label, value in banner_facts(summary)]
    for name, contents, share, state in banner_blocks(summary):
        of_parameters = f" | {share} of the parameters" if share else ""
        lines.append(f"{name:<11} {contents}{of_parameters} | model state {state} by rank (estimated)")
    return lines


class Screen:
    """Prints lines; on a terminal also a progress line below them."""

    def __init__(self, console: Console | None, *, train_iters: int, start_iteration: int) -> None:
        # By default rich obeys FORCE_COLOR, which would write control characters into a log file.
        self._console = console or Console(force_terminal=sys.stdout.isatty(), highlight=False)
        self._live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._train_iters = train_iters
        self._start = self._last = start_iteration
        self._busy_ms = 0.0
        self._left = ""
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._refreshed = 0.0

    def banner(self, summary: RunSummary) -> None:
        if self._live:
            self._console.print(_banner_panel(summary))
            return
        for line in _banner_lines(summary):
            self.line(line)

    def line(self, text: str, *, style: str = "", block: int | None = None) -> None:
        """Print `text` as one line, neither wrapped nor cut."""
        rich_text = Text(" ".join(text.splitlines()), style=style)
        if block is not None:
            rich_text.highlight_words([" | "], "dim")
            rich_text.highlight_regex(r"\bloss [\d.]\S+", "bold")
            rich_text.highlight_words([f"block {block}"], _BLOCK_STYLES[block % len(_BLOCK_STYLES)])
        self._console.print(rich_text, soft_wrap=True, highlight=False)

    def time_left(self, record: StepMetrics) -> str:
        """By the mean step so far: blocks differ in speed."""
        self._busy_ms += record.step_time_ms * max(0, record.iteration - self._last)
        self._last = max(self._last, record.iteration)
        done = self._last - self._start
        self._left = format_left(self._busy_ms / done * max(0, self._train_iters - self._last) if done else 0.0)
        return self._left

    def advance(self, iteration: int, record: StepMetrics | None = None) -> None:
        """Move the progress line to `iteration`; a record updates its text."""
        if not self._live:
            return
        if self._progress is None:
            self._progress = self._started_progress()
        self._progress.update(self._task, completed=iteration)
        if record is not None:
            self._progress.update(self._task, doing=self._doing(record))
        now = time.monotonic()
        if record is not None or now - self._refreshed >= _REFRESH_SECONDS:
            self._progress.refresh()
            self._refreshed = now

    def _started_progress(self) -> Progress:
        # No refresh thread: it would hold locks while data workers are forked.
        progress = Progress(
            TextColumn("iteration {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:.0f}%"),
            TextColumn("{task.fields[doing]}"),
            console=self._console,
            auto_refresh=False,
            transient=True,
            expand=True,
        )
        self._task = progress.add_task("", total=self._train_iters, completed=self._start, doing="")
        progress.start()
        return progress

    def _doing(self, record: StepMetrics) -> str:
        style = _BLOCK_STYLES[record.block % len(_BLOCK_STYLES)]
        return (
            f"[{style}]block {record.block}[/{style}]  loss [bold]{record.loss:.4f}[/bold]"
            f"  {record.tokens_per_second:,.0f} tokens/s  [dim]{self._left}[/dim]"
        )

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
