"""tools/report.py: table, ratios, JSON and picture from metrics files."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import report as tool

MIB = 2**20


def step_line(iteration: int, *, phase: int, block: int, step_ms: float, state: list[int], loss: float = 1.0) -> str:
    about = {"iteration": iteration, "phase": phase, "block": block, "loss": loss, "model_state_bytes": state}
    return json.dumps(about | {"step_time_ms": step_ms, "tokens_per_second": 1e6 / step_ms})


def write_run(path: Path, *, num_blocks: int, step_ms: tuple[float, ...], state_mib: tuple[int, ...]) -> str:
    """Write two cycles with two steps per block; block b takes step_ms[b], holds state_mib[b] (rank 1: half of it)."""
    lines = []
    for iteration in range(1, 4 * num_blocks + 1):
        phase = (iteration - 1) // 2
        block = phase % num_blocks
        state = [state_mib[block] * MIB, state_mib[block] * MIB // 2]
        lines.append(
            step_line(iteration, phase=phase, block=block, step_ms=step_ms[block], state=state, loss=10.0 / iteration)
        )
        evaluation = {"iteration": iteration, "validation_loss": 8.0 / iteration, "validation_perplexity": 3.0}
        lines.append(json.dumps(evaluation))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.fixture
def two_runs(tmp_path: Path) -> list[str]:
    bcd = write_run(tmp_path / "bcd.jsonl", num_blocks=3, step_ms=(70.0, 60.0, 50.0), state_mib=(80, 40, 30))
    full = write_run(tmp_path / "full.jsonl", num_blocks=1, step_ms=(100.0,), state_mib=(160,))
    return ["--run", f"BCD={bcd}", "--run", f"full={full}"]


def test_table_and_ratios(two_runs: list[str], tmp_path: Path) -> None:
    """The table has the largest state of all phases, the mean time of all blocks and the last evaluation."""
    picture = tmp_path / "pictures" / "loss.png"
    assert tool.main([*two_runs, "--json", str(tmp_path / "new" / "t.json"), "--figure", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG") and [*picture.parent.iterdir()] == [picture]
    table = json.loads((tmp_path / "new" / "t.json").read_text())
    assert table["runs"][0]["model_state_bytes"] == [80 * MIB, 40 * MIB]
    assert table["runs"][0]["mean_model_state_bytes"] == [50 * MIB, 25 * MIB]
    assert [run["step_time_ms"] for run in table["runs"]] == pytest.approx([60, 100])
    assert [run["validation_loss"] for run in table["runs"]] == pytest.approx([2 / 3, 2])
    assert table["ratios"]["step_time_ms"] == pytest.approx(0.6)


def test_files_without_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A FILE is named after itself or, if it is called metrics.jsonl, its folder; equal names become paths."""
    monkeypatch.chdir(tmp_path)
    files = ["out/full.jsonl", "out/lr=2/metrics.jsonl", "out/b/full.jsonl", "metrics.jsonl"]
    for file in files:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        write_run(Path(file), num_blocks=1, step_ms=(10.0,), state_mib=(20,))
    assert tool.main([*files, "--run", "x=out/full.jsonl", "--json=t.json"]) == 0
    runs = {run["run"]: run["file"] for run in json.loads(Path("t.json").read_text())["runs"]}
    assert runs == {
        "x": files[0],
        "out/full": files[0],
        "lr 2": files[1],
        "out/b/full": files[2],
        "metrics": files[3],
    }


def test_calls_without_a_file(two_runs: list[str], tmp_path: Path, capsys: Any) -> None:
    """No file is a mistake, and --json does not replace a metrics file that follows it."""
    assert tool.main([]) == 2
    assert "give FILE or --run NAME=FILE" in capsys.readouterr().err
    file = tmp_path / "bcd.jsonl"
    content = file.read_text()
    assert tool.main([*two_runs, "--json", str(file)]) == 2
    assert f"--json {file}: is a metrics file." in capsys.readouterr().err
    assert file.read_text() == content


def test_diverged_and_evaluation_only_runs(tmp_path: Path) -> None:
    """A run that diverged and one with evaluations only have their rows, and do not stop the picture."""
    diverged = Path(write_run(tmp_path / "nan.jsonl", num_blocks=1, step_ms=(10.0,), state_mib=(20,)))
    with diverged.open("a") as file:
        lost = {"validation_loss": None, "validation_perplexity": None}
        lost |= {"iteration": 5, "non_finite": {"validation_loss": "nan", "validation_perplexity": "nan"}}
        file.write(json.dumps(lost) + "\n")
    only = tmp_path / "eval.jsonl"
    only.write_text('{"iteration": 7, "validation_loss": 2.5, "validation_perplexity": 12.18}\n')
    arguments = ["--run", f"nan={diverged}", "--run", f"eval={only}"]
    assert tool.main([*arguments, "--figure", str(tmp_path / "p.svg"), "--json", str(tmp_path / "t.json")]) == 0
    runs = json.loads((tmp_path / "t.json").read_text())["runs"]
    assert runs[0]["validation_loss"] is None
    assert math.isclose(runs[1]["validation_perplexity"], 12.18)


def test_resumed_on_other_ranks(two_runs: list[str], tmp_path: Path) -> None:
    """A run that was resumed on other ranks has the figures of its last number of ranks."""
    run = tmp_path / "resumed.jsonl"
    lines = [step_line(i, phase=0, block=0, step_ms=5.0, state=[10 * MIB] * 4) for i in range(1, 7)]
    # resumed on two ranks, and once more with another log interval
    lines += [step_line(i, phase=0, block=0, step_ms=10.0, state=[20 * MIB] * 2) for i in (7, 8, 9, 10)]
    lines += [step_line(i, phase=1, block=1, step_ms=40.0, state=[30 * MIB] * 2) for i in (14, 18)]
    lines.append('{"iteration": 18, "validation_loss": 2.0, "validation_perplexity": 7.389}')
    run.write_text("\n".join(lines) + "\n")
    arguments = ["--run", f"resumed={run}", *two_runs, "--json", str(tmp_path / "t.json")]
    assert tool.main([*arguments, "--figure", str(tmp_path / "p.png")]) == 0
    row = json.loads((tmp_path / "t.json").read_text())["runs"][0]
    assert row["step_time_ms"] == pytest.approx((4 * 10 + 8 * 40) / 12) and row["num_ranks"] == [4, 2]
    assert row["mean_model_state_bytes"] == [25 * MIB] * 2
    assert tool.phase_bands(tool.read_run(f"resumed={run}")) == [(0.0, 10.0, 0), (10.0, 18.0, 1)]


STEP = '{"iteration": 1, "phase": 0, "block": 0, "loss": %s, "step_time_ms": 1, "tokens_per_second": 1%s}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, ""),
        ('{"iteration": 1}\n', ""),
        ("{bad\n", "line 1"),
        (STEP % ('"x"', ', "model_state_bytes": [1]'), "line 1"),
        (STEP % ("1", ', "model_state_bytes": 5'), "line 1"),
    ],
)
def test_bad_files(tmp_path: Path, capsys: Any, content: str | None, message: str) -> None:
    """A bad file is refused in one line that names it, and an older picture stays."""
    path, picture = tmp_path / "m.jsonl", tmp_path / "p.png"
    picture.write_text("older")
    if content is not None:
        path.write_text(content)
    assert tool.main(["--run", f"BCD={path}", "--figure", str(picture)]) == 2
    error = capsys.readouterr().err
    assert f"error: {path}" in error and error.count("\n") == 1
    assert message in error
    assert picture.read_text() == "older"
