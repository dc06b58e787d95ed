"""Records of fine-tuning: read files of them, and check that each is an example to learn from.

A record is an instruction, a prompt and its completion, or a conversation. Several dialects are read as messages of
transformers' chat templates.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import rich.progress
from rich.console import Console

from megatron.bcd.data.sft.tables import is_table, read_rows
from megatron.bcd.tokenizer import one_line

SHAPES = (
    "{instruction, input, output}, {prompt, completion}, {messages: [{role, content}, ...]} or "
    "{conversations: [{from, value}, ...]}"
)
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "function_call": "assistant"}
_ROLES |= {"observation": "tool"}
"""Roles of ShareGPT and ours; other names stay unchanged."""
EMPTY: tuple[Any, ...] = (None, "", [], {})
"""Values that say no more than a missing key."""
Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Record:
    """One example: a conversation up to its last learned answer."""

    messages: tuple[Message, ...]
    learned: tuple[int, ...]
    """Indices of the answers that are learned."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Other keys of the record, which a chat template may use: tools, documents, ..."""
    plain: tuple[str, str] | None = None
    """Prompt and answer without a chat template; None for a conversation."""


def read_values(path: str) -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of each record of a JSONL file, a JSON list or a table.

    A place is "line 3" or "entry 3", counted from 1. The value of a line or row that can't be read is a ValueError.

    Raises:
        ValueError: the file is not readable or empty. The message does not name the file.
    """
    is_empty = True
    rows = ((f"entry {number}", row) for number, row in enumerate(read_rows(path), start=1))
    try:
        for place, value in rows if is_table(path) else _json_values(path):
            is_empty = False
            yield place, value
    except OSError as error:
        raise ValueError(f"can't be read ({error.strerror})") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"is not JSON ({one_line(error)}). Give a list of records, or one record per line.") from None
    if is_empty:
        raise ValueError(f"is empty. Give a file with records {SHAPES}.")


def _json_values(path: str) -> Iterator[tuple[str, Any]]:
    """Yield what `read_values` does of a file of JSON. Show progress on a terminal."""
    with rich.progress.open(
        path,
        "r",
        encoding="utf-8-sig",
        errors="surrogateescape",  # one damaged record must not hide the others
        description=f"tokenizing {os.path.basename(path)}",
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    ) as file:
        is_list = file.read(4096).lstrip().startswith("[")
        file.seek(0)
        for number, item in enumerate(json.load(file) if is_list else file, start=1):
            if is_list or item.strip():
                yield (f"entry {number}", item) if is_list else (f"line {number}", _parsed_line(item))


def _parsed_line(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return ValueError(f"is not JSON ({one_line(error)}). Give one record per line.")


def alpaca(instruction: str, context: str = "") -> str:
    """Return Stanford Alpaca's prompt (2023)."""
    task = "Below is an instruction that describes a task"
    more = ", paired with an input that provides further context" if context else ""
    inputs = f"### Input:\n{context}\n\n" if context else ""
    return (
        f"{task}{more}. Write a response that appropriately completes the request.\n\n"
        f"### Instruction:\n{instruction}\n\n{inputs}### Response:"
    )


