"""Measure the layers of a model of transformers without memory for its weights.

One layer of each kind runs under fake tensors, with what the model's own forward pass gives it.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from megatron.bcd.config.measured import LayerKind, MeasuredModel
from megatron.bcd.huggingface.tensors import parameters_of
from megatron.bcd.model.skeleton import LAYERS, Pass, Skeleton, read_config
from megatron.bcd.model.split_check import check_split
from megatron.bcd.runtime.compat.fake_tensors import MATRIX_PRODUCTS, LiveBytes, count_flops, fake_tensors


@lru_cache
def read_model(path: str, *, sequence: int) -> MeasuredModel:
    """Measure the model of a config.json or its folder in sequences of `sequence` tokens.

    Raises:
        ValueError: its layers cannot be measured.
    """
    try:
        return measure(read_config(path, is_quantised=True).get_text_config(), sequence=sequence)
    except Exception as error:  # of any model's own code
        raise ValueError(f"{path}: cannot be planned ({' '.join(str(error).split())[:200]})") from None


def measure(config: Any, *, sequence: int) -> MeasuredModel:
    """Measure the decoder of a transformers configuration in sequences of `sequence` tokens: seconds.

    Raises:
        ValueError: as `Skeleton`.
    """
    by_text = can_pack = False
    with suppress(ValueError):  # a run refuses what it can't train
        by_text, can_pack = check_split(config, is_packed=True).attends_by_text, True
    with fake_tensors():
        skeleton = Skeleton(config, dtype=torch.bfloat16, has_weights=True)
        skeleton.model.train()
        parameters, layers = parameters_of(skeleton, tied=config.tie_word_embeddings), skeleton.layers
        skeleton.fill()
        one, two = (_arguments(skeleton, number, sequence) for number in (1, 2))
        keys = [_kind(layer, given) for layer, given in zip(layers, one, strict=True)]
        kinds = list(dict.fromkeys(keys))
        first = [keys.index(key) for key in kinds]
        return MeasuredModel(
            kinds=tuple(_measure(layers[index], one[index], two[index], sequence) for index in first),
            layers=tuple(map(kinds.index, keys)),
            parameters=parameters,
            has_plain_head=skeleton.has_plain_head,
            attends_by_text=by_text and skeleton.has_kernels_of_texts,
            can_pack=can_pack,
        )


def _arguments(skeleton: Skeleton, number: int, sequence: int) -> list[Any]:
    """Return the arguments that the model's forward pass of `number` sequences gives each layer."""
    given: list[Any] = []
    hooks = [
        slot.register_forward_pre_hook(lambda _, args, kwargs: given.append((args, kwargs)), with_kwargs=True)
        for slot in skeleton.module(LAYERS).children()
    ]
    tokens = torch.zeros(number, sequence, dtype=torch.long)
    skeleton.run(Pass(layers=range(0), has_head=True), input_ids=tokens)
    for hook in hooks:
        hook.remove()
    return given


def _kind(layer: nn.Module, given: Any) -> Any:
    """Return a key that is equal for layers with the same class, parameters and mask."""
    shapes = tuple((name, parameter.shape) for name, parameter in layer.named_parameters())
    return type(layer), shapes, id(given[1].get("attention_mask"))


def _measure(layer: nn.Module, one: Any, two: Any, sequence: int) -> LayerKind:
    (args, kwargs), hidden = one, one[0][0]
    flops = count_flops(layer, *args, **kwargs)
    matrices = sum(flops.get(name, 0) for name in MATRIX_PRODUCTS)
    forward = LiveBytes()
    with forward, torch.no_grad():
        layer(*args, **kwargs)
    active, working = _passes(layer, *one, is_trained=True)
    by_tokens = max(0, _passes(layer, *two, is_trained=True)[1] - working)
    suffix, suffix_working = _passes(layer, *one, is_trained=False)
    return LayerKind(
        active=active / sequence,
        suffix=suffix / sequence,
        active_working=by_tokens / sequence,
        suffix_working=suffix_working / sequence,
        forward_working=(forward.peak + hidden.nbytes) / sequence,
        weight_working=working - by_tokens,
        matrices=matrices // (2 * sequence),
        core=(sum(flops.values()) - matrices) // (2 * sequence),
    )


def _passes(layer: nn.Module, args: Any, kwargs: Any, *, is_trained: bool) -> tuple[int, int]:
    """Return the bytes that the forward pass saves, and the temporary bytes of the backward pass."""
    layer.requires_grad_(is_trained)
    hooks = [each.register_post_accumulate_grad_hook(_drop) for each in layer.parameters() if is_trained]
    with LiveBytes() as live:
        output = layer(args[0].detach().requires_grad_(), *args[1:], **kwargs)
        output = output[0] if isinstance(output, tuple) else output
        saved = live.peak = live.now
        output.backward(torch.empty_like(output))
    for hook in hooks:
        hook.remove()
    return saved, live.peak - saved


def _drop(parameter: Tensor) -> None:
    parameter.grad = None  # a run adds it to a buffer
