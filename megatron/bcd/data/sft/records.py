"""Records of fine-tuning: read files of them, and check that each is an example to learn from.

A record is an instruction, a prompt and its completion, or a conversation. Several dialects are read as messages of
transformers' chat templates.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.bcd.data.sft.tables import is_table, read_rows

SHAPES = (
    "{instruction, input, output}, {prompt, completion}, {messages: [{role, content}, ...]} or "
    "{conversations: [{from, value}, ...]}"
)
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "function_call": "assistant"}
_ROLES |= {"observation": "tool"}
"""Roles of ShareGPT and ours; other names stay unchanged."""
EMPTY: tuple[Any, ...] = (None, "", [], {})
"""Values that say no more than a missing key. Tables fill columns with them."""
Message = dict[str, Any]
_BOM = b"\xef\xbb\xbf"


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


@dataclass(frozen=True, kw_only=True)
class Place:
    """A value of a file and its position."""

    value: Any
    """The JSON value, or the row of a table; a ValueError if there is none."""
    number: int
    """Number of the line, or of the entry in a list or table, from 1."""
    is_line: bool
    share: float
    """Share of the file up to the end of this value; 0 in tables."""


def describe_place(number: int, *, is_line: bool) -> str:
    """Return the name of a record's position for messages."""
    return f"line {number}" if is_line else f"entry {number}"


def read_values(path: str) -> Iterator[Place]:
    """Yield the values of a JSONL file, a JSON list or a table in order. Skip blank lines.

    Raises:
        ValueError: the file is not readable or empty. The message does not name the file.
    """
    place = None
    try:
        if is_table(path):
            places = _entries(read_rows(path))
        else:
            with open(path, "rb") as file:
                is_line = file.read(4096).removeprefix(_BOM).lstrip()[:1] != b"["
            places = _lines(path) if is_line else _entries(_json_list(path))
        for place in places:
            yield place
    except OSError as error:
        raise ValueError(f"can't be read ({error.strerror})") from None
    if place is None:
        raise ValueError(f"is empty. Give a file with records {SHAPES}.")


def _lines(path: str) -> Iterator[Place]:
    size, bytes_read = os.path.getsize(path), 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            bytes_read += len(line)
            text = line.removeprefix(_BOM) if number == 1 else line
            if text.strip():
                try:
                    value = json.loads(text)
                except (ValueError, RecursionError) as error:
                    value = ValueError(f"is not JSON ({_reason(error)}). Give one record per line.")
                yield Place(value=value, number=number, is_line=True, share=bytes_read / size)


def _json_list(path: str) -> list[Any]:
    with open(path, encoding="utf-8-sig") as file:
        try:
            return list(json.load(file))
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"is not JSON ({_reason(error)}). Give a list of records, or one record per line."
            ) from None


def _entries(rows: Iterable[Any]) -> Iterator[Place]:
    size = len(rows) if isinstance(rows, list) else math.inf  # tables are streams
    for number, row in enumerate(rows, start=1):
        yield Place(value=row, number=number, is_line=False, share=number / size)


