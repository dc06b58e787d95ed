"""Output of tools/study.py: results as JSON, the table as Markdown, pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from _machine import cpu_model
from _study_arithmetic import step_arithmetic
from _study_data import ROOT, Text
from _study_plan import Lookup, Point, budget_runs, final_runs, grid, points, tuner
from _study_rows import Row, frontier, rows_of
from _study_runs import Commands, Result, Run, read_result, write_json
from _study_times import Times

PUBLISHED, PICTURES = ROOT / "studies", ROOT / "docs" / "images"


class Report:
    """Writes what is known so far; nothing is run."""

    def __init__(
        self, commands: Commands, lookup: Lookup, times: Times, *, folder: Path, texts: Mapping[str, Text]
    ) -> None:
        self._times = times
        self._commands, self._study, self._lookup = commands, commands.study, lookup
        self._folder = folder
        self._texts = {name: text.sha256 for name, text in texts.items()}
        self._arithmetic: dict[Point, float | None] = {}

    def rows(self) -> list[Row]:
        """The table's."""
        return rows_of(self._study, self._lookup, self._step_arithmetic, self._times)

    def _step_arithmetic(self, point: Point) -> float | None:
        if point not in self._arithmetic:
            self._arithmetic[point] = step_arithmetic(self._commands, point)
        return self._arithmetic[point]

    @property
    def has_failures(self) -> bool:
        """Whether a method has no figures because its runs failed."""
        return any(row.failure for row in self.rows())

    def write(self) -> str:
        """Results and table of everything that has finished, in the study's folder; the table."""
        rows = self.rows()
        results = {
            "study": self._study.name,
            "title": self._study.title,
            "machine": {"cpu": self._cpus(), "jobs": self._study.jobs, "threads": self._study.threads},
            "texts": self._texts,
            "step_times": self._times,
            "rows": [_plain(row) for row in rows],
            "runs": [result.plain() for result in (*self._used(), *self._others())],
        }  # fmt: skip
        write_json(self._folder / "results.json", results)
        text = self._markdown(rows)
        (self._folder / "table.md").write_text(text, encoding="utf-8")
        return text

    def _used(self) -> list[Result]:
        """Every finished run that the table rests on."""
        runs: dict[Run, None] = {}
        for point in points(self._study):
            tried = grid(self._study, tuner(self._study, point), self._lookup)
            runs |= dict.fromkeys(tuner(self._study, point).run(lr, self._study.seeds[0]) for lr in tried.values)
            best = tried.best_so_far
            if best is not None:
                runs |= dict.fromkeys(final_runs(self._study, point, best))
                runs |= dict.fromkeys(budget_runs(self._study, point, best))
        return [result for result in map(self._lookup, runs) if result is not None]

    def _others(self) -> list[Result]:
        """Published runs of this study file that its table does not rest on, such as rates of a wider grid."""
        used = {_identity(result) for result in self._used()}
        by_name = {(point.model.name, point.data.name, point.method.name): point for point in points(self._study)}
        others = []
        for result in published_runs(self._study.name):
            point = by_name.get((result.model, result.data, result.method))
            if point is not None and _identity(result) not in used:
                run = point.run(result.lr, result.seed, result.budget)
                others += [result] if result.command == self._commands.shown(run) else []
        return others

    def _markdown(self, rows: Sequence[Row]) -> str:
        study = self._study
        lines = [f"# {study.title or study.name}", "", f"`python tools/study.py studies/{study.name}.yaml`", ""]
        for (model, data), group in groupby(rows, key=lambda row: (row.model, row.data)):
            mine = list(group)
            baseline = next((row for row in mine if row.method == study.baseline), None)
            count = f", {baseline.num_parameters:,} parameters" if baseline and baseline.num_parameters else ""
            lines += [f"## {self._case(model, data)}{count}", "", *table(mine, metric=study.metric), ""]
        commits = ", ".join(sorted({result.commit for result in self._used() if result.commit})) or "unknown"
        where = f"{self._cpus()}, {study.threads} thread(s) a run"
        lines += [self._about(), "", f"Commit {commits}; {where}."]
        if self._times:
            rounds, commit = self._times["rounds"], self._times["commit"]
            lines.append(f"Step times: `--step-times {rounds}`, one run at a time, the median; commit {commit}.")
        return "\n".join(lines) + "\n"

    def _cpus(self) -> str:
        """Of the machines that the runs were on."""
        return ", ".join(sorted({result.cpu for result in self._used() if result.cpu})) or cpu_model()

    def _case(self, model: str, data: str) -> str:
        """A text, with the model where there are several."""
        return f"{model}, {data}" if len(self._study.models) > 1 else data

    def _about(self) -> str:
        study = self._study
        seeds = f"{len(study.seeds)} seeds" if len(study.seeds) > 1 else "one seed"
        rates = ", ".join(f"{rate:g}" for rate in study.learning_rates)
        others = " (some methods: others)" if any(method.learning_rates for method in study.methods) else ""
        return (
            f"{study.steps:,} steps, {seeds}; learning rates {rates} and up to {study.extend} factor(s) of 2 beyond"
            f"{others}, tuned on the validation split at seed {study.seeds[0]}. **Bold**: on the Pareto frontier of"
            f" test {_metric_name(study.metric)} and state. *edge*: the best rate is the grid's first or last;"
            " *n of m rates*: best of those that have run; *n of m seeds* likewise."
            " Columns: [docs/learning.md](../docs/learning.md#columns)."
        )

    def draw(self) -> list[Path]:
        """Both pictures of every model and text, in the study's folder; their paths."""
        from _study_figures import draw_cost, draw_state  # matplotlib takes a second to import

        paths = []
        rows = [row for row in self.rows() if row.test is not None]
        cases = [(case, list(group)) for case, group in groupby(rows, key=lambda row: (row.model, row.data))]
        for (model, data), mine in cases:
            case = self._case(model, data)
            suffix = f"_{case.replace(', ', '_')}" if len(cases) > 1 else ""
            for kind, draw in (("state", draw_state), ("cost", draw_cost)):
                path = self._folder / f"{self._study.name}{suffix}_{kind}.png"
                title = f"{self._study.title or self._study.name}" + (f": {case}" if suffix else "")
                draw(path, mine, title=title, metric=self._study.metric, baseline=self._study.baseline)
                paths.append(path)
        return paths

    def publish(self, pictures: Sequence[Path]) -> list[Path]:
        """Copy results, table and pictures to where the project keeps them; their paths."""
        copies = [(self._folder / "results.json", PUBLISHED / f"{self._study.name}.json"),
                  (self._folder / "table.md", PUBLISHED / f"{self._study.name}.md"),
                  *((path, PICTURES / path.name) for path in pictures)]  # fmt: skip
        for source, target in copies:
            target.write_bytes(source.read_bytes())
        return [target for _, target in copies]


