"""Plan a run before it starts: the stages of --pipeline-cut auto, and what --dry-run prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from megatron.bcd.blocks.partition import describe_layers, partition_from_config
from megatron.bcd.config import RunConfig
from megatron.bcd.planner.run_state import balance_stages
from megatron.bcd.planner.state import ModelState, largest_rank
from megatron.bcd.planner.tables import GIB
from megatron.bcd.tokenizer import build_tokenizer, padded_vocab_size

_VOCABULARIES = {"ByteLevelTokenizer": 257, "GPT2BPETokenizer": 50257}
"""Vocabulary sizes that are known without the tokenizer's files."""


def known_vocabulary(config: RunConfig) -> int | None:
    """Return the vocabulary size of --load-hf or the tokenizer, or None if it is only known from the latter's files."""
    if config.checkpoint.load_hf is not None:
        from megatron.bcd.huggingface.folder import read_architecture  # other dry runs import no torch

        name, implementation = config.checkpoint.load_hf, config.model.transformer_impl
        return int(read_architecture(name, transformer_impl=implementation).config.vocab_size)
    kind, size = config.tokenizer.tokenizer_type, config.tokenizer.vocab_size
    if kind == "NullTokenizer" and size is not None:
        return size + 1  # its end-of-document token
    return _VOCABULARIES.get(str(kind), size)


def with_balanced_cut(config: RunConfig, *, reads_files: bool = True) -> RunConfig:
    """Return `config` with the --pipeline-model-parallel-layout that --pipeline-cut auto asks for.

    The work of the output head depends on the size of the vocabulary, so this reads the tokenizer. If `reads_files` is
    False and the size is only known from files, the stages stay cut evenly. transformers' layers are measured, which
    takes seconds.

    Raises:
        ValueError: the tokenizer can't be read, or the layers can't be measured.
    """
    if config.training.pipeline_cut != "auto" or config.pipeline_size == 1:
        return config
    vocab_size = known_vocabulary(config)
    if vocab_size is None and reads_files:
        vocab_size = build_tokenizer(**vars(config.tokenizer)).vocab_size
    if vocab_size is None:
        return config
    padded = padded_vocab_size(vocab_size, config.model.make_vocab_size_divisible_by, config.tensor_size)
    measured = None
    if config.model.transformer_impl == "transformers":  # other dry runs import no torch
        from megatron.bcd.huggingface.measure import read_model

        measured = read_model(str(config.checkpoint.load_hf), sequence=config.model.seq_length)
    return replace(balance_stages(replace(config, measured=measured), padded_vocab_size=padded), measured=None)


def describe_run(config: RunConfig, *, world_size: int, notes: Sequence[str] = ()) -> list[str]:
    """Return the lines of --dry-run on ranks, blocks and planned memory. Needs no GPU."""
    partition = partition_from_config(config)
    data_size = world_size // config.model_size
    lines = [
        f"{world_size} ranks: {config.describe_ranks(data_size)}, {config.precision}; "
        f"{config.training.global_batch_size} sequences per step",
        f"{partition.num_blocks} block(s), layout {partition.layout}:"
        if partition.has_active_block
        else "no block: every layer in every step",
    ]
    for block in partition.blocks if partition.has_active_block else ():
        extras = partition.describe_extras(block.index)
        lines.append(f"  block {block.index}: {', '.join((f'layers {describe_layers(block.layers)}', *extras))}")
    vocabulary = known_vocabulary(config)
    padded = padded_vocab_size(vocabulary or 0, config.model.make_vocab_size_divisible_by, config.tensor_size)
    planned = ModelState(
        config=config, partition=partition, padded_vocabulary=padded, num_replicas=data_size * config.context_size
    )
    if config.model.transformer_impl == "transformers":  # other dry runs import no torch
        from megatron.bcd.huggingface.tensors import list_parameters

        planned = replace(planned, parameters=list_parameters(config))
    lines.append("planned model state of a rank in its largest phase (weights, gradients, optimizer; no activations):")
    for stage, num_parameters in enumerate(planned.num_parameters):
        state = max(largest_rank(planned, stage, block.index).model_state for block in partition.blocks)
        layers = partition.stage_layers(stage)
        numbers = [len({*layers}.intersection(block.layers)) for block in partition.blocks]
        by_block = ", ".join(f"{number} of block {block}" for block, number in enumerate(numbers))
        lines.append(
            f"  stage {stage}: layers {describe_layers(layers)} ({by_block}), {num_parameters:,} parameters, "
            f"{state:,} bytes ({state / GIB:.2f} GiB)"
        )
    if vocabulary is None:
        lines.append("  without embedding and output head: their size is known from the tokenizer's files only")
        if config.training.pipeline_cut == "auto" and partition.num_stages > 1:
            lines.append("  stages cut evenly: --pipeline-cut auto needs the vocabulary's size")
    return [*lines, *notes]


def describe_data(config: RunConfig) -> tuple[list[str], str | None]:
    """Return the lines of --dry-run about the data, and what is wrong with it. Reads what is on this machine."""
    if config.data.mock_data:
        return [], None
    try:
        return _describe_records(config) if config.data.sft else _describe_datasets(config)
    except ValueError as error:
        return [], str(error)


def _describe_datasets(config: RunConfig) -> tuple[list[str], None]:
    from megatron.bcd.data.lengths import num_iterations  # other dry runs import no Megatron Core
    from megatron.bcd.data.splits import plan_splits

    data = config.data
    paths = (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path)
    words = [word for path in paths for word in path or ()]
    if not any(os.path.exists(f"{word}{suffix}") for word in words for suffix in (".idx", ".bin")):
        return [f"data: not checked, because {words[-1]}.idx does not exist here"], None
    plan = plan_splits(config, build_tokenizer(**vars(config.tokenizer)), num_iterations(config))
    length = config.model.seq_length
    return [f"data: an epoch has {plan.epoch_samples:,} sequences of {length:,} tokens"], None


def _describe_records(config: RunConfig) -> tuple[list[str], str | None]:
    from megatron.bcd.data.sft.dataset import count_records  # other dry runs import no Megatron Core
    from megatron.bcd.data.sft.store import files_of

    data, files = config.data, files_of(config)
    if absent := [path for _, path in files if not os.path.exists(path)]:
        return [f"records: not counted, because {absent[0]} does not exist here"], None
    counts = count_records(
        files,
        build_tokenizer(**vars(config.tokenizer)),
        seq_length=config.model.seq_length,
        prompt_format=data.sft_prompt_format,
        ignored=data.sft_ignore_keys or (),
        is_packed=data.sft_packing,
    )
    problem = f"{counts.report}. Correct them, or give --sft-skip-bad-records."
    return [f"records: {counts.text}"], problem if counts.num_bad and not data.sft_skip_bad_records else None


def exit_with(lines: Sequence[str], problems: Sequence[str] = ()) -> NoReturn:
    """Let rank 0 print the lines, and the problems to stderr; end the process, with code 2 if there are problems."""
    for texts, file in ((lines, sys.stdout), (problems, sys.stderr)):
        if texts and os.environ.get("RANK", "0") == "0":
            print("\n".join(texts), file=file, flush=True)
    raise SystemExit(2 if problems else 0)
