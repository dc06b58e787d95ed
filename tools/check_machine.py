"""What holds on this machine: what is installed and found, then a self-test of minutes on all its GPUs.

    python tools/check_machine.py
    python tools/check_machine.py --json out/machine.json --calibrate
    python tools/check_machine.py --only "one block*"

One line per part: PASS, FAIL with the remedy, SKIP with the reason. The self-test trains models of 0.2 M parameters
with the training script under torchrun: with one block and in every layout against one process of this machine, killed
and resumed, with prefix cache, with the optimizer on the host. Without a GPU it runs on the CPU under gloo.
--calibrate measures rates and writes examples/clusters.csv with a row of this machine, for tools/plan.py. Exit code 0
if nothing failed, 1 if something did, 2 for bad flags. See docs/gpu.md.
"""

from __future__ import annotations

import argparse
import csv
import fnmatch
import importlib
import importlib.metadata
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from _parser import Parser, add_json, check_can_write, command, cpu_model, leave_with, tell
from _processes import ROOT, CannotRun, run
from _self_test import FAIL, FLAGS, Check, Runner, SelfTest, failed, passed, skipped

from megatron.bcd.planner.tables import GIB, Cluster, read_clusters

if TYPE_CHECKING:
    import torch

PROG = "tools/check_machine.py"
# ---------------------------------------------------------------- what is installed and found

NEEDED = ("python", "torch", "compiler", "folder")
"""Parts without which no run is tried, beside all packages."""
TESTS_ONLY = "# tests/run.sh"
"""The line of requirements.txt from which on running can do without."""
EXACT = ("megatron-core",)
"""Packages whose private parts are used: patches are for this version only."""
OPTIONAL = {
    "transformer_engine": ("transformer_engine.pytorch",),
    "apex": ("apex.optimizers", "apex.normalization", "amp_C"),
}
"""Modules that training needs of a package to use it (megatron.bcd.runtime.packages)."""
SHOWN = ("CUDA_", "CUBLAS_", "PYTORCH_", "OMP_", "GLOO_", "NCCL_", "NVTE_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_")
"""Beginnings of variables that change a run."""
HARMFUL = {
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
    "NVIDIA_TF32_OVERRIDE": "fp32 products get another precision than the run chose",
    "NVTE_DEBUG": "Transformer Engine computes slowly",
}
"""Settings for debugging, when they are not 0."""
LEAST_GIB = 1.0
"""Free in the folder, and in /dev/shm."""


def pins(path: Path = ROOT / "requirements.txt") -> dict[str, str]:
    """Version by package of all that running needs."""
    lines = path.read_text(encoding="utf-8").split(TESTS_ONLY)[0].splitlines()
    return dict(line.split("==") for line in (line.split("#")[0].strip() for line in lines) if line)


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_packages(version_of: Callable[[str], str | None] = installed_version) -> Iterator[Check]:
    """Python, and one check per pin. A newer or older version passes, except of what is patched."""
    python = sys.version.split()[0]
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        yield passed("python", f"{python}, {sys.executable}")
    else:
        yield failed("python", python, remedy="install Python 3.11 to 3.13; examples/setup_env.sh makes .venv of it")
    for name, pin in pins().items():
        version, part = version_of(name), f"package {name}"
        install = f". examples/setup_env.sh in this shell, or {sys.executable} -m pip install {name}=={pin}"
        if version is None:
            yield failed(part, f"not installed; the pin is {pin}", remedy=install)
        elif version.split("+")[0] == pin:
            yield passed(part, version)
        elif name in EXACT:
            yield failed(part, f"{version} is installed, and private parts of {pin} are used", remedy=install)
        elif version.split(".")[:2] != pin.split(".")[:2]:
            yield skipped(part, f"{version} is installed, which was not tested: the pin is {pin}")
        else:
            yield passed(part, f"{version} (the pin is {pin})")


