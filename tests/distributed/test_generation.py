"""Generation and likelihoods against transformers, on small random models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import huggingface_models as models
from support import worlds
from support.dist import World

from megatron.bcd.generation import cached_model, generate, likelihood, load, multiple_choice
from megatron.bcd.runtime import device

BYTES = load.TokenizerFlags(tokenizer_type="ByteLevelTokenizer")
PROMPTS = [[5, 17, 200, 3], [7] * 11, [250]]
NEW = 16
ONE_RANK: dict[str, Any] = {"mock_data": True}


END = 256
"""ByteLevelTokenizer's."""


def greedy(folder: str, prompts: list[list[int]]) -> list[list[int]]:
    """What the model in `folder` says after each prompt."""
    with worlds.parallel(worlds.run_config(**ONE_RANK)):
        loaded = load.open_model(folder)
        return [list(generate.continuation(loaded, one, max_new_tokens=NEW).tokens) for one in prompts]


def greedy_of_transformers(
    folder: Path, prompts: list[list[int]], *, default_end: int | None = None
) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.pad_token_id = 0
    found = []
    for one in prompts:
        tokens = model.generate(torch.tensor([one]), max_new_tokens=NEW, do_sample=False)[0, len(one) :].tolist()
        end = model.generation_config.eos_token_id or default_end
        found.append(tokens[: tokens.index(end)] if end in tokens else tokens)
    return found


@pytest.mark.parametrize("name", ["gpt2_exact_untied", "llama2", "qwen3"])
def test_greedy_is_that_of_transformers(world1: World, tmp_path: Path, name: str) -> None:
    """Positions that start again, keys without rotation, a mask in the wrong place, an end token without effect."""
    folder = models.write_model(name, tmp_path / "model")
    theirs = greedy_of_transformers(folder, PROMPTS)
    assert len({token for answer in theirs for token in answer}) > 5, "a model that says one thing shows nothing"
    [ours] = world1.run(greedy, str(folder), PROMPTS)
    assert ours == theirs
    ends = theirs[0][3]
    for path in ("config.json", "generation_config.json"):
        said = json.loads((folder / path).read_text())
        (folder / path).write_text(json.dumps(said | {"eos_token_id": ends}))
    shorter = greedy_of_transformers(folder, PROMPTS[:1])
    assert shorter == [theirs[0][: theirs[0].index(ends)]]
    assert world1.run(greedy, str(folder), PROMPTS[:1]) == [shorter]


