"""Compare a small model of the same class, split into two stages, with transformers' own, before training."""

from __future__ import annotations

import contextlib
import copy
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
_MAX_HIDDEN = 1024
"""Largest hidden size of a model that is compared at full width."""
_WIDTHS = {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "intermediate_size_mlp": 64, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "sliding_window": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "attention_chunk_size": 8,
}  # fmt: skip
"""Sizes of the small model by the names of configurations, where the model's own are larger. Heads keep their width."""


def _small_configs(config: Any) -> Iterator[Any]:
    """Yield small configurations with one to four layers of all kinds: narrow ones first, then one of full width."""
    text = config.to_dict()
    number = config.num_hidden_layers  # GPT-2 has another name for it in its file
    patterns = {name: value for name, value in text.items() if isinstance(value, list) and len(value) == number}
    kinds: dict[Any, int] = {}
    for layer in range(number):
        kinds.setdefault(repr([pattern[layer] for pattern in patterns.values()]), layer)
    chosen = sorted([*kinds.values()][:_MAX_LAYERS])
    chosen += [layer for layer in range(number) if layer not in chosen][: max(0, min(number, 3) - len(chosen))]
    small: dict[str, Any] = {name: [pattern[layer] for layer in sorted(chosen)] for name, pattern in patterns.items()}
    small |= {"num_hidden_layers": len(chosen), "vocab_size": _VOCABULARY}
    small |= {name: 0 for name in text if name.endswith("_token_id") and text[name] is not None}
    if text.get("first_k_dense_replace"):
        small["first_k_dense_replace"] = 1
    narrow = {name: size for name, size in _WIDTHS.items() if type(text.get(name)) is int and text[name] > size}
    if "num_key_value_heads" in narrow and text["num_key_value_heads"] == text["num_attention_heads"]:
        narrow["num_key_value_heads"] = narrow.get("num_attention_heads", text["num_attention_heads"])
    if "hidden_size" in narrow and not text.get("head_dim") and text.get("num_attention_heads"):
        heads = narrow.get("num_attention_heads", text["num_attention_heads"])
        narrow["hidden_size"] = heads * (text["hidden_size"] // text["num_attention_heads"])
    is_small = (text.get("hidden_size") or 0) <= _MAX_HIDDEN
    for widths in (narrow, {}) if is_small else (narrow,):
        result = copy.deepcopy(config)
        for name, value in (small | widths).items():
            setattr(result, name, value)
        yield result


def check_split(config: Any, *, is_packed: bool = False) -> Skeleton:
    """Check that a small model of this class computes the same in two stages, and return it.

    With `is_packed` also check that a text has the same logits behind another one, and whether it has without masks
    (`attends_by_text`).

    Raises:
        ValueError: logits or gradients differ, or no small model can be built. One line.
    """
    problem = ""
    for small in _small_configs(config):
        try:
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
        actual = [_run_halves(skeleton, tokens), *map(_gradient, parameters)]
        difference = max(map(_difference, wanted, actual))
        problem = f"logits or gradients by {difference:.1g}" if difference > TOLERANCE else ""
    except Exception as error:  # the whole model has run, and halves may raise many types
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
    if problem:
        raise skeleton.refusal(f"computes otherwise when its layers are split ({problem})")


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _run_halves(skeleton: Skeleton, tokens: Tensor) -> Tensor:
    """Return the logits of two stages after their backward passes."""
    number = len(skeleton.layers)
    skeleton.fill()
    with torch.no_grad():
        skeleton.run(Pass(layers=range(number), has_head=True), input_ids=tokens)  # sets `returns_tuple`
    first, last = range(number // 2), range(number // 2, number)
    sent = skeleton.run(Pass(layers=first, has_head=False), input_ids=tokens) if first else None
    received = None if sent is None else sent.detach().requires_grad_()
    logits = skeleton.run(Pass(layers=last, received=received, has_head=True), input_ids=tokens)
    logits.square().mean().backward()
    if sent is not None and received is not None:
        sent.backward(received.grad)
    return logits


def _difference(left: Tensor, right: Tensor) -> float:
    left, right = left.detach(), right.detach()
    return float((left - right).abs().max() / left.abs().max().clamp(min=1e-9))
