"""``run_state.json`` of a checkpoint: counters, phase and flags of a run. Plain Python, no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypedDict

from megatron.bcd.blocks.partition import Partition
from megatron.bcd.blocks.schedule import BlockSchedule, PhaseState
from megatron.bcd.config import MAY_CHANGE, ModelConfig, RunConfig, run_config_to_dict

FORMAT_VERSION = 2

_COMPUTATION = ("make_vocab_size_divisible_by", "transformer_impl")
"""Fields of `ModelConfig` on which the network does not depend."""
_NETWORK = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
            "add_bias_linear", "add_qkv_bias", "qk_layernorm", "normalization", "layernorm_epsilon",
            "layernorm_zero_centered_gamma", "apply_residual_connection_post_layernorm", "rotary_interleaved",
            "num_moe_experts", "moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk",
            "moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor",
            "moe_router_num_groups", "moe_router_group_topk", "moe_shared_expert_intermediate_size",
            "moe_shared_expert_gate", *(each.name for each in fields(ModelConfig) if each.name not in _COMPUTATION),
            "bf16", "fp16", "optimizer", "window_size", "no_rope_freq", "quick_geglu")  # fmt: skip
"""Flags that must not change: the weights or the optimizer state would not fit, or mean something else. Earlier
versions had the last three."""
_MAY_CHANGE_WITHOUT_STATE = ("seq_length", "max_position_embeddings", "bf16", "fp16", "optimizer")
"""Those flags that may change if a run loads only the weights."""
_MAY_CHANGE = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "cp_comm_type",
               "hierarchical_context_parallel_sizes", "world_size", *MAY_CHANGE)  # fmt: skip
"""Flags that a resumed run may change without a message, like all of the sections below."""
_SECTIONS_THAT_MAY_CHANGE = ("checkpoint", "groups", "report")


class StateSummary(TypedDict):
    """The optimizer state of one group of parameters (`optim.state`); the same on every rank."""

    names: list[str]
    """Names of each parameter's tensors, such as exp_avg, exp_avg_sq and master."""
    num_steps: int


@dataclass(kw_only=True)
class Counters:
    """Progress of a run; the same on every rank."""

    iteration: int = 0
    """Completed training steps, including skipped ones."""
    consumed_samples: int = 0
    """Samples of the training split."""
    consumed_validation_samples: int = 0
    """Samples of the validation split. Each evaluation continues where the last one ended, as in stock Megatron-LM."""
    samples_in_phase: int = 0
    """Training samples of the present phase, including repeated ones."""
    samples_seen_before: int = 0
    """Distinct training samples of each earlier phase, summed over the phases."""
    skipped_steps: int = 0
    """Number of last steps that were skipped in a row because their loss or gradient was not finite."""
    owes_evaluation: bool = False
    """Whether a signal stopped the evaluation after `iteration`, which a resumed run repeats."""


@dataclass(kw_only=True)
class RunState(Counters):
    """Content of the file: JSON values only, floats are not rounded. Field names are the keys."""

    phase: dict[str, Any]
    """`PhaseState` as a dictionary."""
    blocks: list[str]
    """See `block_contents`."""
    scheduler_steps: int
    """The learning-rate scheduler's own count (samples)."""
    optimizer_state: dict[str, StateSummary]
    """Summaries by the key of the state group (`optim.state`)."""
    loss_scaler: dict[str, float] | None
    interval: list[dict[str, Any]]
    """Results of the steps since the last log line."""
    layout: dict[str, Any]
    """See `loader.current_layout`."""
    flags: dict[str, Any]
    """`RunConfig`."""
    versions: dict[str, str] = field(default_factory=dict)
    run: str
    """Result of `run_name`."""
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        """Return the content of the file."""
        return json.dumps(asdict(self), indent=1)


def from_json(text: str, *, path: str) -> RunState:
    """Parse the output of `to_json`; `path` is for messages.

    Raises:
        ValueError: the text is damaged, or has another format version.
    """
    try:
        values = json.loads(text)
        version = values["format_version"]
        values.setdefault("owes_evaluation", False)  # later than the format
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error})") from error
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path}: format version {version}, but this program reads {FORMAT_VERSION}; use a Megatron-BCD "
            "that reads it, or add --finetune to load the weights only"
        )
    if different := sorted(set(values) ^ {each.name for each in fields(RunState)}):
        raise ValueError(
            f"{path}: entries {different} are missing or unknown; use the Megatron-BCD that wrote it, or add "
            "--finetune to load the weights only"
        )
    return RunState(**values)


