"""The architecture of a model of transformers, and the parameters of any decoder on its own layers."""

from __future__ import annotations

from dataclasses import replace

from megatron.bcd.config import RunConfig
from megatron.bcd.config.measured import Parameters
from megatron.bcd.huggingface.architecture import TRANSFORMERS, Architecture, NotInCore, architecture_of
from megatron.bcd.model.skeleton import HEAD, Skeleton, read_config


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
            return architecture_of(config)
    except NotInCore as error:
        if transformer_impl != "auto":
            raise NotInCore(f"{path}: {error}. --transformer-impl transformers trains it.") from None
        reason = str(error)
    return replace(architecture_of(config.get_text_config(), family=TRANSFORMERS), not_in_core=reason)


def list_parameters(config: RunConfig) -> Parameters:
    """Return names and shapes of the parameters of a run on transformers' layers; nothing for other runs."""
    if config.model.transformer_impl != TRANSFORMERS:
        return ()
    return parameters_of(Skeleton(read_config(str(config.checkpoint.load_hf)).get_text_config()), tied=config.tied)


def parameters_of(skeleton: Skeleton, *, tied: bool) -> Parameters:
    """Return names and shapes of a model's parameters. A tied head counts once."""
    parameters = dict(skeleton.model.named_parameters(remove_duplicate=False))
    return tuple(
        (key, tuple(tensor.shape))
        for key, name, tensor in skeleton.state()
        if name in parameters and not (tied and key == f"{HEAD}.weight")
    )
