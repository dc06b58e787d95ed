"""Compare a small model of the same class, split into stages of one layer, with transformers' own, before training."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.bcd.config import RunConfig
from megatron.bcd.model.implementation import TRANSFORMERS
from megatron.bcd.model.skeleton import Pass, Refused, Skeleton, read_config
from megatron.bcd.model.texts import BY_TEXT, text_arguments

TOLERANCE = 5e-5
"""Largest difference of logits and gradients, relative to their largest element."""
_VOCABULARY, _MAX_LAYERS, _LENGTH = 64, 4, 12
_HIDDEN = 256
"""Hidden size of a small model, or a divisor of the model's own near it: a quarter to four times as large."""
_DIVIDED = re.compile(r"heads|experts|groups?$|intermediate|ffn|ssm$")
"""Names of sizes that are divided with the hidden size, as are its multiples. Heads and states keep their widths."""


def _small_sizes(config: Any) -> Iterator[dict[str, Any]]:
    """Yield settings of small models with one to four layers of all kinds, by width: not all widths fit together."""
    text = config.to_dict()
    text |= {alias: text.get(name) for alias, name in config.attribute_map.items()}
    number = config.num_hidden_layers
    lists = {name: value for name, value in text.items() if isinstance(value, list)}
    patterns = {name: value for name, value in lists.items() if len(value) == number}
    indices = {
        name: [layer in value for layer in range(number)]
        for name, value in lists.items()
        if "layer" in name and name not in patterns and all(type(each) is int for each in value)
    }
    kinds: dict[Any, int] = {}
    for layer in range(number):
        kinds.setdefault(repr([pattern[layer] for pattern in (patterns | indices).values()]), layer)
    chosen = [*kinds.values()][:_MAX_LAYERS]
    chosen += [layer for layer in range(number) if layer not in chosen][: max(0, min(number, 3) - len(chosen))]
    chosen.sort()
    small: dict[str, Any] = {name: [pattern[layer] for layer in chosen] for name, pattern in patterns.items()}
    small |= {name: [at for at, layer in enumerate(chosen) if has[layer]] for name, has in indices.items()}
    small |= {"num_hidden_layers": len(chosen), "vocab_size": _VOCABULARY}
    small |= {name: 0 for name in text if name.endswith("_token_id") and text[name] is not None}
    small |= {name: 8 for name in ("sliding_window", "attention_chunk_size") if (text.get(name) or 0) > 8}
    if text.get("first_k_dense_replace"):
        small["first_k_dense_replace"] = 1
    sizes = {name: size for name, size in text.items() if type(size) is int and size > 0 and name not in small}
    hidden = sizes.get("hidden_size", 1)
    factors = [each for each in range(1, hidden + 1) if hidden % each == 0 and 1 <= 4 * hidden // each // _HIDDEN <= 16]
    factors.sort(key=lambda factor: abs(hidden // factor - _HIDDEN))
    for factor in factors or [1]:
        yield small | {
            name: max(size // factor, min(size, 2) if "experts" in name else 1)
            for name, size in sizes.items()
            if size % hidden == 0 or _DIVIDED.search(name)
        }


def check_split(config: Any, *, is_packed: bool = False) -> Skeleton:
    """Check that a small model of this class computes the same with a stage for each layer, and return it.

    With `is_packed` also check that a text has the same logits behind another one, and whether it has without masks
    (`attends_by_text`).

    Raises:
        ValueError: logits or gradients differ, or no small model can be built. One line.
    """
    problem = ""
    for sizes in _small_sizes(config):
        try:
            small = copy.deepcopy(config)
            for name, size in sizes.items():
                setattr(small, name, size)
            skeleton = Skeleton(small, has_weights=True)
            if is_packed:
                _check_packed(skeleton)
            _compare(skeleton)
            return skeleton
        except Refused:
            raise
        except Exception as error:  # the widths may not fit together, and models raise many types
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
    raise ValueError(
        f"--transformer-impl transformers: no small {config.model_type} model could be compared with its stages "
        f"({problem}). BlockCoordinate trains it on one GPU (docs/pytorch.md)."
    )


def has_plain_head(config: RunConfig) -> bool:
    """Return whether the logits of the run's model are its head's products and nothing else. Raises ValueError."""
    if config.model.transformer_impl != TRANSFORMERS:
        return True
    return check_split(read_config(str(config.checkpoint.load_hf)).get_text_config()).has_plain_head


@torch.no_grad()
def _check_packed(skeleton: Skeleton) -> None:
    """Raise Refused if texts in one sequence see each other. Set `attends_by_text` if they need no mask."""
    texts = torch.arange(1, 1 + 2 * _LENGTH).view(2, _LENGTH)
    positions = torch.arange(_LENGTH).repeat(2)
    model = skeleton.model.eval()
    apart = model(input_ids=texts, use_cache=False).logits
    packed = model(input_ids=texts.view(1, -1), position_ids=positions[None], use_cache=False).logits
    if _difference(apart, packed.view_as(apart)) > TOLERANCE:
        raise Refused(
            f"--reset-attention-mask: layers of {skeleton.name} carry one text into the next. Give --no-sft-packing "
            "with --sft, or omit it."
        )
    given = text_arguments(torch.tensor([0, _LENGTH, 2 * _LENGTH], dtype=torch.int32), _LENGTH)
    with contextlib.suppress(Exception):  # the model's own code may know no such attention
        model.train().set_attn_implementation(BY_TEXT)  # dropout has no such kernel
        packed = model(input_ids=texts.view(1, -1), position_ids=positions[None], use_cache=False, **given).logits
        skeleton.attends_by_text = _difference(apart, packed.view_as(apart)) <= TOLERANCE
    model.set_attn_implementation(skeleton.masked_attention)


def _compare(skeleton: Skeleton) -> None:
    """Compare logits and gradients. Raises Refused."""
    model = skeleton.model.eval()
    parameters = [*model.parameters()]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for parameter in parameters:
            parameter.data += 0.02 * torch.randn(parameter.shape)
        tokens = torch.randint(1, _VOCABULARY, (2, _LENGTH))
    whole = model(input_ids=tokens, use_cache=False).logits
    whole.square().mean().backward()
    wanted = [whole, *map(_gradient, parameters)]
    model.zero_grad()
    try:
        actual = [_run_stages(skeleton, tokens), *map(_gradient, parameters)]
        difference = max(map(_difference, wanted, actual))
        problem = f"logits or gradients by {difference:.1g}" if difference > TOLERANCE else ""
    except Exception as error:  # the whole model has run, and stages may raise many types
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
    if problem:
        raise skeleton.refusal(f"computes otherwise when its layers are split ({problem})")


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _run_stages(skeleton: Skeleton, tokens: Tensor) -> Tensor:
    """Return the logits of stages of one layer each after their backward passes."""
    number = len(skeleton.layers)
    skeleton.fill()
    with torch.no_grad():
        skeleton.run(Pass(layers=range(number), has_head=True), input_ids=tokens)  # sets `tuple_length`
    stages = list[tuple[Tensor, Tensor]]()
    """Outputs, and the copies that the next stages receive."""
    for layer in range(number):
        received = stages[-1][1] if stages else None
        now = Pass(layers=range(layer, layer + 1), received=received, has_head=layer == number - 1)
        output = skeleton.run(now, input_ids=tokens)
        stages.append((output, output.detach().requires_grad_()))
    output.square().mean().backward()
    for sent, copied in reversed(stages[:-1]):
        sent.backward(copied.grad)
    return output


def _difference(left: Tensor, right: Tensor) -> float:
    left, right = left.detach(), right.detach()
    return float((left - right).abs().max() / left.abs().max().clamp(min=1e-9))
