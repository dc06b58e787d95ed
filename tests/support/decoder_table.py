"""Write the table of docs/huggingface.md from the results of the tests.

pytest tests/distributed/test_transformers_layers.py --long --junitxml results.xml
python tests/support/decoder_table.py results.xml
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import decoders

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"
COLUMNS = {
    "logits and gradients": "test_logits_and_gradients",
    "host = device": "test_layers_on_host",
    "export and resume": "test_export_and_resume",
    "packed = unpacked": "test_packed_texts",
}
"""Tests of a model type by column."""
_CASE = re.compile(r"(\w+)\[(\w+)")
ROW = re.compile(r"^\| (`\w+`(?:, `\w+`)*) \|(.*)\|$", re.MULTILINE)
"""A row: the model types that have the same cells, and the cells."""


def read_results(paths: Sequence[str]) -> dict[tuple[str, str], bool]:
    """Return whether every case of a test has passed, by the names of test and model type. Later files win."""
    results: dict[tuple[str, str], bool] = {}
    for path in paths:
        passed: dict[tuple[str, str], bool] = {}
        for case in ElementTree.parse(path).iter("testcase"):
            if match := _CASE.match(case.get("name", "")):
                has_passed = not any(child.tag in ("failure", "error", "skipped") for child in case)
                passed[match[1], match[2]] = passed.get((match[1], match[2]), True) and has_passed
        results |= passed
    return results


def format_table(results: Mapping[tuple[str, str], bool]) -> str:
    """Return the table: a row for the model types with the same cells. A test that did not run has an empty cell."""

    def cell(name: str, test: str) -> str:
        has_passed = results.get((test, name))
        yes = "refused" if test == "test_packed_texts" and name in decoders.UNPACKED else "yes"
        return "" if has_passed is None else yes if has_passed else "fails"

    rows: dict[str, list[str]] = {}
    for name in decoders.SETTINGS:
        rows.setdefault(" | ".join(cell(name, test) for test in COLUMNS.values()), []).append(f"`{name}`")
    return "\n".join(f"| {', '.join(names)} | {cells} |" for cells, names in rows.items())


def main(paths: Sequence[str]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = [*ROW.finditer(text)]
    start, end = rows[0].start(), rows[-1].end()
    PAGE.write_text(text[:start] + format_table(read_results(paths)) + text[end:], encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