def probe() -> dict[str, Any]:
    """What torch finds, in a process of its own, which may die at an import. Raises OSError with its last line."""
    command = [sys.executable, __file__, "--probe"]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        raise OSError((done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"])[-1])
    return json.loads(lines[-1])


def found_by_torch() -> dict[str, Any]:
    import torch

    from megatron.bcd.runtime import packages

    has_cuda = torch.cuda.is_available()
    gpus = []
    for index in range(torch.cuda.device_count() if has_cuda else 0):
        about = torch.cuda.get_device_properties(index)
        gpus.append({"name": about.name, "memory_gib": about.total_memory / GIB})
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "has_cuda": has_cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_cuda else None,
        "gpus": gpus,
        "missing_for_compilation": packages.missing_for_compilation(),
        "cores": len(os.sched_getaffinity(0)),
        **{name: _optional(name) for name in OPTIONAL},
    }


def _optional(name: str) -> dict[str, Any]:
    """Whether a package that training can do without is usable."""
    try:
        for module in OPTIONAL[name]:
            importlib.import_module(module)
    except ModuleNotFoundError as error:
        return {"is_absent": (error.name or "").split(".")[0] == name, "error": str(error)}
    except Exception as error:  # a broken binary package may raise anything
        return {"is_absent": False, "error": f"{type(error).__name__}: {error}".splitlines()[0]}
    return {"version": str(getattr(importlib.import_module(name), "__version__", "unknown"))}


def check_torch(found: Mapping[str, Any]) -> Iterator[Check]:
    """torch, driver, NCCL, compiler, the GPUs, and the packages with faster kernels."""
    if found["has_cuda"]:
        yield passed("torch", f"{found['torch']}, CUDA {found['cuda']}", **found)
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        yield passed("driver", next(iter(driver.splitlines()), "unknown: nvidia-smi is missing"))
        yield passed("nccl", found["nccl"])
        if found["missing_for_compilation"]:
            remedy = "install gcc and python3-dev; a run without fusions says which flags switch them off"
            yield failed("compiler", f"torch.compile lacks {found['missing_for_compilation']}", remedy=remedy)
        else:
            yield passed("compiler", "C compiler and Python.h are there, or torch.compile is off")
    elif _output("nvidia-smi", "-L"):
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        remedy = "unset CUDA_VISIBLE_DEVICES" if hidden else "install the torch build of the driver's CUDA version"
        yield failed("torch", f"{found['torch']} finds none of the GPUs of nvidia-smi", remedy=remedy, **found)
    else:
        yield passed("torch", f"{found['torch']}, no GPU", **found)
    yield from check_gpus(found["gpus"], found["cores"])
    for name in OPTIONAL:
        part, about = name.replace("_", " "), found[name]
        if "version" in about:
            yield passed(part, about["version"]) if found["has_cuda"] else skipped(part, "used on a GPU only")
        elif about["is_absent"] or not found["has_cuda"]:
            yield skipped(part, "not installed: PyTorch's kernels are used")
        else:
            detail = f"installed and broken ({about['error']}): training goes on without it"
            yield failed(part, detail, remedy="reinstall it for this torch and CUDA, or uninstall it")


def check_gpus(gpus: list[Mapping[str, Any]], cores: int) -> Iterator[Check]:
    """Processor cores and GPUs."""
    if cores < len(gpus):
        yield failed("cores", f"{cores} for {len(gpus)} processes", remedy="give every process a core of its own")
    else:
        yield passed("cores", str(cores))
    if not gpus:
        yield skipped("gpus", "none: the self-test runs on the CPU under gloo")
        return
    kinds = {gpu["name"] for gpu in gpus}
    names = f"{len(gpus)} x {' and '.join(sorted(kinds))}, {min(gpu['memory_gib'] for gpu in gpus):.1f} GiB"
    figures = {"gpus": [dict(gpu) for gpu in gpus], "topology": _output("nvidia-smi", "topo", "-m")}
    if len(kinds) > 1:
        remedy = "choose equal ones with CUDA_VISIBLE_DEVICES: every step waits for the slowest"
        yield failed("gpus", names, remedy=remedy, **figures)
    else:
        yield passed("gpus", names, **figures)


def _output(*command: str) -> str:
    """Stdout; empty where the program is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def check_settings(environment: Mapping[str, str], *, shared_gib: float | None) -> Iterator[Check]:
    """Environment variables, and the size of /dev/shm, which NCCL uses between GPUs that do not reach each other."""
    harmful = [name for name in HARMFUL if environment.get(name, "0") not in ("", "0")]
    shown = {name: value for name, value in sorted(environment.items()) if name.startswith(SHOWN)}
    if harmful:
        detail = "; ".join(f"{name}={environment[name]}: {HARMFUL[name]}" for name in harmful)
        yield failed("settings", detail, remedy=f"unset {' '.join(harmful)}", environment=shown)
    else:
        listed = ", ".join(f"{name}={value}" for name, value in shown.items()) or "none of NCCL's, CUDA's or OpenMP's"
        yield passed("settings", listed, environment=shown)
    if shared_gib is not None and shared_gib < LEAST_GIB:
        remedy = "in a container: docker run --ipc=host, or --shm-size=8g"
        yield failed("shared memory", f"/dev/shm has {shared_gib:.2f} GiB", remedy=remedy)


def check_folder(path: Path) -> Check:
    """Whether files can be written where checkpoints and the self-test's files go."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return failed("folder", f"{path}: {error.strerror}", remedy="give one that can be written with --output")
    free = shutil.disk_usage(path).free / GIB
    if free < LEAST_GIB:
        return failed("folder", f"{path} has {free:.2f} GiB free", remedy="free some, or give another with --output")
    return passed("folder", f"{path}, {free:,.1f} GiB free")


# ---------------------------------------------------------------- the link, and this machine's row of the cluster table

NAME = "this-machine"
LEAST_OF_TABLE = 0.25
"""Share of the table's bandwidth that a link must have."""
LEAST_LINK = {"cuda": 1.0, "cpu": 0.01}
"""10^9 bytes per second, where the table has no such GPU."""
MOST_OF_PCIE = 20.0
"""10^9 bytes per second: rtx4090's and a800's in the table. A row's link may be NVLink, which the same GPU has in
its SXM form."""
# What is measured, by the device's type.
MATRIX_SIZE = {"cuda": 8192, "cpu": 1024}
MESSAGE_BYTES = {"cuda": 2**26, "cpu": 2**22}
TENSOR_BYTES = {"cuda": 2**30, "cpu": 2**26}


def measured(runner: Runner, *, calibrate: bool) -> dict[str, Any]:
    """What `measure` finds on all ranks. Raises CannotRun."""
    file = runner.folder / "rates.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command = [*torchrun, str(runner.num_ranks), __file__, "--measure", str(file)]
    command += ["--calibrate"] * calibrate
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


def row_of(found: Mapping[str, Any], *, gpu: str, known: Cluster | None, like: Cluster, num_ranks: int) -> Cluster:
    """The row of the measured rates. What is not measured is the known row's; else the price is 0, the network is the
    link, and shares are those of `like`."""
    link = min(found["links"]["by_pair"].values()) if "links" in found else found["memory_gb_per_s"]
    other = known or replace(like, network_gb_per_s=link, usd_per_gpu_hour=0.0)
    rates = {name: found[name] for name in ("fp32_tflops", "bf16_tflops", "memory_gb_per_s")}
    rounded = {name: float(f"{value:.4g}") for name, value in (rates | {"link_gb_per_s": link}).items()}
    source = f"rates measured by tools/check_machine.py --calibrate; others of {known.name if known else like.name}"
    memory = round(found["device_bytes"] / GIB, 2)
    return replace(other, name=NAME, gpu=gpu, memory_gib=memory, gpus_per_node=num_ranks, source=source, **rounded)


def write_table(table: Path, row: Cluster, target: Path) -> None:
    """The table with this machine's row at its end, in place of an older one. Raises OSError."""
    kept = [line for line in table.read_text(encoding="utf-8").splitlines() if not line.startswith(f"{NAME},")]
    columns = next(csv.reader(line for line in kept if not line.startswith("#")))
    text = io.StringIO()  # optional columns that the table does not have are left out
    csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="").writerow(asdict(row))
    target.write_text("\n".join([*kept, text.getvalue(), ""]), encoding="utf-8")


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


