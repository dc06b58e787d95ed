"""Records of supervised fine-tuning (a line of a JSONL file, or an entry of a JSON list) as text and as tokens.

What is learned are the assistant's messages and what ends them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy
import numpy.typing

from megatron.bcd.tokenizer import HuggingFaceTokenizer, Tokenizer

PROMPT_FORMATS = ("auto", "chat", "text")
"""Values of --sft-prompt-format."""
SHAPES = (
    "{instruction, input, output}, {prompt, completion}, {messages: [{role, content}, ...]} or "
    "{conversations: [{from, value}, ...]}"
)
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "function_call": "assistant"}
_ROLES |= {"observation": "tool"}
"""ShareGPT's names of roles; others keep their own."""
Message = dict[str, str]
_BOM = b"\xef\xbb\xbf"


# --- records


@dataclass(frozen=True, kw_only=True)
class Record:
    """One example: a prompt and its answer, or a conversation."""

    prompt: str = ""
    context: str = ""
    """The `input` of an instruction."""
    answer: str = ""
    is_instruction: bool = False
    messages: tuple[Message, ...] = ()
    """The conversation, up to the assistant's last message; empty for a prompt and its answer."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A record, and where it was read."""

    record: Record
    number: int
    """Of its line, or of its entry in a list, from 1."""
    is_line: bool
    bytes_read: int
    """Of the file, up to the end of this record."""


def name_of(number: int, *, is_line: bool) -> str:
    """For messages."""
    return f"line {number}" if is_line else f"entry {number}"


def read_records(path: str) -> Iterator[Place]:
    """The records of a file, JSONL or one JSON list, in order; blank lines are skipped.

    Raises:
        ValueError: a line, its number first, is not a record; or the file can't be read or holds none. The message does
            not name the file.
    """
    try:
        with open(path, "rb") as file:
            is_line = file.read(4096).removeprefix(_BOM).lstrip()[:1] != b"["
        is_empty = True
        for number, value, bytes_read in _lines(path) if is_line else _entries_of_list(path):
            is_empty = False
            try:
                record = record_of(value)
            except ValueError as error:
                raise ValueError(f"{name_of(number, is_line=is_line)} {error}") from None
            yield Place(record=record, number=number, is_line=is_line, bytes_read=bytes_read)
    except OSError as error:
        raise ValueError(f"can't be read ({error.strerror})") from None
    if is_empty:
        raise ValueError(f"is empty: give a file with records {SHAPES}")


def _lines(path: str) -> Iterator[tuple[int, Any, int]]:
    bytes_read = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            bytes_read += len(line)
            text = line.removeprefix(_BOM) if number == 1 else line
            if text.strip():
                try:
                    yield number, json.loads(text), bytes_read
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"line {number} is not JSON ({_reason(error)}): give one record a line") from None


def _entries_of_list(path: str) -> Iterator[tuple[int, Any, int]]:
    size = os.path.getsize(path)
    with open(path, encoding="utf-8-sig") as file:
        try:
            entries = json.load(file)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"is not JSON ({_reason(error)}): give a list of records, or one record a line") from None
    for number, entry in enumerate(entries, start=1):
        yield number, entry, size * number // len(entries)


def _reason(error: Exception) -> str:
    return "it is not UTF-8" if isinstance(error, UnicodeError) else " ".join(str(error).split())[:100]


def record_of(value: Any) -> Record:
    """The record of a JSON value. Raises ValueError: it is none; the message follows the record's place."""
    if not isinstance(value, dict):
        raise ValueError(f"is no object but {type(value).__name__}: a record is {SHAPES}")
    if "messages" in value:
        return Record(messages=_conversation(value["messages"]))
    if "conversations" in value:
        return Record(messages=_conversation(value["conversations"], role="from", content="value", first=value))
    if {"instruction", "output"} <= value.keys():
        return Record(
            prompt=_text(value, "instruction"),
            context=_text(value, "input") if value.get("input") is not None else "",
            answer=_text(value, "output"),
            is_instruction=True,
        )
    if {"prompt", "completion"} <= value.keys():
        return Record(prompt=_text(value, "prompt"), answer=_text(value, "completion"))
    keys = ", ".join(sorted(map(str, value))[:6]) or "no key"
    raise ValueError(f"has {keys}: a record is {SHAPES}")


