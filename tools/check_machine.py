"""Check this machine: what is installed and detected, then a self-test of a few minutes on all its GPUs.

    python tools/check_machine.py
    python tools/check_machine.py --json out/machine.json --calibrate
    python tools/check_machine.py --only "one block*"

Prints one line per part: PASS, FAIL with the remedy, or SKIP with the reason. The self-test trains models of 0.2 M
parameters with the training script under torchrun and compares them with one process of this machine: with one block,
in every layout, killed and resumed, with prefix cache, and with the optimizer on the host. Without a GPU it runs on the
CPU under gloo. --calibrate measures rates and writes a cluster table with a row for this machine, for tools/plan.py.
The exit code is 0 if nothing failed, 1 if something did, 2 for bad flags. See docs/gpu.md.
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

from _parser import Parser, add_json, check_writable, command, cpu_model, run_main, write_figures
from _processes import ROOT, CannotRun, run
from _self_test import FAIL, FLAGS, Check, Runner, SelfTest, failed, passed, skipped

from megatron.bcd.planner.tables import GIB, Cluster, read_table

if TYPE_CHECKING:
    import torch

PROG = "tools/check_machine.py"
NEEDED = ("python", "torch", "compiler", "folder")
"""Parts that every run needs, in addition to all packages."""
TESTS_ONLY = "# tests/run.sh"
"""The line of requirements.txt after which only tests need the packages."""
EXACT = ("megatron-core",)
"""Packages whose private parts are patched, which holds for the pinned version only."""
OPTIONAL = {
    "transformer_engine": ("transformer_engine.pytorch",),
    "apex": ("apex.optimizers", "apex.normalization", "amp_C"),
}
"""Modules that each optional package must provide (megatron.bcd.runtime.packages)."""
SHOWN = ("CUDA_", "CUBLAS_", "PYTORCH_", "OMP_", "GLOO_", "NCCL_", "NVTE_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_")
"""Prefixes of the variables that change a run."""
HARMFUL = {
    "CUDA_LAUNCH_BLOCKING": "the CPU waits for every kernel",
    "NVIDIA_TF32_OVERRIDE": "overrides the precision of fp32 products",
    "NVTE_DEBUG": "Transformer Engine computes slowly",
}
"""Debugging variables that must be unset or 0."""
MIN_FREE_GIB = 1.0
"""Required free space of the folder, and size of /dev/shm."""


def pins(path: Path = ROOT / "requirements.txt") -> dict[str, str]:
    """Return the pinned version of each package that the program needs to run."""
    text, result = path.read_text(encoding="utf-8").split(TESTS_ONLY)[0], {}
    for line in text.splitlines():
        name, is_pin, rest = line.split("#")[0].partition("==")
        pin, _, marker = rest.partition(";")  # python_version < "3.12" or python_version >= "3.12"
        if is_pin and (not marker or ("<" in marker) == (sys.version_info < (3, 12))):
            result[name] = pin.strip()
    return result


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_packages(version_of: Callable[[str], str | None] = installed_version) -> Iterator[Check]:
    """Check Python, and each pin. Another version passes, except for patched packages."""
    python = sys.version.split()[0]
    if (3, 11) <= sys.version_info[:2] <= (3, 14):
        yield passed("python", f"{python}, {sys.executable}")
    else:
        yield failed("python", python, remedy="install Python 3.11 to 3.14; examples/setup_env.sh makes .venv of it")
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
    """Return what torch detects. Runs in a subprocess, because importing torch may crash. Raises OSError."""
    command = [sys.executable, __file__, "--probe"]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        raise OSError((done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"])[-1])
    return json.loads(lines[-1])


def describe_torch() -> dict[str, Any]:
    """Collect versions, GPUs and optional packages."""
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
    """Return the version of an optional package, or why it cannot be used."""
    try:
        for module in OPTIONAL[name]:
            importlib.import_module(module)
    except ModuleNotFoundError as error:
        return {"is_absent": (error.name or "").split(".")[0] == name, "error": str(error)}
    except Exception as error:  # a broken binary package may raise anything
        return {"is_absent": False, "error": f"{type(error).__name__}: {error}".splitlines()[0]}
    return {"version": str(getattr(importlib.import_module(name), "__version__", "unknown"))}


def check_torch(probed: Mapping[str, Any]) -> Iterator[Check]:
    """Check torch, driver, NCCL, compiler, the GPUs, and the packages with faster kernels."""
    if probed["has_cuda"]:
        yield passed("torch", f"{probed['torch']}, CUDA {probed['cuda']}", **probed)
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        yield passed("driver", next(iter(driver.splitlines()), "unknown: nvidia-smi is missing"))
        yield passed("nccl", probed["nccl"])
        if probed["missing_for_compilation"]:
            remedy = "install gcc and python3-dev; a run without fusions says which flags switch them off"
            yield failed("compiler", f"torch.compile needs {probed['missing_for_compilation']}", remedy=remedy)
        else:
            yield passed("compiler", "C compiler and Python.h are there, or torch.compile is off")
    elif _output("nvidia-smi", "-L"):
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        remedy = "unset CUDA_VISIBLE_DEVICES" if hidden else "install the torch build of the driver's CUDA version"
        yield failed("torch", f"{probed['torch']} finds none of the GPUs of nvidia-smi", remedy=remedy, **probed)
    else:
        yield passed("torch", f"{probed['torch']}, no GPU", **probed)
    yield from check_gpus(probed["gpus"], probed["cores"])
    for name in OPTIONAL:
        part, about = name.replace("_", " "), probed[name]
        if "version" in about:
            yield passed(part, about["version"]) if probed["has_cuda"] else skipped(part, "used on a GPU only")
        elif about["is_absent"] or not probed["has_cuda"]:
            yield skipped(part, "not installed: PyTorch's kernels are used")
        else:
            detail = f"installed and broken ({about['error']}): training goes on without it"
            yield failed(part, detail, remedy="reinstall it for this torch and CUDA, or uninstall it")


def check_gpus(gpus: list[Mapping[str, Any]], cores: int) -> Iterator[Check]:
    """Check the number of CPU cores, and that all GPUs are the same model."""
    if cores < len(gpus):
        yield failed("cores", f"{cores} for {len(gpus)} processes", remedy="provide one core per process")
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
    """Return the command's stdout; empty if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def check_settings(environment: Mapping[str, str], *, shared_gib: float | None) -> Iterator[Check]:
    """Check environment variables, and the size of /dev/shm, which NCCL uses between GPUs without peer access."""
    harmful = [name for name in HARMFUL if environment.get(name, "0") not in ("", "0")]
    shown = {name: value for name, value in sorted(environment.items()) if name.startswith(SHOWN)}
    if harmful:
        detail = "; ".join(f"{name}={environment[name]}: {HARMFUL[name]}" for name in harmful)
        yield failed("settings", detail, remedy=f"unset {' '.join(harmful)}", environment=shown)
    else:
        listed = ", ".join(f"{name}={value}" for name, value in shown.items()) or "none of NCCL's, CUDA's or OpenMP's"
        yield passed("settings", listed, environment=shown)
    if shared_gib is not None and shared_gib < MIN_FREE_GIB:
        remedy = "in a container: docker run --ipc=host, or --shm-size=8g"
        yield failed("shared memory", f"/dev/shm has {shared_gib:.2f} GiB", remedy=remedy)


