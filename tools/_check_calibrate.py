"""This machine's row of the cluster table, and what the planner makes of it: parts of tools/check_machine.py."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from _check_result import Check, failed, passed, skipped
from _check_runs import Runner
from _compare_runs import ROOT, CannotRun, measure, planned, run, variants_of
from _machine import cpu_model

from megatron.bcd.planner.recipe import Recipe
from megatron.bcd.planner.tables import GIB, Cluster, Model, choose, read_clusters, read_models

NAME = "this-machine"
LEAST_OF_TABLE = 0.25
"""Share of the table's bandwidth that a link must have."""
LEAST_LINK = {"cuda": 1.0, "cpu": 0.01}
"""10^9 bytes per second, where the table has no such GPU."""
MOST_OF_PCIE = 20.0
"""10^9 bytes per second: rtx4090's and a800's in the table. A row's link may be NVLink, which the same GPU has in
its SXM form."""
_NOT_THE_MODEL = re.compile(r"nvidia|geforce|pcie|sxm\d*|hbm\w*")
PEAK_TOLERANCE = 0.10
CPU_MODEL = Model(name="calibration", form="gpt", layers=6, hidden=256, heads=4, groups=4, ffn=1024, vocabulary=1024,
                  sequence=128, source="")  # fmt: skip
GPU_MODEL = "G-0.15B"
STEPS = 4
"""Timed, of every phase."""


def measured(runner: Runner, *, quick: bool) -> dict[str, Any]:
    """What tools/_check_measure.py finds on all ranks. Raises CannotRun."""
    file = runner.folder / "rates.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(runner.num_ranks)]
    command = [sys.executable, *launcher, str(ROOT / "tools" / "_check_measure.py"), str(file)]
    run([*command, *["--quick"] * quick], runner.folder / "rates.log", threads=1, seconds=runner.seconds)
    return json.loads(file.read_text(encoding="utf-8"))


def known_gpu(name: str, clusters: Mapping[str, Cluster]) -> Cluster | None:
    """The table's row of a GPU, by the name that CUDA gives it: model and memory size, such as A100 and 80GB, are the
    row's, whatever the card's form. A card in a PCIe slot gets no more than PCIe's link."""
    rows = [row for row in clusters.values() if row.name != NAME and _model_words(row.gpu) == _model_words(name)]
    if len(rows) != 1:
        return None
    on_pcie = "pcie" in name.lower()
    return replace(rows[0], link_gb_per_s=min(rows[0].link_gb_per_s, MOST_OF_PCIE)) if on_pcie else rows[0]


def _model_words(name: str) -> frozenset[str]:
    """NVIDIA A100-SXM4-80GB: a100, 80gb."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return frozenset(word for word in words if not _NOT_THE_MODEL.fullmatch(word))


def check_links(found: Mapping[str, Any], known: Cluster | None, *, least: float | None) -> Check:
    """The slowest link between neighbouring ranks, against `least`, the table or what any link has."""
    if "links" not in found:
        return skipped("link", "one rank")
    by_pair = found["links"]["by_pair"]
    pair, rate = min(by_pair.items(), key=lambda item: item[1])
    if least is None:
        least = LEAST_OF_TABLE * known.link_gb_per_s if known else LEAST_LINK[found["device"]]
    detail = f"ranks {pair}: {rate:.2f} GB/s, all-reduce {found['links']['all_reduce']:.2f} GB/s"
    if rate < least:
        remedy = "see nvidia-smi topo -m; NCCL_DEBUG=INFO names the way that NCCL takes; NCCL_P2P_DISABLE must be unset"
        return failed("link", f"{detail}, expected {least:.2f}", remedy=remedy, **found["links"])
    return passed("link", detail, **found["links"])


def row_of(found: Mapping[str, Any], *, gpu: str, known: Cluster | None, num_ranks: int) -> Cluster:
    """The row of the measured rates. What cannot be measured on one node is the known row's, else said in `source`."""
    products = found["matrix_products"]
    best = {precision: max(rates.values()) for precision, rates in products.items()}
    typical = min(_typical_share(rates) for rates in products.values())
    moved = found["memory"]
    link = min(found["links"]["by_pair"].values()) if "links" in found else moved["copy"]
    return Cluster(
        name=NAME,
        gpu=gpu,
        memory_gib=round(found["device_bytes"] / GIB, 2),
        fp32_tflops=float(f"{best['fp32']:.4g}"),
        bf16_tflops=float(f"{best['bf16']:.4g}"),
        memory_gb_per_s=float(f"{moved['copy']:.4g}"),
        link_gb_per_s=float(f"{link:.4g}"),
        network_gb_per_s=known.network_gb_per_s if known else float(f"{link:.4g}"),
        gpus_per_node=num_ranks,
        usd_per_gpu_hour=known.usd_per_gpu_hour if known else 0.0,
        compute_share=round(typical, 3),
        memory_share=round(moved["element_wise"] / moved["copy"], 3),
        framework_gib=round(found["framework_bytes"] / GIB, 3),
        host_gb_per_s=float(f"{found['host_optimizer']:.4g}"),
        source="measured by tools/check_machine.py --calibrate; price and network "
        + (f"of {known.name}" if known else "not known: 0 and the link's"),
    )


