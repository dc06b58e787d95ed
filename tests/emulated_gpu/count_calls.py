"""Count a training step's kernel launches, copies and waits on an emulated GPU; operators count by their CUDA kernels.

    run="bash tests/emulated_gpu.sh --run python tests/emulated_gpu/count_calls.py"
    $run --output docs/measurements/calls_of_a_step.csv
    $run --method pretrain      # by operator
    $run --method pretrain --compiled

The model is a GPT of 8 layers without dropout; a step has 4 microbatches, in bf16 on one GPU. The figures are those of
the block with the most calls. Views and empty tensors do not count. A wait is a read of the device, or a copy that
blocks the host. With --compiled, a function that a GPU compiles counts as the kernels that Inductor makes of it on the
CPU; its backward pass counts by operator, unless it is such a function too.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
METHODS = {
    "full": ["--bcd-num-blocks", "1"],
    "paper": ["--bcd-preset", "paper"],
    "paper, frozen weights on the host": ["--bcd-preset", "paper", "--bcd-layers-on", "host"],
    "pretrain": ["--bcd-preset", "pretrain"],
    "pretrain, breadth-first, layers on the host": ["--bcd-preset", "pretrain", "--bcd-layers-on", "host"],
    "finetune": ["--bcd-preset", "finetune", "--bcd-inactive-update", "none"],
    "no active block, factored": [
        "--bcd-num-blocks",
        "0",
        "--bcd-inactive-update",
        "factored",
        "--bcd-embedding-update",
        "factored",
    ],
    "finetune, 12 layers of 128 experts": [
        *("--bcd-preset", "finetune", "--num-layers", "12", "--num-experts", "128", "--moe-ffn-hidden-size", "32"),
        *("--moe-router-topk", "8", "--swiglu", "--disable-bias-linear", "--moe-grouped-gemm"),
        *("--moe-token-dispatcher-type", "alltoall"),
    ],
    "finetune, frozen weights and embedding on the host": [
        *("--bcd-preset", "finetune", "--bcd-inactive-update", "none"),
        *("--untie-embeddings-and-output-weights", "--bcd-layers-on", "host"),
    ],
}
SIZES = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --hidden-dropout 0 --attention-dropout 0 "
    "--micro-batch-size 1 --global-batch-size 4 --bf16 --mock-data --tokenizer-type NullTokenizer --vocab-size 1023 "
    "--num-workers 0 --train-iters 1000 --eval-iters 0 --lr 1e-4"
)


def counted(method: str) -> dict[str, dict[str, int]]:
    """Return the calls by operator, and the waits and copies by kind, of one step on this process's GPU."""
    import torch

    from megatron.bcd import data
    from megatron.bcd.arguments import parse_run_config
    from megatron.bcd.metrics.reporter import SilentReporter
    from megatron.bcd.runtime import distributed, rng
    from megatron.bcd.trainer import Trainer
    from megatron.bcd.training.resolve import resolve_run

    emulated_kernels = sys.modules["emulated_kernels"]  # imported by torch, see emulated_gpu.sh
    emulated_kernels.observe()
    config = parse_run_config([*SIZES.split(), *METHODS[method]], prog="count_calls", world_size=1)
    distributed.initialize(backend="auto", timeout_minutes=2, tensor_size=1, pipeline_size=1, context_size=1)
    rng.seed_everything(config.training.seed)
    trainer = Trainer(resolve_run(config), reporter=SilentReporter())
    batches = data.batches(trainer.splits.train, config, consumed_samples=0)
    copies: Counter[str] = Counter()
    copies_later = emulated_kernels._Kernel._copies_later

    def counting(kernel: Any, args: Any, kwargs: Any) -> bool:
        copies["to the device" if args[0].is_cuda else "to the host"] += 1
        return copies_later(kernel, args, kwargs)

    emulated_kernels._Kernel._copies_later = counting
    counters = {"calls": emulated_kernels.calls, "copies": copies, "waits": emulated_kernels.waits}
    steps = []
    for block in range(trainer.partition.num_blocks):
        trainer.active.build(block)
        trainer.pipeline.begin_phase(block)
        # the first step of a phase measures activations
        trainer.train_step(batches, num_microbatches_next=4)
        torch.cuda.synchronize()
        for counter in counters.values():
            counter.clear()
        trainer.train_step(batches, num_microbatches_next=4)
        steps.append({name: dict(counter) for name, counter in counters.items()})
        trainer.active.dispose()
    return max(steps, key=lambda step: sum(step["calls"].values()))


def count_compiled() -> None:
    """Let calls of functions under torch.compile count as Inductor's kernels. Call it before Megatron is imported."""
    os.environ |= {"TORCHDYNAMO_DISABLE": "0", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    import torch
    from torch._inductor import metrics
    from torch.utils._pytree import tree_leaves, tree_map

    calls, compile_function = sys.modules["emulated_kernels"].calls, torch.compile

    def on_the_cpu(value: Any) -> Any:
        is_tensor = isinstance(value, torch.Tensor)
        return torch.zeros_like(value, device="cpu", requires_grad=False) if is_tensor else value

    def counting(function: Any = None, **options: Any) -> Any:
        if function is None:
            return functools.partial(counting, **options)
        compiled, kernels = compile_function(function, **options), dict[str, int]()

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            before, given = calls.copy(), (args, kwargs)
            key = str([(each.shape, each.dtype) if hasattr(each, "shape") else each for each in tree_leaves(given)])
            if key not in kernels:
                metrics.reset()
                cpu_args, cpu_kwargs = tree_map(on_the_cpu, given)
                compiled(*cpu_args, **cpu_kwargs)
                # code for all shapes is compiled once
                kernels[key] = metrics.generated_kernel_count or max(kernels.values(), default=0)
                print(function.__qualname__, kernels[key], file=sys.stderr)
            result = function(*args, **kwargs)
            calls.clear()
            calls.update(before + Counter({"compiled": kernels[key]}))
            return result

        return call

    torch.compile = counting


def table(methods: Sequence[str] = tuple(METHODS)) -> list[dict[str, Any]]:
    """Return one row per method; the first is full training."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megatron.bcd.trainer"])
    # the server must not initialise CUDA, which forks could not use then
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    with context.Pool(1, maxtasksperchild=1) as pool:  # a process can set up only one run
        steps = dict(zip(methods, pool.map(counted, methods, chunksize=1), strict=True))
    totals = {method: {name: sum(item.values()) for name, item in step.items()} for method, step in steps.items()}
    return [
        {"method": method, **total, "calls of full": round(total["calls"] / totals["full"]["calls"], 3)}
        for method, total in totals.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=METHODS, help="only this one, by operator, as JSON")
    parser.add_argument("--compiled", action="store_true", help="with --method: count compiled kernels")
    parser.add_argument("--output", metavar="FILE", help="the table (default: stdout)")
    options = parser.parse_args()
    if options.method is not None:
        sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
        if options.compiled:
            count_compiled()
        json.dump(counted(options.method), sys.stdout, indent=1, sort_keys=True)
        return
    rows = table()
    with open(options.output or sys.stdout.fileno(), "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