def consumed_samples(text: str) -> int:
    """Return the number of consumed training samples, in any format version; 0 if the file does not contain it."""
    try:
        return int(json.loads(text)["consumed_samples"])
    except (ValueError, KeyError, TypeError):
        return 0


def run_name(config: RunConfig, resumed: RunState | None) -> str:
    """Return 12 hexadecimal digits that identify a run: all its starts have the same name, other runs another one.

    The name is a digest of the flags of the first start, without `_SECTIONS_THAT_MAY_CHANGE`. So a start that is killed
    before its first checkpoint and repeated is the same run.
    """
    if resumed is not None:
        return resumed.run
    sections = {
        name: values for name, values in run_config_to_dict(config).items() if name not in _SECTIONS_THAT_MAY_CHANGE
    }
    return hashlib.sha256(json.dumps(sections, sort_keys=True, default=str).encode()).hexdigest()[:12]


def block_contents(partition: Partition) -> list[str]:
    """Describe the layers and other modules of each block, independent of their pipeline stages."""
    return [
        " + ".join((partition.describe_layers(block.index), *partition.describe_extras(block.index)))
        for block in partition.blocks
    ]


def check_same_weights(text: str, config: RunConfig, *, source: str) -> None:
    """Compare the flags on which the meaning of the weights depends.

    `text` is the content of the file, also of another format version. Raises ValueError that names what differs.
    """
    try:
        saved = json.loads(text)["flags"]
        sections = {section: saved[section] for section in ("transformer", "model")}
    except (ValueError, KeyError, TypeError):
        return  # this version wrote other sections; shapes are compared when the weights are loaded
    names = [name for name in _NETWORK if name not in _MAY_CHANGE_WITHOUT_STATE]
    check_same_network(sections, config, source=source, names=names)


def check_same_network(
    saved: Mapping[str, Any], config: RunConfig, *, source: str, names: Sequence[str] = _NETWORK
) -> None:
    """Compare the flags on which weights and optimizer state depend. Raises ValueError that names what differs."""
    before, now = _network(saved), _network(run_config_to_dict(config))
    differing = [
        f"{_flag(name)} {_show(before.get(name))}, here {_show(now.get(name))}"
        for name in names
        if (before.get(name) or None) != (now.get(name) or None)
    ]
    if differing:
        raise ValueError(
            f"{source} is of another network or optimizer ({'; '.join(differing)}): give the flags of the run that "
            "saved it, those of the network by --use-checkpoint-args, or --finetune for the weights alone"
        )


_TOKENS = {"mock_data": "data", "tokenizer_type": "tokenizer", "vocab_size": "tokenizer"}
"""Flags on which the meaning of token ids depends, with their sections. The files of a tokenizer may be moved."""


def check_same_tokens(saved: Mapping[str, Any], config: RunConfig, *, source: str) -> None:
    """Compare the tokenizer and --mock-data with those of the checkpoint's run. The data itself may differ.

    Raises:
        ValueError: only one of the two runs uses mock data, or their tokenizers differ.
    """
    now = run_config_to_dict(config)
    for name, section in _TOKENS.items():
        if saved[section][name] != now[section][name]:
            raise ValueError(
                f"{source} was written with {_flag(name)} {saved[section][name]}, but this run has "
                f"{now[section][name]}: give the same value, or other folders for --save and --load (--finetune starts "
                "a new run with these weights)"
            )


def check_has_loaded_parts(saved: Mapping[str, Any], config: RunConfig, *, source: str) -> None:
    """Check that a checkpoint has the optimizer state and the random generators that this run loads.

    Raises:
        ValueError: one is missing (--no-save-optim, --no-save-rng).
    """
    for part, what in (("optim", "optimizer state"), ("rng", "random generators")):
        if getattr(config.checkpoint, f"load_{part}") and not saved["checkpoint"][f"save_{part}"]:
            raise ValueError(
                f"{source} was written with --no-save-{part} and holds no {what}: give --no-load-{part} to start with "
                "new ones, or another --load"
            )


_SCHEDULED = ("lr", "min_lr", "weight_decay")
"""Fields of the optimizer that belong to the schedule."""