def _typical_share(rates: Mapping[str, float]) -> float:
    """Of the highest rate, what the mean of all but the smallest size achieves."""
    largest = list(rates.values())[1:] or list(rates.values())
    return min(1.0, sum(largest) / len(largest) / max(rates.values()))


def write_table(table: Path, row: Cluster, target: Path) -> None:
    """The table with this machine's row at its end, in place of an older one. Raises OSError."""
    kept = [line for line in table.read_text(encoding="utf-8").splitlines() if not line.startswith(f"{NAME},")]
    columns = next(csv.reader(line for line in kept if not line.startswith("#")))
    assert set(columns) == {field.name for field in fields(Cluster)}
    text = io.StringIO()
    csv.DictWriter(text, columns, lineterminator="").writerow(asdict(row))
    target.write_text("\n".join([*kept, text.getvalue(), ""]), encoding="utf-8")


def check_plan(runner: Runner, row: Cluster) -> Check:
    """A run against the planner's estimate from the row: step time, and on a GPU the peak."""
    try:
        recipe = recipe_of(runner, row)
        variant = variants_of(recipe, ["bcd"], peer=False, steps=STEPS)[0]
        plan = planned(variant, has_cluster=True)
        turn = measure(variant, runner.folder, threads=1)
    except CannotRun as error:
        return failed("plan", str(error), remedy="see the log of the run")
    assert plan.iteration_ms is not None and plan.peak_bytes is not None
    peak = max(turn.peak_memory_bytes)
    figures = {
        "command": variant.command(),
        "planned_ms": plan.iteration_ms,
        "measured_ms": turn.iteration_ms,
        "planned_peak_bytes": plan.peak_bytes,
        "measured_peak_bytes": peak,
    }
    times = f"step {turn.iteration_ms:,.1f} ms, planned {plan.iteration_ms:,.1f}"
    peaks = f"peak {peak / GIB:.2f} GiB, planned {plan.peak_bytes / GIB:.2f}"
    if not runner.on_gpu:
        return passed("plan", f"{recipe.model.name}: {times}; {peaks} (on a CPU: the whole process)", **figures)
    without = plan.peak_bytes - row.framework_gib * GIB  # torch counts its own tensors only
    if abs(peak / without - 1) > PEAK_TOLERANCE:
        remedy = "plan with that much more memory, and report it with the file of --json"
        return failed("plan", f"{recipe.model.name}: {peaks}; {times}", remedy=remedy, **figures)
    return passed("plan", f"{recipe.model.name}: {times}; {peaks}", **figures)


def recipe_of(runner: Runner, row: Cluster) -> Recipe:
    """What is run: small on a CPU, G-0.15B in bf16 on GPUs."""
    models = read_models(ROOT / "examples" / "models.csv")
    return Recipe(
        model=choose(models, GPU_MODEL, flag="--model") if runner.on_gpu else CPU_MODEL,
        cluster=row,
        num_gpus=runner.num_ranks,
        pipeline_size=runner.num_stages,
        precision="bf16" if runner.on_gpu else "fp32",
        micro_batch_size=2,
        global_batch_size=8 * runner.num_ranks,
    )


def calibrate(runner: Runner, *, gpu: str | None, table: Path) -> tuple[list[Check], Path]:
    """Measure, write the table with this machine's row, and compare a run with the plan. Raises CannotRun, OSError."""
    found = measured(runner, quick=False)
    known = known_gpu(gpu, read_clusters(table)) if gpu else None
    row = row_of(found, gpu=gpu or cpu_model().replace(",", " "), known=known, num_ranks=runner.num_ranks)
    target = runner.folder / "clusters.csv"
    write_table(table, row, target)
    detail = f"{row.fp32_tflops:g} TFLOP/s fp32, {row.bf16_tflops:g} bf16, memory {row.memory_gb_per_s:g} GB/s"
    return [passed("rates", f"{detail}; wrote {target}", **found), check_plan(runner, row)], target