def check_folder(path: Path) -> Check:
    """Check that files can be written where checkpoints and the self-test's files go."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return failed("folder", f"{path}: {error.strerror}", remedy="give one that can be written with --output")
    free = shutil.disk_usage(path).free / GIB
    if free < MIN_FREE_GIB:
        return failed("folder", f"{path} has {free:.2f} GiB free", remedy="free some, or give another with --output")
    return passed("folder", f"{path}, {free:,.1f} GiB free")


NAME = "this-machine"
MIN_SHARE_OF_TABLE = 0.25
"""The smallest acceptable share of the cluster table's bandwidth."""
MIN_LINK = {"cuda": 1.0, "cpu": 0.01}
"""GB/s (10^9 bytes per second), for GPUs that the table does not list."""
PCIE_LINK = 20.0
"""GB/s of a card in a PCIe slot, as for rtx4090 and a800. A row's link may be the NVLink of the same GPU's SXM form."""
# Sizes of the measurements, by device type.
MATRIX_SIZE = {"cuda": 8192, "cpu": 1024}
MESSAGE_BYTES = {"cuda": 2**26, "cpu": 2**22}
TENSOR_BYTES = {"cuda": 2**30, "cpu": 2**26}


def run_measurement(runner: Runner, *, calibrate: bool) -> dict[str, Any]:
    """Run `measure` on all ranks. Raises CannotRun."""
    file = runner.folder / "rates.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command = [*torchrun, str(runner.num_ranks), __file__, "--measure", str(file)]
    command += ["--calibrate"] * calibrate
    run(command, runner.folder / "rates.log", seconds=runner.seconds)
    return json.loads(file.read_text(encoding="utf-8"))