def with_saved_schedule(saved: Mapping[str, Any], config: RunConfig) -> RunConfig:
    """Return `config` with the phase length and the learning-rate schedule of a checkpoint's flags.

    The phase length is taken if --bcd-steps-per-block is not given, the learning-rate schedule with
    --use-checkpoint-opt_param-scheduler.

    Raises:
        ValueError: one of the two schedules counts steps and the other one samples.
    """
    if config.bcd.bcd_steps_per_block is None:
        config = config.replace_section("bcd", bcd_steps_per_block=saved["bcd"]["bcd_steps_per_block"])
    if not config.checkpoint.use_checkpoint_opt_param_scheduler:
        return config
    if (saved["training"]["train_samples"] is None) != (config.training.train_samples is None):
        raise ValueError(
            "--use-checkpoint-opt_param-scheduler: one of --train-iters and --train-samples was given to the run that "
            "wrote the checkpoint, the other one to this run: give the same one"
        )
    with_schedule = config.replace_section("schedule", **saved["schedule"])
    return with_schedule.replace_section("optimizer", **{name: saved["optimizer"][name] for name in _SCHEDULED})


def changed_flags(saved: RunState, config: RunConfig) -> list[str]:
    """Return the other flags that differ, as ``--lr 0.1 (was 0.2)``. The run resumes with the new values.

    `config` is resolved. Values that neither run gave count as equal to what Megatron Core derives from other flags.
    """
    now = run_config_to_dict(config)
    sections = [section for section in now if section not in _SECTIONS_THAT_MAY_CHANGE]
    before_flat = _network({section: saved.flags[section] for section in sections})
    now_flat = _network({section: now[section] for section in sections})
    return [
        f"{_flag(name)} {_show(value)} (was {_show(before_flat[name])})"
        for name, value in sorted(now_flat.items())
        if name in before_flat and before_flat[name] != value and name not in _MAY_CHANGE
    ]


def has_same_optimizers(saved: RunState, config: RunConfig) -> bool:
    """Return whether the optimizers of this run have the same kinds of state as the checkpoint's.

    With 16-bit weights an inactive update has separate main parameters. A factored embedding has no
    moments.
    """
    before, now = saved.flags["bcd"], config.bcd
    is_same = (before["bcd_inactive_update"] == "none") == (now.bcd_inactive_update == "none")
    is_same_embedding = before["bcd_embedding_update"] == now.bcd_embedding_update
    if before["bcd_inactive_update"] == now.bcd_inactive_update == "factored":  # column means by part
        is_same_embedding &= saved.flags["optimizer"]["muon_split_qkv"] == config.optimizer.muon_split_qkv
    return is_same_embedding and (is_same or config.precision == "fp32")


def resumed_phase(
    saved: RunState, config: RunConfig, partition: Partition, phases: BlockSchedule
) -> tuple[PhaseState, str | None]:
    """Return the phase to resume with, and a message if it is not the saved phase.

    The saved phase continues if every block has the same layers as before, and the optimizers have the same state.
    Otherwise the cycle restarts at its first block and step.
    """
    state = PhaseState.from_dict(saved.phase)
    cycle = state.phase // len(saved.blocks)
    if saved.blocks != block_contents(partition):
        problem = (
            f"the checkpoint's blocks ({'; '.join(saved.blocks)}) are not those of this run "
            f"({'; '.join(block_contents(partition))}), so their optimizer state is not loaded"
        )
    elif not has_same_optimizers(saved, config):
        problem = (
            f"--bcd-inactive-update {config.bcd.bcd_inactive_update} and --bcd-embedding-update "
            f"{config.bcd.bcd_embedding_update} have other optimizer state than the checkpoint's run, so optimizer "
            "state is not loaded"
        )
    else:
        return state, None
    restarted = PhaseState(phase=cycle * phases.num_blocks)
    return restarted, f"{problem}: cycle {cycle} restarts"


def _network(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return all flags in one dictionary, with the sizes that Megatron Core derives if no flag gives them."""
    values = {name: value for section in sections.values() for name, value in section.items()}
    hidden, heads = values.get("hidden_size"), values.get("num_attention_heads")
    if hidden and heads:
        values["kv_channels"] = values.get("kv_channels") or hidden // heads
        values["ffn_hidden_size"] = values.get("ffn_hidden_size") or 4 * hidden
        values["num_query_groups"] = values.get("num_query_groups") or heads
    return values


def _flag(name: str) -> str:
    return "--" + name.replace("moe_experts", "experts").replace("_", "-")


def _show(value: Any) -> str:
    return "not given" if value is None else str(value)
