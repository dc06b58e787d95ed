"""What tools/check_machine.py reads off a machine before it trains: packages, GPUs, links, settings, folders."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from _check_result import Check, failed, passed, skipped

ROOT = Path(__file__).resolve().parents[1]
TESTS_ONLY = "# tests/run.sh"
"""The line of requirements.txt from which on running can do without."""
EXACT = ("megatron-core",)
"""Packages whose private parts are used: patches are for this version only."""
SETTINGS = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_WORKSPACE_CONFIG", "PYTORCH_CUDA_ALLOC_CONF",
            "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")  # fmt: skip
SHOWN_PREFIXES = ("NCCL_", "NVTE_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_")
HARMFUL = {
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
    "NVIDIA_TF32_OVERRIDE": "fp32 products get another precision than the run chose",
    "NVTE_DEBUG": "Transformer Engine computes slowly",
}
"""Settings for debugging, when they are not 0."""
LEAST_FREE_GIB = 1.0
LEAST_SHARED_GIB = 1.0
LEAST_FILES = 1024


def pins(path: Path) -> dict[str, str]:
    """Version by package of all that running needs, from requirements.txt."""
    lines = path.read_text(encoding="utf-8").split(TESTS_ONLY)[0].splitlines()
    return dict(line.split("==") for line in (line.split("#")[0].strip() for line in lines) if line)


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_packages(
    path: Path = ROOT / "requirements.txt", *, version_of: Callable[[str], str | None] = installed_version
) -> Iterator[Check]:
    """Python, and one check per pin. A newer or older version passes, except of what is patched."""
    python = sys.version.split()[0]
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        yield passed("python", f"{python}, {sys.executable}")
    else:
        yield failed("python", python, remedy="install Python 3.11 to 3.13; examples/setup_env.sh makes .venv of it")
    for name, pin in pins(path).items():
        version, part = version_of(name), f"package {name}"
        install = f"{sys.executable} -m pip install {name}=={pin}"
        if version is None:
            yield failed(part, f"not installed; the pin is {pin}", remedy=install)
        elif version.split("+")[0] == pin:
            yield passed(part, version)
        elif name in EXACT:
            yield failed(part, f"{version} is installed, and private parts of {pin} are used", remedy=install)
        elif _minor(version) != _minor(pin):
            why = "its private parts are used, read docs/gpu.md" if name == "torch" else "not tested"
            yield skipped(part, f"{version} is installed, the pin is {pin}: {why}")
        else:
            yield passed(part, f"{version} (the pin is {pin})")


def _minor(version: str) -> str:
    found = re.match(r"\d+\.\d+", version)
    return found[0] if found else version


def probe(*, seconds: float = 300) -> dict[str, Any]:
    """What torch finds, read in a process of its own. Raises OSError with the last line of what went wrong."""
    try:
        done = subprocess.run(
            [sys.executable, str(ROOT / "tools" / "_check_probe.py")], capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"no answer within {seconds:.0f} s") from None
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        said = (done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"])[-1]
        raise OSError(said)
    return json.loads(lines[-1])


def check_torch(found: Mapping[str, Any]) -> Iterator[Check]:
    """torch, driver and NCCL, the GPUs, and the packages with faster kernels."""
    has_driver = shutil.which("nvidia-smi") is not None
    if found["has_cuda"]:
        yield passed("torch", f"{found['torch']}, CUDA {found['cuda']}", **found)
        yield passed("driver", _query("driver_version") or "unknown: nvidia-smi is missing")
        yield passed("nccl", found["nccl"])
        yield check_compiler(found["missing_for_compilation"])
    elif has_driver and _query("name"):
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        remedy = "unset CUDA_VISIBLE_DEVICES" if hidden else "install the torch build of the driver's CUDA version"
        yield failed("torch", f"{found['torch']} finds none of the GPUs of nvidia-smi", remedy=remedy, **found)
    else:
        yield passed("torch", f"{found['torch']}, no GPU", **found)
        yield skipped("driver", "no GPU")
        yield skipped("nccl", "no GPU")
    yield from check_gpus(found["gpus"], found["cores"])
    for name in ("transformer_engine", "apex"):
        yield _check_optional(name.replace("_", " "), found[name], has_cuda=found["has_cuda"])


def _check_optional(part: str, found: Mapping[str, Any], *, has_cuda: bool) -> Check:
    if "version" in found:
        return passed(part, found["version"]) if has_cuda else skipped(part, "used on a GPU only")
    if found["is_absent"] or not has_cuda:
        return skipped(part, "not installed: PyTorch's kernels are used")
    return failed(
        part,
        f"installed and broken ({found['error']}): training goes on without it",
        remedy="reinstall it for this torch and CUDA, or uninstall it",
    )


def check_compiler(missing: str) -> Check:
    """Of Megatron Core's fused functions."""
    if missing:
        remedy = "install gcc and python3-dev; a run without fusions says which flags switch them off"
        return failed("compiler", f"torch.compile lacks {missing}", remedy=remedy)
    return passed("compiler", "C compiler and Python.h are there, or torch.compile is off")


