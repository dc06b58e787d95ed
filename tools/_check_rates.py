"""Rates of this machine, its row of the cluster table, and what the planner makes of it: for tools/check_machine.py.

    torchrun --nproc-per-node 2 tools/_check_rates.py FILE [--links-only]

As a program it measures matrix products, memory, links and an optimizer on the host on all ranks at once; rank 0 writes
FILE as JSON.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _check_result import Check, failed, passed, skipped
from _parser import cpu_model
from _processes import ROOT, SCRIPTS, CannotRun, launcher, read_metrics, run

from megatron.bcd.planner.command import layout_flags, network_flags
from megatron.bcd.planner.estimate import make_estimate
from megatron.bcd.planner.recipe import Recipe
from megatron.bcd.planner.tables import GIB, Cluster, Model, choose, read_clusters, read_models

if TYPE_CHECKING:
    import torch
    from _check_self_test import Runner

NAME = "this-machine"
LEAST_OF_TABLE = 0.25
"""Share of the table's bandwidth that a link must have."""
LEAST_LINK = {"cuda": 1.0, "cpu": 0.01}
"""10^9 bytes per second, where the table has no such GPU."""
MOST_OF_PCIE = 20.0
"""10^9 bytes per second: rtx4090's and a800's in the table. A row's link may be NVLink, which the same GPU has in
its SXM form."""
PEAK_TOLERANCE = 0.10
CPU_MODEL = Model(name="calibration", form="gpt", layers=6, hidden=256, heads=4, groups=4, ffn=1024, vocabulary=1024,
                  sequence=128, source="")  # fmt: skip
GPU_MODEL = "G-0.15B"
STEPS = 4
"""Timed, of every phase."""
# What is measured, by the device's type.
SIZES = {"cuda": (1024, 2048, 4096, 8192), "cpu": (256, 512, 1024)}
MESSAGE_BYTES = {"cuda": 2**26, "cpu": 2**22}
TENSOR_BYTES = {"cuda": 2**30, "cpu": 2**26}
ADAM_ELEMENTS = {"cuda": 2**25, "cpu": 2**22}
ADAM_BYTES = 16
"""Per parameter: weight, gradient and two moments in fp32, as the planner counts an optimizer on the host."""


# ---------------------------------------------------------------- the link and the row


def measured(runner: Runner, *, links_only: bool) -> dict[str, Any]:
    """What this program finds on all ranks. Raises CannotRun."""
    file = runner.folder / "rates.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command = [*torchrun, str(runner.num_ranks), __file__, str(file), *["--links-only"] * links_only]
    run(command, runner.folder / "rates.log", seconds=runner.seconds)
    return json.loads(file.read_text(encoding="utf-8"))


def known_gpu(name: str, clusters: Mapping[str, Cluster]) -> Cluster | None:
    """The table's row of a GPU, by the name that CUDA gives it: model and memory size, such as A100 and 80GB, are the
    row's, whatever the card's form. A card in a PCIe slot gets no more than PCIe's link."""

    def words(text: str) -> set[str]:  # NVIDIA A100-SXM4-80GB: a100, 80gb
        return set(re.findall(r"[a-z0-9]+", re.sub(r"nvidia|geforce|pcie|sxm\d*|hbm\w*", "", text.lower())))

    rows = [row for row in clusters.values() if row.name != NAME and words(row.gpu) == words(name)]
    if len(rows) != 1:
        return None
    on_pcie = "pcie" in name.lower()
    return replace(rows[0], link_gb_per_s=min(rows[0].link_gb_per_s, MOST_OF_PCIE)) if on_pcie else rows[0]


def check_links(found: Mapping[str, Any], known: Cluster | None, *, least: float | None) -> Check:
    """The slowest link between neighbouring ranks, against `least`, the table or what any link has."""
    if "links" not in found:
        return skipped("link", "one rank")
    pair, rate = min(found["links"]["by_pair"].items(), key=lambda item: item[1])
    if least is None:
        least = LEAST_OF_TABLE * known.link_gb_per_s if known else LEAST_LINK[found["device"]]
    detail = f"ranks {pair}: {rate:.2f} GB/s, all-reduce {found['links']['all_reduce']:.2f} GB/s"
    if rate < least:
        remedy = "see nvidia-smi topo -m; NCCL_DEBUG=INFO names the way that NCCL takes; NCCL_P2P_DISABLE must be unset"
        return failed("link", f"{detail}, expected {least:.2f}", remedy=remedy, **found["links"])
    return passed("link", detail, **found["links"])


