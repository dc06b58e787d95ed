"""Any decoder of transformers, as its own layers compute it: sizes, and the tensors of its files."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from megatron.bcd.config import RunConfig
from megatron.bcd.config.measured import Parameters
from megatron.bcd.huggingface import tensors
from megatron.bcd.huggingface.architecture import TRANSFORMERS, Architecture
from megatron.bcd.model.skeleton import EMBEDDING, HEAD, Skeleton, read_config
from megatron.bcd.runtime.compat import transformers as compat


def read(path: str) -> Architecture:
    """Return the sizes of a model, given its folder or its name on the hub.

    Raises:
        ValueError: as `read_config`.
    """
    config = read_config(path)
    values = config.to_dict()

    def value(*names: str, default: Any) -> Any:
        found = (values.get(name) for name in names)
        return next((each for each in found if isinstance(each, int | float) and each), default)

    hidden, heads = config.hidden_size, value("num_attention_heads", default=1)
    return Architecture(
        family=TRANSFORMERS,
        source=path,
        num_layers=config.num_hidden_layers,
        hidden_size=hidden,
        ffn_hidden_size=value("intermediate_size", "ffn_hidden_size", default=4 * hidden),
        num_attention_heads=heads,
        num_query_groups=value("num_key_value_heads", default=heads),
        head_size=value("head_dim", default=max(1, hidden // heads)),
        vocab_size=config.vocab_size,
        max_positions=value("max_position_embeddings", default=10**6),
        norm_epsilon=value("rms_norm_eps", "layer_norm_eps", "norm_eps", default=1e-5),
        tied=bool(config.tie_word_embeddings),
        hidden_dropout=value("resid_pdrop", "hidden_dropout", "residual_dropout", "dropout", default=0.0),
        attention_dropout=value("attention_dropout", "attn_pdrop", default=0.0),
    )


@functools.lru_cache(maxsize=2)
def _skeleton(path: str) -> Skeleton:
    return Skeleton(read_config(path))


def list_parameters(config: RunConfig) -> Parameters:
    """Return names and shapes of the parameters of a run on transformers' layers; nothing for other runs."""
    if config.model.transformer_impl != TRANSFORMERS:
        return ()
    return parameters_of(_skeleton(str(config.checkpoint.load_hf)), tied=config.tied)


def parameters_of(skeleton: Skeleton, *, tied: bool) -> Parameters:
    """Return names and shapes of a model's parameters. A tied head counts once."""
    parameters = dict(skeleton.model.named_parameters(remove_duplicate=False))
    return tuple(
        (key, tuple(tensor.shape))
        for key, name, tensor in skeleton.state()
        if name in parameters and not (tied and key == f"{HEAD}.weight")
    )


@functools.lru_cache(maxsize=2)
def build_rows(network: Architecture) -> tuple[tensors.Row, ...]:
    """Return `tensors.build_rows`, or with transformers' layers a row for each tensor of a checkpoint."""
    if network.family != TRANSFORMERS:
        return tensors.build_rows(network)
    skeleton = _skeleton(network.source)
    conversion = compat.Conversion(skeleton.model)

    def row(key: str, name: str, tensor: Tensor) -> tensors.Row:
        parts = conversion.to_files(name, tensor.to("meta"))
        is_same = [*parts] == [name]
        return tensors.Row(
            key=key,
            names=tuple(parts),
            shapes=tuple(tuple(part.shape) for part in parts.values()),
            is_vocabulary=key in (f"{EMBEDDING}.weight", f"{HEAD}.weight"),
            **{} if is_same else {"join": joined(name, tuple(parts)), "split": split(name)},
        )

    def joined(name: str, names: tuple[str, ...]) -> tensors.Join:
        return lambda parts: conversion.from_files(name, dict(zip(names, parts, strict=True)))

    def split(name: str) -> tensors.Split:
        return lambda tensor: tuple(conversion.to_files(name, tensor).values())

    return tuple(
        row(key, name, tensor)
        for key, name, tensor in skeleton.state()
        if not (network.tied and key == f"{HEAD}.weight")
    )