def check_gpus(gpus: list[Mapping[str, Any]], cores: int) -> Iterator[Check]:
    """GPUs, links between them, and processor cores."""
    processes = max(1, len(gpus))
    if cores < processes:
        yield failed("cores", f"{cores} for {processes} processes", remedy="give every process a core of its own")
    else:
        yield passed("cores", f"{cores} for {processes} process(es) with a GPU" if gpus else str(cores))
    if not gpus:
        yield skipped("gpus", "none: the self-test runs on the CPU under gloo")
        return
    kinds = {gpu["name"] for gpu in gpus}
    names = f"{len(gpus)} x {' and '.join(sorted(kinds))}, {min(gpu['memory_gib'] for gpu in gpus):.1f} GiB"
    if len(kinds) > 1:
        remedy = "choose equal ones with CUDA_VISIBLE_DEVICES: every step waits for the slowest"
        yield failed("gpus", names, remedy=remedy)
    else:
        yield passed("gpus", names, gpus=[dict(gpu) for gpu in gpus])
    if len(gpus) > 1:
        direct = sum(len(gpu["peers"]) for gpu in gpus) // 2
        pairs = len(gpus) * (len(gpus) - 1) // 2
        topology = _output(["nvidia-smi", "topo", "-m"])
        yield passed("links", f"{direct} of {pairs} pairs of GPUs reach each other directly", topology=topology)


def _query(field: str) -> str:
    return next(iter(_output(["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]).splitlines()), "")


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def check_settings(environment: Mapping[str, str], *, num_gpus: int) -> Iterator[Check]:
    """Environment variables, limits and shared memory."""
    harmful = [name for name in HARMFUL if environment.get(name, "0") not in ("", "0")]
    shown = {
        name: value for name, value in sorted(environment.items())
        if name in SETTINGS or name.startswith(SHOWN_PREFIXES)
    }  # fmt: skip
    listed = ", ".join(f"{name}={value}" for name, value in shown.items()) or "none of NCCL's, CUDA's or OpenMP's"
    if harmful:
        detail = "; ".join(f"{name}={environment[name]}: {HARMFUL[name]}" for name in harmful)
        yield failed("settings", detail, remedy=f"unset {' '.join(harmful)}", environment=shown)
    else:
        yield passed("settings", listed, environment=shown)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= files < LEAST_FILES:
        yield failed("open files", f"at most {files}", remedy=f"ulimit -n {LEAST_FILES} or more")
    else:
        yield passed("open files", f"at most {files}")
    if num_gpus > 1:
        yield check_shared_memory(shutil.disk_usage("/dev/shm").total / 2**30)


def check_shared_memory(gib: float) -> Check:
    """Of /dev/shm, which NCCL uses between GPUs that do not reach each other."""
    if gib < LEAST_SHARED_GIB:
        remedy = "in a container: docker run --ipc=host, or --shm-size=8g"
        return failed("shared memory", f"/dev/shm has {gib:.2f} GiB", remedy=remedy)
    return passed("shared memory", f"/dev/shm has {gib:.1f} GiB")


def check_folder(path: Path) -> Check:
    """Whether files can be written where checkpoints and the self-test's files go."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path) as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return failed("folder", f"{path}: {error.strerror}", remedy="give one that can be written with --output")
    free = shutil.disk_usage(path).free / 2**30
    if free < LEAST_FREE_GIB:
        return failed("folder", f"{path} has {free:.2f} GiB free", remedy="free some, or give another with --output")
    return passed("folder", f"{path}, {free:,.1f} GiB free")
