"""Run the measurements of studies/gpu_hour.sh, which sets up what they need, and report their results.

    bash studies/gpu_hour.sh                       # see its --help
    python studies/gpu_hour.py --report            # studies/gpu_hour.md and pictures from studies/gpu_hour/*.jsonl

Each measurement is one line of OUTPUT/results/PART.jsonl, written when it ends. What has a line is not measured
again; delete the line to repeat it. Exit code 1 if a measurement of this call failed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "tools"))

import psutil
from _parser import Parser, command, run_main
from _processes import ROOT, failure_reason, kill, start
from gpu_hour_jobs import JOBS, PARTS, WIDTHS, Job, Setting, read_results
from study import commit, tell

PROG = "studies/gpu_hour.py"
KEPT_FIELDS = ("iteration", "consumed_samples", "phase", "block", "loss", "learning_rate", "grad_norm", "step_time_ms",
        "tokens_per_second", "model_state_bytes", "peak_memory_bytes", "reserved_memory_bytes", "host_state_bytes",
        "skipped_iterations", "validation_loss", "test_loss", "is_final", "switch_time_ms")  # fmt: skip
"""Fields of a metrics line that a record keeps."""
LOG_LINES = 60
"""Last lines of the log that a record keeps."""


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Add a record, without the paths of this machine."""
    text = json.dumps(record)
    for folder in (ROOT, Path(sys.prefix), Path.home()):
        text = text.replace(f"{folder}/", "").replace(str(folder), ".")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{text}\n")
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file, reduced to the fields in KEPT_FIELDS; empty without a file."""
    lines = []
    with contextlib.suppress(FileNotFoundError):
        for text in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                lines.append({name: value for name, value in json.loads(text).items() if name in KEPT_FIELDS})
    return lines


@functools.cache
def hardware() -> dict[str, Any]:
    """Return the device and the versions. Query them in another process, so that no context stays on the GPU."""
    program = (
        "import json, platform, torch, importlib.metadata as m\n"
        "has = torch.cuda.is_available()\n"
        "about = torch.cuda.get_device_properties(0) if has else None\n"
        "print(json.dumps({'gpu': about.name if has else '', 'memory_gib': about.total_memory / 2**30 if has else 0,\n"
        "    'torch': torch.__version__, 'cuda': torch.version.cuda, 'python': platform.python_version(),\n"
        "    'megatron_core': m.version('megatron-core'), 'transformers': m.version('transformers')}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"torch does not start: {done.stderr.strip().splitlines()[-1:]}; check the environment")
    return json.loads(done.stdout.splitlines()[-1])


@dataclass(kw_only=True, eq=False)
class Running:
    """A job that has been started."""

    job: Job
    process: subprocess.Popen[bytes]
    folder: Path
    began: float
    host_bytes: int = 0
    """The largest resident memory of its processes, page-locked memory included."""


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and its descendants; 0 once they have ended."""
    try:
        process = psutil.Process(pid)
        return sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))
    except psutil.Error:
        return 0


