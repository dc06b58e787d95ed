"""Questions with a few answers, scored by the likelihood of each answer (lm-evaluation-harness's multiple choice)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.bcd.generation.likelihood import Score, of_texts, score
from megatron.bcd.generation.load import LoadedModel

QUESTIONS = ("query", "context", "ctx", "question", "prompt")
CHOICES = ("choices", "endings", "options")
ANSWERS = ("gold", "label", "answer")
FORM = '{"query": "...", "choices": ["...", ...], "gold": 0}'


@dataclass(frozen=True, kw_only=True)
class Question:
    """One line of a file."""

    text: str
    choices: tuple[str, ...]
    answer: int
    """Index of the right choice."""


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Over a file's questions, each 0 to 1."""

    num_questions: int
    acc: float
    """The right choice has the largest log-likelihood."""
    acc_norm: float
    """The same of the log-likelihood over the choice's characters."""

    def stderr(self, value: float) -> float | None:
        """Standard error of one of both; None for one question."""
        count = self.num_questions
        return math.sqrt(value * (1 - value) / (count - 1)) if count > 1 else None


def read_questions(path: str, *, limit: int | None = None) -> list[Question]:
    """The first `limit` lines of a JSONL file, all by default.

    Raises:
        ValueError: it can't be read, is empty, or a line (named by its number) is no question.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} can't be read ({error})") from None
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append(_question(json.loads(line)))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: {error}; a line is {FORM}") from None
        if len(found) == limit:
            break
    if not found:
        raise ValueError(f"{path} is empty: a line is {FORM}")
    return found


def _question(line: Any) -> Question:
    if not isinstance(line, Mapping):
        raise ValueError("is no object")
    text, choices, answer = (_value(line, names) for names in (QUESTIONS, CHOICES, ANSWERS))
    if isinstance(choices, Mapping):  # ARC's form: texts, and their labels
        texts, labels = choices.get("text"), choices.get("label")
        answer = labels.index(answer) if isinstance(labels, list) and answer in labels else answer
        choices = texts
    if not isinstance(text, str) or not isinstance(choices, list) or not all(isinstance(one, str) for one in choices):
        raise ValueError("the question is no text, or the choices are no list of texts")
    if len(choices) < 2 or not all(choices):
        raise ValueError("there must be two choices or more, none of them empty")
    return Question(text=text, choices=tuple(choices), answer=_index(answer, choices))


def _value(line: Mapping[str, Any], names: Sequence[str]) -> Any:
    for name in names:
        if name in line:
            return line[name]
    raise ValueError(f"has no {' or '.join(names)}")


def _index(answer: Any, choices: Sequence[str]) -> int:
    """From a number, a number as text, a letter, or the choice itself."""
    if isinstance(answer, str) and answer in choices:
        return choices.index(answer)
    if isinstance(answer, str) and answer.isdigit():
        answer = int(answer)
    elif isinstance(answer, str) and len(answer) == 1 and answer.isascii() and answer.isupper():
        answer = ord(answer) - ord("A")
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise ValueError(f"the answer {answer!r} is none of the {len(choices)} choices")
    return answer


def accuracy(loaded: LoadedModel, questions: Sequence[Question], *, batch_size: int = 8) -> Accuracy:
    """Of the model on `questions`; a choice follows its question after a space.

    Raises:
        ValueError: a choice is longer than the model's positions.
    """
    requests = [of_texts(loaded, one.text, f" {choice}") for one in questions for choice in one.choices]
    scores = iter(score(loaded, requests, batch_size=batch_size))
    right = right_norm = 0
    for one in questions:
        own: list[Score] = [next(scores) for _ in one.choices]
        plain = [found.log_likelihood for found in own]
        by_length = [value / len(choice) for value, choice in zip(plain, one.choices, strict=True)]
        right += plain.index(max(plain)) == one.answer
        right_norm += by_length.index(max(by_length)) == one.answer
    count = len(questions)
    return Accuracy(num_questions=count, acc=right / count, acc_norm=right_norm / count)
