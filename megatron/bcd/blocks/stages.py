"""How many layers each pipeline stage holds, and the blocks of a run. Pure."""

from __future__ import annotations

import re

from megatron.bcd.blocks import partition as partitions
from megatron.bcd.blocks.layers import divide
from megatron.bcd.blocks.partition import Partition
from megatron.bcd.config import RunConfig

_MOST_WORDS = 10**6
"""Of an unrolled layout; more are taken for a typing error."""
_REPEATED = (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)")
"""Megatron Core's: a group in brackets first, then single letters."""


def layers_per_stage(config: RunConfig) -> tuple[int, ...]:
    """Layers of each stage: as the flags of the split say, else as even as possible, larger stages first.

    Raises:
        ValueError: the flags don't fit each other or the model; one line that names them.
    """
    training = config.training
    text = training.pipeline_model_parallel_layout
    first, last = training.decoder_first_pipeline_num_layers, training.decoder_last_pipeline_num_layers
    asked = {
        "--pipeline-model-parallel-layout": text is not None,
        "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers": not first is last is None,
        "--account-for-embedding-in-pipeline-split or --account-for-loss-in-pipeline-split": (
            training.account_for_embedding_in_pipeline_split or training.account_for_loss_in_pipeline_split
        ),
    }
    given = [flag for flag, is_given in asked.items() if is_given]
    if len(given) > 1:
        raise ValueError(f"{given[0]} and {given[1]} both divide the layers over the stages: give one of them")
    if given and config.pipeline_size == 1 and text is None:
        raise ValueError(f"{given[0]} needs --pipeline-model-parallel-size 2 or more")
    if text is not None:
        return _of_layout(text, num_layers=config.num_layers, num_stages=config.pipeline_size)
    if first is not None or last is not None:
        return _with_ends(first, last, num_layers=config.num_layers, num_stages=config.pipeline_size)
    if given:
        return _with_counted_ends(config)
    return tuple(len(layers) for layers in divide(config.num_layers, config.pipeline_size))


def partition_from_config(config: RunConfig) -> Partition:
    """The partition of a run. Raises ValueError, one line that names the flags, where it does not fit the model."""
    return partitions.partition(
        num_layers=config.num_layers,
        num_stages=config.pipeline_size,
        num_blocks=config.bcd.bcd_num_blocks,
        layout=config.bcd.bcd_layout,
        layers_per_stage=_layers_per_virtual_stage(config),
        tied=config.tied,
        always_active=config.bcd.always_active,
        frozen=config.bcd.frozen,
        resting=config.bcd.bcd_resting_layers if config.bcd.bcd_resting_update != "none" else "none",
        num_parts=config.bcd.num_virtual_stages_per_pipeline_rank,
    )


def _layers_per_virtual_stage(config: RunConfig) -> tuple[int, ...] | None:
    if config.bcd.bcd_layout != "interleaved":
        return layers_per_stage(config)
    text = config.training.pipeline_model_parallel_layout
    if text is None:
        return None
    return _of_layout(text, num_layers=config.num_layers, num_stages=config.pipeline_size * config.bcd.num_parts)


def _with_ends(first: int | None, last: int | None, *, num_layers: int, num_stages: int) -> tuple[int, ...]:
    """The first and the last stage as given, the stages between evenly."""
    between = num_stages - (first is not None) - (last is not None)
    left = num_layers - (first or 0) - (last or 0)
    if left < 0 or (left % between if between else left):
        flags = " ".join(
            f"--decoder-{end}-pipeline-num-layers {number}"
            for end, number in (("first", first), ("last", last))
            if number is not None
        )
        raise ValueError(
            f"{flags} of --num-layers {num_layers} leaves {left} layers for {between} other stages: must be a multiple"
        )
    middle = [left // between] * between if between else []
    return (*([] if first is None else [first]), *middle, *([] if last is None else [last]))


def _with_counted_ends(config: RunConfig) -> tuple[int, ...]:
    """Embedding and loss count as a layer each, and all stages are equal."""
    embedding = config.training.account_for_embedding_in_pipeline_split
    loss = config.training.account_for_loss_in_pipeline_split
    total, num_stages = config.num_layers + embedding + loss, config.pipeline_size
    if total % num_stages:
        named = " ".join(
            f"--account-for-{name}-in-pipeline-split"
            for name, is_given in (("embedding", embedding), ("loss", loss))
            if is_given
        )
        raise ValueError(
            f"{named}: --num-layers {config.num_layers} and {total - config.num_layers} more is {total}, which is not "
            f"divisible by --pipeline-model-parallel-size {num_stages}"
        )
    sizes = [total // num_stages] * num_stages
    sizes[0] -= embedding
    sizes[-1] -= loss
    return tuple(sizes)


def _of_layout(text: str, *, num_layers: int, num_stages: int) -> tuple[int, ...]:
    """The sizes of a layout in Megatron Core's notation, such as ``Et*3|(tt|)*4L``."""
    name = f"--pipeline-model-parallel-layout {text}"
    stages = _unrolled(text, name).split("|")
    unknown = set("".join(stages)) - set("EtL")
    if unknown:
        what = "multi-token prediction is not supported" if unknown == {"m"} else "letters are E, t and L"
        raise ValueError(f"{name}: {what}")
    if len(stages) != num_stages:
        raise ValueError(
            f"{name}: has {len(stages)} stages: must be {num_stages} (--pipeline-model-parallel-size; with layout "
            "interleaved that times the chunks of a stage)"
        )
    whole = "".join(stages)
    if whole != "E" + "t" * num_layers + "L" or stages[0][:1] != "E" or stages[-1][-1:] != "L":
        raise ValueError(
            f"{name}: must be E on the first stage, t for each of --num-layers {num_layers} layers, and L on the last "
            f"stage; there are {whole.count('t')} layers"
        )
    return tuple(stage.count("t") for stage in stages)


def _unrolled(text: str, name: str) -> str:
    """The layout without commas and repetitions."""
    left = _MOST_WORDS

    def repeated(match: re.Match[str]) -> str:
        nonlocal left
        times = int(match[2]) if len(match[2]) < len(str(_MOST_WORDS)) else _MOST_WORDS
        left -= len(match[1]) * times
        if left <= 0:
            raise ValueError(f"{name}: has more than {_MOST_WORDS} layers")
        return match[1] * times

    text = text.replace(",", "")
    for pattern in _REPEATED:
        text = re.sub(pattern, repeated, text)
    return text
