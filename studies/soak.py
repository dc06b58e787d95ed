"""Test replica groups under failures: groups that are killed, stopped and slow, and a lighthouse that restarts.

    python studies/soak.py --replica-groups 3 --ranks 2 --train-iters 600 --kills 30 --seed 1 --output out/soak

Trains a small model twice on this machine's CPU, each replica group under a separate torchrun (docs/replica_groups.md):
first undisturbed, then with events at random times. Prints one line per event, and at the end a table; writes
OUTPUT/soak.json. Checks that nothing hangs and every group ends with 0; that after each exchange its groups hold the
same bits and have counted the same samples; that between two exchanges no two groups train the same sample, and each
step counts the samples of all; and that the last validation loss is at most 1 % above the undisturbed run's. The exit
code is 1 if a check fails, 2 for bad flags. While a group is away, the others run only a few steps a second,
because a start takes much longer than a step of this small model.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import signal
import socket
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

import psutil
from _parser import Parser, command, run_main, table
from _processes import ROOT, SCRIPTS, CannotRun, failure_reason, kill, launcher, run, start, text_commands

PROG = "studies/soak.py"
BATCH_SIZE = 8
MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 4 --lr 3e-3 "
    f"--global-batch-size {BATCH_SIZE} --bcd-preset pretrain --bcd-num-blocks 2 --bcd-steps-per-block 20 "
    "--outer-interval 10 --tokenizer-type ByteLevelTokenizer --split 90,5,5 --num-workers 0 --eval-iters 20 "
    "--log-interval 1 --distributed-timeout-minutes 2"
)
EVENTS = {"kill": "kills", "hang": "hangs", "slow": "slow", "lighthouse": "lighthouse_restarts"}
"""Names of the events, and the flags that set their number."""
_LIGHTHOUSE = Path(sys.executable).with_name("torchft_lighthouse")
TICK_SECONDS = 0.02
OUTER_TIMEOUT_SECONDS, STEP_SECONDS, LIMIT_MINUTES = 8, 1.0, 60
"""Of an exchange; the pause after a step while a group is away; of a run, after which it counts as hung."""
MOST_LOSS_CHANGE = 1.0
"""Percent."""
SLOW_SECONDS, SLOW_PULSE = 5.0, (0.2, 0.3)
"""Duration of a slow period, and the lengths of its alternating running and stopped parts."""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed flags. Raises ValueError for a bad flag."""
    parser = Parser(prog=PROG, description=__doc__)
    add = parser.add_argument
    add("--output", required=True, metavar="FOLDER", help="logs, metrics files and soak.json; must not exist")
    add("--replica-groups", type=int, default=3, metavar="N", help="(default: 3)")
    add("--ranks", type=int, choices=(1, 2, 4), default=2, help="pipeline stages of a group (default: 2)")
    add("--train-iters", type=int, default=600, metavar="N", help="(default: 600)")
    add("--kills", type=int, default=30, metavar="N", help="number of kills; the group restarts (default: 30)")
    add("--hangs", type=int, default=2, metavar="N",
        help="number of stops for 1.5 times the exchange's timeout (default: 2)")  # fmt: skip
    add("--slow", type=int, default=2, metavar="N", help="number of periods at two fifths of the speed (default: 2)")
    add("--lighthouse-restarts", type=int, default=2, metavar="N", help="number of restarts (default: 2)")
    add("--seed", type=int, default=1, help="seed of the events (default: 1)")
    add("--flags", default="", help="more flags of pretrain_gpt_bcd.py, in one word")
    options = parser.parse_args(argv)
    if options.replica_groups < 2:
        raise ValueError(f"--replica-groups {options.replica_groups}: must be at least 2, so that others continue")
    return options


