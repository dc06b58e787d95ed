"""Records of supervised fine-tuning as text and as tokens.

Only the assistant's messages, and the tokens that end them, contribute to the loss.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
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
_NO_TEMPLATE = (
    "the tokenizer has no chat template. Give --tokenizer-type HuggingFaceTokenizer with a folder that has "
    "chat_template.jinja, or chat_template in its tokenizer_config.json."
)


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
        """Raises ValueError: there is no default template, or none at all though the format is `chat`."""
        self._format, self._start = prompt_format, ""
        self._engine: Any = None
        """The tokenizer of transformers, if its chat template is used."""
        if isinstance(tokenizer, HuggingFaceTokenizer):
            self._start = tokenizer.start_of_text
            if prompt_format != "text" and tokenizer.engine.chat_template is not None:
                self._engine = tokenizer.engine
                self._engine.get_chat_template()
        if prompt_format == "chat" and self._engine is None:
            raise ValueError(f"--sft-prompt-format chat: {_NO_TEMPLATE}")

    def samples(self, record: Record) -> list[Rendered]:
        """Return the record as text.

        It has several samples if the template shortens earlier answers when a later one follows, for example by
        removing their reasoning.

        Raises:
            ValueError: there is no template, it rejects the record, or it leaves out a part. The message follows the
                record's position.
        """
        if self._engine is not None:
            _refuse_unused(record, self._source(record.variables))
            turns = [self._turn(record, index) for index in record.learned]
            if not all(turns[-1].text.startswith(turn.text) for turn in turns):
                return turns
            answers = tuple(answer for turn in turns for answer in turn.answers)
            return [Rendered(text=turns[-1].text, answers=answers, needs_end=turns[-1].needs_end)]
        if record.plain is None:
            text_only = "--sft-prompt-format text supports only prompts. Give auto."
            reason = text_only if self._format == "text" else _NO_TEMPLATE
            raise ValueError(f"has messages or a system text, and {reason}")
        _refuse_unused(record, template="")
        prompt = self._start + record.plain[0]
        text = prompt + record.plain[1]
        return [Rendered(text=text, answers=((len(prompt), len(text)),), needs_end=True)]

    def render(
        self, messages: Sequence[Message], variables: Mapping[str, Any], *, for_answer: bool = False
    ) -> tuple[str, list[Span] | None]:
        """Return the text of a conversation, and the characters inside generation marks; None without such marks.

        The text is that of transformers, except that templates see no date, so that it is the same on any day.

        Args:
            variables: tools, documents and whatever else the template uses.
            for_answer: whether to append the beginning of the assistant's next message.

        Raises:
            ValueError: the template rejects the conversation.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        source = self._source(variables)
        has_marks = bool(_MARK.search(source))
        values = self._engine.special_tokens_map | dict(variables) | {"add_generation_prompt": for_answer}
        try:
            # what `apply_chat_template` calls; only this returns the marks of a text that is not tokenized
            texts, spans = render_jinja_template(
                conversations=[[*messages]],
                chat_template="{% set strftime_now = undefined %}\n" + source,
                return_assistant_tokens_mask=has_marks,
                **values,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"is refused by the tokenizer's chat template ({reason})") from error
        return str(texts[0]), [*spans[0]] if has_marks else None

    def _source(self, variables: Mapping[str, Any]) -> str:
        """Return the template: a folder may have another one for conversations with tools."""
        return str(self._engine.get_chat_template(tools=variables.get("tools")))

    def _turn(self, record: Record, index: int) -> Rendered:
        """Return the conversation up to one of the assistant's messages. Only that message is learned."""
        *before, message = record.messages[: index + 1]
        text, marks = self.render([*before, message], record.variables)
        # some templates begin a prompt with words that they omit from a finished message
        start = len(commonprefix((self.render(before, record.variables, for_answer=True)[0], text)))
        parts = [("system", turn["content"].strip()) for turn in before if turn["role"] == "system"]
        parts += [("tool_calls", call["function"]["name"]) for call in message.get("tool_calls", ())]
        parts += [(key, str(message.get(key, "")).strip()) for key in ("content", *_REASONING)]
        if lost := [key for key, part in parts if part not in text]:
            raise ValueError(f"has {lost[0]!r}, which the tokenizer's chat template leaves out")
        if marks is not None:
            answers = tuple(span for span in marks if span[1] > max(start, span[0]))
            return Rendered(text=text, answers=answers, needs_end=False)
        plain, _ = self.render([*before, {"role": "assistant", "content": _PLAIN}], record.variables)
        is_ended = bool(plain.rpartition(_PLAIN)[2].strip())
        last = len(text.rstrip()) if is_ended else len(text)
        return Rendered(text=text[:last], answers=((start, last),), needs_end=not is_ended)


def _refuse_unused(record: Record, template: str) -> None:
    """Raise ValueError if the record has keys that the template does not name, so that they would be lost."""

    def is_named(key: str) -> bool:
        names = _REASONING if key in _REASONING else (key,)
        return key != "add_generation_prompt" and any(re.search(rf"\b{re.escape(name)}\b", template) for name in names)

    messages = [message for message in record.messages if message["role"] != "tool"]  # its place says which call
    keys = {key for message in messages for key, item in message.items() if item not in EMPTY}
    unused = [*record.variables, *sorted(keys - {"role", "content"})]
    if names := [repr(key) for key in unused if not is_named(key)]:
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
    rendered = renderer.samples(record)
    try:
        for sample in rendered:
            sample.text.encode()
    except UnicodeError as error:
        raise ValueError(f"can't be tokenized ({error})") from error
    samples = [tokenize_sample(sample, tokenizer) for sample in rendered]
    if not all(sample.learned.any() for sample in samples):
        raise ValueError("has an answer of which no token is learned: it is outside the template's generation marks")
    return samples


def tokenize_sample(sample: Rendered, tokenizer: Tokenizer) -> Tokens:
    """Tokenize the whole text. A token contributes to the loss if any of its characters belongs to an answer."""
    ids = tokenizer.tokenize(sample.text)
    learned = numpy.zeros(len(ids) + sample.needs_end, dtype=bool)
    for start, end in sample.answers:
        last = len(ids) if end == len(sample.text) else _answer_end(sample.text, end, ids, tokenizer)
        before = tokenizer.tokenize(sample.text[:start])
        learned[len(commonprefix((before, ids))) : last] = True
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
    shared = len(commonprefix((before, ids)))
    if shared == len(before):
        return shared
    behind = len(commonprefix((tokenizer.tokenize(text[end:])[::-1], ids[::-1])))
    return max(shared + 1, len(ids) - behind)
