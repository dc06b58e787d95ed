"""Records of fine-tuning: valid files, and the error line of invalid ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.bcd.data.sft.text import Record, read_records

MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "unanswered"},
]
SHARE_GPT = [
    {"from": "system", "value": "s"},
    {"from": "human", "value": "q"},
    {"from": "gpt", "value": "a"},
    {"from": "human", "value": "unanswered"},
]
GOOD: tuple[tuple[dict[str, Any], Record], ...] = (
    (
        {"instruction": "do", "input": "it", "output": "done", "id": 3},
        Record(prompt="do", context="it", answer="done", is_instruction=True),
    ),
    ({"instruction": "do", "output": ""}, Record(prompt="do", is_instruction=True)),
    ({"instruction": "do", "input": None, "output": "é"}, Record(prompt="do", answer="é", is_instruction=True)),
    ({"prompt": "p", "completion": "c"}, Record(prompt="p", answer="c")),
    ({"messages": MESSAGES, "source": "x"}, Record(messages=tuple(MESSAGES[:3]))),
    ({"conversations": SHARE_GPT, "id": "x"}, Record(messages=tuple(MESSAGES[:3]))),
    ({"conversations": SHARE_GPT[1:], "system": "s"}, Record(messages=tuple(MESSAGES[:3]))),
)
OK = '{"prompt": "p", "completion": "c"}\n'
BAD: dict[str, tuple[str, tuple[str, ...]]] = {
    "empty": ("", ()),
    "not_json": (OK + "\n" + "{'prompt': 1}\n", ("line 3",)),
    "deep": ("[" * 5 + OK.strip() + "," + "[" * 100_000, ()),
    "list_is_cut": ("[" + OK, ()),
    "not_utf8": (OK.replace("p", "\udce9"), ("line 1",)),
    "surrogate": ('{"prompt": "\\ud800", "completion": "c"}', ("line 1",)),
    "number": (OK + "17\n", ("line 2",)),
    "text_document": (OK + '{"text": "a document"}\n', ("line 2", "completion")),
    "no_text": ('{"prompt": 3, "completion": "c"}\n', ("line 1", "'prompt'")),
    "input": ('{"instruction": "a", "input": ["b"], "output": "c"}\n', ("line 1", "'input'")),
    "entry": ("[" + OK.strip() + ', {"prompt": "p"}]', ("entry 2",)),
    "messages": ('{"messages": "hello"}', ("line 1", "messages")),
    "no_value": ('{"conversations": [{"from": "gpt", "content": "a"}]}', ("line 1", "'value'")),
    "no_role": ('{"messages": [{"content": "a"}]}', ("line 1", "'role'")),
    "no_answer": ('{"messages": [{"role": "user", "content": "a"}]}', ("line 1", "assistant")),
}


def written(folder: Path, text: str, name: str = "data.jsonl") -> str:
    path = folder / name
    path.write_bytes(text.encode("utf-8", errors="surrogateescape"))
    return str(path)


@pytest.mark.parametrize("form", ["lines", "list", "bom", "no_newline"])
def test_good_records(tmp_path: Path, form: str) -> None:
    """A kind of record, a blank line or a byte order mark that is not understood; a line that is counted wrongly."""
    lines = [json.dumps(value, ensure_ascii=False) for value, _ in GOOD]
    text = {
        "lines": "\n".join(lines) + "\n\n",
        "list": json.dumps([value for value, _ in GOOD], indent=1),
        "bom": "\ufeff\n" + "\r\n".join(lines),
        "no_newline": "\n\n".join(lines),
    }[form]
    path = written(tmp_path, text)
    places = list(read_records(path))
    assert [place.record for place in places] == [record for _, record in GOOD]
    first, step = {"lines": (1, 1), "list": (1, 1), "bom": (2, 1), "no_newline": (1, 2)}[form]
    assert [place.number for place in places] == [first + step * i for i in range(len(GOOD))]
    assert {place.is_line for place in places} == {form != "list"}
    assert places[-1].bytes_read <= len(text.encode()) and places[-1].bytes_read > 0


@pytest.mark.parametrize("name", BAD)
def test_bad_records(tmp_path: Path, name: str) -> None:
    """A traceback, a message without the line's number, a record that is left out in silence."""
    text, named = BAD[name]
    with pytest.raises(ValueError) as caught:
        list(read_records(written(tmp_path, text)))
    assert all(word in str(caught.value) for word in named), caught.value
    assert "\n" not in str(caught.value)