def _conversation(
    messages: Any, *, role: str = "role", content: str = "content", first: Mapping[str, Any] | None = None
) -> tuple[Message, ...]:
    """Return the messages, whose parts have the keys `role` and `content`. A key "system" of `first` precedes them."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f'has messages that are no list of {{"{role}": ..., "{content}": ...}}')
    found = [{"role": _text(message, role), "content": _text(message, content)} for message in messages]
    if first is not None:
        found = [message | {"role": _ROLES.get(message["role"], message["role"])} for message in found]
        if first.get("system"):
            found.insert(0, {"role": "system", "content": _text(first, "system")})
    while found and found[-1]["role"] != "assistant":  # nothing answers them
        found.pop()
    if not found:
        raise ValueError("has no message of the role assistant: there is nothing to learn")
    return tuple(found)


def _text(values: Mapping[str, Any], key: str) -> str:
    text = values.get(key)
    if not isinstance(text, str):
        raise ValueError(f"has {key!r} that is {'missing' if key not in values else 'no text'}: give a string")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"has {key!r} with half of a surrogate pair, which is no character") from None
    return text


# --- chat templates


class ChatTemplate:
    """Renders conversations as transformers does, but the template sees no date: equal conversations give equal texts
    on every day."""

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        """Raises ValueError: there are several templates, and none is the default."""
        self._engine = tokenizer.engine
        self._source = "{% set strftime_now = undefined %}\n" + self._engine.get_chat_template()

    def render(self, messages: Sequence[Mapping[str, str]], *, for_answer: bool = False) -> str:
        """The text of a conversation; with `for_answer`, with what precedes the assistant's next message.

        Raises:
            ValueError: the template refuses the conversation.
        """
        try:
            texts = self._engine.apply_chat_template(
                [list(messages)], chat_template=self._source, tokenize=False, add_generation_prompt=for_answer
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"is refused by the tokenizer's chat template ({' '.join(str(error).split())})") from error
        return str(texts[0])


# --- text


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A text that ends with an answer."""

    text: str
    answers: tuple[tuple[int, int], ...]
    """First character and end of each part of the text that is learned."""
    needs_end: bool
    """Whether the end-of-document token is still to be appended, and learned: nothing in the text ends the answer."""


class Renderer:
    """Renders records in one of `PROMPT_FORMATS`.

    `chat` is the tokenizer's chat template. `text` is Alpaca's prompt for instructions (Stanford Alpaca, 2023), and a
    prompt as it is. `auto` is `chat` where the tokenizer has a template, and for every conversation, else `text`.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_format: str) -> None:
        """Raises ValueError: the format is `chat`, and the tokenizer has no chat template."""
        self._format = prompt_format
        self._start, self._template = "", None
        if isinstance(tokenizer, HuggingFaceTokenizer):
            self._start = tokenizer.start_of_text
            if prompt_format != "text" and tokenizer.engine.chat_template is not None:
                self._template = ChatTemplate(tokenizer)
        if prompt_format == "chat" and self._template is None:
            raise ValueError(f"--sft-prompt-format chat: {_NO_TEMPLATE}")

    def samples(self, record: Record) -> list[Rendered]:
        """The record as text; more than one where the template shortens an earlier answer when a later one follows.

        Raises:
            ValueError: the template is missing, or refuses the record; the message follows the record's place.
        """
        if record.messages and self._format == "text":
            raise ValueError("has messages, which --sft-prompt-format text has no form for: give auto")
        if self._template is None:
            if record.messages:
                raise ValueError(f"has messages, and {_NO_TEMPLATE}")
            asked = alpaca(record.prompt, record.context) if record.is_instruction else record.prompt
            prompt = self._start + asked
            text = prompt + record.answer
            return [Rendered(text=text, answers=((len(prompt), len(text)),), needs_end=True)]
        question = "\n\n".join(part for part in (record.prompt, record.context) if part)
        pair = ({"role": "user", "content": question}, {"role": "assistant", "content": record.answer})
        return _chat_samples(self._template, record.messages or pair)


_NO_TEMPLATE = (
    "the tokenizer has no chat template: give --tokenizer-type HuggingFaceTokenizer with a folder that has "
    "chat_template.jinja, or chat_template in its tokenizer_config.json"
)


def alpaca(instruction: str, context: str = "") -> str:
    """Stanford Alpaca's prompt."""
    task = "Below is an instruction that describes a task"
    more = ", paired with an input that provides further context" if context else ""
    given = f"### Input:\n{context}\n\n" if context else ""
    return (
        f"{task}{more}. Write a response that appropriately completes the request.\n\n"
        f"### Instruction:\n{instruction}\n\n{given}### Response:"
    )