class Runner:
    """Run the jobs of all parts within a time limit, and leave no process behind."""

    def __init__(self, setting: Setting, deadline: float) -> None:
        self.setting, self.deadline = setting, deadline
        self.results = setting.output / "results"
        self.num_failed = self.num_left = 0
        self._running: list[Running] = []
        self._recording: dict[Running, Future[None]] = {}
        self._pool = ThreadPoolExecutor(8)
        self._lock = threading.Lock()

    def run_part(self, part: str) -> None:
        """Run the missing jobs in order, until the time limit."""
        width = min(WIDTHS.get(part, 1), max(1, (os.cpu_count() or 1) // 2))
        while True:
            records = read_results(self.results, part)
            busy = {running.job.name for running in (*self._running, *self._recording)}
            jobs = JOBS[part](self.setting, records)
            missing = [job for job in jobs if job.name not in records and not (job.makes and job.makes.is_file())]
            waiting = [job for job in missing if job.name not in busy]
            startable = [job for job in waiting if time.monotonic() + job.seconds <= self.deadline]
            while startable and len(self._running) < width:
                self._start(startable.pop(0))
            if not (self._running or self._recording):
                self.num_left += len(waiting)
                return
            time.sleep(0.2)
            for running in list(self._running):
                self._check(running, part)
            for running in [running for running, done in self._recording.items() if done.done()]:
                self._recording.pop(running).result()  # raises what the thread raised

    def stop(self) -> None:
        for running in self._running:
            kill(running.process)
        self._pool.shutdown()

    def _start(self, job: Job) -> None:
        folder = self.setting.work(job.name)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        words = [
            each.replace("{metrics}", f"{folder}/metrics").replace("{model}", f"{folder}/model") for each in job.words
        ]
        process = start(words, folder / "log", threads=2)
        self._running.append(Running(job=job, process=process, folder=folder, began=time.monotonic()))
        tell(f"start {job.name} (at most {job.seconds:.0f} s)")

    def _check(self, running: Running, part: str) -> None:
        """Hand a job that has ended or run out of time to a thread, which scores its model and writes the record."""
        took, code = time.monotonic() - running.began, running.process.poll()
        running.host_bytes = max(running.host_bytes, resident_bytes(running.process.pid))
        if code is None and took < running.job.seconds:
            return
        kill(running.process)
        self._running.remove(running)
        self._recording[running] = self._pool.submit(self._record, running, part, code, took)

    def _record(self, running: Running, part: str, code: int | None, took: float) -> None:
        job, folder = running.job, running.folder
        log = (folder / "log").read_text(encoding="utf-8", errors="replace")
        failure = "" if code == 0 else "ran out of time" if code is None else failure_reason(log, code)
        if not failure and job.makes and not job.makes.is_file():
            failure = f"did not write {job.makes.name}"
        record: dict[str, Any] = {
            "job": job.name, **job.about, "failure": failure, "seconds": round(took, 1),
            "host_bytes": running.host_bytes, "command": shlex.join(["python", *job.words[1:]]), "commit": commit(),
            **hardware(),
        }  # fmt: skip
        if job.kind == "train":
            record["metrics"] = read_lines(folder / "metrics")
        elif job.kind == "json" and not failure:
            record["json"] = json.loads((folder / "metrics").read_text(encoding="utf-8"))
        if not failure and job.texts:
            record["scores"] = self._scores(folder / "model", job.texts)
        record["log"] = log.splitlines()[-LOG_LINES:]
        with self._lock:
            if failure or not job.makes:
                append(self.results / f"{part}.jsonl", record)
            self.num_failed += bool(failure)
        shutil.rmtree(folder / "model", ignore_errors=True)
        tell(f"done  {job.name}: {failure or f'{took:.0f} s'}")

    def _scores(self, model: Path, texts: Iterable[Path]) -> dict[str, float] | None:
        words = [sys.executable, __file__, "--score", str(model), *map(str, texts)]
        done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
        return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def score(model_folder: Path, texts: Sequence[Path], *, seq_length: int = 256) -> dict[str, float]:
    """Return the mean loss per token of a Hugging Face model on each text, cut into sequences of `seq_length`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16).to(place).eval()
    losses = {}
    for path in texts:
        documents = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
        tokens = [token for text in documents for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
        sequences = torch.tensor(tokens[: (len(tokens) - 1) // seq_length * seq_length + 1]).unfold(
            0, seq_length + 1, seq_length
        )
        total = 0.0
        with torch.no_grad():
            for rows in sequences.split(16):
                rows = rows.to(place)
                logits = model(rows[:, :-1]).logits.float().flatten(0, 1)
                total += torch.nn.functional.cross_entropy(logits, rows[:, 1:].flatten(), reduction="sum").item()
        losses[path.parent.name] = total / (len(sequences) * seq_length)
    return losses


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return the checked command line. Raises ValueError."""
    parser = Parser(prog=PROG, description=__doc__)
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all, in this order)")
    add("--scale", choices=("full", "tiny"), default="full")
    add("--output", type=Path, default=ROOT / "out" / "gpu_hour", help="folder of results and work files")
    add("--inputs", type=Path, help="what gpu_hour_inputs.py --unpack wrote (default: OUTPUT/inputs_unpacked)")
    add("--minutes", type=float, default=9.0, help="start nothing that could end later (default: 9)")
    add("--report", action="store_true", help="write the tables and pictures of studies/gpu_hour/*.jsonl")
    add("--score", nargs="+", type=Path, metavar="PATH", help="print the loss of a model's folder on these texts")
    options = parser.parse_args(argv)
    for part in options.parts:
        if part not in PARTS:
            raise ValueError(f"{part}: unknown part. Give some of {', '.join(PARTS)}.")
    if options.score and len(options.score) < 2:
        raise ValueError("--score: give the folder of a model and at least one text")
    options.output = options.output.resolve()
    options.inputs = (options.inputs or options.output / "inputs_unpacked").resolve()
    return options


@command(PROG)
def main(argv: Sequence[str]) -> int:
    options = parse_arguments(argv)
    if options.score:
        print(json.dumps(score(options.score[0], options.score[1:])))
        return 0
    if options.report:
        from gpu_hour_report import write_report  # slow: matplotlib

        for path in write_report():
            print(f"wrote {path.relative_to(ROOT)}")
        return 0
    deadline = time.monotonic() + 60 * options.minutes
    about = hardware()
    setting = Setting(
        is_tiny=options.scale == "tiny",
        has_gpu=bool(about["gpu"]),
        inputs=options.inputs,
        output=options.output,
    )
    if not setting.is_tiny and not setting.has_gpu:
        raise ValueError("this machine shows no GPU: SCALE=tiny tries everything on a CPU")
    tell(f"{about['gpu'] or 'CPU'}, torch {about['torch']}, Python {about['python']}, commit {commit()}")
    setting.data.mkdir(parents=True, exist_ok=True)
    runner = Runner(setting, deadline)
    try:
        for part in options.parts or PARTS:
            runner.run_part(part)
    finally:
        runner.stop()
    left = f"{runner.num_left} measurements are left: repeat the call" if runner.num_left else "nothing is left"
    tell(f"{left}; results are in {setting.output / 'results'}")
    return 1 if runner.num_failed else 0


if __name__ == "__main__":
    run_main(main)
