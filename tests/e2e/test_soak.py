"""tools/soak.py: its short form as a user starts it, and whether it would notice what must not happen."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import _soak_comparison
import pytest
import soak
import torch
import torch.distributed.checkpoint as dcp
from _soak_comparison import different_metrics, different_tensors
from _soak_job import Files, Job, Progress, SoakFailed

from megatron.bcd.checkpoint import layout

KILL = re.compile(
    r"kill +\d/\d: (SIG\w+ to .+?) at iteration .*, (restarted by torchrun|started again), resumed from \d+"
)


def run(root: Path, temporary: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Ends the tool gently where the test is ended: it has ranks to end."""
    command = [sys.executable, "tools/soak.py", *words]
    environment = os.environ | {"TMPDIR": str(temporary)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=root, env=environment, text=True, **pipes) as tool:  # type: ignore[call-overload]
        try:
            output, errors = tool.communicate()
        finally:
            tool.terminate()
    return subprocess.CompletedProcess(command, tool.returncode, output, errors)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """tmp_path with the name of a test is too long for the sockets of the ranks' data workers."""
    with tempfile.TemporaryDirectory(prefix="soak_") as folder:
        yield Path(folder)


SHORT = ["SIGKILL to rank 1 at a save", "SIGTERM to torchrun"]
LONGER = [
    "SIGKILL to torchrun and all ranks",
    "SIGKILL to rank 0 at a save",
    "SIGKILL to rank 0",
    "SIGTERM to torchrun",
]


@pytest.mark.long
@pytest.mark.timeout(900)  # starts two ranks four or six times; the tool itself notices a run that hangs
@pytest.mark.parametrize(
    ("seed", "expected"),
    [("1318", SHORT), ("29", LONGER)],
    ids=["two_kills", "four_kills"],
)
def test_short_form(repo_root: Path, short_folder: Path, seed: str, expected: list[str]) -> None:
    """A run that a kill changes, a checkpoint that a kill leaves half written, a rank that outlives its run.

    In the two kills a rank dies alone, in a save, and all ranks are asked to stop; that a machine
    dies is in test_resume_torchrun.py.
    """
    number = len(expected)
    done = run(repo_root, short_folder, "--kills", str(number), "--seed", seed, "--iterations", "44")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == (
        f"kills {number}, resumes {number}, invalid checkpoints 0, final weights equal: yes, metrics equal: yes"
    )
    kills = [match.groups() for match in map(KILL.match, lines) if match]
    assert sorted(what for what, _ in kills) == sorted(expected), "one line for each kill"
    assert {how for _, how in kills} == {"restarted by torchrun", "started again"}, "both ways to go on"
    assert list(short_folder.iterdir()) == [], "a run that went well leaves nothing"


@pytest.mark.parametrize(
    "words, message",
    [
        ("--kills 0", "--kills 0"),
        ("--pipeline-size 0", "--pipeline-model-parallel-size 0"),
        ("--kills 30 --iterations 49", "--iterations 49"),
        ("--output tools", "--output tools"),
        ("--folder tools/soak.py", "--output tools/soak.py"),
    ],
)
def test_bad_flags(repo_root: Path, tmp_path: Path, words: str, message: str) -> None:
    """A traceback, or an exit code that says the soak has found something."""
    done = run(repo_root, tmp_path, *words.split())
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1) and message in done.stderr


