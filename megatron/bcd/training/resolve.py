"""Resolve open settings before the trainer exists: sizes, phase length, location of frozen weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.core import parallel_state

from megatron.bcd import data
from megatron.bcd.arguments.run_plan import known_vocabulary
from megatron.bcd.arguments.validate import check_learning_rate
from megatron.bcd.blocks.partition import Partition, partition_from_config
from megatron.bcd.blocks.schedule import BlockSchedule, block_schedule_from_config
from megatron.bcd.checkpoint import run_state
from megatron.bcd.checkpoint.loader import Source
from megatron.bcd.config import RunConfig
from megatron.bcd.huggingface import tensors
from megatron.bcd.model import split_check
from megatron.bcd.planner.activations import Recomputed
from megatron.bcd.planner.run_state import RunMemory, with_loss
from megatron.bcd.planner.state import ModelState
from megatron.bcd.planner.tables import GIB
from megatron.bcd.runtime import collectives, replicas
from megatron.bcd.runtime.memory import total_bytes
from megatron.bcd.tokenizer import Tokenizer, build_tokenizer, padded_vocab_size

_FRAMEWORK_GIB = 1.0
"""Memory of a GPU for the driver's context, workspaces of libraries and buffers of collectives (the planner's cluster
table)."""


@dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """The final configuration of a run and the sizes that follow from it. Nothing changes them later."""

    config: RunConfig
    """The flags. The number of blocks, the phase length and the place of frozen weights hold what was chosen."""
    name: str
    """The name of the run, see `run_state.run_name`."""
    source: Source | None
    """The checkpoint to load, with a warning if flags differ from it."""
    partition: Partition
    block_schedule: BlockSchedule
    train_iters: int
    global_batch_size: int
    """Sequences of a training step, after the ramp-up."""
    tokenizer: Tokenizer
    vocab_size: int
    """Vocabulary size of the model: the size in the model of --load-hf, otherwise the tokenizer's."""
    padded_vocab_size: int
    memory: RunMemory
    """Planned model state and activations."""
    recomputed: list[list[Recomputed]]
    """What --recompute auto recomputes, by stage and block; empty without it."""


def resolve_run(config: RunConfig, source: Source | None = None) -> ResolvedRun:
    """Resolve the configuration of a run that starts from `source`. Collective; needs initialized parallel groups.

    Raises:
        ValueError: the tokenizer can't be read or doesn't fit --load-hf, --train-samples holds no full batch, or
            a flag with auto knows no memory limit.
    """
    saved = source.state if source else None
    tokenizer = build_tokenizer(**vars(config.tokenizer))
    config = with_length(config, tokenizer)
    if saved is not None:
        config = run_state.with_saved_schedule(saved.flags, config)
    partition = partition_from_config(config)
    train_iters = data.num_iterations(config)
    block_schedule = block_schedule_from_config(config, partition, num_steps=train_iters)
    config = config.replace_section("bcd", bcd_steps_per_block=block_schedule.settings.bcd_steps_per_block)
    name = run_state.run_name(config, saved)
    if config.bcd.bcd_layout != "stage":  # its blocks are the stages
        config = config.replace_section("bcd", bcd_num_blocks=config.bcd.num_blocks)
    vocab_size = _vocab_size(config, tokenizer)
    padded_size = padded_vocab_size(vocab_size, config.model.make_vocab_size_divisible_by, config.tensor_size)
    config = with_loss(config, padded_vocab_size=padded_size, has_plain_head=lambda: split_check.has_plain_head(config))
    global_batch_size = data.global_batch_size(config)
    per_microbatch = config.training.micro_batch_size * parallel_state.get_data_parallel_world_size()
    memory = RunMemory(
        config=config,
        state=ModelState(
            config=config,
            partition=partition,
            padded_vocabulary=padded_size,
            num_replicas=replicas.size(),
            parameters=tensors.list_parameters(config),
        ),
        num_microbatches=global_batch_size // per_microbatch,
    )
    is_auto = config.bcd.bcd_layers_on == "auto"
    if is_auto or (config.is_breadth_first and config.bcd.bcd_saved_inputs == "auto"):
        memory = memory.with_places(memory_bytes=_rank_bytes(config, flag="--bcd-layers-on auto" if is_auto else None))
        config = memory.config
    if config.bcd.bcd_saved_activations != "recompute":
        limit = "--bcd-saved-activations auto" if config.bcd.bcd_saved_activations == "auto" else None
        memory = memory.with_kept(memory_bytes=_rank_bytes(config, flag=limit))
    recomputed = list[list[Recomputed]]()
    if config.training.recompute is not None:
        recomputed = memory.recomputation(limit=_rank_bytes(config, flag="--recompute auto"))
    if source is not None and saved is not None and (changed := run_state.changed_flags(saved, config)):
        warning = f"flags differ from those that wrote {source.path}: {', '.join(changed)}"
        source = replace(source, messages=(*source.messages, warning))
    return ResolvedRun(
        config=config,
        name=name,
        source=source,
        partition=partition,
        block_schedule=replace(block_schedule, settings=config.bcd),
        train_iters=train_iters,
        global_batch_size=global_batch_size,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        padded_vocab_size=padded_size,
        memory=memory,
        recomputed=recomputed,
    )


def with_length(config: RunConfig, tokenizer: Tokenizer) -> RunConfig:
    """Return `config` with --num-epochs converted to --train-iters. Collective; reads the data.

    Raises:
        ValueError: a record can't be used, or the learning-rate schedule does not fit the number of steps.
    """
    if config.training.num_epochs is None:
        return config
    config = data.resolve_epochs(config, tokenizer, global_batch_size=data.global_batch_size(config))
    check_learning_rate(config)
    return config


def _rank_bytes(config: RunConfig, *, flag: str | None) -> float:
    """Return the number of bytes that model state and activations of a rank may take. Collective.

    Raises:
        ValueError: there is neither a GPU nor --recompute-memory-gib. If no `flag` needs them, there is no limit.
    """
    if config.training.recompute_memory_gib:
        return config.training.recompute_memory_gib * GIB
    total = min(collectives.gather_objects(total_bytes()))
    if not total:
        if flag is None:
            return float("inf")
        raise ValueError(f"{flag}: there is no GPU whose memory would be the limit. Give --recompute-memory-gib.")
    return total - _FRAMEWORK_GIB * GIB


def _vocab_size(config: RunConfig, tokenizer: Tokenizer) -> int:
    """Return the vocabulary size of the model. Raises ValueError if it is too small for the tokens."""
    name = config.checkpoint.load_hf
    if name is None:
        return tokenizer.vocab_size
    size = known_vocabulary(config) or 0
    if tokenizer.vocab_size > size:
        raise ValueError(
            f"--load-hf {name}: the embedding has {size} rows, and the tokenizer has "
            f"{tokenizer.vocab_size} tokens. Give the tokenizer of the model."
        )
    return size
