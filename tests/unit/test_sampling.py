"""How the next token is chosen, and which tokens of a text are scored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron.bcd.config.sections import TokenizerConfig
from megatron.bcd.generation.likelihood import of_texts, perplexity, windows
from megatron.bcd.generation.load import LoadedModel, TokenizerFlags
from megatron.bcd.generation.multiple_choice import Accuracy, Question, read_questions
from megatron.bcd.generation.sampling import Sampling, next_tokens
from megatron.bcd.tokenizer import NullTokenizer

LOGITS = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))


def drawn(sampling: Sampling, count: int = 400) -> list[int]:
    """How often each token comes, of `count` draws."""
    generator = torch.Generator().manual_seed(1)
    tokens = next_tokens(LOGITS.expand(count, 4), sampling, generator)
    return torch.bincount(tokens, minlength=4).tolist()


def test_draws() -> None:
    """A temperature that multiplies, a nucleus that leaves out its last token or takes one too many."""
    assert drawn(Sampling()) == [400, 0, 0, 0]
    assert drawn(Sampling(temperature=1, top_p=0.4)) == [400, 0, 0, 0]
    first, second, *rest = drawn(Sampling(temperature=1, top_p=0.79))
    assert 210 < first < 290 and second == 400 - first and rest == [0, 0]
    assert (
        drawn(Sampling(temperature=1, top_p=0.81))[2:] != [0, 0] and drawn(Sampling(temperature=1, top_p=0.81))[3] == 0
    )
    hot, cold = drawn(Sampling(temperature=10)), drawn(Sampling(temperature=0.2))
    assert hot[3] > 50 and cold[0] > 360


def test_a_seed_gives_the_same_draws() -> None:
    """Draws from a generator of the process."""
    draws = [next_tokens(LOGITS.expand(50, 4), Sampling(temperature=1), torch.Generator().manual_seed(7)) for _ in "ab"]
    assert torch.equal(*draws)


@pytest.mark.parametrize(("total", "length", "stride"), [(23, 8, 8), (23, 8, 3), (9, 8, 1), (5, 8, 8), (2, 1, 1)])
def test_windows_score_every_token_once(total: int, length: int, stride: int) -> None:
    """A token that is left out or scored twice, a window longer than the model, less context than promised."""
    tokens = list(range(total))
    scored: list[int] = []
    for number, window in enumerate(windows(tokens, length=length, stride=stride)):
        assert len(window.tokens) <= length + 1
        start = window.tokens[0]
        assert list(window.tokens) == tokens[start : start + len(window.tokens)]
        own = list(window.tokens[-window.num_scored :])
        scored += own
        assert number == 0 or (len(own) <= stride and own[0] - start >= length - stride)
    assert scored == tokens[1:]


def loaded_with(num_rows: int) -> LoadedModel:
    """No model, a tokenizer of 101 ids of which the last one ends a text, and so many rows of an embedding."""
    return LoadedModel(
        model=torch.nn.Identity(),
        tokenizer=NullTokenizer(vocab_size=100),
        files=None,
        precision="fp32",
        num_ids=min(num_rows, 101),
        num_rows=num_rows,
        max_length=8,
        end_ids=frozenset([100]),
        turn_end_ids=frozenset(),
        adds_special_tokens=False,
    )


def test_a_tokenizer_of_a_larger_model() -> None:
    """An id without an embedding that reaches the model: an IndexError, or another word's row."""
    loaded = loaded_with(50)
    assert loaded.encode("49") == [49]
    said = "gives the id 50, and the model has the ids 0 to 49: give --tokenizer-type"
    for given in (
        lambda: loaded.encode("3 50"),
        lambda: of_texts(loaded, "1", " 50"),
        lambda: perplexity(loaded, "50"),
    ):
        with pytest.raises(ValueError, match=said):
            given()
    with pytest.raises(ValueError, match="gives the id 100"):  # what starts a document
        perplexity(loaded, "1 2")
    assert loaded_with(101).encode("100") == [100]


def test_a_continuation_within_the_context_s_last_token() -> None:
    """A request without tokens, which ends the whole evaluation."""
    loaded = loaded_with(101)
    for context, more, tokens in (("3 1", "2", (3, 12)), ("1", "2", (100, 12)), ("3 1", " 2", (3, 1, 2))):
        request = of_texts(loaded, context, more)
        assert (request.tokens, request.num_scored) == (tokens, 1)


def test_the_tokenizer_s_flags_are_those_of_training() -> None:
    """A flag that generation leaves out, or whose default is another one: a model that reads other ids."""
    assert vars(TokenizerFlags()) == vars(TokenizerConfig())


def test_questions(tmp_path: Path) -> None:
    """A right answer that becomes another one on the way in."""
    path = tmp_path / "questions.jsonl"
    lines = [
        {"query": "q", "choices": ["x", "y"], "gold": 1},
        {"ctx": "q", "endings": ["x", "y"], "label": "1"},
        {"question": "q", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answer": "2"},
        {"context": "q", "options": ["x", "y"], "answer": "B"},
        {"context": "q", "options": ["x", "y"], "answer": "y"},
    ]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    assert read_questions(str(path)) == [Question(text="q", choices=("x", "y"), answer=1)] * len(lines)
    assert len(read_questions(str(path), limit=2)) == 2
    path.write_text(json.dumps({"query": "q\u2028r\x85", "choices": ["x", "y"], "gold": 1}, ensure_ascii=False))
    assert read_questions(str(path)) == [Question(text="q\u2028r\x85", choices=("x", "y"), answer=1)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("\n{", "line 2"),
        ("[1]", "line 1: is no object"),
        ('{"query": "q", "choices": ["x", "y"]}', "line 1: has no gold"),
        ('{"query": "q", "choices": ["x", "y"], "gold": 2}', "line 1: the answer 2 is none of the 2 choices"),
        ('{"query": "q", "choices": ["x"], "gold": 0}', "two choices or more"),
    ],
)
def test_lines_that_are_no_questions(tmp_path: Path, text: str, said: str) -> None:
    """A traceback, or a line that is counted as wrong."""
    path = tmp_path / "questions.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        read_questions(str(path))


def test_standard_error() -> None:
    """Of one question there is none, and JSON has no NaN."""
    assert Accuracy(num_questions=1, acc=1.0, acc_norm=1.0).stderr(1.0) is None
    assert Accuracy(num_questions=5, acc=0.5, acc_norm=1.0).stderr(0.5) == 0.25
