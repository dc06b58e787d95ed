"""Compare the CPU time of one block's training step with stock Megatron-LM's, for the same flags.

    python studies/stock_time.py --stock "torchrun --nproc-per-node 1 Megatron-LM/pretrain_gpt.py"

Trains a GPT of 38 million parameters on mock data, by stock's command and by `pretrain_gpt_bcd.py --bcd-num-blocks 1`
in turn. A step's time is the difference between a long and a short run over the difference of their steps, so that the
start does not count. --stock is the command that starts pretrain_gpt.py of Megatron-LM core_v0.16.1; the flags are
appended. Prints the times of each round, and the ratio of the shortest ones, as other work only adds CPU time.
"""

from __future__ import annotations

import resource
import shlex
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

from _parser import Parser, check_positive, command, run_main
from _processes import SCRIPTS, run

PROG = "studies/stock_time.py"
FLAGS = (
    "--num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 "
    "--micro-batch-size 2 --global-batch-size 2 --lr 1e-4 --lr-decay-style constant --weight-decay 0 --seed 1 "
    "--hidden-dropout 0 --attention-dropout 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 1023 "
    "--use-cpu-initialization --num-workers 0 --eval-interval 1000 --eval-iters 0 --log-interval 1"
)
SHORT, LONG = 3, 23
"""Steps of the two runs."""


def cpu_seconds(words: list[str], log: Path) -> float:
    """Run a command and return the CPU time of its processes. Raises CannotRun if it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run(words, log)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def step_seconds(words: list[str], log: Path) -> float:
    """Return the CPU time of a training step."""
    short, long = (cpu_seconds([*words, "--train-iters", str(steps)], log) for steps in (SHORT, LONG))
    return (long - short) / (LONG - SHORT)


def shortest_times(ways: dict[str, list[str]], *, rounds: int) -> dict[str, float]:
    """Time the commands in turn, print the times of each round, and return the shortest time of each command."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory(prefix="step_time_") as folder:
        for number in range(rounds):
            for name, words in ways.items():
                times[name].append(step_seconds(words, Path(folder, "log")))
            text = ", ".join(f"{name} {seconds[-1]:.3f} s" for name, seconds in times.items())
            print(f"round {number + 1}: {text}", flush=True)
    return {name: min(seconds) for name, seconds in times.items()}


@command(PROG)
def main(argv: list[str]) -> None:
    parser = Parser(prog=PROG, description=__doc__)
    parser.add_argument("--stock", required=True, metavar="COMMAND", help="starts stock's pretrain_gpt.py")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="measurements of both (default: 3)")
    options = parser.parse_args(argv)
    check_positive(options, "rounds")
    ours = [sys.executable, SCRIPTS["gpt"], *FLAGS.split(), "--bcd-num-blocks", "1"]
    stock = [*shlex.split(options.stock), *FLAGS.split()]
    best = shortest_times({"stock": stock, "one block": ours}, rounds=options.rounds)
    print(f"CPU time of one block over stock's: {best['one block'] / best['stock']:.3f}")


if __name__ == "__main__":
    run_main(main)
