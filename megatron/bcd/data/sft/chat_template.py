"""A tokenizer's chat template: Jinja, rendered in a sandbox as transformers renders it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, nodes, parser, sandbox

from megatron.bcd.tokenizer import HuggingFaceTokenizer, Tokenizer


class _GenerationMarks(ext.Extension):
    """{% generation %} and {% endgeneration %}, with which templates may mark answers, write nothing."""

    tags = {"generation"}

    def parse(self, parser: parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

    def _write(self, caller: Callable[[], str]) -> str:
        return caller()


class ChatTemplate:
    """Renders conversations. The template sees no date, so that equal conversations give equal texts on every day."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: bos_token, eos_token and the like, which templates write.

        Raises:
            ValueError: `source` is no template.
        """
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationMarks, ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template is not Jinja ({error})") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]], *, for_answer: bool = False) -> str:
        """The text of a conversation; with `for_answer`, with what precedes the assistant's next message.

        Raises:
            ValueError: the template refuses the conversation.
        """
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=for_answer, tools=None, **self._special_tokens
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"is refused by the tokenizer's chat template ({' '.join(str(error).split())})") from error


def chat_template_of(tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template in the folder of a HuggingFaceTokenizer; None where there is none.

    It is in chat_template.jinja, chat_template.json, or tokenizer_config.json, the first that is there.

    Raises:
        ValueError: it can't be read.
    """
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return None
    source = _source(tokenizer.folder)
    return None if source is None else ChatTemplate(source, special_tokens=tokenizer.special_tokens)


def end_of_answer(tokenizer: Tokenizer) -> int | None:
    """The token that the chat template puts after an answer, such as <|im_end|>: models that are trained on
    conversations end with it, whatever their end-of-document token is. None without a template, for one that can't be
    read, and where ordinary text or nothing follows an answer.
    """
    answer = "Yes."
    try:
        template = chat_template_of(tokenizer)
        if template is None:
            return None
        text = template.render([{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": answer}])
    except ValueError:  # said where the template is used
        return None
    _, found, after = text.rpartition(answer)
    ids = tokenizer.tokenize(after.lstrip()) if found else []
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    return ids[0] if ids and ids[0] in tokenizer.added_ids else None


def _source(folder: str) -> str | None:
    path = os.path.join(folder, "chat_template.jinja")
    try:
        if os.path.isfile(path):
            with open(path, encoding="utf-8") as file:
                return file.read()
        for name in ("chat_template.json", "tokenizer_config.json"):
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                with open(path, encoding="utf-8") as file:
                    found = json.load(file).get("chat_template")
                if isinstance(found, list):  # several, by name
                    found = {entry["name"]: entry["template"] for entry in found}.get("default")
                if found is not None:
                    return str(found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} can't be read for its chat template ({error})") from error
    return None


def _to_json(value: Any, **options: Any) -> str:
    """As transformers': Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=options.pop("ensure_ascii", False), **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
