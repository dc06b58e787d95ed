"""Measure the layers of a model of transformers without memory for its weights.

One layer of each kind runs under fake tensors, with what the model's own forward pass gives it.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from megatron.bcd.config.measured import LayerKind, MeasuredModel, Parameters
from megatron.bcd.planner.tables import TransformersModel
from megatron.bcd.runtime.compat.fake_tensors import MATRIX_PRODUCTS, LiveBytes, count_flops, fake_tensors


@lru_cache
def read_model(path: str, *, sequence: int | None, longest: int) -> TransformersModel:
    """Return the measured model of a config.json or its folder. The default sequence has at most `longest` tokens.

    Raises:
        ValueError: transformers cannot read it or build a decoder of text, or its layers cannot be measured.
    """
    from transformers import AutoConfig, logging

    logging.set_verbosity_error()  # kernels that a plan does not need
    folder = path if os.path.isdir(path) else os.path.dirname(path) or "."
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        text = config.get_text_config()
        tokens = sequence or min(text.max_position_embeddings, longest)
        measured = measure(config, sequence=tokens)
    except Exception as error:  # of any model's own code
        raise ValueError(f"cannot be planned ({' '.join(str(error).split())[:200]})") from None
    return TransformersModel(
        name=os.path.basename(os.path.abspath(folder)),
        form="llama",
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        heads=text.num_attention_heads,
        groups=text.num_attention_heads,
        ffn=4 * text.hidden_size,
        head_dim=1,
        vocabulary=text.vocab_size,
        sequence=tokens,
        source=path,
        tied=bool(config.tie_word_embeddings),
        measured=measured,
    )


def measure(config: Any, *, sequence: int) -> MeasuredModel:
    """Measure the decoder of a transformers configuration in sequences of `sequence` tokens: seconds.

    Raises:
        ValueError: no list of the model has its number of layers.
    """
    from transformers import AutoModelForCausalLM

    text = config.get_text_config()
    with fake_tensors():
        model = AutoModelForCausalLM.from_config(text, dtype=torch.bfloat16).train()
        name, layers = decoder_layers(model, text.num_hidden_layers)
        one, two = (_given(model, name, layers, (number, sequence)) for number in (1, 2))
        keys = [_kind(layer, given) for layer, given in zip(layers, one, strict=True)]
        kinds = list(dict.fromkeys(keys))
        first = [keys.index(key) for key in kinds]
        parent = model.get_submodule(name.rpartition(".")[0])
        norms = [_parameters(child) for key, child in parent.named_children() if "norm" in key]
        embedding = (text.vocab_size, text.hidden_size)
        return MeasuredModel(
            kinds=tuple(_measure(layers[index], one[index], two[index], sequence) for index in first),
            layers=tuple(map(kinds.index, keys)),
            parameters=(
                ("embedding.word_embeddings.weight", embedding),
                *(
                    (f"decoder.layers.{number}.{key}", shape)
                    for number, layer in enumerate(layers)
                    for key, shape in _parameters(layer)
                ),
                *((f"decoder.final_layernorm.{key}", shape) for norm in norms[-1:] for key, shape in norm),
                *((("output_layer.weight", embedding),) if not config.tie_word_embeddings else ()),
            ),
        )


def decoder_layers(model: nn.Module, number: int) -> tuple[str, nn.ModuleList]:
    """Return the name and the list of the decoder's layers, of which there are `number`. Raises ValueError."""
    lists = [(name, each) for name, each in model.named_modules() if isinstance(each, nn.ModuleList)]
    whole = [(name, each) for name, each in lists if len(each) == number]
    if not whole:
        raise ValueError(f"{type(model).__name__} has no list of {number} layers, so it cannot be cut into blocks")
    return min(whole, key=lambda pair: pair[0].count("."))


class _Recorder(nn.Module):
    """Stands in for a layer, and keeps what it is given. Other attributes are the layer's."""

    def __init__(self, layer: nn.Module, given: list[Any]) -> None:
        super().__init__()
        self.__dict__.update(layer=layer, given=given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.__dict__["given"].append(((hidden, *args), kwargs))
        return hidden


def _given(model: nn.Module, name: str, layers: nn.ModuleList, size: tuple[int, int]) -> list[Any]:
    """Return the arguments that the model's forward pass of [B, S] tokens gives each layer."""
    given: list[Any] = []
    parent, _, attribute = name.rpartition(".")
    base = model.get_submodule(parent)
    setattr(base, attribute, nn.ModuleList(_Recorder(layer, given) for layer in layers))
    try:
        base(input_ids=torch.zeros(size, dtype=torch.long), use_cache=False)
    finally:
        setattr(base, attribute, layers)
    return given


def _kind(layer: nn.Module, given: Any) -> Any:
    """Return a key that is equal for layers with the same class, parameters and mask."""
    return type(layer), _parameters(layer), id(given[1].get("attention_mask"))


def _parameters(module: nn.Module) -> Parameters:
    return tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())


def _measure(layer: nn.Module, one: Any, two: Any, sequence: int) -> LayerKind:
    """Measure a layer with the arguments of one sequence, and of two."""
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