def known_gpu(name: str, clusters: Mapping[str, Cluster]) -> Cluster | None:
    """Return the table's row of a GPU, given the name that CUDA reports.

    Compares model and memory size, such as A100 and 80GB, and ignores the form, except that PCIe limits the link.
    """

    def words(text: str) -> set[str]:  # NVIDIA A100-SXM4-80GB: a100, 80gb
        return set(re.findall(r"[a-z0-9]+", re.sub(r"nvidia|geforce|pcie|sxm\d*|hbm\w*", "", text.lower())))

    rows = [row for row in clusters.values() if row.name != NAME and words(row.gpu) == words(name)]
    if len(rows) != 1:
        return None
    on_pcie = "pcie" in name.lower()
    return replace(rows[0], link_gb_per_s=min(rows[0].link_gb_per_s, PCIE_LINK)) if on_pcie else rows[0]


def check_links(rates: Mapping[str, Any], known: Cluster | None) -> Check:
    """Check the slowest link between neighbouring ranks against the table's rate, or MIN_LINK."""
    if "links" not in rates:
        return skipped("link", "one rank")
    pair, rate = min(rates["links"]["by_pair"].items(), key=lambda item: item[1])
    minimum = MIN_SHARE_OF_TABLE * known.link_gb_per_s if known else MIN_LINK[rates["device"]]
    detail = f"ranks {pair}: {rate:.2f} GB/s, all-reduce {rates['links']['all_reduce']:.2f} GB/s"
    if rate < minimum:
        remedy = "see nvidia-smi topo -m; NCCL_DEBUG=INFO shows the path that NCCL uses; NCCL_P2P_DISABLE must be unset"
        return failed("link", f"{detail}, expected {minimum:.2f}", remedy=remedy, **rates["links"])
    return passed("link", detail, **rates["links"])


def cluster_row(rates: Mapping[str, Any], *, gpu: str, known: Cluster | None, like: Cluster, num_ranks: int) -> Cluster:
    """Return a cluster row with the measured rates.

    Other values come from the `known` row. Without one price and FP8 rate are 0, the network is as fast as the link,
    and the shares are those of `like`.
    """
    link = min(rates["links"]["by_pair"].values()) if "links" in rates else rates["memory_gb_per_s"]
    other = known or replace(like, network_gb_per_s=link, usd_per_gpu_hour=0.0, fp8_tflops=0.0)
    values = {name: rates[name] for name in ("fp32_tflops", "bf16_tflops", "memory_gb_per_s")}
    rounded = {name: float(f"{value:.4g}") for name, value in (values | {"link_gb_per_s": link}).items()}
    source = f"rates measured by tools/check_machine.py --calibrate; others from {known.name if known else like.name}"
    memory = round(rates["device_bytes"] / GIB, 2)
    return replace(other, name=NAME, gpu=gpu, memory_gib=memory, gpus_per_node=num_ranks, source=source, **rounded)


