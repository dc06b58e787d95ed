"""Measures what each replacement of runtime/compat/cpu_kernels.py saves of a training step on a CPU.

    OMP_NUM_THREADS=1 python tools/cpu_kernels_ablation.py --json docs/measurements/cpu_kernels_ablation.json

One process with one thread, for a GPT and a LLaMA, full training and one block of three. A pair is a turn with all
replacements and a turn with all but one, in alternating order; the figure is the median over the pairs of the extra
CPU time without it. All turns train the same model. The freed-memory setting is per process: its turns without run in
a second process, one after the other.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import _benchmark_common as common
import torch
from _parser import STDOUT, Parser, add_json, leave_with

from megatron.bcd.arguments import FAMILY_DEFAULTS, parse_run_config
from megatron.bcd.model.builder import unwrap_model
from megatron.bcd.runtime import distributed, rng
from megatron.bcd.runtime.compat import cpu, cpu_kernels
from megatron.bcd.runtime.exit import exit_on_error

PROG = "tools/cpu_kernels_ablation.py"
CASES = (("gpt", "full"), ("gpt", "block"), ("llama", "full"), ("llama", "block"))
NUM_BLOCKS = {"full": 1, "block": 3}
ACTIVE_BLOCK = {"full": 0, "block": 1}
MEMORY = "keep_freed_memory"
FLAGS = (
    "--num-layers 6 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 4 --global-batch-size 8 --hidden-dropout 0 --attention-dropout 0 --lr 1e-4 "
    "--lr-decay-style constant --train-iters 1000000 --eval-iters 0 --num-workers 0 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 1023"
)

Site = tuple[Any, str, Any]
"""An object, an attribute, and its value without the replacement."""


def sites() -> dict[str, list[Site]]:
    """By replacement, what Megatron Core and PyTorch have in its place. To be called before they are patched."""
    from megatron.core import tensor_parallel
    from megatron.core.distributed import param_and_grad_buffer as buffers
    from megatron.core.tensor_parallel import layers

    def own(owner: Any, *names: str) -> list[Site]:
        return [(owner, name, getattr(owner, name)) for name in names]

    return {
        "linear": own(layers, "linear_with_frozen_weight", "linear_with_grad_accumulation_and_async_allreduce"),
        "weight_gradient_in_place": [(cpu_kernels, "_takes_gradient_in_place", lambda weight: False)],
        "regions": own(layers, "copy_to_tensor_model_parallel_region", "reduce_from_tensor_model_parallel_region"),
        "rms_norm": [(cpu_kernels.RmsNorm, "forward", torch.nn.RMSNorm.forward)],
        "cross_entropy": own(tensor_parallel, "vocab_parallel_cross_entropy"),
        "collectives": own(buffers, "dist_all_gather_func", "dist_reduce_scatter_func"),
    }


def run_sites(model: Any, optimizer: Any, clip_grads: Any) -> dict[str, list[Site]]:
    """As `sites`, for what a run's own objects hold."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}.values()
    return {
        "swiglu": [(one, "bias_activation_fusion", False) for one in configs if one.gated_linear_unit],
        "qkv_rope": [(one, "fused_single_qkv_rope", False) for one in configs if one.fused_single_qkv_rope],
        "collectives": [(clip_grads.torch, "distributed", torch.distributed)],
        "fused_adam": [
            (_Items(group), "fused", None) for one in optimizer.chained_optimizers for group in one.param_groups
        ],
    }


class _Items:
    """A dict's items as attributes."""

    def __init__(self, items: dict[str, Any]) -> None:
        object.__setattr__(self, "_items", items)

    def __getattr__(self, name: str) -> Any:
        return self._items[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self._items[name] = value


class Run:
    """A model in training in this process, whose replacements can be left out one by one."""

    def __init__(self, form: str, extent: str, *, keeps_memory: bool) -> None:
        from megatron.core.optimizer import clip_grads

        torch.set_num_threads(1)
        before = sites()
        if not keeps_memory:
            cpu.keep_freed_memory = lambda: None
        flags = [*FLAGS.split(), "--bcd-num-blocks", str(NUM_BLOCKS[extent])]
        config = parse_run_config(flags, prog=PROG, defaults=FAMILY_DEFAULTS[form])
        distributed.initialize(backend="gloo", timeout_minutes=10, tensor_size=1, pipeline_size=1)
        rng.seed_everything(config.training.seed)
        self.bench = common.Bench(config)
        self.bench.build(ACTIVE_BLOCK[extent])
        self.bench.components.pipeline.begin_phase(ACTIVE_BLOCK[extent])
        model = unwrap_model(self.bench.components.model)
        for name, more in run_sites(model, self.bench.active.optimizer, clip_grads).items():
            before[name] = before.get(name, []) + more
        if form == "gpt":
            del before["rms_norm"]
        self.sites = {name: own for name, own in before.items() if own}

    def turn(self, without: str | None, num_steps: int) -> tuple[float, float]:
        """CPU and wall seconds of one step, the mean of `num_steps` after an untimed one."""
        present = [(owner, name, getattr(owner, name)) for owner, name, _ in self.sites.get(without or "", [])]
        for owner, name, value in self.sites.get(without or "", []):
            setattr(owner, name, value)
        try:
            self._step()
            start = time.process_time(), time.perf_counter()
            for _ in range(num_steps):
                self._step()
            return (time.process_time() - start[0]) / num_steps, (time.perf_counter() - start[1]) / num_steps
        finally:
            for owner, name, value in present:
                setattr(owner, name, value)

    def _step(self) -> None:
        self.bench.step()


def _serve(connection: Connection, form: str, extent: str, keeps_memory: bool) -> None:
    """A process's life: turns on request, until the connection is closed."""
    run = Run(form, extent, keeps_memory=keeps_memory)
    connection.send(sorted(run.sites))
    while (request := connection.recv()) is not None:
        connection.send(run.turn(*request))


class Process:
    """A `Run` in a process of its own."""

    def __init__(self, form: str, extent: str, *, keeps_memory: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, form, extent, keeps_memory))
        self._process.start()
        theirs.close()

    def wait(self) -> list[str]:
        """Once it is ready to run, the replacements that it has. To be called once."""
        return self._connection.recv()

    def turn(self, without: str | None, num_steps: int) -> tuple[float, float]:
        self._connection.send((without, num_steps))
        return self._connection.recv()

    def close(self) -> None:
        self._connection.send(None)
        self._process.join()


