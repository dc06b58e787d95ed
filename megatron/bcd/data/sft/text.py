"""Records of supervised fine-tuning as text and as tokens.

Only the assistant's messages, and the tokens that end them, contribute to the loss.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jinja2
import numpy
import numpy.typing

from megatron.bcd.data.sft.records import EMPTY, Message, Record
from megatron.bcd.tokenizer import HuggingFaceTokenizer, Tokenizer

Span = tuple[int, int]
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of an answer's reasoning, which transformers treats alike."""
_PLAIN = "a plain answer"
_USED = {("tool", "tool_call_id"), ("tool", "name"), ("user", "content"), ("assistant", "content")}
"""Role and key of what `parse_record` compares with the calls, and of content that every template renders."""


# --- chat templates


class ChatTemplate:
    """Renders conversations as transformers does, except that templates see no date.

    Equal conversations thus give equal texts on any day.
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        """Raises ValueError: there are several templates and no default one."""
        from transformers.utils.chat_template_utils import render_jinja_template

        self._engine, self._render = tokenizer.engine, render_jinja_template
        self._engine.get_chat_template()

    def render(
        self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None, *, for_answer: bool = False
    ) -> str:
        """Return the text of a conversation. With `for_answer`, append the beginning of the assistant's next message.

        Args:
            variables: tools, documents and whatever else the template uses.

        Raises:
            ValueError: the template rejects the conversation.
        """
        return self.render_marked(messages, variables or {}, for_answer=for_answer)[0]

    def render_marked(
        self, messages: Sequence[Message], variables: Mapping[str, Any], *, for_answer: bool = False
    ) -> tuple[str, list[Span] | None]:
        """Return the text, and the characters inside the template's generation marks; None if it has no marks."""
        # a folder may have another template for conversations with tools
        source = "{% set strftime_now = undefined %}\n" + self._engine.get_chat_template(tools=variables.get("tools"))
        has_marks = bool(_MARK.search(source))
        values = self._engine.special_tokens_map | dict(variables) | {"add_generation_prompt": for_answer}
        refusal: Exception | None = None
        for form in _forms(messages):
            try:
                # what `apply_chat_template` calls; only this returns the marks of a text that is not tokenized
                texts, spans = self._render(
                    conversations=[form], chat_template=source, return_assistant_tokens_mask=has_marks, **values
                )
                return str(texts[0]), [*spans[0]] if has_marks else None
            except (jinja2.TemplateError, TypeError, ValueError) as error:
                refusal = refusal or error
        raise ValueError(f"is refused by the tokenizer's chat template ({' '.join(str(refusal).split())})") from refusal


def _forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield the messages in the forms in which templates expect tool calls, the usual one first.

    Some templates fail if a call comes without content, and some join arguments to text as OpenAI writes them.
    """
    yield [*messages]
    if any("tool_calls" in message for message in messages):
        yield (filled := [{"content": "", **message} for message in messages])
        yield [
            message | {key: [*map(_with_text, message[key])] for key in message if key == "tool_calls"}
            for message in filled
        ]


def _with_text(call: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


# --- text


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A text that ends with an answer."""

    text: str
    answers: tuple[Span, ...]
    """Start and end of each part of the text that contributes to the loss, in characters."""
    needs_end: bool
    """Whether the text itself does not end the answer, so that an end-of-document token must be added and learned."""


class Renderer:
    """Renders records in a --sft-prompt-format.

    `chat` uses the tokenizer's chat template. `text` uses Alpaca's prompt for instructions and leaves other prompts
    unchanged. `auto` uses `chat` for conversations, or if the tokenizer has a template, else `text`.
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
            ValueError: there is no template, it rejects the record, or it leaves out a part. The message follows the
                record's position.
        """
        if self._template is not None:
            turns = [_turn(self._template, record, index) for index in record.learned]
            _refuse(_unused_keys(self._template, record, turns))
            return _merged(turns)
        if record.plain is None:
            text_only = "--sft-prompt-format text supports only prompts. Give auto."
            reason = text_only if self._format == "text" else _NO_TEMPLATE
            raise ValueError(f"has messages or a system text, and {reason}")
        _refuse([*map(repr, record.variables)])
        prompt = self._start + record.plain[0]
        text = prompt + record.plain[1]
        return [Rendered(text=text, answers=((len(prompt), len(text)),), needs_end=True)]


