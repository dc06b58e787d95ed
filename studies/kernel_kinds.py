"""Profile one training step and print what the GPU does in it, by kind of kernel.

    python studies/kernel_kinds.py [--json FILE] pretrain_llama_bcd.py ARGUMENTS...      # step 5 of the run

Times are milliseconds. `busy` is the time in which at least one kernel runs, copies between host and device excluded;
`idle` is the rest between the first kernel and the last. The profiler itself makes a step longer.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

from _parser import Parser, command, run_main

KINDS = (
    ("copies between host and device", r"Memcpy (HtoD|DtoH)"),
    ("copies and fills", r"Memcpy|Memset|FillFunctor|direct_copy|CatArray|bfloat16_copy|foreach_copy|MulFunctor.*Copy"),
    ("attention", r"flash|fmha|attention|sdpa"),
    ("matrix products", r"gemm|cutlass|xmma|nvjet|wgmma|cublas|splitKreduce|sm90_|_scaled_mm"),
    ("compiled", r"^triton_"),
    ("norms of layers", r"layer_norm|rms_norm|LayerNorm|RMSNorm|GammaBeta"),
    ("reductions", r"reduce|Reduce|norm"),
    ("elementwise", r"elementwise|vectorized|multi_tensor|foreach"),
)
"""Names of kinds and patterns of kernels' names; the first match counts."""


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), "other")


def kernel_table(trace: dict[str, Any], *, num_names: int = 25) -> dict[str, Any]:
    """Return times and numbers of kernels by kind, and the longest ones, from a trace of PyTorch's profiler."""
    events = [each for each in trace["traceEvents"] if each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not events:
        raise ValueError("COMMAND: no kernels of a GPU. Profile a run on a GPU.")
    kinds: collections.Counter[str] = collections.Counter()
    names: collections.Counter[str] = collections.Counter()
    numbers: collections.Counter[str] = collections.Counter()
    for each in events:
        kinds[kind_of(each["name"])] += each["dur"]
        names[each["name"][:120]] += each["dur"]
        numbers[kind_of(each["name"])] += 1
        numbers[each["name"][:120]] += 1
    computing = sorted((each["ts"], each["ts"] + each["dur"], each["name"]) for each in events
                       if "HtoD" not in each["name"] and "DtoH" not in each["name"])  # fmt: skip
    busy, end, last = 0.0, computing[0][0], ""
    gaps = []
    for start, stop, name in computing:
        if start > end:
            gaps.append((start - end, last, name))
        busy += max(0.0, stop - max(start, end))
        if stop > end:
            end, last = stop, name[:70]
    span = end - computing[0][0]
    return {
        "ms": span / 1e3, "busy": busy / 1e3, "idle": (span - busy) / 1e3,
        "gaps": {f"{start / 1e3:.2f} ms behind {before}": after[:70] for start, before, after in sorted(gaps)[:-9:-1]},
        "kinds": {kind: [round(us / 1e3, 2), numbers[kind]] for kind, us in kinds.most_common()},
        "kernels": {name: [round(us / 1e3, 2), numbers[name]] for name, us in names.most_common(num_names)},
    }  # fmt: skip


def profiled(words: Sequence[str]) -> dict[str, Any]:
    """Run a training command with the profiler and return its trace."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--profile", "--use-pytorch-profiler", "--profile-step-start", "4", "--profile-step-end", "5"]
        subprocess.run([sys.executable, *words, *flags, "--tensorboard-dir", folder], check=True)
        [path] = Path(folder).glob("*.json")
        return json.loads(path.read_text(encoding="utf-8"))


@command("studies/kernel_kinds.py")
def main(argv: Sequence[str]) -> None:
    parser = Parser(prog="studies/kernel_kinds.py", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the table here")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND")
    options = parser.parse_args(argv)
    if not options.words:
        raise ValueError("COMMAND: missing. Give a script and its arguments.")
    table = kernel_table(profiled(options.words))
    print(f"step {table['ms']:.0f} ms, busy {table['busy']:.0f}, idle {table['idle']:.0f}")
    for title in ("kinds", "kernels"):
        for name, (ms, number) in table[title].items():
            print(f"{ms:10.2f} ms {number:7} x  {name}")
    for gap, kernel in table["gaps"].items():
        print(f"idle {gap}, before {kernel}")
    if options.json:
        options.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_main(main)