def measure(form: str, extent: str, *, num_pairs: int, num_steps: int) -> dict[str, Any]:
    """Seconds of every turn, and by replacement what a step takes longer without it, as a share of the step."""
    kept, plain = (Process(form, extent, keeps_memory=keeps) for keeps in (True, False))
    plain.wait()
    pairs: dict[str, list[Any]] = {name: [] for name in (*kept.wait(), MEMORY)}
    for index in range(num_pairs):
        for name, turns in pairs.items():
            pair: dict[str, tuple[float, float]] = {}
            without = (plain, None) if name == MEMORY else (kept, name)
            order = {"all_s": (kept, None), "without_s": without}
            for key in sorted(order, reverse=index % 2 == 1):
                process, left_out = order[key]
                pair[key] = process.turn(left_out, num_steps)
            turns.append(pair)
        print(f"{form} {extent}: pair {index + 1}/{num_pairs}", file=sys.stderr, flush=True)
    kept.close()
    plain.close()
    every = [turn["all_s"] for turns in pairs.values() for turn in turns]
    return {
        "step_cpu_ms": 1e3 * statistics.median(cpu_s for cpu_s, _ in every),
        "step_wall_ms": 1e3 * statistics.median(wall_s for _, wall_s in every),
        "replacements": {name: _saved(turns) for name, turns in pairs.items()},
        "turns": pairs,
    }


def _saved(turns: list[dict[str, tuple[float, float]]]) -> dict[str, float]:
    """Median over the pairs of (without - all) / all, of CPU and of wall time; quartiles of the former."""
    of_cpu, of_wall = ([turn["without_s"][i] / turn["all_s"][i] - 1 for turn in turns] for i in (0, 1))
    low, _, high = statistics.quantiles(of_cpu, n=4, method="inclusive")
    return {
        "cpu": statistics.median(of_cpu),
        "cpu_low": low,
        "cpu_high": high,
        "wall": statistics.median(of_wall),
    }


def show(cases: dict[str, dict[str, Any]]) -> None:
    """Extra time of a step without each replacement, in percent: CPU (quartiles), wall."""
    shown = common.table(("without", *cases), num_left=1)
    names = list(dict.fromkeys(name for case in cases.values() for name in case["replacements"]))
    for name in names:
        row = []
        for case in cases.values():
            one = case["replacements"].get(name)
            row.append(
                "-"
                if one is None
                else f"{one['cpu']:+.1%} ({one['cpu_low']:+.1%} to {one['cpu_high']:+.1%}), wall {one['wall']:+.1%}"
            )
        shown.add_row(name, *row)
    shown.add_row("step, CPU ms", *(f"{case['step_cpu_ms']:.1f}" for case in cases.values()))
    common.print_table(shown)


def main(argv: Sequence[str]) -> None:
    parser = Parser(prog=PROG, description=__doc__)
    parser.add_argument("--pairs", type=int, default=15, metavar="N", help="pairs per replacement (default: 15)")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="timed steps of a turn (default: 3)")
    add_json(parser)
    with exit_on_error(ValueError, prog=PROG):
        own = parser.parse_args(list(argv))
        if own.pairs < 2 or own.steps < 1:
            raise ValueError("--pairs must be at least 2 and --steps at least 1")
        if own.json not in (None, STDOUT):
            common.check_can_write(own.json)
    torch.set_num_threads(1)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    command = common.command_line(argv).replace(common.PROG, PROG)
    cases: dict[str, Any] = {}
    figures = {"command": command, "hardware": common.hardware(), "commit": commit, "cases": cases}
    for form, extent in CASES:
        cases[f"{form} {extent}"] = measure(form, extent, num_pairs=own.pairs, num_steps=own.steps)
        if own.json not in (None, STDOUT):  # after each case: it takes long
            common.write_json(own.json, figures)
    if own.json == STDOUT:
        print(json.dumps(figures, indent=1))
    else:
        show(cases)


if __name__ == "__main__":
    leave_with(lambda: main(sys.argv[1:]))
