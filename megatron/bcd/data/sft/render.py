"""Records as text, with the parts that are learned: the assistant's messages and what ends them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.bcd.data.sft.chat_template import ChatTemplate, chat_template_of
from megatron.bcd.data.sft.records import Message, Record
from megatron.bcd.tokenizer import HuggingFaceTokenizer, Tokenizer

PROMPT_FORMATS = ("auto", "chat", "text")
"""Values of --sft-prompt-format."""


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
        self._template = None if prompt_format == "text" else chat_template_of(tokenizer)
        self._format = prompt_format
        self._start = tokenizer.start_of_text if isinstance(tokenizer, HuggingFaceTokenizer) else ""
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
            prompt = self.prompt(record)
            text = prompt + record.answer
            return [Rendered(text=text, answers=((len(prompt), len(text)),), needs_end=True)]
        messages = record.messages or (_question(record), {"role": "assistant", "content": record.answer})
        return _chat_samples(self._template, messages)

    def prompt(self, record: Record) -> str:
        """What the model is given to answer the record: the text before the answer, or before the next message.

        Raises:
            ValueError: as `samples`.
        """
        if self._template is not None:
            return self._template.render(record.messages or (_question(record),), for_answer=True)
        return self._start + (_alpaca(record) if record.is_instruction else record.prompt)


_NO_TEMPLATE = (
    "the tokenizer has no chat template: give --tokenizer-type HuggingFaceTokenizer with a folder that has "
    "chat_template.jinja, or chat_template in its tokenizer_config.json"
)


def _question(record: Record) -> Message:
    return {"role": "user", "content": "\n\n".join(part for part in (record.prompt, record.context) if part)}


def _alpaca(record: Record) -> str:
    task = "Below is an instruction that describes a task"
    more = ", paired with an input that provides further context" if record.context else ""
    given = f"### Input:\n{record.context}\n\n" if record.context else ""
    return (
        f"{task}{more}. Write a response that appropriately completes the request.\n\n"
        f"### Instruction:\n{record.prompt}\n\n{given}### Response:"
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
