"""Write studies/gpu_hour.md and its picture from the results of studies/gpu_hour.sh in studies/gpu_hour/*.jsonl."""

from __future__ import annotations

import functools
import itertools
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from gpu_hour_jobs import LARGE_STEPS, NETWORKS, PARTS, SCHEDULES, VARIANTS, final_loss, read_results
from matplotlib.figure import Figure
from report import RUN_COLOURS, STYLE

from megatron.bcd.planner.tables import GIB

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "studies" / "gpu_hour"
PICTURE = ROOT / "docs" / "images" / "gpu_hour_learning.png"
NAMES = {
    "full_adam": "full Adam", "full_adam_8_bit": "full Adam, 8-bit moments", "full_muon": "full Muon, bf16 momentum",
    "full_muon_int8": "full Muon, int8 momentum",
    "pretrain": "`pretrain`", "paper": "`paper`", "lora_64": "LoRA, rank 64", "lora_16": "LoRA, rank 16",
    "six_blocks": "six Adam blocks, the rest frozen",
    "factored": "factored, no block", "factored_adam_embedding": "factored, no block, embedding by Adam",
    "factored_adam_blocks": "factored, six Adam blocks", "factored_muon_blocks": "factored, six Muon blocks",
    "orthogonal": "orthogonal, no block",
    "before": "before fine-tuning",
}  # fmt: skip
"""Labels of methods."""
IN_PRETRAINING = "`pretrain`, factored"
"""The label of `factored` in pretraining."""

Record = Mapping[str, Any]


def write_report() -> list[Path]:
    """Write the page and its picture and return their paths. Raises ValueError without results."""
    results = {part: list(read_results(RESULTS, part).values()) for part in PARTS}
    if not any(results.values()):
        raise ValueError(f"{RESULTS} has no results: copy OUTPUT/results of studies/gpu_hour.sh there")
    page = ROOT / "studies" / "gpu_hour.md"
    page.write_text("\n".join(page_lines(results)) + "\n", encoding="utf-8")
    paths = [page]
    if best_curves(results["learning"]):
        draw(PICTURE, best_curves(results["learning"]))
        paths.append(PICTURE)
    return paths


def page_lines(results: Mapping[str, Sequence[Record]]) -> Iterator[str]:
    yield from ("# What a GPU measured", "")
    records = [record for part in results.values() for record in part]
    keys = ("torch", "cuda", "python", "megatron_core", "transformers")
    for values in sorted({tuple(str(record[key]) for key in keys) for record in records}):
        gpus = {record["gpu"] for record in records if tuple(str(record[key]) for key in keys) == values}
        versions = "PyTorch {}, CUDA {}, Python {}, Megatron Core {}, transformers {}".format(*values)
        yield f"- {', '.join(sorted(gpus))}: {versions}"
    commits = ", ".join(sorted({record["commit"] for record in records}))
    yield f"- `bash studies/gpu_hour.sh` at commit {commits}, this page by `python studies/gpu_hour.py --report`."
    yield "- [gpu_hour/](gpu_hour) has the command, the metrics and the log of each run."
    tables = {
        "Learning, GPT-2 small": learning,
        "Fine-tuning on a new language, 500 steps of 1,024 tokens": functools.partial(fine_tuning, part="fine_tuning"),
        "The same in 125 steps of 4,096 tokens": functools.partial(fine_tuning, part="fine_tuning", suffix=LARGE_STEPS),
        "Step times": speed,
        "Every layer trained, by schedule": every_layer, "Copies": copies, "Beside other systems": peers,
    }  # fmt: skip
    for title, table in tables.items():
        rows = list(table(results))
        if len(rows) > 1:
            yield from ("", f"## {title}", "")
            yield from markdown(rows)


