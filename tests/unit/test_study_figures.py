"""Which points of a study's picture have a name."""

from __future__ import annotations

from typing import Any

from figures import MOST_LABELS, _named
from results import Row


def row(method: str, group: str, test: float, state: float) -> Row:
    names: Any = dict.fromkeys(("model", "data", "label"), method) | {"method": method, "group": group}
    return Row(**names, tests=(test,), state=state)


def test_names_that_decide() -> None:
    """Names over each other, or a method of the frontier without one."""
    few = [row("full", "full", 2.0, 16), *(row(f"plain{i}", "plain", 3 + i, 8 + i) for i in range(MOST_LABELS - 1))]
    assert _named(few, "full") == {each.method for each in few}
    many = [*few, row("light", "plain", 9.0, 4), row("muon", "muon", 1.0, 12)]
    assert _named(many, "full") == {"full", "plain0", "plain1", "light", "muon"}
