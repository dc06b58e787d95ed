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
import fnmatch
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import _check_installed as installed
from _check_result import FAIL, Check, failed, passed, skipped
from _parser import STDOUT, Parser, add_json, bad_input, check_can_write, leave_with, write_aside

PROG = "tools/check_machine.py"
ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("python", "torch", "compiler", "folder")
"""Parts without which no run is tried, beside all packages."""


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Raises ValueError for a bad flag."""
    parser = Parser(prog=PROG, description=__doc__)
    add = parser.add_argument
    add("--only", nargs="+", metavar="PART", help='parts of the self-test; patterns such as "layout*" (default: all)')
    add("--no-self-test", action="store_true", help="only what is installed and found")
    add("--num-ranks", type=int, metavar="N", help="processes of the self-test: 1, 2, 4 or 8 (default: the most that"
        " the GPUs allow, on a CPU at most 2)")  # fmt: skip
    add("--calibrate", action="store_true", help="measure rates, write OUTPUT/clusters.csv, and compare a run with its"
        " plan")  # fmt: skip
    add("--clusters", metavar="FILE", default=str(ROOT / "examples" / "clusters.csv"), help="the cluster table that"
        " --calibrate adds a row to (default: examples/clusters.csv)")  # fmt: skip
    add("--least-link-gb-per-s", type=float, metavar="RATE", help="slower links fail (default: a quarter of the"
        " cluster table's for this GPU)")  # fmt: skip
    add("--output", metavar="FOLDER", help="logs, checkpoints and tables; kept (default: a folder that is removed if"
        " nothing failed)")  # fmt: skip
    add_json(parser)
    arguments = parser.parse_args(argv)
    if arguments.num_ranks not in (None, 1, 2, 4, 8):
        raise ValueError(f"--num-ranks {arguments.num_ranks}: must be 1, 2, 4 or 8")
    check_can_write(arguments.json, flag="--json")
    return arguments


def checks(arguments: argparse.Namespace, folder: Path) -> Iterator[Check]:
    """Every part, as soon as it is known."""
    found: list[Check] = []
    for check in installed.check_packages():
        found.append(check)
        yield check
    probed: dict[str, Any] = {}
    try:
        probed = installed.probe()
        of_torch = list(installed.check_torch(probed))
    except OSError as error:
        remedy = "see package torch; on a GPU machine its CUDA version must be one that the driver supports"
        of_torch = [failed("torch", f"cannot be imported: {error}", remedy=remedy)]
    gpus = probed.get("gpus", [])
    of_machine = [*of_torch, *installed.check_settings(os.environ, num_gpus=len(gpus)), installed.check_folder(folder)]
    found += of_machine
    yield from of_machine
    missing = [check.part for check in found if check.verdict == FAIL and _is_needed(check.part)]
    if arguments.no_self_test or missing:
        yield skipped("self-test", f"without {', '.join(missing)} no run starts" if missing else "--no-self-test")
        return
    yield from self_test(arguments, folder, probed)


def _is_needed(part: str) -> bool:
    return part in NEEDED or part.startswith("package ")


def num_ranks_of(arguments: argparse.Namespace, *, num_gpus: int, cores: int) -> int:
    """A power of two, as many as there are GPUs, at most 8; on a CPU at most 2. Raises ValueError for too many."""
    most = num_gpus or min(2, cores)
    if arguments.num_ranks is not None:
        if num_gpus and arguments.num_ranks > num_gpus:
            raise ValueError(f"--num-ranks {arguments.num_ranks}: there are {num_gpus} GPUs")
        return int(arguments.num_ranks)
    return max(number for number in (1, 2, 4, 8) if number <= most)


def self_test(arguments: argparse.Namespace, folder: Path, probed: dict[str, Any]) -> Iterator[Check]:
    """Runs. Imported here: the packages that they need are there."""
    from _check_rates import calibrate, check_links, known_gpu, measured
    from _check_self_test import FLAGS, Runner, SelfTest
    from _processes import CannotRun

    from megatron.bcd.planner.tables import read_clusters

    gpus = probed["gpus"]
    num_ranks = num_ranks_of(arguments, num_gpus=len(gpus), cores=probed["cores"])
    runner = Runner(folder=folder, num_ranks=num_ranks, on_gpu=bool(gpus), flags=FLAGS)
    if gpus and num_ranks < len(gpus):
        yield skipped("other gpus", f"the self-test uses {num_ranks} of {len(gpus)}: choose with CUDA_VISIBLE_DEVICES")
    # Transformer Engine multiplies fp32 matrices in TF32
    fp32 = "tf32" if gpus and "version" in probed["transformer_engine"] else "fp32"
    only = wanted(arguments.only)
    test = SelfTest(runner=runner, fp32=fp32, only=only)
    parts = [*test.parts(), "link"]
    for pattern in arguments.only or ():
        if not fnmatch.filter(parts, pattern):
            raise ValueError(f"--only {pattern}: no such part; there are {', '.join(parts)}")
    clusters = read_clusters(arguments.clusters)
    if any(only(part) for part in parts if part != "link"):
        yield from test.checks()
    name = gpus[0]["name"] if gpus else None
    try:
        if only("link"):
            known = known_gpu(name, clusters) if name else None
            yield check_links(measured(runner, links_only=True), known, least=arguments.least_link_gb_per_s)
        if arguments.calibrate:
            found, table = calibrate(runner, gpu=name, table=Path(arguments.clusters))
            yield from found
            command = ["python", "tools/plan.py", "--clusters", str(table), "--gpu", "this-machine"]
            yield passed("table", f"{shlex.join(command)} --num-gpus {num_ranks} --model NAME plans for this machine")
    except CannotRun as error:
        yield failed("rates", str(error), remedy=f"see {folder / 'rates.log'}")


def show(found: Sequence[Check]) -> None:
    """A line for every part, and one below it for its remedy."""
    width = max(len(check.part) for check in found)
    for check in found:
        print(f"{check.verdict}  {check.part:<{width}}  {check.detail}")
        if check.remedy:
            print(f"      {'':<{width}}  remedy: {check.remedy}")


def wanted(patterns: Sequence[str] | None) -> Callable[[str], bool]:
    """Whether a part of the self-test is to run."""
    return lambda part: patterns is None or any(fnmatch.fnmatchcase(part, pattern) for pattern in patterns)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """The exit code. Raises ValueError for bad flags."""
    # runs start in the repository, wherever this was started
    folder = Path(arguments.output or tempfile.mkdtemp(prefix="check_machine_")).resolve()
    arguments.clusters = str(Path(arguments.clusters).resolve())
    found = []
    for check in checks(arguments, folder):
        found.append(check)
        print(f"{check.verdict} {check.part}", file=sys.stderr, flush=True)
    code = int(any(check.verdict == FAIL for check in found))
    if arguments.json != STDOUT:
        show(found)
    if arguments.json:
        figures = {"command": shlex.join(["python", PROG, *argv]), "checks": [asdict(check) for check in found]}
        text = json.dumps(figures, indent=1)
        if arguments.json == STDOUT:
            print(text)
        else:
            write_aside(arguments.json, lambda name: Path(name).write_text(f"{text}\n"), flag="--json")
            print(f"wrote {arguments.json}")
    if not arguments.output and not code and not arguments.calibrate:
        shutil.rmtree(folder, ignore_errors=True)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        return run(parse_arguments(given), given)
    except (ValueError, OSError) as error:
        return bad_input(PROG, error)


if __name__ == "__main__":
    leave_with(main)