def row_of(found: Mapping[str, Any], *, gpu: str, known: Cluster | None, num_ranks: int) -> Cluster:
    """The row of the measured rates. What cannot be measured on one node is the known row's, else said in `source`."""

    def rounded(value: float) -> float:
        return float(f"{value:.4g}")

    products, moved = found["matrix_products"], found["memory"]
    best = {precision: max(rates.values()) for precision, rates in products.items()}
    # of the highest rate, what the mean of all but the smallest size achieves
    larger = {precision: [*rates.values()][1:] or [*rates.values()] for precision, rates in products.items()}
    shares = [sum(rates) / len(rates) / best[precision] for precision, rates in larger.items()]
    link = min(found["links"]["by_pair"].values()) if "links" in found else moved["copy"]
    return Cluster(
        name=NAME,
        gpu=gpu,
        memory_gib=round(found["device_bytes"] / GIB, 2),
        fp32_tflops=rounded(best["fp32"]),
        bf16_tflops=rounded(best["bf16"]),
        memory_gb_per_s=rounded(moved["copy"]),
        link_gb_per_s=rounded(link),
        network_gb_per_s=known.network_gb_per_s if known else rounded(link),
        gpus_per_node=num_ranks,
        usd_per_gpu_hour=known.usd_per_gpu_hour if known else 0.0,
        compute_share=round(min(1.0, *shares), 3),
        memory_share=round(moved["element_wise"] / moved["copy"], 3),
        framework_gib=round(found["framework_bytes"] / GIB, 3),
        host_gb_per_s=rounded(found["host_optimizer"]),
        source="measured by tools/check_machine.py --calibrate; price and network "
        + (f"of {known.name}" if known else "not known: 0 and the link's"),
    )


def write_table(table: Path, row: Cluster, target: Path) -> None:
    """The table with this machine's row at its end, in place of an older one. Raises OSError."""
    kept = [line for line in table.read_text(encoding="utf-8").splitlines() if not line.startswith(f"{NAME},")]
    columns = next(csv.reader(line for line in kept if not line.startswith("#")))
    text = io.StringIO()
    csv.DictWriter(text, columns, lineterminator="").writerow(asdict(row))
    target.write_text("\n".join([*kept, text.getvalue(), ""]), encoding="utf-8")


def check_plan(runner: Runner, row: Cluster) -> Check:
    """A run against the planner's estimate from the row: step time, and on a GPU the peak."""
    from benchmark import ALWAYS, SETTLED, WARM_UP_STEPS, turn_of

    recipe = recipe_of(runner, row)
    plan, per_block = make_estimate(recipe), WARM_UP_STEPS + STEPS
    length = f"--train-iters {recipe.partition.num_blocks * per_block} --bcd-steps-per-block {per_block}"
    mock = f"--mock-data --tokenizer-type NullTokenizer --vocab-size {recipe.model.vocabulary - 1}"
    flags = " ".join([SETTLED, *network_flags(recipe), *layout_flags(recipe), length, mock, ALWAYS]).split()
    metrics = runner.folder / "plan.jsonl"
    command = [*launcher(recipe.num_gpus), SCRIPTS[recipe.model.form], *flags, "--metrics-file", str(metrics)]
    try:
        run(command, runner.folder / "plan.log")
        turn = turn_of(read_metrics(metrics))
    except CannotRun as error:
        return failed("plan", str(error), remedy="see the log of the run")
    peak, planned_ms = max(turn.peak_memory_bytes), 1e3 * plan.iteration_seconds
    figures = {
        "command": " ".join([SCRIPTS[recipe.model.form], *flags]),
        "planned_ms": planned_ms,
        "measured_ms": turn.iteration_ms,
        "planned_peak_bytes": plan.peak.total,
        "measured_peak_bytes": peak,
    }
    times = f"{recipe.model.name}: step {turn.iteration_ms:,.1f} ms, planned {planned_ms:,.1f}"
    peaks = f"peak {peak / GIB:.2f} GiB, planned {plan.peak.total / GIB:.2f}"
    if not runner.on_gpu:
        return passed("plan", f"{times}; {peaks} (on a CPU: the whole process)", **figures)
    without = plan.peak.total - row.framework_gib * GIB  # torch counts its own tensors only
    if abs(peak / without - 1) > PEAK_TOLERANCE:
        remedy = "plan with that much more memory, and report it with the file of --json"
        return failed("plan", f"{peaks}; {times}", remedy=remedy, **figures)
    return passed("plan", f"{times}; {peaks}", **figures)


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
    found = measured(runner, links_only=False)
    known = known_gpu(gpu, read_clusters(table)) if gpu else None
    row = row_of(found, gpu=gpu or cpu_model().replace(",", " "), known=known, num_ranks=runner.num_ranks)
    target = runner.folder / "clusters.csv"
    write_table(table, row, target)
    detail = f"{row.fp32_tflops:g} TFLOP/s fp32, {row.bf16_tflops:g} bf16, memory {row.memory_gb_per_s:g} GB/s"
    return [passed("rates", f"{detail}; wrote {target}", **found), check_plan(runner, row)], target