def parse_record(value: Any, *, ignored: tuple[str, ...] = ()) -> Record:
    """Return the record of a JSON value, without the `ignored` keys (--sft-ignore-keys).

    Raises:
        ValueError: with a message to follow the record's position.
    """
    if isinstance(value, ValueError):
        raise value
    if not isinstance(value, dict):
        raise ValueError(f"is no object but {type(value).__name__}. A record is {SHAPES}.")
    rest = {key: item for key, item in value.items() if key not in ignored and item not in EMPTY}
    turns, plain = _turns(value, rest, ignored)
    if "system" in rest and turns and turns[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": _text(rest, "system")})
        plain = None
        del rest["system"]
    answers = []
    for index, message in enumerate(turns):
        is_answer = message["role"] == "assistant"
        weight = message.pop("weight", int(is_answer))
        if weight not in ((0, 1) if is_answer else (0,)):
            raise ValueError(
                f"has the weight {weight!r} for a message of the role {message['role']}. Give an assistant's message 0 "
                "or 1, and others none."
            )
        if weight and not message["content"].strip() and message.keys() <= {"role", "content", "name"}:
            raise ValueError("has an empty answer, from which nothing can be learned")
        if weight:
            answers.append(index)
    if not answers:
        raise ValueError("has no message of the role assistant to learn from. Add an answer, or a weight other than 0.")
    rest |= rest.pop("chat_template_kwargs", {})
    if "tools" in rest:
        tools = _objects(rest["tools"], "tools")
        rest["tools"] = [{"type": "function", "function": tool} if "name" in tool else tool for tool in tools]
    return Record(messages=tuple(turns[: answers[-1] + 1]), learned=tuple(answers), variables=rest, plain=plain)


def _turns(
    value: Mapping[str, Any], rest: dict[str, Any], ignored: tuple[str, ...]
) -> tuple[list[Message], tuple[str, str] | None]:
    """Return the messages of a record, with `weight`, and its plain text. Remove the keys that they use from `rest`."""

    def messages(name: str) -> list[Message]:
        rest.pop(name, None)
        return [_message(message, ignored) for message in _objects(value[name], name)]

    def pair(question: Any, answer: Any) -> list[Message]:
        return [_message({"role": role, "content": text}) for role, text in (("user", question), ("assistant", answer))]

    if name := next((name for name in ("messages", "conversations") if name in value), None):
        return messages(name), None
    if {"instruction", "output"} <= value.keys():
        question, context = _text(value, "instruction"), _text(rest, "input") if "input" in rest else ""
        answer, history = _text(value, "output"), rest.pop("history", [])
        if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
            raise ValueError("has 'history' that is no list of [question, answer]. Give one.")
        for name in ("instruction", "input", "output"):
            rest.pop(name, None)
        turns = [*history, ("\n\n".join(part for part in (question, context) if part), answer)]
        return [message for turn in turns for message in pair(*turn)], (
            None if history else (alpaca(question, context), answer)
        )
    if {"prompt", "completion"} <= value.keys():
        if any(isinstance(value[name], list) for name in ("prompt", "completion")):
            return [message | {"weight": 0} for message in messages("prompt")] + messages("completion"), None
        plain = _text(value, "prompt"), _text(value, "completion")
        for name in ("prompt", "completion"):
            rest.pop(name, None)
        return pair(*plain), plain
    keys = ", ".join(sorted(map(str, value))[:6]) or "no key"
    raise ValueError(f"has {keys}. A record is {SHAPES}.")


def _message(values: Mapping[str, Any], ignored: tuple[str, ...] = ()) -> Message:
    """Return a message as chat templates know it, from OpenAI's or ShareGPT's form. Keep `weight`."""
    names = ("from", "value") if "from" in values else ("role", "content")
    role, content = _text(values, names[0]), values.get(names[1])
    more = {key: item for key, item in values.items() if key not in (*names, *ignored) and item not in EMPTY}
    if names[0] == "from":
        if role == "function_call":
            calls = _parsed(content)
            content, more["tool_calls"] = None, calls if isinstance(calls, list) else [calls]
        role = _ROLES.get(role, role)
    if "tool_calls" in more:
        more["tool_calls"] = [_call(call) for call in _objects(more["tool_calls"], "tool_calls")]
        content = content or ""  # some templates fail without it
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in _objects(content, names[1])):
            raise ValueError(f"has {names[1]!r} with parts that are no text. Only text is supported.")
        content = "".join(_text(part, "text") for part in content)
    return {"role": role, "content": _text({**values, names[1]: content}, names[1]), **more}


def _call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool call in OpenAI's form, from that form or the function alone, with arguments as an object."""
    function = call["function"] if isinstance(call.get("function"), dict) else call
    arguments = _parsed(function.get("arguments") or {})
    if not isinstance(arguments, dict) or not isinstance(function.get("name"), str):
        raise ValueError("has a tool call without a name, or with arguments that are no JSON object. Correct it.")
    envelope = {"type": "function"} if function is call else call
    return {**envelope, "function": {**function, "arguments": arguments}}


def _parsed(value: Any) -> Any:
    """Return the value of a JSON text, as OpenAI and ShareGPT store calls and tools; other values unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _objects(value: Any, name: str) -> list[Any]:
    value = _parsed(value)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"has {name!r} that is no list of objects. A record is {SHAPES}.")
    return value


def _text(values: Mapping[str, Any], key: str) -> str:
    if not isinstance(text := values.get(key), str):
        raise ValueError(f"has {key!r} that is {'missing' if key not in values else 'no text'}. Give a string.")
    return text
