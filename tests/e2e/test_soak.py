"""studies/soak.py: replica groups that are killed or stopped, a lighthouse that restarts, and which faults count."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import soak
from support.bad_input_cases import write_dataset

LINE = {"iteration": 4, "consumed_samples": 8, "groups": 2, "lineage": 1, "values": 7}


def faults(*changes: dict[str, Any], consumed: int = 12) -> str:
    """Return the faults of groups that train a step after an exchange, with batches of 2."""
    step = {"iteration": 5, "consumed_samples": consumed, "loss": 1.0}
    lines = [[LINE | {"group": number} | change, step] for number, change in enumerate(changes)]
    return " ".join(soak.disagreements([SimpleNamespace(name="a", lines=line) for line in lines], 2)[0])  # type: ignore[misc]


def test_what_counts_as_a_fault() -> None:
    """Groups with different bits or sample counts, or that train the same samples, are not reported."""
    assert faults({}, {}) == ""
    assert "differ" in faults({}, {"values": 8}) and "differ" in faults({}, {"consumed_samples": 6}, consumed=12)
    assert "one number" in faults({}, {"group": 0}) and "trained twice" in faults({}, {"group": 0})
    assert "10 samples" in faults({}, {}, consumed=10)


@pytest.mark.long  # the faults one by one: distributed/test_replica_groups.py
@pytest.mark.timeout(600)
def test_kills_a_hang_and_a_lighthouse_that_restarts(tmp_path: Path) -> None:
    """A group that does not end, or ends with an error, or holds other bits after an exchange than the others."""
    pytest.importorskip("torchft")
    text = Path(textwrap.__file__).read_bytes()
    write_dataset(tmp_path / "text", [[*text[start : start + 200], 256] for start in range(0, 20000, 200)])
    flags = "--replica-groups 2 --ranks 1 --train-iters 100 --kills 2 --hangs 1 --slow 0 --lighthouse-restarts 1"
    flags += " --outer-timeout-seconds 3 --most-loss-change 5 --limit-minutes 4 --flags=--outer-interval=5"
    output = tmp_path / "out"
    code = soak.main([*flags.split(), "--data-path", str(tmp_path / "text"), "--output", str(output)])
    figures = json.loads((output / "soak.json").read_text())
    assert (code, figures["problems"]) == (0, [])
    assert figures["runs"]["disturbed"]["starts"] == 4 and figures["runs"]["undisturbed"]["alone"] == 0