class Group:
    """One replica group, which may start several times, and the lines of its metrics files."""

    def __init__(self, name: str, folder: Path, words: Sequence[str]) -> None:
        self.name, self._folder, self._words = name, folder, words
        self.starts, self.iteration = 0, 0
        self.is_away = True
        """True from a kill, start or hang until the group's next exchange."""
        self.start_at = self.hung_until = self.slow_until = self.rests_until = 0.0
        self._is_stopped = False
        self.lines: list[dict[str, Any]] = []

    def start(self) -> None:
        self.starts, self.start_at = self.starts + 1, 0.0
        self._place = self._folder / f"{self.name}.{self.starts}"
        words = [*self._words, "--replica-id", self.name, "--metrics-file", f"{self._place}.jsonl"]
        self.process = start(words, Path(f"{self._place}.log"), environment={"CUDA_VISIBLE_DEVICES": ""})
        self.lines.append({"start": self.starts})
        self._read, self._processes = 0, []

    def kill(self, now: float, seconds: float) -> None:
        kill(self.process)
        self.read(now)
        self.is_away, self._is_stopped, self.start_at = True, False, now + seconds
        self.hung_until = self.slow_until = self.rests_until = 0.0

    def read(self, now: float) -> bool:
        """Read new lines of the metrics file. Return True if one of them is a training step."""
        path, before = Path(f"{self._place}.jsonl"), len(self.lines)
        if path.exists():
            with open(path, "rb") as file:
                file.seek(self._read)
                content = file.read()
            whole = content[: content.rfind(b"\n") + 1]
            self._read += len(whole)
            self.lines += map(json.loads, whole.splitlines())
        new = self.lines[before:]
        if new:
            self.iteration = new[-1]["iteration"]
        if self.is_away and now > self.hung_until and any("lineage" in line for line in new):
            self.is_away = False
            root = psutil.Process(self.process.pid)
            self._processes = [root, *root.children(recursive=True)]
        return any("loss" in line for line in new)

    def rest(self, now: float) -> None:
        """Stop or continue all processes, as the current time requires."""
        is_slow = now < self.slow_until and now % sum(SLOW_PULSE) > SLOW_PULSE[0]
        if (is_stopped := is_slow or now < max(self.hung_until, self.rests_until)) != self._is_stopped:
            for process in self._processes:
                if process.is_running():
                    process.send_signal(signal.SIGSTOP if is_stopped else signal.SIGCONT)
            self._is_stopped = is_stopped