def test_kills_spread_over_the_run() -> None:
    """Kills that pile up at the beginning, lack a kind, or come after the last save, or can't be repeated."""
    for seed in range(20):
        kills = soak.plan_kills(num_kills=20, num_iterations=220, num_ranks=2, seed=seed)
        assert kills == soak.plan_kills(num_kills=20, num_iterations=220, num_ranks=2, seed=seed)
        assert [(kill.iteration - 1) // 10 for kill in kills] == list(range(20)), "one in each tenth iteration"
        assert [sum(kill.kind is kind for kill in kills) for kind in soak.Kind] == [4] * len(soak.Kind)
        assert {kill.rank for kill in kills} == {0, 1}
    starts = soak.plan_starts(3)
    for _ in range(3):
        assert len({next(starts) for _ in range(4)}) == 4, "each combination once in four starts"


@pytest.mark.parametrize(
    "change, expected",
    [
        ([], []),
        ([("remove", 1)], ["iteration 2"]),
        ([("double", 0)], ["iteration 1"]),
        ([("double", 2)], ["iteration 2"]),
        ([("loss", 1)], ["iteration 2"]),
        ([("grad_norm", 0)], ["iteration 1"]),
        ([("learning_rate", 0)], ["iteration 1"]),
        ([("step_time_ms", 0)], []),
    ],
)
def test_metrics_comparison(tmp_path: Path, change: list[tuple[str, int]], expected: list[str]) -> None:
    """A comparison that overlooks a lost or repeated line or a changed figure, or that minds the time of a step."""
    rate = {"learning_rate": 0.01, "grad_norm": 0.1, "step_time_ms": 5.0}
    lines: list[dict[str, float]] = [
        {"iteration": 1, "loss": 1.1, **rate},
        {"iteration": 2, "loss": 1.2, **rate},
        {"iteration": 2, "validation_loss": 1.3},
    ]
    write_metrics(tmp_path / "reference", lines)
    for what, index in change:
        if what == "remove":
            del lines[index]
        elif what == "double":
            lines.insert(index, lines[index])
        else:
            lines[index] = lines[index] | {what: 7.0}
    write_metrics(tmp_path / "other", lines)
    found = different_metrics(str(tmp_path / "reference"), str(tmp_path / "other"))
    assert [line.partition(":")[0] for line in found] == expected


def write_metrics(path: Path, lines: list[dict[str, float]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_weights_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison within a tolerance, or of the weights that one of the two happens to have."""
    # PyTorch without Megatron Core writes into its index what a checkpoint of ours has no need of
    monkeypatch.setattr(_soak_comparison, "only_data", contextlib.nullcontext)
    weights = {"a": torch.tensor([1.0, -0.0]), "b": torch.tensor([2.0], dtype=torch.bfloat16), "c": torch.zeros(1)}
    dcp.save(weights, checkpoint_id=tmp_path / "one", no_dist=True)
    assert different_tensors(str(tmp_path / "one"), str(tmp_path / "one")) == []
    del weights["c"]
    weights["a"] = torch.tensor([1.0, 0.0])
    weights["b"] = torch.nextafter(weights["b"], torch.tensor([3.0], dtype=torch.bfloat16))
    dcp.save(weights, checkpoint_id=tmp_path / "two", no_dist=True)
    found = different_tensors(str(tmp_path / "one"), str(tmp_path / "two"))
    assert sorted(line[0] for line in found) == ["a", "b", "c"]


def test_progress_is_that_of_the_present_start(tmp_path: Path) -> None:
    """Lines of the start before would let a kill come while the next one still imports, again and again."""
    path = tmp_path / "metrics.jsonl"
    progress = Progress(str(path))
    assert not progress.has_reached(0)
    write_metrics(path, [{"iteration": 1}, {"iteration": 2}])
    assert progress.has_reached(2) and not progress.has_reached(3)
    with path.open("a") as file:
        file.write('{"iteration": 3')
    assert progress.iteration() == 2, "half a line does not count"
    progress.new_start()
    assert not progress.has_reached(1)
    write_metrics(tmp_path / "aside", [{"iteration": 1}])
    (tmp_path / "aside").replace(path)
    assert progress.has_reached(1) and not progress.has_reached(2)


def killed_run(files: Files) -> soak.KilledRun:
    return soak.KilledRun(files, [], num_ranks=1, starts=soak.plan_starts(0))


def test_checkpoint_check(tmp_path: Path) -> None:
    """A damaged checkpoint, or a tracker that names none, that the tally does not count."""
    files = Files(folder=tmp_path)
    for iteration in (5, 10):
        aside = Path(layout.incomplete_folder(files.checkpoints, iteration))
        aside.mkdir(parents=True)
        (aside / "weights").write_bytes(bytes(100))
        layout.finish(str(aside), {"weights": layout.file_digest(str(aside / "weights"))})
        layout.publish(files.checkpoints, iteration)
    good = killed_run(files)
    good._check_checkpoints("a kill")
    assert (good.num_invalid, good.problems) == (0, [])
    shard = Path(layout.iteration_folder(files.checkpoints, 5)) / "weights"
    shard.write_bytes(bytes(99))
    (Path(files.checkpoints) / layout.TRACKER).write_text("15")
    bad = killed_run(files)
    bad._check_checkpoints("a kill")
    assert bad.num_invalid == 1
    damaged, tracker = bad.problems
    assert str(shard) in damaged and layout.TRACKER in tracker
    assert len(soak.left_behind(files.checkpoints)) == 1, "2 of 3 checkpoints"
    Path(layout.incomplete_folder(files.checkpoints, 20)).mkdir()
    assert "iter_0000020.incomplete" in soak.left_behind(files.checkpoints)[0]


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Callable[[str], soak.KilledRun]]:
    """Starts Python code instead of torchrun, as the job of a killed run."""
    runs = []

    def start(code: str) -> soak.KilledRun:
        killed = killed_run(Files(folder=tmp_path))
        killed._job = Job([sys.executable, "-c", code], tmp_path / "log", num_ranks=1, max_restarts=0)
        runs.append(killed)
        return killed

    yield start
    for killed in runs:
        killed.end()
        assert killed.job.processes() == frozenset()


def test_orphan_is_found(jobs: Callable[[str], soak.KilledRun], monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has left its parent and its session, and still belongs to the job."""
    killed = jobs("import os, time; os.fork() and os._exit(3); os.setsid(); time.sleep(60)")
    killed.job.wait()
    monkeypatch.setattr(soak, "GRACE_SECONDS", 0.5)
    with pytest.raises(SoakFailed, match="time.sleep"):
        killed._wait_until_gone(killed.job.processes, "a kill")
    killed.end()
    killed._wait_until_gone(killed.job.processes, "a kill")
    with pytest.raises(SoakFailed, match="code 3"):
        killed._wait(lambda: False, "the end")


def test_hang_is_found(jobs: Callable[[str], soak.KilledRun], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose ranks wait for each other would keep the tool waiting for ever."""
    killed = jobs("import time; time.sleep(60)")
    monkeypatch.setattr(soak, "STALL_SECONDS", 0.5)
    with pytest.raises(SoakFailed, match="a save"):
        killed._wait(lambda: False, "a save")
    with pytest.raises(SoakFailed, match="1 ranks"):
        killed.job.ranks()
