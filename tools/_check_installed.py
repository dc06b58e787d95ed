"""What tools/check_machine.py reads off a machine before it trains: packages, GPUs, settings, folders.

As a program it prints what torch finds, as JSON: a process of its own, which may die at an import.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
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
        elif version.split(".")[:2] != pin.split(".")[:2]:
            yield skipped(part, f"{version} is installed, which was not tested: the pin is {pin}")
        else:
            yield passed(part, f"{version} (the pin is {pin})")


# ---------------------------------------------------------------- what torch finds


def probe(*, seconds: float = 300) -> dict[str, Any]:
    """What torch finds. Raises OSError with the last line of what went wrong."""
    command = [sys.executable, __file__]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise OSError(f"no answer within {seconds:.0f} s") from None
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
        gpus.append({"name": about.name, "memory_gib": about.total_memory / 2**30})
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
    """torch, driver, NCCL, the GPUs, and the packages with faster kernels."""
    if found["has_cuda"]:
        yield passed("torch", f"{found['torch']}, CUDA {found['cuda']}", **found)
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        yield passed("driver", next(iter(driver.splitlines()), "unknown: nvidia-smi is missing"))
        yield passed("nccl", found["nccl"])
        yield check_compiler(found["missing_for_compilation"])
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


def check_compiler(missing: str) -> Check:
    """Of Megatron Core's fused functions."""
    if missing:
        remedy = "install gcc and python3-dev; a run without fusions says which flags switch them off"
        return failed("compiler", f"torch.compile lacks {missing}", remedy=remedy)
    return passed("compiler", "C compiler and Python.h are there, or torch.compile is off")


def check_gpus(gpus: list[Mapping[str, Any]], cores: int) -> Iterator[Check]:
    """GPUs and processor cores."""
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


# ---------------------------------------------------------------- settings and folders


def check_settings(environment: Mapping[str, str], *, num_gpus: int) -> Iterator[Check]:
    """Environment variables, limits and shared memory."""
    harmful = [name for name in HARMFUL if environment.get(name, "0") not in ("", "0")]
    shown = {name: value for name, value in sorted(environment.items()) if name.startswith(SHOWN)}
    if harmful:
        detail = "; ".join(f"{name}={environment[name]}: {HARMFUL[name]}" for name in harmful)
        yield failed("settings", detail, remedy=f"unset {' '.join(harmful)}", environment=shown)
    else:
        listed = ", ".join(f"{name}={value}" for name, value in shown.items()) or "none of NCCL's, CUDA's or OpenMP's"
        yield passed("settings", listed, environment=shown)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= files < LEAST_FILES:
        yield failed("open files", f"at most {files}", remedy=f"ulimit -n {LEAST_FILES} or more")
    if num_gpus > 1:
        yield check_shared_memory(shutil.disk_usage("/dev/shm").total / 2**30)


def check_shared_memory(gib: float) -> Check:
    """Of /dev/shm, which NCCL uses between GPUs that do not reach each other."""
    if gib < LEAST_GIB:
        remedy = "in a container: docker run --ipc=host, or --shm-size=8g"
        return failed("shared memory", f"/dev/shm has {gib:.2f} GiB", remedy=remedy)
    return passed("shared memory", f"/dev/shm has {gib:.1f} GiB")


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
    free = shutil.disk_usage(path).free / 2**30
    if free < LEAST_GIB:
        return failed("folder", f"{path} has {free:.2f} GiB free", remedy="free some, or give another with --output")
    return passed("folder", f"{path}, {free:,.1f} GiB free")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    print(json.dumps(found_by_torch()))