def measure(*, calibrate: bool) -> dict[str, Any]:
    """The links; to calibrate, the rates too. All ranks at once, as in training: on a CPU they share its memory's
    bandwidth."""
    import psutil
    import torch
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    size = dist.get_world_size()
    total = torch.cuda.mem_get_info()[1] if on_gpu else psutil.virtual_memory().total // size
    found: dict[str, Any] = {"device": device.type, "device_bytes": total}
    if size > 1:
        found["links"] = links(device)
    if calibrate:
        side = MATRIX_SIZE[device.type]
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            one, other = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
            found[f"{name}_tflops"] = 2 * side**3 / best_seconds(lambda a=one, b=other: a @ b, device) / 1e12
        source = torch.randn(TENSOR_BYTES[device.type] // 4, device=device)
        target = torch.empty_like(source)
        found["memory_gb_per_s"] = 2 * source.nbytes / best_seconds(lambda: target.copy_(source), device) / 1e9
    dist.barrier()
    dist.destroy_process_group()
    return found


# ---------------------------------------------------------------- command line


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Raises ValueError for a bad flag."""
    parser = Parser(prog=PROG, description=__doc__)
    add = parser.add_argument
    add("--only", nargs="+", metavar="PART", help='parts of the self-test; patterns such as "layout*" (default: all)')
    add("--no-self-test", action="store_true", help="only what is installed and found, and what --calibrate measures")
    add("--num-ranks", type=int, choices=(1, 2, 4, 8), help="processes of the self-test (default: the most that the "
        "GPUs allow, on a CPU at most 2)")  # fmt: skip
    add("--calibrate", action="store_true", help="measure rates, and write OUTPUT/clusters.csv")
    add("--clusters", metavar="FILE", default=str(ROOT / "examples" / "clusters.csv"), help="the cluster table that"
        " --calibrate adds a row to (default: examples/clusters.csv)")  # fmt: skip
    add("--least-link-gb-per-s", type=float, metavar="RATE", help="slower links fail (default: a quarter of the"
        " cluster table's for this GPU)")  # fmt: skip
    add("--output", metavar="FOLDER", help="logs, checkpoints and tables; kept (default: a folder that is removed if"
        " nothing failed)")  # fmt: skip
    add_json(parser)
    # processes that this tool starts of itself
    add("--probe", action="store_true", help=argparse.SUPPRESS)
    add("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    check_can_write(arguments.json, flag="--json")
    return arguments


def checks(arguments: argparse.Namespace, folder: Path) -> Iterator[Check]:
    """Every part, as soon as it is known."""
    found = []
    for check in _found(folder, probed := {}):
        found.append(check)
        yield check
    missing = [check.part for check in found if check.verdict == FAIL
               and (check.part in NEEDED or check.part.startswith("package "))]  # fmt: skip
    if missing or arguments.no_self_test and not arguments.calibrate:
        yield skipped("self-test", f"without {', '.join(missing)} no run starts" if missing else "--no-self-test")
    else:
        yield from self_test(arguments, folder, probed)


def _found(folder: Path, probed: dict[str, Any]) -> Iterator[Check]:
    """What is installed and found; `probed` gets what torch found."""
    yield from check_packages()
    try:
        probed |= probe()
        yield from check_torch(probed)
    except OSError as error:
        remedy = "see package torch; on a GPU machine its CUDA version must be one that the driver supports"
        yield failed("torch", f"cannot be imported: {error}", remedy=remedy)
    shared_gib = shutil.disk_usage("/dev/shm").total / GIB if len(probed.get("gpus", ())) > 1 else None
    yield from check_settings(os.environ, shared_gib=shared_gib)
    yield check_folder(folder)


def num_ranks_of(wanted: int | None, *, num_gpus: int, cores: int) -> int:
    """A power of two, as many as there are GPUs, at most 8; on a CPU at most 2. Raises ValueError for too many."""
    if wanted is not None:
        if num_gpus and wanted > num_gpus:
            raise ValueError(f"--num-ranks {wanted}: there are {num_gpus} GPUs")
        return wanted
    most = num_gpus or min(2, cores)
    return max(number for number in (1, 2, 4, 8) if number <= most)


def self_test(arguments: argparse.Namespace, folder: Path, probed: dict[str, Any]) -> Iterator[Check]:
    """All runs."""
    gpus, table = probed["gpus"], Path(arguments.clusters)
    num_ranks = num_ranks_of(arguments.num_ranks, num_gpus=len(gpus), cores=probed["cores"])
    runner = Runner(folder=folder, num_ranks=num_ranks, on_gpu=bool(gpus), flags=FLAGS)
    if gpus and num_ranks < len(gpus):
        yield skipped("other gpus", f"the self-test uses {num_ranks} of {len(gpus)}: choose with CUDA_VISIBLE_DEVICES")

    def only(part: str) -> bool:
        patterns = ["link"] if arguments.no_self_test else arguments.only or ["*"]
        return any(fnmatch.fnmatchcase(part, pattern) for pattern in patterns)

    # Transformer Engine multiplies fp32 matrices in TF32
    fp32 = "tf32" if gpus and "version" in probed["transformer_engine"] else "fp32"
    test = SelfTest(runner=runner, fp32=fp32, only=only)
    parts = [*test.parts(), "link"]
    for pattern in arguments.only or ():
        if not fnmatch.filter(parts, pattern):
            raise ValueError(f"--only {pattern}: no such part; there are {', '.join(parts)}")
    clusters = read_clusters(arguments.clusters)
    if any(only(part) for part in parts if part != "link"):
        yield from test.checks()
    known = known_gpu(gpus[0]["name"], clusters) if gpus else None
    try:
        figures = measured(runner, calibrate=arguments.calibrate) if only("link") or arguments.calibrate else {}
    except CannotRun as error:
        yield failed("link", str(error), remedy=f"see {folder / 'rates.log'}")
        return
    if only("link"):
        yield check_links(figures, known, least=arguments.least_link_gb_per_s)
    if arguments.calibrate:
        gpu, target = gpus[0]["name"] if gpus else cpu_model().replace(",", " "), folder / "clusters.csv"
        row = row_of(figures, gpu=gpu, known=known, like=next(iter(clusters.values())), num_ranks=num_ranks)
        write_table(table, row, target)
        plan = f"python tools/plan.py --clusters {shlex.quote(str(target))} --gpu {NAME} --num-gpus {num_ranks}"
        detail = f"{row.fp32_tflops:g} TFLOP/s fp32, {row.bf16_tflops:g} bf16, memory {row.memory_gb_per_s:g} GB/s"
        yield passed("rates", f"{detail}; {plan} --model NAME plans for this machine", **figures)


def show(found: Sequence[Check]) -> None:
    """A line for every part, and one below it for its remedy."""
    width = max(len(check.part) for check in found)
    for check in found:
        print(f"{check.verdict}  {check.part:<{width}}  {check.detail}")
        if check.remedy:
            print(f"      {'':<{width}}  remedy: {check.remedy}")


@command(PROG)
def main(argv: Sequence[str]) -> int:
    arguments = parse_arguments(argv)
    if arguments.probe:
        print(json.dumps(found_by_torch()))
        return 0
    if arguments.measure:
        rates = measure(calibrate=arguments.calibrate)
        if os.environ["RANK"] == "0":
            arguments.measure.write_text(json.dumps(rates), encoding="utf-8")
        return 0
    # runs start in the repository, wherever this was started
    folder = Path(arguments.output or tempfile.mkdtemp(prefix="check_machine_")).resolve()
    found = []
    for check in checks(arguments, folder):
        found.append(check)
        print(f"{check.verdict} {check.part}", file=sys.stderr, flush=True)
    code = int(any(check.verdict == FAIL for check in found))
    figures = {"command": shlex.join(["python", PROG, *argv]), "checks": [asdict(check) for check in found]}
    tell(arguments.json, figures, lambda: show(found))
    if not arguments.output and not code and not arguments.calibrate:
        shutil.rmtree(folder, ignore_errors=True)
    return code


if __name__ == "__main__":
    leave_with(main)
