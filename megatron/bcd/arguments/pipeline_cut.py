"""--pipeline-cut auto: how many layers each pipeline stage gets, by the work of layers and output head."""

from __future__ import annotations

from megatron.bcd.blocks.cut import balanced_cut
from megatron.bcd.blocks.partition import partition_from_config
from megatron.bcd.config import RunConfig
from megatron.bcd.planner.run_state import head_passes
from megatron.bcd.tokenizer import TikTokenizer, build_tokenizer, padded_vocab_size

_VOCABULARIES = {"ByteLevelTokenizer": 257, "GPT2BPETokenizer": 50257}
"""Of tokenizers whose size is known without their files."""


def known_vocabulary(config: RunConfig) -> int | None:
    """The tokenizer's vocabulary size; None if only its files tell."""
    kind, size = config.tokenizer.tokenizer_type, config.tokenizer.vocab_size
    if kind == "NullTokenizer" and size is not None:
        return size + 1  # its end-of-document token
    if kind == "TikTokenizer":
        return size or TikTokenizer.VOCAB_SIZE
    return _VOCABULARIES.get(str(kind), size)


def with_balanced_cut(config: RunConfig, *, reads_files: bool = True) -> RunConfig:
    """The configuration with --pipeline-model-parallel-layout set; unchanged without --pipeline-cut auto.

    The head's work depends on the vocabulary, so the tokenizer is read. With `reads_files` False none is, and the
    configuration is unchanged too where only files tell the vocabulary's size. Raises ValueError as `build_tokenizer`.
    """
    if config.training.pipeline_cut != "auto" or config.pipeline_size == 1:
        return config
    vocab_size = build_tokenizer(**vars(config.tokenizer)).vocab_size if reads_files else known_vocabulary(config)
    if vocab_size is None:
        return config
    even = partition_from_config(config)
    padded = padded_vocab_size(vocab_size, config.model.make_vocab_size_divisible_by, config.tensor_size)
    sizes = balanced_cut(even, head=head_passes(config, padded_vocab_size=padded))
    layout = f"E{'|'.join('t' * size for size in sizes)}L"  # Megatron Core's notation
    return config.replace_section("training", pipeline_model_parallel_layout=layout)