def published_times(name: str) -> Times:
    """Step times of the published study; empty where it has none."""
    return _published(name).get("step_times", {})


def published_runs(name: str) -> list[Result]:
    """All runs of the published study; none where it is not published."""
    published = _published(name)
    cpu = published.get("machine", {}).get("cpu", "")  # older versions have it once for all
    return [read_result({**values, "cpu": values.get("cpu") or cpu}) for values in published.get("runs", ())]


def published_lookup(name: str) -> Lookup:
    """Results of the published study. Raises ValueError if it is not published."""
    runs = published_runs(name)
    if not runs:
        raise ValueError(f"{PUBLISHED / name}.json: no results; run the study with --publish first")
    results = {_identity(result): result for result in runs}
    return lambda run: results.get((run.model.name, run.data.name, run.method.name, run.lr, run.seed, run.budget))


def _published(name: str) -> dict[str, Any]:
    path = PUBLISHED / f"{name}.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {type(error).__name__}; run the study with --publish first") from None


def _identity(result: Result) -> tuple[str, str, str, float, int, float]:
    return result.model, result.data, result.method, result.lr, result.seed, result.budget


def _plain(row: Row) -> dict[str, Any]:
    return {**asdict(row), "test": row.test, "spread": row.spread}


def table(rows: Sequence[Row], *, metric: str) -> list[str]:
    """Markdown lines, rows in the order given."""
    with_host = any(row.host_bytes_per_parameter for row in rows)
    name = _metric_name(metric)
    heads = ["method", "learning rate", f"test {name}", "to full", "B-F multiplier", "state, bytes/parameter"]
    heads += ["of full", *(["host"] if with_host else []), "step time", "arithmetic", "cost: time", "cost: arithmetic"]
    with_price = any(row.dollars for row in rows)
    heads += ["dollars"] if with_price else []
    best = frontier(rows)
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---|" * (len(heads) - 1)]
    for row in rows:
        label = f"**{row.label}**" if row in best else row.label
        if row.failure:
            lines.append(f"| {label} | failed: {row.failure.replace('|', '/')} |" + " |" * (len(heads) - 2))
            continue
        spread = f" ± {row.spread / 2:.4f}" if row.spread is not None else ""
        host = [_shown(row.host_bytes_per_parameter, ".1f")] if with_host else []
        cells = [
            label,
            _rate(row),
            f"{row.test:.4f}{spread}{_seeds(row)}",
            "-" if row.relative_test is None else f"{100 * (row.relative_test - 1):+.1f} %",
            _shown(row.multiplier, ""),
            _shown(row.state_bytes_per_parameter, ".2f"),
            "-" if row.relative_state is None else f"{100 * row.relative_state:.0f} %",
            *host,
            _shown(row.relative_time, ".2f"),
            _shown(row.arithmetic, ".2f"),
            _shown(row.multiplier and row.multiplier.times(row.relative_time), ""),
            _shown(row.multiplier and row.multiplier.times(row.arithmetic), ""),
            *([_shown(row.dollars, ".3g")] if with_price else []),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _rate(row: Row) -> str:
    tried, wanted = row.rates_tried
    note = f" *{tried} of {wanted} rates*" if tried < wanted else " *edge*" if row.lr_at_edge else ""
    return f"{row.lr:g}{note}"


def _seeds(row: Row) -> str:
    return f" *{len(row.tests)} of {row.seeds_wanted} seeds*" if len(row.tests) < row.seeds_wanted else ""


def _shown(value: Any, form: str) -> str:
    return "-" if value is None else str(value) if not form else format(value, form)


def _metric_name(metric: str) -> str:
    return "error" if metric == "accuracy" else metric
