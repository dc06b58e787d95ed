"""Write the table of docs/huggingface.md, and docs/decoders.csv, from the results of the tests.

pytest tests/distributed/test_transformers_layers.py tests/unit/test_split_check.py --long --junitxml results.xml
python tests/support/decoder_table.py results.xml
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import decoders

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"
TYPES = PAGE.with_name("decoders.csv")
"""The other model types: how they were split."""
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


EQUAL = "equal"
REASONS = {
    "has an encoder": "encoders",
    "no single list": "no single list of layers",
    "weights between": "weights between layers and head",
    " ties ": "ties other than of the head",
    "computes otherwise": "layers share more than hidden states",
    "": "transformers' default sizes do not run small",
}
"""What a type is refused for, by a part of the message; the first one counts."""
_NUMBERS = re.compile(r"\d+ split equally, \d+ are refused")


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


def format_table(results: Mapping[tuple[str, str], bool], page: str) -> str:
    """Return the table: a row for the model types with the same cells. A test that did not run keeps the page's."""
    known = {name: cells.split("|") for names, cells in ROW.findall(page) for name in names.split(", ")}

    def cell(name: str, column: int, test: str) -> str:
        has_passed = results.get((test, name))
        yes = "refused" if test == "test_packed_texts" and name in decoders.UNPACKED else "yes"
        if has_passed is None:
            return known.get(f"`{name}`", [""] * len(COLUMNS))[column].strip()
        return yes if has_passed else "fails"

    rows: dict[str, list[str]] = {}
    for name in decoders.SETTINGS:
        cells = (cell(name, column, test) for column, test in enumerate(COLUMNS.values()))
        rows.setdefault(" | ".join(cells), []).append(f"`{name}`")
    return "\n".join(f"| {', '.join(names)} | {cells} |" for cells, names in rows.items())


def read_types(paths: Sequence[str]) -> dict[str, str]:
    """Return how each model type without a row was split: EQUAL, or why it was refused."""
    types = {}
    for path in paths:
        for case in ElementTree.parse(path).iter("testcase"):
            name = case.get("name", "").partition("[")[2].rstrip("]")
            results = [each.get("value", "") for each in case.iter("property") if each.get("name") == "split"]
            if results and name not in decoders.SETTINGS:
                types[name] = results[0]
    return types


def main(paths: Sequence[str]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = [*ROW.finditer(text)]
    start, end = rows[0].start(), rows[-1].end()
    text = text[:start] + format_table(read_results(paths), text) + text[end:]
    if types := read_types(paths):
        lines = (f"{name},{result}\n" for name, result in sorted(types.items()))
        TYPES.write_text("model_type,split\n" + "".join(lines), encoding="utf-8")
        numbers = Counter(result == EQUAL for result in types.values())
        text = _NUMBERS.sub(f"{numbers[True]} split equally, {numbers[False]} are refused", text)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