class Soak:
    """One run, disturbed by `events`: pairs of the iteration at which an event is due, and its name."""

    def __init__(self, options: argparse.Namespace, folder: Path, data: str, events: list[tuple[int, str]]) -> None:
        self.options, self.events, self._num_events = options, events, len(events)
        self._draw = random.Random(options.seed)
        folder.mkdir(parents=True)
        self._folder, self._lighthouse_starts = folder, 0
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        words = [*launcher(options.ranks), str(ROOT / SCRIPTS["gpt"]), *MODEL.split(), "--data-path", data]
        words += ["--pipeline-model-parallel-size", str(options.ranks), "--train-iters", str(options.train_iters)]
        words += ["--eval-interval", str(options.train_iters), "--lighthouse", f"127.0.0.1:{self._port}"]
        words += ["--replica-groups", str(options.replica_groups), "--save", str(folder / "checkpoints")]
        words += ["--load", str(folder / "checkpoints"), "--save-interval", str(options.train_iters // 10)]
        words += ["--outer-timeout-seconds", str(OUTER_TIMEOUT_SECONDS), *shlex.split(options.flags)]
        self.groups = [Group(f"group{number}", folder, words) for number in range(options.replica_groups)]

    def run(self) -> float:
        """Run and return the seconds that it took. Raises CannotRun if a group fails or hangs."""
        self._begin = time.monotonic()
        try:
            self._start_lighthouse()
            for group in self.groups:
                group.start()
            while any(group.start_at or group.process.poll() != 0 for group in self.groups):
                now = time.monotonic()
                if now - self._begin > 60 * LIMIT_MINUTES:
                    raise CannotRun(f"hangs: did not end within {LIMIT_MINUTES} minutes")
                for group in self.groups:
                    self._look_at(group, now)
                self._next_event(now)
                time.sleep(TICK_SECONDS)
            for group in self.groups:
                group.read(time.monotonic())
        finally:
            for process in [self._lighthouse, *(group.process for group in self.groups if group.starts)]:
                kill(process)
        if self.events:
            raise CannotRun(f"{len(self.events)} of {self._num_events} events had no time; give more --train-iters")
        return time.monotonic() - self._begin

    def _start_lighthouse(self) -> None:
        """Start the lighthouse and wait until it accepts connections."""
        self._lighthouse_starts += 1
        least = "1" if self._num_events else str(self.options.replica_groups)
        words = [str(_LIGHTHOUSE), "--min_replicas", least, "--bind", f"[::]:{self._port}"]
        words += ["--join_timeout_ms", "20000", "--heartbeat_timeout_ms", "2500"]
        log = self._folder / f"lighthouse.{self._lighthouse_starts}.log"
        self._lighthouse = start(words, log, environment={"RUST_LOG": "warn"})
        while self._lighthouse.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                    return
            time.sleep(TICK_SECONDS)
        raise CannotRun(f"torchft_lighthouse {failure_reason(log.read_text(), self._lighthouse.returncode)}")

    def _look_at(self, group: Group, now: float) -> None:
        if group.start_at:
            if now > group.start_at:
                group.start()
            return
        if group.process.poll():
            log = group._place.with_name(f"{group._place.name}.log")
            raise CannotRun(f"{group.name} {failure_reason(log.read_text(), group.process.returncode)}; see {log}")
        has_stepped = group.read(now)
        if has_stepped and self._num_events and any(other.is_away for other in self.groups):
            group.rests_until = now + STEP_SECONDS
        group.rest(now)

    def _next_event(self, now: float) -> None:
        """Trigger the next event if it is due and the other groups can continue without this one."""
        present = [group for group in self.groups if not group.is_away and group.process.poll() is None]
        if not self.events or not present or max(group.iteration for group in present) < self.events[0][0]:
            return
        kind = self.events[0][1]
        if len(present) < (len(self.groups) if kind == "lighthouse" else 2):
            return
        self.events.pop(0)
        group = self._draw.choice(present)
        if kind == "kill":
            seconds = self._draw.uniform(0, 3)
            group.kill(now, seconds)
            event = f"{group.name} is killed, and starts again after {seconds:.1f} s"
        elif kind == "hang":
            seconds = 1.5 * OUTER_TIMEOUT_SECONDS
            group.is_away, group.hung_until = True, now + seconds
            event = f"{group.name} is stopped for {seconds:.1f} s"
        elif kind == "slow":
            group.slow_until = now + SLOW_SECONDS
            event = f"{group.name} is slow for {SLOW_SECONDS:.1f} s"
        else:
            kill(self._lighthouse)
            self._start_lighthouse()
            event = f"the lighthouse was away for {time.monotonic() - now:.1f} s"
        print(f"{now - self._begin:7.1f} s  iteration {group.iteration:5}  {event}", flush=True)


def disagreements(groups: Sequence[Group], batch_size: int) -> tuple[list[str], dict[str, int]]:
    """Check the bits and samples of all groups' lines. Return the problems, and counts of the exchanges."""
    by_lineage: dict[int, list[dict[str, Any]]] = defaultdict(list)
    trained: dict[int, Counter[int]] = defaultdict(Counter)
    problems = []
    for group in groups:
        last: dict[str, Any] | None = None
        for line in group.lines:
            if "start" in line:
                last = None
            elif "lineage" in line:
                last = line
                by_lineage[line["lineage"]].append(line)
            elif "loss" in line:
                assert last is not None
                steps, at_once = line["iteration"] - last["iteration"], batch_size * last["groups"]
                if line["consumed_samples"] != last["consumed_samples"] + steps * at_once:
                    problems.append(f"{group.name}, iteration {line['iteration']}: {line['consumed_samples']} samples")
                trained[last["lineage"]][(steps - 1) * at_once + last["group"] * batch_size] += 1
    for lines in by_lineage.values():
        where = f"exchange after iteration {lines[0]['iteration']}"
        if len({json.dumps(line | {"group": 0}, sort_keys=True) for line in lines}) > 1:
            problems.append(f"{where}: groups differ: {lines}")
        if len({line["group"] for line in lines}) < len(lines):
            problems.append(f"{where}: two groups have one number: {lines}")
    for lineage, batches in trained.items():
        if twice := [first for first, times in batches.items() if times > 1]:
            iteration = by_lineage[lineage][0]["iteration"]
            problems.append(
                f"after the exchange of iteration {iteration}, trained twice: samples from its {twice[0]}th on"
            )
    at = Counter(lines[0]["iteration"] for lines in by_lineage.values())
    seen = {"exchanges": len(by_lineage), "of several groups": sum(len(lines) > 1 for lines in by_lineage.values())}
    seen |= {"alone": sum(lines[0]["groups"] == 1 for lines in by_lineage.values())}
    return problems, seen | {"parted": sum(times > 1 for iteration, times in at.items() if iteration)}


def soak(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run both trainings and return all figures; `problems` lists the failed checks."""
    draw = random.Random(options.seed)
    names = [name for name, flag in EVENTS.items() for _ in range(getattr(options, flag))]
    draw.shuffle(names)
    last = round(0.8 * options.train_iters)
    moments = sorted(draw.randint(min(10, last), last) for _ in names)
    figures: dict[str, Any] = {"flags": vars(options), "runs": {}, "problems": []}
    for number, words in enumerate(text_commands(folder)):
        run([sys.executable, *words], folder / f"data.{number}.log")
    data = (folder / "stdlib_text_document").resolve()
    for name, events in (("undisturbed", []), ("disturbed", list(zip(moments, names, strict=True)))):
        print(
            f"{name}: {options.replica_groups} groups of {options.ranks} ranks, {options.train_iters} steps", flush=True
        )
        training = Soak(options, folder / name, str(data), events)
        seconds, groups = training.run(), training.groups
        problems, counts = disagreements(groups, BATCH_SIZE)
        figures["problems"] += [f"{name}: {problem}" for problem in problems]
        figures["runs"][name] = {"seconds": round(seconds), "starts": sum(group.starts for group in groups)} | counts
        losses = [[line["validation_loss"] for line in group.lines if "validation_loss" in line] for group in groups]
        figures["runs"][name]["validation loss"] = [values[-1] for values in losses]
    undisturbed, disturbed = (run["validation loss"] for run in figures["runs"].values())
    figures["loss_change_percent"] = (max(disturbed) / undisturbed[0] - 1) * 100
    if not figures["loss_change_percent"] <= MOST_LOSS_CHANGE:
        figures["problems"].append(f"validation loss {disturbed}, undisturbed {undisturbed}")
    return figures


@command(PROG)
def main(argv: list[str]) -> int:
    options = parse_arguments(argv)
    folder = Path(options.output).resolve()
    if folder.exists():
        raise ValueError(f"--output {options.output}: exists already. Give a new folder.")
    if not _LIGHTHOUSE.exists():
        raise ValueError('torchft is not installed: pip install -e ".[elastic]"')
    folder.mkdir(parents=True)
    try:
        figures = soak(options, folder)
    except CannotRun as error:
        figures = {"flags": vars(options), "problems": [str(error)]}
    (folder / "soak.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if runs := figures.get("runs"):
        rows = [[name, *(str(value) for value in run_figures.values())] for name, run_figures in runs.items()]
        print(table(["run", *runs["disturbed"]], rows))
        print(f"validation loss: {figures['loss_change_percent']:+.2f} % to the undisturbed run's")
    for problem in figures["problems"]:
        print(f"FAILED: {problem}")
    print("all checks passed" if not figures["problems"] else f"{len(figures['problems'])} FAILED")
    return 1 if figures["problems"] else 0


if __name__ == "__main__":
    run_main(main)
