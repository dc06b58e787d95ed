"""Where a run stands, beside weights, optimizer state and random generators: one JSON file of a checkpoint. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from megatron.bcd.blocks.partition import Partition
from megatron.bcd.blocks.phase_state import PhaseState
from megatron.bcd.blocks.schedule import BlockSchedule
from megatron.bcd.config import RunConfig, run_config_to_dict

FILE_NAME = "run_state.json"
FORMAT_VERSION = 2

_NETWORK = ("num_layers", "hidden_size", "swiglu", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
            "kv_channels", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "normalization", "seq_length",
            "max_position_embeddings", "position_embedding_type", "untie_embeddings_and_output_weights", "bf16", "fp16",
            "optimizer")  # fmt: skip
"""Flags without which a run can't go on: the weights, or the state of the optimizer, would not fit."""
_MAY_CHANGE = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "world_size", "num_workers")
"""Flags that a resumed run may change without a word, like all of the sections below."""
_SECTIONS_THAT_MAY_CHANGE = ("checkpoint", "report")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the ranks were cut: random generators belong to it."""

    tensor_size: int
    pipeline_size: int
    data_size: int
    device: str


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Plain values only; written as JSON, floats unrounded."""

    iteration: int
    consumed_samples: int
    consumed_validation_samples: int
    samples_in_phase: int
    """Training samples of the present phase, where --bcd-sample-ratio goes on."""
    samples_seen_before: int
    """Different training samples of the phases before."""
    phase: dict[str, Any]
    """PhaseState."""
    blocks: list[str]
    """Contents of every block, as `contents_of_blocks` gives them."""
    scheduler_steps: int
    """The learning-rate scheduler's own count (samples)."""
    optimizer_state: dict[str, dict[str, Any]]
    """By owner, a block's number or "always" (`checkpoint.optimizer_state`): names of the tensors of each of its
    parameters, and the steps that they have seen."""
    loss_scaler: dict[str, float] | None
    skipped_steps: int
    """In a row, up to now."""
    interval: list[dict[str, Any]]
    """Steps since the last log line."""
    layout: dict[str, Any]
    """Layout."""
    flags: dict[str, Any]
    """RunConfig."""
    versions: dict[str, str] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def from_json(text: str, *, path: str) -> RunState:
    """What `to_json` wrote.

    Raises:
        ValueError: it is damaged, or its format is newer than this program.
    """
    try:
        values = json.loads(text)
        version = values["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error})") from error
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path}: format version {version}, and this program reads {FORMAT_VERSION}; take a Megatron-BCD that "
            "reads it, or --finetune to take the weights only"
        )
    expected = {own.name for own in fields(RunState)}
    if set(values) != expected:
        raise ValueError(f"{path} is damaged (entries {sorted(set(values) ^ expected)} are missing or unknown)")
    return RunState(**values)


def contents_of_blocks(partition: Partition) -> list[str]:
    """What each block holds, whatever stage it lies on."""
    return [
        " + ".join((partition.describe_layers(block.index), *partition.describe_extras(block.index)))
        for block in partition.blocks
    ]


def check_same_network(saved: Mapping[str, Any], config: RunConfig, *, source: str) -> None:
    """Raise ValueError that names the first flag whose value the weights depend on and that differs."""
    before, now = _side_by_side(saved), _side_by_side(run_config_to_dict(config))
    for name in _NETWORK:
        if before.get(name) != now.get(name):
            raise ValueError(
                f"{source} was written with {_flag(name)} {_show(before.get(name))}, and this run has "
                f"{_show(now.get(name))}: give the same value, or another --load"
            )


def changed_flags(saved: Mapping[str, Any], config: RunConfig) -> list[str]:
    """Other flags that differ, as ``--lr 0.1 (was 0.2)``: the run goes on with the new ones, but not as it was."""
    now = run_config_to_dict(config)
    kept = [section for section in now if section not in _SECTIONS_THAT_MAY_CHANGE]
    before_flat = _side_by_side({section: saved.get(section, {}) for section in kept})
    now_flat = _side_by_side({section: now[section] for section in kept})
    return [
        f"{_flag(name)} {_show(now_flat.get(name))} (was {_show(before_flat.get(name))})"
        for name in sorted({*before_flat, *now_flat})
        if before_flat.get(name) != now_flat.get(name) and name not in _MAY_CHANGE
    ]


def resumed_phase(saved: RunState, partition: Partition, phases: BlockSchedule) -> tuple[PhaseState, str | None]:
    """The phase to go on with, and a message where it can't be the saved one.

    The saved phase goes on where every block still holds the same layers; otherwise the cycle begins again, at its
    first block and step.
    """
    state = PhaseState.from_dict(saved.phase)
    cycle = state.phase // len(saved.blocks)
    if saved.blocks != contents_of_blocks(partition):
        problem = (
            f"the checkpoint's blocks ({'; '.join(saved.blocks)}) are not those of this run "
            f"({'; '.join(contents_of_blocks(partition))}), so their optimizer state is left behind"
        )
    elif not phases.fits(state):
        problem = f"--bcd-order {phases.settings.bcd_order} can't go on amid a cycle of the checkpoint's order"
    else:
        return state, None
    restarted = PhaseState(phase=cycle * phases.num_blocks)
    return restarted, f"{problem}: cycle {cycle} begins again"


def _side_by_side(sections: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for section in sections.values() for name, value in section.items()}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _show(value: Any) -> str:
    return "no value" if value is None else str(value)
