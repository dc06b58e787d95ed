"""Runs of tools/compare.py: the command of each variant, and one execution of it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from _compare_figures import WARM_UP_STEPS, Planned, Turn, turn_of

from megatron.bcd.planner.command import SCRIPTS, layout_flags, network_flags
from megatron.bcd.planner.cost import compute_ratio
from megatron.bcd.planner.estimate import make_estimate
from megatron.bcd.planner.memory import rank_memory
from megatron.bcd.planner.recipe import Recipe

ROOT = Path(__file__).resolve().parents[1]
PEER = "badam"
_NO_MEMORY = re.compile(r"OutOfMemoryError|out of memory|can't allocate memory|Cannot allocate memory", re.IGNORECASE)
_KILLED = (-9, 137)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One method, or the peer: it has one turn in every round."""

    name: str
    recipe: Recipe
    """For the peer: the recipe of the BCD run that it is compared with."""
    steps_per_block: int
    num_iterations: int

    @property
    def is_peer(self) -> bool:
        return self.name == PEER

    def flags(self) -> list[str]:
        """Of the training script, but for --metrics-file.

        Without weight decay: Megatron Core spares biases and norms, BAdam does not. Without reader processes, which
        would take a core from the steps that are timed.
        """
        recipe = self.recipe
        words = [*network_flags(recipe), *layout_flags(recipe)]
        words.append(f"--train-iters {self.num_iterations} --bcd-steps-per-block {self.steps_per_block}")
        words.append("--lr 1e-4 --lr-decay-style constant --weight-decay 0")
        words.append("--num-workers 0 --eval-iters 0 --log-interval 1 --mock-data --tokenizer-type NullTokenizer")
        words.append(f"--vocab-size {recipe.model.vocabulary - 1}")  # NullTokenizer adds an end of document
        return " ".join(words).split()

    def command(self) -> str:
        """For people: what can be typed, but for --metrics-file."""
        if self.is_peer:
            return "transformers and BAdam on the samples and initial weights of that run (tools/_compare_peer.py)"
        processes = self.recipe.num_gpus
        start = "python" if processes == 1 else f"torchrun --nproc-per-node {processes}"
        return " ".join([start, SCRIPTS[self.recipe.model.form], *self.flags()])

    def argv(self, metrics: Path, peer_folder: Path) -> list[str]:
        """What is started."""
        if self.is_peer:
            return [sys.executable, "tools/_compare_peer.py", str(peer_folder), str(metrics)]
        processes = self.recipe.num_gpus
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        script = [SCRIPTS[self.recipe.model.form], *self.flags(), "--metrics-file", str(metrics)]
        return [sys.executable, *(launcher if processes > 1 else []), *script]

    def export_argv(self, folder: Path) -> list[str]:
        """What writes the samples and weights of this run for the peer."""
        return [sys.executable, "tools/_compare_export.py", str(folder), self.recipe.model.form, *self.flags()]


def variants_of(recipe: Recipe, methods: list[str], *, peer: bool, steps: int) -> list[Variant]:
    """By the table's order. The peer is one process, and so is the BCD run beside it, if need be one of its own.

    Raises ValueError if a method cannot use the layout.
    """
    alone = recipe if recipe.num_gpus == 1 else replace(recipe, num_gpus=1, pipeline_size=1, layout="spread")
    num_blocks = recipe.partition.num_blocks if "bcd" in methods else 1
    if peer:
        num_blocks = max(num_blocks, alone.partition.num_blocks)
    per_block = WARM_UP_STEPS + steps
    shared = {"steps_per_block": per_block, "num_iterations": num_blocks * per_block}
    whole = {"num_blocks": None, "layout": "spread"}
    variants = [
        Variant(name=method, recipe=replace(recipe, method=method, **({} if method == "bcd" else whole)), **shared)
        for method in methods
    ]
    if peer:
        if recipe.num_gpus > 1 or "bcd" not in methods:
            variants.append(Variant(name=beside_peer(recipe, methods), recipe=alone, **shared))
        variants.append(Variant(name=PEER, recipe=alone, **shared))
    return variants


