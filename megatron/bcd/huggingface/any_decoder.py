"""Any decoder of transformers, as its own layers compute it: sizes, and the tensors of its files."""

from __future__ import annotations

import functools
from dataclasses import replace

from torch import Tensor

from megatron.bcd.config import RunConfig
from megatron.bcd.config.measured import Parameters
from megatron.bcd.huggingface import tensors
from megatron.bcd.huggingface.architecture import TRANSFORMERS, Architecture, NotInCore, architecture_of
from megatron.bcd.model.skeleton import EMBEDDING, HEAD, Skeleton, read_config
from megatron.bcd.runtime.compat import transformers as compat


def read_architecture(path: str, *, transformer_impl: str = "auto", is_quantised: bool = False) -> Architecture:
    """Return the architecture of a model, given its folder, its config.json or its name on the hub.

    With `transformer_impl` auto, transformers' layers compute what Megatron Core's cannot. With `is_quantised` the
    weights may be quantised: they will not be read.

    Raises:
        NotInCore: another `transformer_impl` cannot express the model.
        ValueError: as `read_config`.
    """
    config, reason = read_config(path, is_quantised=is_quantised), ""
    try:
        if transformer_impl != TRANSFORMERS:
            return replace(architecture_of(config), source=path)
    except NotInCore as error:
        if transformer_impl != "auto":
            raise NotInCore(f"{path}: {error}. --transformer-impl transformers trains it.") from None
        reason = str(error)
    network = architecture_of(config.get_text_config(), family=TRANSFORMERS)
    return replace(network, source=path, not_in_core=reason)


@functools.lru_cache(maxsize=2)
def _skeleton(path: str) -> Skeleton:
    return Skeleton(read_config(path).get_text_config())


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
        return tensors.Row(
            key=key,
            names=tuple(parts),
            shapes=tuple(tuple(part.shape) for part in parts.values()),
            is_vocabulary=key in (f"{EMBEDDING}.weight", f"{HEAD}.weight"),
            join=lambda given: conversion.from_files(name, dict(zip(parts, given, strict=True))),
            split=lambda whole: tuple(conversion.to_files(name, whole).values()),
        )

    return tuple(
        row(key, name, tensor)
        for key, name, tensor in skeleton.state()
        if not (network.tied and key == f"{HEAD}.weight")
    )