def _chat_samples(template: ChatTemplate, messages: Sequence[Message]) -> list[Rendered]:
    turns = [_turn(template, messages, i) for i, message in enumerate(messages) if message["role"] == "assistant"]
    whole = turns[-1]
    if all(whole.text.startswith(turn.text) for turn in turns):
        answers = tuple(answer for turn in turns for answer in turn.answers)
        return [Rendered(text=whole.text, answers=answers, needs_end=whole.needs_end)]
    return turns


def _turn(template: ChatTemplate, messages: Sequence[Message], index: int) -> Rendered:
    """The conversation up to one message of the assistant, which alone is learned."""
    text = template.render(messages[: index + 1])
    # some templates begin a prompt with words that they leave out of a finished message
    start = len(os.path.commonprefix((template.render(messages[:index], for_answer=True), text)))
    content = messages[index]["content"].strip()
    found = text.find(content, start)
    if found < 0:  # the prompt may end with the answer's first words, such as "<think>"
        found = text.find(content, len(os.path.commonprefix((template.render(messages[:index]), text))))
    if found < 0:
        raise ValueError("has an answer that the tokenizer's chat template leaves out")
    is_ended = bool(text[found + len(content) :].strip())
    end = len(text.rstrip()) if is_ended else len(text)
    return Rendered(text=text[:end], answers=((start, end),), needs_end=not is_ended)


# --- tokens


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """One sample of N tokens."""

    ids: numpy.typing.NDArray[numpy.int32]
    """[N]"""
    learned: numpy.typing.NDArray[numpy.bool_]
    """[N]; whether the loss counts the prediction of the token."""


def tokens_of(record: Record, renderer: Renderer, tokenizer: Tokenizer) -> list[Tokens]:
    """Samples of a record, see `Renderer.samples`.

    Raises:
        ValueError: the record can't be rendered or tokenized; the message follows the record's place.
    """
    try:
        return [tokenized(sample, tokenizer) for sample in renderer.samples(record)]
    except UnicodeError as error:
        raise ValueError(f"can't be tokenized ({error})") from error


def tokenized(sample: Rendered, tokenizer: Tokenizer) -> Tokens:
    """The text is tokenized as a whole. A token of which a part belongs to an answer is learned."""
    ids = tokenizer.tokenize(sample.text)
    learned = numpy.zeros(len(ids) + sample.needs_end, dtype=bool)
    for start, end in sample.answers:
        last = len(ids) if end == len(sample.text) else _end_of(sample.text, end, ids, tokenizer)
        learned[_shared(tokenizer.tokenize(sample.text[:start]), ids) : last] = True
    if sample.needs_end:
        ids.append(tokenizer.eod)
        learned[-1] = True
    return Tokens(ids=numpy.array(ids, dtype=numpy.int32), learned=learned)


def _end_of(text: str, end: int, ids: list[int], tokenizer: Tokenizer) -> int:
    """Number of ids up to character `end` of the text, with the one that goes on behind it, if there is one.

    The ids that follow are those that the text behind `end` ends with when it stands alone.
    """
    before = tokenizer.tokenize(text[:end])
    shared = _shared(before, ids)
    if shared == len(before):
        return shared
    behind = _shared(tokenizer.tokenize(text[end:])[::-1], ids[::-1])
    return max(shared + 1, len(ids) - behind)


def _shared(left: list[int], right: list[int]) -> int:
    """Number of ids at the start that both have."""
    return next((i for i, (one, two) in enumerate(zip(left, right, strict=False)) if one != two), len(left))