def beside_peer(recipe: Recipe, methods: list[str]) -> str:
    """The name of the BCD variant that the peer is compared with."""
    return "bcd, 1 process" if recipe.num_gpus > 1 and "bcd" in methods else "bcd"


def planned(variant: Variant, *, has_cluster: bool) -> Planned:
    """The planner's estimate; without a cluster only what does not depend on one."""
    recipe = variant.recipe
    plan = make_estimate(recipe)
    state = 0
    for replica in range(recipe.num_replicas):
        ranks = rank_memory(recipe, replica=replica)
        stages = range(recipe.pipeline_size)
        state += sum(max(rank.model_state for rank in ranks if rank.stage == stage) for stage in stages)
    peak_flops = recipe.num_gpus * recipe.cluster.peak_flops_per_s(recipe.precision)
    blocks = range(recipe.partition.num_blocks)
    return Planned(
        model_state_bytes=None if variant.is_peer else state,
        peak_bytes=plan.peak.total if has_cluster and not variant.is_peer else None,
        iteration_ms=1e3 * plan.iteration_seconds if has_cluster and not variant.is_peer else None,
        full_flops=plan.mfu * plan.iteration_seconds * peak_flops,
        arithmetic=statistics.fmean(compute_ratio(recipe.partition, block) for block in blocks),
    )


class CannotRun(RuntimeError):
    """A variant could not be measured; the message is one line with the reason."""

    def __init__(self, message: str, *, for_want_of_memory: bool = False) -> None:
        super().__init__(message)
        self.for_want_of_memory = for_want_of_memory


def run(
    argv: list[str],
    log: Path,
    *,
    threads: int,
    environment: Mapping[str, str] | None = None,
    seconds: float | None = None,
    until: Callable[[], bool] | None = None,
) -> None:
    """Start, wait, and leave no process, however it ends. Raises CannotRun where it does not end well.

    `environment`: variables beside those of this process. `seconds`: a limit. `until`: asked again and again; as soon
    as it is true everything is killed, and that is a good end; the run must not end before.
    """
    with open(log, "wb") as output:
        process = subprocess.Popen(
            argv,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"} | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # an interrupt at the terminal is for this tool: it ends them
        )
        try:
            code = _wait(process, seconds=seconds, until=until)
        except subprocess.TimeoutExpired:
            raise CannotRun(f"did not end within {seconds:.0f} s; see {log}") from None
        finally:
            _end(process)
    if code is None:
        return
    if until is not None and code == 0:
        raise CannotRun("ended before it could be killed")
    if code != 0:
        raise _failure(code, log.read_text(encoding="utf-8", errors="replace"))


def _wait(process: subprocess.Popen[bytes], *, seconds: float | None, until: Callable[[], bool] | None) -> int | None:
    """The exit code; None once `until` is true. Raises subprocess.TimeoutExpired."""
    if until is None:
        return process.wait(seconds)
    deadline = time.monotonic() + (math.inf if seconds is None else seconds)
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return process.returncode
        if until():
            return None
        time.sleep(0.01)
    raise subprocess.TimeoutExpired(process.args, seconds or 0.0)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill it and all that it has started."""
    if process.poll() is not None:
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        root.suspend()  # torchrun would start anew what is killed before it
        for one in [*root.children(recursive=True), root]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    process.wait()


def _failure(code: int, text: str) -> CannotRun:
    if _NO_MEMORY.search(text) or code in _KILLED:
        return CannotRun("out of memory", for_want_of_memory=True)
    said = re.findall(r"^\S+: error: (.+)$", text, re.MULTILINE)
    lines = [line for line in text.splitlines() if line.strip()]
    return CannotRun(said[0] if said else f"ended with code {code}: {lines[-1] if lines else 'without a word'}")


def measure(variant: Variant, folder: Path, *, threads: int) -> Turn:
    """One turn. Raises CannotRun."""
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    run(variant.argv(metrics, folder), folder / "log", threads=threads)
    with open(metrics, encoding="utf-8") as file:
        return turn_of([json.loads(line) for line in file])
