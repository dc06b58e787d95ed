"""Records of supervised fine-tuning (lines of a JSONL file, or entries of a JSON list) as text and as tokens.

Only the assistant's messages, and the tokens that end them, contribute to the loss.
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

SHAPES = (
    "{instruction, input, output}, {prompt, completion}, {messages: [{role, content}, ...]} or "
    "{conversations: [{from, value}, ...]}"
)
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "function_call": "assistant"}
_ROLES |= {"observation": "tool"}
"""Roles of ShareGPT and ours; other names stay unchanged."""
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
    """The conversation up to the assistant's last message; empty for a prompt and its answer."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A record and its position in a file."""

    record: Record
    number: int
    """Number of the line, or of the entry in a list, from 1."""
    is_line: bool
    bytes_read: int
    """Bytes of the file up to the end of this record."""


def describe_place(number: int, *, is_line: bool) -> str:
    """Return the name of a record's position for messages."""
    return f"line {number}" if is_line else f"entry {number}"


def read_records(path: str) -> Iterator[Place]:
    """Yield the records of a JSONL file, or of one JSON list, in order. Skip blank lines.

    Raises:
        ValueError: the file is not readable or empty, or a record is malformed. The message starts with the record's
            number and does not name the file.
    """
    try:
        with open(path, "rb") as file:
            is_line = file.read(4096).removeprefix(_BOM).lstrip()[:1] != b"["
        is_empty = True
        for number, value, bytes_read in _lines(path) if is_line else _list_entries(path):
            is_empty = False
            try:
                record = parse_record(value)
            except ValueError as error:
                raise ValueError(f"{describe_place(number, is_line=is_line)} {error}") from None
            yield Place(record=record, number=number, is_line=is_line, bytes_read=bytes_read)
    except OSError as error:
        raise ValueError(f"can't be read ({error.strerror})") from None
    if is_empty:
        raise ValueError(f"is empty. Give a file with records {SHAPES}.")


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
                    raise ValueError(
                        f"line {number} is not JSON ({_reason(error)}). Give one record per line."
                    ) from None


def _list_entries(path: str) -> Iterator[tuple[int, Any, int]]:
    size = os.path.getsize(path)
    with open(path, encoding="utf-8-sig") as file:
        try:
            entries = json.load(file)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"is not JSON ({_reason(error)}). Give a list of records, or one record per line."
            ) from None
    for number, entry in enumerate(entries, start=1):
        yield number, entry, size * number // len(entries)


def _reason(error: Exception) -> str:
    return "it is not UTF-8" if isinstance(error, UnicodeError) else " ".join(str(error).split())[:100]


def parse_record(value: Any) -> Record:
    """Return the record of a JSON value. Raises ValueError, with a message to follow the record's position."""
    if not isinstance(value, dict):
        raise ValueError(f"is no object but {type(value).__name__}. A record is {SHAPES}.")
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
    raise ValueError(f"has {keys}. A record is {SHAPES}.")


def _conversation(
    messages: Any, *, role: str = "role", content: str = "content", first: Mapping[str, Any] | None = None
) -> tuple[Message, ...]:
    """Return the messages of a conversation up to its last answer. `role` and `content` are the keys in the file.

    A "system" entry in `first` becomes the first message.
    """
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f'has messages that are no list of {{"{role}": ..., "{content}": ...}}')
    turns = [{"role": _text(message, role), "content": _text(message, content)} for message in messages]
    if first is not None:
        turns = [message | {"role": _ROLES.get(message["role"], message["role"])} for message in turns]
        if first.get("system"):
            turns.insert(0, {"role": "system", "content": _text(first, "system")})
    while turns and turns[-1]["role"] != "assistant":  # drop messages without an answer
        turns.pop()
    if not turns:
        raise ValueError("has no message of the role assistant, so there is nothing to learn")
    return tuple(turns)


def _text(values: Mapping[str, Any], key: str) -> str:
    text = values.get(key)
    if not isinstance(text, str):
        raise ValueError(f"has {key!r} that is {'missing' if key not in values else 'no text'}. Give a string.")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"has {key!r} with half of a surrogate pair, which is no character") from None
    return text


# --- chat templates


class ChatTemplate:
    """Renders conversations as transformers does, except that templates see no date.

    Equal conversations thus give equal texts on any day.
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        """Raises ValueError: there are several templates and no default one."""
        self._engine = tokenizer.engine
        self._source = "{% set strftime_now = undefined %}\n" + self._engine.get_chat_template()

    def render(self, messages: Sequence[Mapping[str, str]], *, for_answer: bool = False) -> str:
        """Return the text of a conversation. With `for_answer`, append the beginning of the assistant's next message.

        Raises:
            ValueError: the template rejects the conversation.
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
    """Start and end of each part of the text that contributes to the loss, in characters."""
    needs_end: bool
    """Whether the text itself does not end the answer, so that an end-of-document token must be added and learned."""