_NO_TEMPLATE = (
    "the tokenizer has no chat template. Give --tokenizer-type HuggingFaceTokenizer with a folder that has "
    "chat_template.jinja, or chat_template in its tokenizer_config.json."
)


def _merged(turns: list[Rendered]) -> list[Rendered]:
    """Return one sample if each answer looks the same in the whole conversation, else one per answer.

    Templates shorten earlier answers, for example by removing their reasoning.
    """
    whole = turns[-1]
    if not all(whole.text.startswith(turn.text) for turn in turns):
        return turns
    answers = tuple(answer for turn in turns for answer in turn.answers)
    return [Rendered(text=whole.text, answers=answers, needs_end=whole.needs_end)]


def _turn(template: ChatTemplate, record: Record, index: int) -> Rendered:
    """Return the conversation up to one of the assistant's messages. Only that message is learned."""
    *before, message = record.messages[: index + 1]
    text, marks = template.render_marked([*before, message], record.variables)
    # some templates begin a prompt with words that they omit from a finished message
    prompts = [template.render(before, record.variables, for_answer=is_begun) for is_begun in (True, False)]
    start, earliest = (len(os.path.commonprefix((prompt, text))) for prompt in prompts)
    content = message.get("content", "").strip()
    parts = [("tool_calls", call["function"]["name"]) for call in message.get("tool_calls", ())]
    parts += [(key, str(message.get(key, "")).strip()) for key in ("content", *_REASONING)]
    if lost := [key for key, part in parts if part not in text[earliest:]]:
        raise ValueError(f"has {lost[0]!r} in an answer, which the tokenizer's chat template leaves out")
    first = text.find(content, start)
    if first < 0:  # the prompt may end with the answer's first words, such as "<think>"
        first = text.find(content, earliest)
    if marks is not None:
        answers = tuple(span for span in marks if span[1] > max(start, span[0]))
        return Rendered(text=text, answers=answers, needs_end=False)
    end = text[first + len(content) :]
    if message.keys() - {"role", "content"}:  # which may follow the content: see how a plain answer ends
        plain = template.render([*before, {"role": "assistant", "content": _PLAIN}], record.variables)
        end = plain.rpartition(_PLAIN)[2]
    is_ended = bool(end.strip())
    last = len(text.rstrip()) if is_ended else len(text)
    return Rendered(text=text[:last], answers=((start, last),), needs_end=not is_ended)


def _unused_keys(template: ChatTemplate, record: Record, turns: list[Rendered]) -> list[str]:
    """Return the names of keys without which every text would be the same, so that they would be lost."""

    def is_used(changed: Record) -> bool:
        try:
            return not all(
                template.render(changed.messages[: index + 1], changed.variables).startswith(turn.text)
                for index, turn in reversed([*zip(record.learned, turns, strict=True)])
            )
        except ValueError:
            return True

    names = []
    for key in record.variables:
        variables = {name: item for name, item in record.variables.items() if name != key}
        if not is_used(replace(record, variables=variables)):
            names.append(repr(key))
    keys = {(message["role"], key) for message in record.messages for key, item in message.items() if item not in EMPTY}
    for role, key in sorted(keys - _USED):
        messages = [
            {name: item for name, item in message.items() if name != key or message["role"] != role}
            for message in record.messages
        ]
        if key != "role" and not is_used(replace(record, messages=tuple(messages))):
            names.append(f"{key!r} of {role}")
    return names


def _refuse(names: Sequence[str]) -> None:
    if names:
        raise ValueError(
            f"has {', '.join(names)}, which neither the chat template nor --sft uses. Remove it, or name it in "
            "--sft-ignore-keys."
        )


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
        samples = [tokenize_sample(sample, tokenizer) for sample in renderer.samples(record)]
    except UnicodeError as error:
        raise ValueError(f"can't be tokenized ({error})") from error
    if not all(sample.learned.any() for sample in samples):
        raise ValueError("has an answer of which no token is learned: it is outside the template's generation marks")
    return samples


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
