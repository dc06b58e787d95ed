"""Records of fine-tuning: valid files, and the error line of invalid ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.bcd.data.sft.records import Record, alpaca, parse_record, read_values

MESSAGES: list[dict[str, Any]] = [
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
SCHEMA = {"name": "add", "parameters": {"type": "object", "properties": {"x": {"type": "number"}}}}
TOOLS = [{"type": "function", "function": SCHEMA}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
OPENAI_CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "2"}
TALK = Record(messages=tuple(MESSAGES[:3]), learned=(2,))


def said(*texts: str) -> tuple[dict[str, Any], ...]:
    """Return messages of the user and the assistant in turn."""
    return tuple({"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts))


def pair(question: str, answer: str, prompt: str | None = None, **variables: Any) -> Record:
    plain = (question if prompt is None else prompt, answer)
    return Record(messages=said(question, answer), learned=(1,), plain=plain, variables=variables)


GOOD: tuple[tuple[dict[str, Any], Record], ...] = (
    (
        {"instruction": "do", "input": "it", "output": "done", "id": 3},
        pair("do\n\nit", "done", alpaca("do", "it"), id=3),
    ),
    ({"instruction": "do", "input": None, "output": "é"}, pair("do", "é", alpaca("do"))),
    ({"prompt": "p", "completion": "c"}, pair("p", "c")),
    ({"messages": MESSAGES, "source": "x", "tools": None}, replace(TALK, variables={"source": "x"})),
    ({"conversations": SHARE_GPT}, TALK),
    ({"conversations": SHARE_GPT[1:], "system": "s"}, TALK),
    ({"conversations": MESSAGES[1:], "system": "s"}, TALK),
    (
        {"instruction": "q2", "input": "", "output": "a2", "system": "s", "history": [["q", "a"]]},
        Record(messages=(MESSAGES[0], *said("q", "a", "q2", "a2")), learned=(2, 4)),
    ),
    ({"prompt": [*said("q")], "completion": [*said("", "a")][1:]}, Record(messages=said("q", "a"), learned=(1,))),
    (
        {"prompt": [*said("q", "a", "q2")], "completion": [{"role": "assistant", "content": "a2"}]},
        Record(messages=said("q", "a", "q2", "a2"), learned=(3,)),
    ),
    (
        {"messages": [*said("q"), {"role": "assistant", "content": "a", "weight": 0}, *said("q2", "a2")]},
        Record(messages=said("q", "a", "q2", "a2"), learned=(3,)),
    ),
    (
        {"messages": [*said("q"), {"role": "assistant", "content": "a", "weight": 1, "refusal": None}, *said("q2")]},
        Record(messages=said("q", "a"), learned=(1,)),
    ),
    (
        {
            "messages": [*said("q"), {"role": "assistant", "content": None, "tool_calls": [OPENAI_CALL]}, RESULT],
            "tools": TOOLS,
        },
        Record(
            messages=(*said("q"), {"role": "assistant", "content": "", "tool_calls": [CALL | {"id": "c1"}]}),
            learned=(1,),
            variables={"tools": TOOLS},
        ),
    ),
    (
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"x": 1}}'},
                {"from": "observation", "value": "2"},
                {"from": "gpt", "value": "two"},
            ],
            "tools": json.dumps([SCHEMA]),
        },
        Record(
            messages=(
                *said("q"),
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "content": "2"},
                {"role": "assistant", "content": "two"},
            ),
            learned=(1, 3),
            variables={"tools": TOOLS},
        ),
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, *said("", "a")[1:]]},
        Record(messages=said("q", "a"), learned=(1,)),
    ),
)
OK = '{"prompt": "p", "completion": "c"}\n'
BAD: dict[str, tuple[str, tuple[str, ...]]] = {
    "empty": ("", ()),
    "not_json": (OK + "\n" + "{'prompt': 1}\n", ("line 3",)),
    "deep": ("[" * 5 + OK.strip() + "," + "[" * 100_000, ()),
    "list_is_cut": ("[" + OK, ()),
    "text_document": (OK + '{"text": "a document"}\n', ("line 2", "completion")),
    "input": ('{"instruction": "a", "input": ["b"], "output": "c"}\n', ("line 1", "'input'")),
    "entry": ("[" + OK.strip() + ', {"prompt": "p"}]', ("entry 2",)),
    "messages": ('{"messages": "hello"}', ("line 1", "messages")),
    "no_value": ('{"conversations": [{"from": "gpt", "content": "a"}]}', ("line 1", "'value'")),
    "prompt_of_two_kinds": ('{"prompt": "p", "completion": [{"role": "assistant", "content": "c"}]}', ("'prompt'",)),
    "empty_answer": ('{"prompt": "p", "completion": " "}', ("line 1", "empty answer")),
    "empty_message": (json.dumps({"messages": said("q", "a", "q2", "")}), ("line 1", "empty answer")),
    "weight": (json.dumps({"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}), ("weight 0.5",)),
    "weight_of_user": (json.dumps({"messages": [said("q")[0] | {"weight": 1}, *said("", "a")[1:]]}), ("role user",)),
    "nothing_is_learned": (json.dumps({"messages": [said("", "a")[1] | {"weight": 0}]}), ("assistant", "weight")),
    "arguments": (
        json.dumps(
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "x"}}]}]}
        ),
        ("line 1", "arguments"),
    ),
    "no_answer": ('{"messages": [{"role": "user", "content": "a"}]}', ("line 1", "assistant")),
}


def written(folder: Path, text: str, name: str = "data.jsonl") -> str:
    path = folder / name
    path.write_bytes(text.encode("utf-8", errors="surrogateescape"))
    return str(path)


def records_of(path: str) -> list[tuple[str, Record]]:
    """Return the places and records of a file. Raises ValueError with the place of the first bad one."""
    results = []
    for place, value in read_values(path):
        try:
            results.append((place, parse_record(value)))
        except ValueError as error:
            raise ValueError(f"{place} {error}") from error
    return results


@pytest.mark.parametrize("form", ["lines", "list", "bom", "no_newline"])
def test_good_records(tmp_path: Path, form: str) -> None:
    """Records of each kind are read with blank lines and byte order marks, and counted by line or entry."""
    lines = [json.dumps(value, ensure_ascii=False) for value, _ in GOOD]
    text = {
        "lines": "\n".join(lines) + "\n\n",
        "list": json.dumps([value for value, _ in GOOD], indent=1),
        "bom": "\ufeff\n" + "\r\n".join(lines),
        "no_newline": "\n\n".join(lines),
    }[form]
    path = written(tmp_path, text)
    places, found = zip(*records_of(path), strict=True)
    assert [*found] == [record for _, record in GOOD]
    first, step = {"lines": (1, 1), "list": (1, 1), "bom": (2, 1), "no_newline": (1, 2)}[form]
    kind = "entry" if form == "list" else "line"
    assert [*places] == [f"{kind} {first + step * i}" for i in range(len(GOOD))]


@pytest.mark.parametrize("name", BAD)
def test_bad_records(tmp_path: Path, name: str) -> None:
    """A bad record is refused in one line that names its place or its fault."""
    text, named = BAD[name]
    with pytest.raises(ValueError) as caught:
        records_of(written(tmp_path, text))
    assert all(word in str(caught.value) for word in named), caught.value
    assert "\n" not in str(caught.value)


def test_ignored_keys() -> None:
    """Keys of --sft-ignore-keys are left out of records and of messages."""
    messages = [message | {"id": 1} for message in MESSAGES]
    assert parse_record({"messages": messages, "source": "x", "id": 7}, ignored=("id", "source")) == TALK
