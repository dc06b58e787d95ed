"""tools/show_schedule.py: what it prints, refuses and draws."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import show_schedule

EXAMPLE = ("--stages", "4", "--microbatches", "8", "--pivot", "2")


def output(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert show_schedule.main(flags) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_command_as_typed_without_torch(repo_root: Path, tmp_path: Path) -> None:
    """A tool that runs from the repository only, or that needs torch, or seconds, to print a table."""
    program = "import os, runpy, sys; sys.argv = sys.argv[1:]; sys.path[0] = os.path.dirname(sys.argv[0])\n"
    program += "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    program += "finally: assert not {'torch', 'megatron.core', 'matplotlib', 'rich'} & sys.modules.keys()"
    command = [sys.executable, "-c", program, repo_root / "tools" / "show_schedule.py", *EXAMPLE]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "iteration time         28    25   -10.7 %" in done.stdout


def test_both_grids_and_what_is_saved(capsys: pytest.CaptureFixture[str]) -> None:
    """Grids of two scales, a figure that does not belong to its grid, lines that a terminal or README would wrap."""
    text = output(capsys, *EXAMPLE)
    assert max(map(len, text.splitlines())) <= 120
    grids = re.findall(r"^stage \d .*", text, re.MULTILINE)
    assert grids[2] == (
        "stage 2 active   .  . F0 F1  . B0--- F2 B1--- F3 B2--- F4 B3--- F5 B4--- F6 B5--- F7 B6--- B7---  ."
    )
    assert grids[6] == ("stage 2 active  F0  . F1 B0--- F2 B1--- F3 B2--- F4 B3--- F5 B4--- F6 B5--- F7 B6--- B7---")
    assert {len(row) for row in grids[:4]} == {16 + 3 * 28 - 1} and {len(row) for row in grids[4:]} == {16 + 3 * 25 - 1}
    assert text.splitlines()[-5:] == [
        "                    stock   bcd    change",
        "iteration time         28    25   -10.7 %",
        "work                   64    56   -12.5 %",
        "activations kept       10     3   -70.0 %",
        "backward messages      24     8   -66.7 %",
    ]


INTERLEAVED = ("--stages", "4", "--microbatches", "8", "--layout", "interleaved", "--num-blocks", "3", "--block", "1")


def test_interleaved(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A layout that is read and ignored, a chunk that is not drawn, a picture that needs the other shape."""
    text = output(capsys, *INTERLEAVED, "--figure", str(tmp_path / "x.png"))
    assert "stage 3 pAs   .   .   .  f0a f1a f2a f3a F0b F1b F2b F3b F0c I0c F1c I1c" in text
    assert "iteration time         81    59   -27.2 %" in text
    assert (tmp_path / "x.png").stat().st_size > 10_000
    assert "stage 0 pAssAs " in output(capsys, *INTERLEAVED, "--schedule", "bcd", "--chunks", "6")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--stages", "4", "--microbatches", "8"), "give --pivot STAGE, or --layout interleaved"),
        ((*INTERLEAVED[:-2],), "needs --num-blocks and --block"),
        ((*INTERLEAVED, "--pivot", "1"), "--pivot does not go with --layout interleaved"),
        ((*INTERLEAVED, "--chunks", "4"), "--chunks 4: must be a multiple of --num-blocks 3"),
        ((*EXAMPLE, "--block", "1"), "--block needs --layout interleaved"),
    ],
)
def test_interleaved_refusals(flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A flag of the other layout that is dropped in silence."""
    assert show_schedule.main(flags) == 2
    assert message in capsys.readouterr().err


def test_flags_are_followed(capsys: pytest.CaptureFixture[str]) -> None:
    """A flag that is read and ignored."""

    def figures(*flags: str) -> list[str]:
        return re.findall(r"iteration time ([\d.]+), bubble", output(capsys, *EXAMPLE, *flags))

    assert figures() == ["28", "25"]
    assert figures("--run-ahead", "0") == ["28", "27"]
    assert figures("--schedule", "stock") == ["28"]
    assert figures("--schedule", "bcd") == ["25"]
    assert figures("--active", "2", "3") == ["30", "27"]
    for flag, without_use, with_use in (
        ("--forward", "1 1 1 1", "1 1 1.5 1"),
        ("--backward", "9 9 2 9", "2 2 3 2"),
        ("--backward-input", "9 1 9 1", "1 1 1 2"),
        ("--message", "0", "1"),
    ):
        assert figures(flag, *without_use.split()) == figures() != figures(flag, *with_use.split())
    assert "f0' next iteration's microbatch 0" in output(capsys, *EXAMPLE)
    assert "f0'" not in output(capsys, *EXAMPLE, "--run-ahead", "0")
    assert "change" not in output(capsys, *EXAMPLE, "--schedule", "bcd")
    assert "no stage is forward-only" in output(capsys, "--stages", "2", "--microbatches", "3", "--pivot", "0")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--stages 0", "--pipeline-model-parallel-size 0: must be 1 to 64"),
        ("--stages four", "--pipeline-model-parallel-size/--stages: invalid int value: 'four'"),
        ("--microbatches 1000000", "--microbatches 1000000: must be 1 to 512"),
        ("--pivot 4", "--pivot 4: must be 0 to 3"),
        ("--pivot -1", "--pivot -1: must be 0 to 3"),
        ("--active 1 2", "--active 1 2: the first must be the first trainable stage 2, the last at most 3"),
        ("--active 3", "--active 3: the first must be the first trainable stage 2"),
        ("--active 2 7", "--active 2 7: the first must be the first trainable stage 2, the last at most 3"),
        ("--run-ahead 9", "--run-ahead 9: must be 0 to 8"),
        ("--pivot 0 --run-ahead 1", "--run-ahead 1: must be 0 with --pivot 0"),
        ("--forward 1 2", "--forward 1 2: must be one number, or one for each of 4 stages"),
        ("--backward -2", "--backward -2: must be 0 to 1e+09"),
        ("--backward-input nan", "--backward-input nan: must be 0 to 1e+09"),
        ("--message inf", "--message inf: must be 0 to 1e+09"),
        ("--schedule all", "--schedule: invalid choice: 'all'"),
        ("--figure plan.pdf", "--figure plan.pdf: must end in .png or .svg"),
        ("--run 3", "unrecognized arguments: --run 3"),
    ],
)
def test_bad_flags(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, message: str
) -> None:
    """A traceback, exit code 0, a guess, or a line that does not say which flag is meant."""
    monkeypatch.chdir(tmp_path)
    assert show_schedule.main([*EXAMPLE, *flags.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith(f"tools/show_schedule.py: error: {message}")
    assert not list(tmp_path.iterdir())


def test_missing_flags(capsys: pytest.CaptureFixture[str]) -> None:
    """A default that nobody asked for."""
    assert show_schedule.main(["--stages", "4"]) == 2
    expected = "tools/show_schedule.py: error: the following arguments are required: --microbatches\n"
    assert capsys.readouterr().err == expected


def test_pictures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """An empty or broken picture, a temporary file left beside it, a folder that must exist before."""
    from matplotlib.image import imread

    picture = tmp_path / "new" / "plan.png"
    assert output(capsys, *EXAMPLE, "--figure", str(picture)).endswith(f"\nwrote {picture}\n")
    pixels = imread(picture)
    assert pixels.shape[:2][::-1] == struct.unpack(">II", picture.read_bytes()[16:24])
    assert pixels.shape[1] == 2080 and 0.3 < pixels[..., :3].mean() < 0.98
    drawing = tmp_path / "new" / "plan.svg"
    output(capsys, *EXAMPLE, "--figure", str(drawing))
    words = "".join(ElementTree.parse(drawing).getroot().itertext())
    for text in (
        "Stock: Megatron Core's 1F1B",
        "iteration time 28",
        "BCD: no backward before stage 2",
        "iteration time 25",
    ):
        assert text in words
    assert sorted(file.name for file in picture.parent.iterdir()) == ["plan.png", "plan.svg"]


@pytest.mark.parametrize(
    "flags",
    [
        "--stages 1 --microbatches 1 --pivot 0",
        "--stages 3 --microbatches 2 --pivot 2 --schedule bcd",
        "--stages 18 --microbatches 40 --pivot 9",
        "--stages 2 --microbatches 2 --pivot 0 --forward 0 --backward 0 --backward-input 0",
    ],
)
def test_pictures_of_corners(capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: str) -> None:
    """One stage, one panel, boxes too small for a number, no time at all."""
    picture = tmp_path / "plan.svg"
    output(capsys, *flags.split(), "--figure", str(picture))
    assert picture.stat().st_size > 1000


def test_picture_that_cannot_be_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A table without its picture, and exit code 0."""
    (tmp_path / "file").write_text("")
    assert show_schedule.main([*EXAMPLE, "--figure", str(tmp_path / "file" / "plan.png")]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("tools/show_schedule.py: error: --figure ")
    assert captured.err.count("\n") == 1