def _reason(error: Exception) -> str:
    return "it is not UTF-8" if isinstance(error, UnicodeError) else " ".join(str(error).split())[:100]


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
    if isinstance(rest.get("system"), str) and turns and turns[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": _text(rest, "system")})
        plain = None
        del rest["system"]
    is_learned = [_is_learned(message) for message in turns]
    if True not in is_learned:
        raise ValueError("has no message of the role assistant to learn from. Add an answer, or a weight other than 0.")
    _check_results(turns)
    rest |= rest.pop("chat_template_kwargs", {})
    if "tools" in rest:
        rest["tools"] = [_function(tool) for tool in _objects(rest["tools"], "tools")]
    learned = tuple(index for index, wanted in enumerate(is_learned) if wanted)
    return Record(messages=tuple(turns[: learned[-1] + 1]), learned=learned, variables=rest, plain=plain)


def _turns(
    value: Mapping[str, Any], rest: dict[str, Any], ignored: tuple[str, ...]
) -> tuple[list[Message], tuple[str, str] | None]:
    """Return the messages of a record, with `weight`, and its plain text. Remove the keys that they use from `rest`."""

    def messages(name: str, **more: int) -> list[Message]:
        rest.pop(name, None)
        return [_message(message, ignored) | more for message in _objects(value[name], name)]

    def pair(question: Any, answer: Any) -> list[Message]:
        return [_message({"role": role, "content": text}) for role, text in (("user", question), ("assistant", answer))]

    if name := next((name for name in ("messages", "conversations") if name in value), None):
        return messages(name), None
    if {"instruction", "output"} <= value.keys():
        question, context = _text(value, "instruction"), _text(rest, "input") if "input" in rest else ""
        answer, history = _text(value, "output"), _parsed(rest.pop("history", []))
        if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
            raise ValueError("has 'history' that is no list of [question, answer]. Give one.")
        for name in ("instruction", "input", "output"):
            rest.pop(name, None)
        turns = [*history, ("\n\n".join(part for part in (question, context) if part), answer)]
        return [message for turn in turns for message in pair(*turn)], (
            None if history else (alpaca(question, context), answer)
        )
    if {"prompt", "completion"} <= value.keys():
        if any(isinstance(_parsed(value[name]), list) for name in ("prompt", "completion")):
            return messages("prompt", weight=0) + messages("completion"), None
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
        calls = _parsed(content) if role == "function_call" else None
        if isinstance(calls, dict | list):
            content, more["tool_calls"] = None, calls if isinstance(calls, list) else [calls]
        role = _ROLES.get(role, role)
    if "tool_calls" in more:
        more["tool_calls"] = [_call(call) for call in _objects(more["tool_calls"], "tool_calls")]
        if content is None:
            return {"role": role, **more}
    if isinstance(content, list):
        texts = [part.get("text") for part in _objects(content, names[1]) if part.get("type") == "text"]
        if len(texts) < len(content):
            raise ValueError(f"has {names[1]!r} with parts that are no text. Only text is supported.")
        content = "".join(_text({names[1]: text}, names[1]) for text in texts)
    return {"role": role, "content": _text(dict(values) | {names[1]: content}, names[1]), **more}


def _call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool call with arguments that are an object, as templates want them. OpenAI's are JSON text."""
    call = _function(call)
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    arguments = _parsed(function.get("arguments") or {})
    if not isinstance(arguments, dict) or not isinstance(function.get("name"), str):
        raise ValueError("has a tool call without a name, or with arguments that are no JSON object. Correct it.")
    return {**call, "function": {**function, "arguments": arguments}}


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool or a call in OpenAI's form, from that form or the function alone."""
    return {"type": "function", "function": tool} if "name" in tool and "function" not in tool else tool


def _is_learned(message: Message) -> bool:
    """Return whether a message is learned. Remove its weight. Raises ValueError."""
    weight, is_answer = message.pop("weight", None), message["role"] == "assistant"
    if weight not in ((None, 0, 1) if is_answer else (None, 0)):
        raise ValueError(
            f"has the weight {weight!r} for a message of the role {message['role']}. Give an assistant's message 0 "
            "or 1, and others none."
        )
    is_empty = not message.get("content", "").strip() and message.keys() <= {"role", "content", "name"}
    if is_answer and weight != 0 and is_empty:
        raise ValueError("has an empty answer, from which nothing can be learned")
    return is_answer and weight != 0


def _check_results(turns: list[Message]) -> None:
    """Raise ValueError if the result of a tool names a call that no earlier message has."""
    known: dict[str, set[Any]] = {"tool_call_id": set(), "name": set()}
    for message in turns:
        for call in message.get("tool_calls", ()):
            known["tool_call_id"].add(call.get("id"))
            known["name"].add(call["function"]["name"])
        for key in known if message["role"] == "tool" else ():
            if key in message and message[key] not in known[key]:
                raise ValueError(f"has a tool's result with {key!r} {message[key]!r}, which no call before it has")


def _parsed(value: Any) -> Any:
    """Return the value of a JSON text, as tables store lists and objects; other values unchanged."""
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
    text = values.get(key)
    if not isinstance(text, str):
        raise ValueError(f"has {key!r} that is {'missing' if key not in values else 'no text'}. Give a string.")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"has {key!r} with half of a surrogate pair, which is no character. Correct it.") from None
    return text