class Renderer:
    """Renders records in a --sft-prompt-format.

    `chat` uses the tokenizer's chat template. `text` uses Alpaca's prompt for instructions (Stanford Alpaca, 2023) and
    leaves other prompts unchanged. `auto` uses `chat` for conversations, or if the tokenizer has a template, else
    `text`.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_format: str) -> None:
        """Raises ValueError: the format is `chat`, but the tokenizer has no chat template."""
        self._format = prompt_format
        self._start, self._template = "", None
        if isinstance(tokenizer, HuggingFaceTokenizer):
            self._start = tokenizer.start_of_text
            if prompt_format != "text" and tokenizer.engine.chat_template is not None:
                self._template = ChatTemplate(tokenizer)
        if prompt_format == "chat" and self._template is None:
            raise ValueError(f"--sft-prompt-format chat: {_NO_TEMPLATE}")

    def samples(self, record: Record) -> list[Rendered]:
        """Return the record as text.

        It has several samples if the template shortens earlier answers when a later one follows.

        Raises:
            ValueError: there is no template, or it rejects the record. The message follows the record's position.
        """
        if record.messages and self._format == "text":
            raise ValueError("has messages, but --sft-prompt-format text supports only prompts. Give auto.")
        if self._template is None:
            if record.messages:
                raise ValueError(f"has messages, and {_NO_TEMPLATE}")
            question = alpaca(record.prompt, record.context) if record.is_instruction else record.prompt
            prompt = self._start + question
            text = prompt + record.answer
            return [Rendered(text=text, answers=((len(prompt), len(text)),), needs_end=True)]
        question = "\n\n".join(part for part in (record.prompt, record.context) if part)
        pair = ({"role": "user", "content": question}, {"role": "assistant", "content": record.answer})
        return _chat_samples(self._template, record.messages or pair)


_NO_TEMPLATE = (
    "the tokenizer has no chat template. Give --tokenizer-type HuggingFaceTokenizer with a folder that has "
    "chat_template.jinja, or chat_template in its tokenizer_config.json."
)


def alpaca(instruction: str, context: str = "") -> str:
    """Return Stanford Alpaca's prompt."""
    task = "Below is an instruction that describes a task"
    more = ", paired with an input that provides further context" if context else ""
    inputs = f"### Input:\n{context}\n\n" if context else ""
    return (
        f"{task}{more}. Write a response that appropriately completes the request.\n\n"
        f"### Instruction:\n{instruction}\n\n{inputs}### Response:"
    )


def _chat_samples(template: ChatTemplate, messages: Sequence[Message]) -> list[Rendered]:
    turns = [_turn(template, messages, i) for i, message in enumerate(messages) if message["role"] == "assistant"]
    whole = turns[-1]
    # One sample suffices if each answer looks the same in the whole conversation. Templates that shorten earlier
    # answers, for example by removing their reasoning, need one sample per answer.
    if all(whole.text.startswith(turn.text) for turn in turns):
        answers = tuple(answer for turn in turns for answer in turn.answers)
        return [Rendered(text=whole.text, answers=answers, needs_end=whole.needs_end)]
    return turns


def _turn(template: ChatTemplate, messages: Sequence[Message], index: int) -> Rendered:
    """Return the conversation up to one of the assistant's messages. Only that message is learned."""
    text = template.render(messages[: index + 1])
    # some templates begin a prompt with words that they omit from a finished message
    start = len(os.path.commonprefix((template.render(messages[:index], for_answer=True), text)))
    content = messages[index]["content"].strip()
    first = text.find(content, start)
    if first < 0:  # the prompt may end with the answer's first words, such as "<think>"
        first = text.find(content, len(os.path.commonprefix((template.render(messages[:index]), text))))
    if first < 0:
        raise ValueError("has an answer that the tokenizer's chat template leaves out")
    is_ended = bool(text[first + len(content) :].strip())
    end = len(text.rstrip()) if is_ended else len(text)
    return Rendered(text=text[:end], answers=((start, end),), needs_end=not is_ended)


# --- tokens


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """One sample of N tokens."""

    ids: numpy.typing.NDArray[numpy.int32]
    """[N]"""
    learned: numpy.typing.NDArray[numpy.bool_]
    """[N]; whether predicting the token contributes to the loss."""


def tokenize_record(record: Record, renderer: Renderer, tokenizer: Tokenizer) -> list[Tokens]:
    """Return the samples of a record, see `Renderer.samples`.

    Raises:
        ValueError: the record can't be rendered or tokenized. The message follows the record's position.
    """
    try:
        return [tokenize_sample(sample, tokenizer) for sample in renderer.samples(record)]
    except UnicodeError as error:
        raise ValueError(f"can't be tokenized ({error})") from error


def tokenize_sample(sample: Rendered, tokenizer: Tokenizer) -> Tokens:
    """Tokenize the whole text. A token contributes to the loss if any of its characters belongs to an answer."""
    ids = tokenizer.tokenize(sample.text)
    learned = numpy.zeros(len(ids) + sample.needs_end, dtype=bool)
    for start, end in sample.answers:
        last = len(ids) if end == len(sample.text) else _answer_end(sample.text, end, ids, tokenizer)
        learned[_num_common(tokenizer.tokenize(sample.text[:start]), ids) : last] = True
    if sample.needs_end:
        ids.append(tokenizer.eod)
        learned[-1] = True
    return Tokens(ids=numpy.array(ids, dtype=numpy.int32), learned=learned)


def _answer_end(text: str, end: int, ids: list[int], tokenizer: Tokenizer) -> int:
    """Return the number of ids that cover the text up to character `end`.

    An id that extends beyond `end` counts. Tokens after `end` are found by tokenizing text[end:] alone: they are the
    longest common suffix with `ids`.
    """
    before = tokenizer.tokenize(text[:end])
    shared = _num_common(before, ids)
    if shared == len(before):
        return shared
    behind = _num_common(tokenizer.tokenize(text[end:])[::-1], ids[::-1])
    return max(shared + 1, len(ids) - behind)


def _num_common(left: list[int], right: list[int]) -> int:
    """Return the length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), len(left))