def markdown(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for index, row in enumerate(rows):
        yield f"| {' | '.join(row)} |"
        if index == 0:
            yield f"|{'---|' * len(row)}"


def step_lines(record: Record) -> list[Record]:
    return [line for line in record.get("metrics", ()) if "step_time_ms" in line]


def typical(record: Record, name: str) -> float:
    """Return the median of a field over the settled steps: those after the first tenth."""
    steps = step_lines(record)
    values = [line[name] for line in steps[max(2, len(steps) // 10) :] or steps]
    return statistics.median(values) if values else float("nan")


def maximum_gib(record: Record, name: str) -> float:
    """Return the maximum over a run of a field that lists one value per rank, in GiB."""
    return max((max(line[name]) for line in step_lines(record) if line.get(name)), default=0) / GIB


def method_name(record: Record) -> str:
    method = record.get("method", record["job"]).removesuffix(LARGE_STEPS)
    return NAMES.get(method, method.replace("_", " "))


def learning(results: Mapping[str, Sequence[Record]]) -> Iterator[Sequence[str]]:
    yield ["method", "rate", "validation loss", "tokens/s", "peak, GiB"]
    for record in results["learning"]:
        if record["job"] == "rate" or (loss := final_loss(record)) is None:
            continue
        yield (
            method_name(record).replace(NAMES["factored"], IN_PRETRAINING),
            f"{record['lr']:g}",
            f"{loss:.3f}",
            f"{typical(record, 'tokens_per_second'):,.0f}",
            f"{maximum_gib(record, 'peak_memory_bytes'):.1f}",
        )


def fine_tuning(results: Mapping[str, Sequence[Record]], *, part: str, suffix: str = "") -> Iterator[Sequence[str]]:
    """Yield one row for each method, with the mean losses at its rates. The suffix is that of the jobs' methods."""
    yield ["method", "rate: validation loss (English)", "model state, MiB"]
    methods: dict[str, dict[float, list[Record]]] = {}
    for record in results[part]:
        if record.get("method", suffix).endswith(LARGE_STEPS) != bool(suffix):
            continue
        if record["job"] == "before" and not suffix:
            scores = json.loads(next(line for line in reversed(record["log"]) if line.startswith("{")))
            yield (NAMES["before"], f"{scores['chichewa']:.3f} ({scores['english']:.2f})", "")
        elif final_loss(record) is not None:
            methods.setdefault(method_name(record), {}).setdefault(record["lr"], []).append(record)
    for name, rates in methods.items():
        cells = (f"{lr:g}: {mean_losses(runs)}" for lr, runs in sorted(rates.items()))
        state = maximum_gib(next(iter(rates.values()))[0], "model_state_bytes") * 1024
        yield (name, ", ".join(cells), f"{state:,.0f}")


def mean_losses(runs: Sequence[Record]) -> str:
    """Return the mean validation loss over the seeds, and in brackets that on English."""
    losses = [loss for run in runs if (loss := final_loss(run)) is not None]
    english = [run["scores"]["english"] for run in runs if run.get("scores")]
    text = f"{statistics.fmean(losses):.3f}" + (f" ± {statistics.stdev(losses):.3f}" if len(losses) > 1 else "")
    return text + (f" ({statistics.fmean(english):.2f})" if english else "")


def speed(results: Mapping[str, Sequence[Record]]) -> Iterator[Sequence[str]]:
    yield ["method", "ms a step", "tokens/s", "TFLOP/s", "model state, GiB", "peak, GiB"]
    for row in (row for record in results["speed"] for row in record.get("json", {}).get("rows", ())):
        yield (
            row["method"],
            f"{row['step_ms']:,.0f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['tflops_per_gpu'] or 0:.0f}",
            f"{row['model_state_bytes'] / GIB:.1f}",
            f"{row['peak_memory_bytes'] / GIB:.1f}",
        )


def every_layer(results: Mapping[str, Sequence[Record]]) -> Iterator[Sequence[str]]:
    """Yield steps that train every layer, by schedule and place of the layers. What the place adds to a step is copy
    time that no kernel hides."""
    yield ["gpu", "model", "schedule", "layers", "ms a step", "not hidden", "peak, GiB", "host memory"]
    records = {record["job"]: record for record in results["speed"] if not record["failure"]}
    for (model, schedule), variant in itertools.product(itertools.product(NETWORKS, SCHEDULES), VARIANTS):
        if (record := records.get("_".join(filter(None, (model, schedule, variant))))) is None:
            continue
        order, _, place = schedule.rpartition("_")
        name = "_".join(filter(None, (model, order, "device", variant)))
        near, step_ms = records.get(name), typical(record, "step_time_ms")
        is_compared = place == "host" and near is not None
        yield (
            record["gpu"].removeprefix("NVIDIA "),
            model,
            " ".join(filter(None, (order.replace("_", "-"), variant.replace("_", ", ")))),
            place,
            f"{step_ms:,.0f}",
            f"{100 * (1 - typical(near, 'step_time_ms') / step_ms):.0f} %" if is_compared and near else "",
            f"{maximum_gib(record, 'peak_memory_bytes'):.1f}",
            f"{maximum_gib(record, 'host_state_bytes'):.1f}",
        )


def peers(results: Mapping[str, Sequence[Record]]) -> Iterator[Sequence[str]]:
    """Yield other systems and this project on the same sizes, with the reason where one did not run."""
    yield ["gpu", "model", "system", "tokens/s", "peak, GiB", "resident host memory, GiB"]
    for record in results["peers"]:
        told = record.get("json", {})
        name = (record["gpu"].removeprefix("NVIDIA ") or "CPU", record["model"])
        if reason := record["failure"] or told.get("skipped"):
            yield (*name, record["job"].partition("_")[2], f"did not run: {reason}", "", "")
            continue
        speed, peak = typical(record, "tokens_per_second"), maximum_gib(record, "peak_memory_bytes")
        if told:
            speed, peak = 1e3 * told["step_tokens"] / statistics.median(told["step_ms"][2:]), told["peak"] / GIB
        how = told.get("how", f"this project: {record['job'].partition('_')[2].replace('_', ' ')}")
        yield (*name, how, f"{speed:,.0f}", f"{peak:.1f}", f"{record['host_bytes'] / GIB:.1f}")


def copies(results: Mapping[str, Sequence[Record]]) -> Iterator[Sequence[str]]:
    """Yield the rates of copies between page-locked memory and the GPU."""
    yield ["gpu", "in, GB/s", "out", "each way at once"]
    for record in results["speed"]:
        if record["job"] == "copies" and not record["failure"]:
            yield (record["gpu"], *(f"{rate:.1f}" for rate in record["json"].values()))


Curve = tuple[str, list[float], list[float], list[float]]
"""Label, millions of tokens, minutes, validation losses."""


def best_curves(records: Iterable[Record]) -> list[Curve]:
    """Return the validation curve of each method at its best rate."""
    best: dict[str, Record] = {}
    for record in records:
        loss, method = final_loss(record), record.get("method")
        if method and loss is not None and (method not in best or loss < (final_loss(best[method]) or 0)):
            best[method] = record
    return [curve(record) for record in best.values()]


def curve(record: Record) -> Curve:
    """Return tokens and time of each validation; the time is that of as many typical steps."""
    step_ms = typical(record, "step_time_ms")
    validations = [line for line in record["metrics"] if "validation_loss" in line and not line.get("is_final")]
    minutes = [line["iteration"] * step_ms / 6e4 for line in validations]
    tokens = [each * 60 * typical(record, "tokens_per_second") / 1e6 for each in minutes]
    label = f"{method_name(record).replace(NAMES['factored'], IN_PRETRAINING)}, {record['lr']:g}".replace("`", "")
    return label, tokens, minutes, [line["validation_loss"] for line in validations]


def draw(path: Path, curves: Sequence[Curve]) -> None:
    """Write a PNG of 1300 x 560 pixels: validation loss against tokens and against time."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13, 5.6), dpi=100, layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for axes, column, title in zip(panels, (1, 2), ("millions of tokens", "minutes of training"), strict=True):
            for index, values in enumerate(curves):
                colour = RUN_COLOURS[index % len(RUN_COLOURS)]
                axes.plot(values[column], values[3], marker="o", markersize=3, color=colour, label=values[0])
            axes.set_xlabel(title)
            axes.grid(color="#b5b5b5", linewidth=0.6, alpha=0.4)
        panels[0].set_ylabel("validation loss (nats per token)")
        panels[0].legend(frameon=False, title="method, learning rate")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