# ---------------------------------------------------------------- the program


def best_seconds(work: Callable[[], Any], device: torch.device, *, rounds: int = 5, repeats: int = 3) -> float:
    """The shortest time of one call, over some rounds: other programs make it longer, nothing makes it shorter."""
    import torch

    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    work()
    times = []
    for _ in range(rounds):
        wait()
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        wait()
        times.append((time.perf_counter() - start) / repeats)
    return min(times)


def matrix_products(device: torch.device) -> dict[str, dict[str, float]]:
    """10^12 floating-point operations per second by type and size of square matrices."""
    import torch

    found: dict[str, dict[str, float]] = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        found[name] = {}
        for size in SIZES[device.type]:
            one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
            found[name][str(size)] = 2 * size**3 / best_seconds(lambda a=one, b=other: a @ b, device) / 1e12
    return found


def memory(device: torch.device) -> dict[str, float]:
    """10^9 bytes per second, read and written: of a copy, and of element-wise work like a layer's."""
    import torch

    source = torch.randn(TENSOR_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / best_seconds(lambda: target.copy_(source), device)
    small = source[: source.numel() // 16]
    moved = 2 * small.nbytes / best_seconds(lambda: torch.nn.functional.gelu(small), device)
    return {"copy": copied / 1e9, "element_wise": min(moved, copied) / 1e9}


def links(device: torch.device) -> dict[str, Any]:
    """10^9 bytes per second, one way, between neighbours by pair; and of an all-reduce over all ranks."""
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    message = torch.ones(MESSAGE_BYTES[device.type] // 4, device=device)

    def pass_on(sender: int) -> None:
        dist.send(message, sender + 1) if rank == sender else dist.recv(message, sender)

    by_pair = {}
    for sender in range(size - 1):
        dist.barrier()
        if rank in (sender, sender + 1):
            seconds = best_seconds(lambda sender=sender: pass_on(sender), device, repeats=2)
            by_pair[f"{sender}-{sender + 1}"] = message.nbytes / seconds / 1e9
    seconds = best_seconds(lambda: dist.all_reduce(message.fill_(1.0)), device, repeats=2)
    every: list[Any] = [None] * size
    dist.all_gather_object(every, by_pair)
    pairs = sorted({pair for one in every for pair in one})
    return {
        "by_pair": {pair: min(one[pair] for one in every if pair in one) for pair in pairs},
        "all_reduce": 2 * (size - 1) / size * message.nbytes / seconds / 1e9,
    }


def host_optimizer(device: torch.device) -> float:
    """10^9 bytes of model state per second that Adam on the host steps, with the ways of gradient and weight."""
    import torch

    count, on_gpu = ADAM_ELEMENTS[device.type], device.type == "cuda"
    on_device, gradient = (torch.zeros(count, device=device) for _ in range(2))
    weight = torch.zeros(count, pin_memory=on_gpu, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], lr=1e-3, fused=True)

    def step() -> None:
        if on_gpu:
            weight.grad.copy_(gradient)
        optimizer.step()
        if on_gpu:
            on_device.copy_(weight.detach())

    return ADAM_BYTES * count / best_seconds(step, device, repeats=1) / 1e9


def measure(*, links_only: bool) -> dict[str, Any]:
    """All ranks at once, as in training: on a CPU they share its memory's bandwidth."""
    import psutil
    import torch
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    size = dist.get_world_size()
    found: dict[str, Any] = {"device": device.type, "num_ranks": size}
    if size > 1:
        found["links"] = links(device)
    if not links_only:
        import megatron.bcd.trainer  # noqa: F401  (counted as framework)

        if on_gpu:
            free, total = torch.cuda.mem_get_info()
            framework = total - free - torch.cuda.memory_reserved()
        else:
            framework, total = psutil.Process().memory_info().rss, psutil.virtual_memory().total // size
        found |= {"framework_bytes": framework, "device_bytes": total}
        found |= {"matrix_products": matrix_products(device), "memory": memory(device)}
        found["host_optimizer"] = host_optimizer(device)
    dist.barrier()
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    figures = measure(links_only="--links-only" in sys.argv)
    if int(os.environ.get("RANK", "0")) == 0:
        Path(sys.argv[1]).write_text(json.dumps(figures), encoding="utf-8")