def cached_and_whole(folder: str, tokens: torch.Tensor, *, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits after each of the tokens from `first` on, with and without a cache."""
    with worlds.parallel(worlds.run_config(**ONE_RANK)):
        model, tokens = load.open_model(folder).model, tokens.to(device.current())
        cached = cached_model.CachedModel(model, batch_size=len(tokens), max_length=tokens.size(1))
        steps = [cached.append(tokens[:, :first])]
        steps += [cached.append(tokens[:, [i]]) for i in range(first, tokens.size(1))]
        return torch.stack(steps, dim=1).cpu(), cached_model.whole_logits(model, tokens)[:, first - 1 :].cpu()


@pytest.mark.parametrize("name", ["gpt2", "llama3"])
def test_a_cached_step_equals_a_whole_forward(world1: World, tmp_path: Path, name: str) -> None:
    """A cache that mixes up sequences, layers or positions."""
    folder = models.write_model(name, tmp_path / "model")
    tokens = torch.randint(0, models.VOCABULARY, (3, 30), generator=torch.Generator().manual_seed(1))
    [(cached, whole)] = world1.run(cached_and_whole, str(folder), tokens, first=7)
    assert cached.shape == whole.shape and (cached - whole).abs().max() < 1e-4


def train_and_save(config: Any) -> None:
    with worlds.started(config) as one:
        one.train()


@pytest.mark.parametrize("form", ["gpt", "llama"])
def test_a_checkpoint_of_ours(world1: World, world2: World, text_data: str, tmp_path: Path, form: str) -> None:
    """Weights of one tensor-parallel rank, of another pipeline stage or of a padded row; the tokenizer of the run that
    is not found again."""
    layout: dict[str, Any] = {"tensor_model_parallel_size": 2} if form == "gpt" else {"pipeline_model_parallel_size": 2}
    config = worlds.run_config(
        form=form,
        world_size=2,
        data_path=text_data,
        train_iters=2,
        openai_gelu=form == "gpt",
        save=str(tmp_path / "run"),
        save_hf=str(tmp_path / "exported"),
        **layout,
    )
    world2.run(train_and_save, config)
    [ours] = world1.run(greedy, str(tmp_path / "run"), PROMPTS)
    assert ours == greedy_of_transformers(tmp_path / "exported", PROMPTS, default_end=END)
    assert world1.run(own_tokenizer, str(tmp_path / "run")) == [("ByteLevelTokenizer", 257, 257, frozenset([256]))]


def own_tokenizer(folder: str) -> tuple[str, int, int, frozenset[int]]:
    with worlds.parallel(worlds.run_config(**ONE_RANK)):
        loaded = load.open_model(folder)
        tokenizer = loaded.known_tokenizer()
        return type(tokenizer).__name__, tokenizer.vocab_size, loaded.num_ids, loaded.end_ids


TEXT = "What is scored is scored once, " * 6
QUESTION = multiple_choice.Question(text="One and one is", choices=("two", "a bicycle", "2"), answer=0)


def likelihoods(folder: str) -> dict[str, Any]:
    with worlds.parallel(worlds.run_config(**ONE_RANK)):
        loaded = load.open_model(folder, tokenizer=BYTES)
        requests = [likelihood.of_texts(loaded, QUESTION.text, f" {choice}") for choice in QUESTION.choices]
        return {
            "choices": [one.log_likelihood for one in likelihood.score(loaded, requests, batch_size=2)],
            "accuracy": multiple_choice.accuracy(loaded, [QUESTION] * 3),
            "whole": likelihood.perplexity(loaded, TEXT, stride=16),
            "short": likelihood.perplexity(loaded, TEXT, length=32, batch_size=3),
        }


def test_likelihoods(world1: World, tmp_path: Path) -> None:
    """Scores off by one token, padding that counts, a window with another context than it says."""
    folder = models.write_model("llama2", tmp_path / "model")
    [found] = world1.run(likelihoods, str(folder))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()

    def score(tokens: list[int], num_scored: int) -> float:
        with torch.no_grad():
            logits = model(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
        return sum(float(logits[i - 1, tokens[i]]) for i in range(len(tokens) - num_scored, len(tokens)))

    choices = [score([*f"{QUESTION.text} {choice}".encode()], len(choice) + 1) for choice in QUESTION.choices]
    assert found["choices"] == pytest.approx(choices, abs=1e-3)
    assert found["accuracy"].acc == float(choices.index(max(choices)) == QUESTION.answer)
    by_length = [value / len(choice) for value, choice in zip(choices, QUESTION.choices, strict=True)]
    assert found["accuracy"].acc_norm == float(by_length.index(max(by_length)) == QUESTION.answer)
    tokens = [256, *TEXT.encode()]  # the document starts after an end token
    total = score(tokens[:65], 64)
    for stop in range(81, len(tokens) + 16, 16):
        stop, last = min(stop, len(tokens)), stop - 16
        total += score(tokens[max(0, stop - 65) : stop], stop - last)
    assert found["whole"].num_tokens == len(TEXT) and found["whole"].num_words == len(TEXT.split())
    assert found["whole"].loss == pytest.approx(-total / len(TEXT), abs=1e-4)
    assert found["whole"].bits_per_byte == pytest.approx(found["whole"].loss / math.log(2))
    total = sum(score(tokens[start - 32 : start + 1], 32) for start in range(32, len(tokens), 32))
    total += score(tokens[-33:], len(TEXT) % 32)
    assert found["short"].loss == pytest.approx(-total / len(TEXT), abs=1e-4)