def write_table(table: Path, row: Cluster, target: Path) -> None:
    """Write the table with this machine's row at its end; an older row is replaced. Raises OSError."""
    lines = [line for line in table.read_text(encoding="utf-8").splitlines() if not line.startswith(f"{NAME},")]
    columns = next(csv.reader(line for line in lines if not line.startswith("#")))
    text = io.StringIO()  # extrasaction: drop optional columns that this table does not have
    csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="").writerow(asdict(row))
    target.write_text("\n".join([*lines, text.getvalue(), ""]), encoding="utf-8")


def best_seconds(work: Callable[[], Any], device: torch.device, *, rounds: int = 5, repeats: int = 3) -> float:
    """Return the shortest time of one call over some rounds, as other programs can only make it longer."""
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
    """Measure one-way GB/s between neighbouring ranks by pair, and of an all-reduce over all ranks."""
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
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, by_pair)
    pairs = sorted({pair for rates in gathered for pair in rates})
    return {
        "by_pair": {pair: min(rates[pair] for rates in gathered if pair in rates) for pair in pairs},
        "all_reduce": 2 * (size - 1) / size * message.nbytes / seconds / 1e9,
    }


def measure(*, calibrate: bool) -> dict[str, Any]:
    """Measure the links and, with `calibrate`, the rates. All ranks measure at once, because ranks on a CPU share its
    memory bandwidth."""
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
    rates: dict[str, Any] = {"device": device.type, "device_bytes": total}
    if size > 1:
        rates["links"] = links(device)
    if calibrate:
        side = MATRIX_SIZE[device.type]
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
            rates[f"{name}_tflops"] = 2 * side**3 / best_seconds(lambda a=left, b=right: a @ b, device) / 1e12
        source = torch.randn(TENSOR_BYTES[device.type] // 4, device=device)
        target = torch.empty_like(source)
        rates["memory_gb_per_s"] = 2 * source.nbytes / best_seconds(lambda: target.copy_(source), device) / 1e9
    dist.barrier()
    dist.destroy_process_group()
    return rates


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return the parsed flags. Raises ValueError for a bad flag."""
    parser = Parser(prog=PROG, description=__doc__)
    add = parser.add_argument
    add("--only", nargs="+", metavar="PART", help='parts of the self-test; patterns such as "layout*" (default: all)')
    add("--no-self-test", action="store_true", help="check only the installation, and what --calibrate measures")
    add("--num-ranks", type=int, choices=(1, 2, 4, 8), help="processes of the self-test (default: the most that the "
        "GPUs allow, on a CPU at most 2)")  # fmt: skip
    add("--calibrate", action="store_true", help="measure rates, and write OUTPUT/clusters.csv")
    add("--clusters", metavar="FILE", default=str(ROOT / "examples" / "clusters.csv"), help="the cluster table that"
        " --calibrate adds a row to (default: examples/clusters.csv)")  # fmt: skip
    add("--output", metavar="FOLDER", help="logs, checkpoints and tables; kept (default: a folder that is removed if"
        " nothing failed)")  # fmt: skip
    add_json(parser)
    # for the subprocesses that this tool starts
    add("--probe", action="store_true", help=argparse.SUPPRESS)
    add("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    check_writable(arguments.json, flag="--json")
    return arguments


def checks(arguments: argparse.Namespace, folder: Path) -> Iterator[Check]:
    """Yield each part's result when it is known."""
    missing: list[str] = []
    for check in _check_installation(folder, probed := {}):
        if check.verdict == FAIL and (check.part in NEEDED or check.part.startswith("package ")):
            missing.append(check.part)
        yield check
    if missing or arguments.no_self_test and not arguments.calibrate:
        yield skipped("self-test", f"no run starts without {', '.join(missing)}" if missing else "--no-self-test")
    else:
        yield from self_test(arguments, folder, probed)


def _check_installation(folder: Path, probed: dict[str, Any]) -> Iterator[Check]:
    """Check packages, torch, settings and the folder; store in `probed` what torch detects."""
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


def choose_num_ranks(wanted: int | None, *, num_gpus: int, cores: int) -> int:
    """Return the number of ranks: a power of two, at most 8 and the number of GPUs (CPU: at most 2). Raises ValueError
    if --num-ranks exceeds the number of GPUs."""
    if wanted is not None:
        if num_gpus and wanted > num_gpus:
            raise ValueError(f"--num-ranks {wanted}: there are {num_gpus} GPUs")
        return wanted
    most = num_gpus or min(2, cores)
    return max(number for number in (1, 2, 4, 8) if number <= most)


def self_test(arguments: argparse.Namespace, folder: Path, probed: dict[str, Any]) -> Iterator[Check]:
    """Run the self-test, the link measurement and the calibration."""
    gpus, table = probed["gpus"], Path(arguments.clusters)
    num_ranks = choose_num_ranks(arguments.num_ranks, num_gpus=len(gpus), cores=probed["cores"])
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
            raise ValueError(f"--only {pattern}: no such part. Give some of {', '.join(parts)}.")
    clusters = read_table(arguments.clusters, Cluster)
    if any(only(part) for part in parts if part != "link"):
        yield from test.checks()
    known = known_gpu(gpus[0]["name"], clusters) if gpus else None
    try:
        figures = run_measurement(runner, calibrate=arguments.calibrate) if only("link") or arguments.calibrate else {}
    except CannotRun as error:
        yield failed("link", str(error), remedy=f"see {folder / 'rates.log'}")
        return
    if only("link"):
        yield check_links(figures, known)
    if arguments.calibrate:
        gpu, target = gpus[0]["name"] if gpus else cpu_model().replace(",", " "), folder / "clusters.csv"
        row = cluster_row(figures, gpu=gpu, known=known, like=next(iter(clusters.values())), num_ranks=num_ranks)
        write_table(table, row, target)
        plan = f"python tools/plan.py --clusters {shlex.quote(str(target))} --gpu {NAME} --num-gpus {num_ranks}"
        detail = f"{row.fp32_tflops:g} TFLOP/s fp32, {row.bf16_tflops:g} bf16, memory {row.memory_gb_per_s:g} GB/s"
        yield passed("rates", f"{detail}; {plan} --model NAME plans for this machine", **figures)


def show(results: Sequence[Check]) -> None:
    """Print a line for every part, and its remedy below it."""
    width = max(len(check.part) for check in results)
    for check in results:
        print(f"{check.verdict}  {check.part:<{width}}  {check.detail}")
        if check.remedy:
            print(f"      {'':<{width}}  remedy: {check.remedy}")


@command(PROG)
def main(argv: Sequence[str]) -> int:
    arguments = parse_arguments(argv)
    if arguments.probe:
        print(json.dumps(describe_torch()))
        return 0
    if arguments.measure:
        rates = measure(calibrate=arguments.calibrate)
        if os.environ["RANK"] == "0":
            arguments.measure.write_text(json.dumps(rates), encoding="utf-8")
        return 0
    # resolve it now, because runs start in the repository
    folder = Path(arguments.output or tempfile.mkdtemp(prefix="check_machine_")).resolve()
    results = []
    for check in checks(arguments, folder):
        results.append(check)
        print(f"{check.verdict} {check.part}", file=sys.stderr, flush=True)
    code = int(any(check.verdict == FAIL for check in results))
    figures = {"command": shlex.join(["python", PROG, *argv]), "checks": [asdict(check) for check in results]}
    write_figures(arguments.json, figures, lambda: show(results))
    if not arguments.output and not code and not arguments.calibrate:
        shutil.rmtree(folder, ignore_errors=True)
    return code


if __name__ == "__main__":
    run_main(main)
