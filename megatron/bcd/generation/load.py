"""A model as one process generates and evaluates with it, from a folder of transformers or a checkpoint of ours."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories

from megatron.bcd.arguments import FAMILY_DEFAULTS, parse_run_config
from megatron.bcd.checkpoint import run_state
from megatron.bcd.config import RunConfig, run_config_from_dict
from megatron.bcd.data.sft.chat_template import end_of_answer
from megatron.bcd.huggingface import convert, folder, load, run_network
from megatron.bcd.huggingface.core_format import CoreCheckpoint
from megatron.bcd.model.builder import build_model, unwrap_model
from megatron.bcd.model.implementation import implementation_here
from megatron.bcd.runtime import device, distributed, rng, threads
from megatron.bcd.tokenizer import HuggingFaceTokenizer, Tokenizer, build_tokenizer

_GENERATION = "generation_config.json"
_EMBEDDING = "embedding.word_embeddings.weight"
_NOT_HERE = ("parallel", "pipeline", "cp_comm_type", "recompute", "overlap", "offload", "deterministic_mode")
"""Parts of the names of Megatron Core's fields that are of a training run on several ranks."""


@dataclass(frozen=True, kw_only=True)
class TokenizerFlags:
    """A tokenizer by the training scripts' flags; without a type it is the model's own."""

    tokenizer_type: str | None = None
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None
    tiktoken_pattern: str = "v2"
    tiktoken_num_special_tokens: int = 1000


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A whole model on this process's device, in evaluation mode, and its tokenizer."""

    model: torch.nn.Module
    tokenizer: Tokenizer | None
    """None: nothing says which."""
    files: str | None
    """Folder with files of transformers (tokenizer, chat template), where there is one."""
    precision: str
    num_ids: int
    """Rows of the vocabulary that are tokens of the tokenizer; the rest is padding."""
    num_rows: int
    """Of the embedding."""
    max_length: int
    """Positions."""
    end_ids: frozenset[int]
    """Tokens that end a text."""
    turn_end_ids: frozenset[int]
    """Tokens that end an answer in a conversation, by the chat template."""
    adds_special_tokens: bool
    """The model expects what its tokenizer puts before a text (such as LLaMA's begin token): those of transformers and
    those that were fine-tuned here (--sft) do, those that were trained here on plain text don't."""

    @property
    def device(self) -> torch.device:
        return device.current()

    def known_tokenizer(self) -> Tokenizer:
        """Raises ValueError if nothing says which."""
        if self.tokenizer is None:
            raise ValueError("the model comes without a tokenizer: give --tokenizer-type and its files")
        return self.tokenizer

    def tokenize(self, text: str) -> list[int]:
        """Ids of `text`. Raises ValueError if there is no tokenizer, or it has ids that the model lacks."""
        return self.checked(self.known_tokenizer().tokenize(text))

    def checked(self, ids: list[int]) -> list[int]:
        """`ids`. Raises ValueError for one that the model has no embedding of."""
        largest = max(ids, default=0)
        if largest >= self.num_rows:
            raise ValueError(
                f"the tokenizer gives the id {largest:,}, and the model has the ids 0 to {self.num_rows - 1:,}: give "
                "--tokenizer-type and the files that the model was trained with"
            )
        return ids

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt or document, with the special tokens that the model expects in front; as `tokenize`."""
        return self.tokenize(self._start + text)

    @property
    def begin_ids(self) -> list[int]:
        """What the model expects in front of every text."""
        return self.tokenize(self._start) if self._start else []

    @property
    def _start(self) -> str:
        is_known = self.adds_special_tokens and isinstance(self.tokenizer, HuggingFaceTokenizer)
        return self.tokenizer.start_of_text if is_known else ""  # type: ignore[union-attr]


def start() -> None:
    """Groups of this process alone, and its threads; what `open_model` needs.

    Raises:
        ValueError: the machine does not fit.
    """
    if not device.has_cuda():
        threads.set_threads()
    distributed.initialize(backend="auto", timeout_minutes=10, tensor_size=1, pipeline_size=1)
    rng.seed_everything(1)


def open_model(
    path: str, *, precision: str | None = None, tokenizer: TokenizerFlags | None = None, flag: str = "--model"
) -> LoadedModel:
    """The model in `path`: a folder of transformers, a folder of --save (its newest checkpoint) or one checkpoint.

    Needs the parallel groups of `start`. `precision` of weights and arithmetic: None for that of the weights.

    Raises:
        ValueError: it can't be read, or a file is missing; one line.
    """
    given = tokenizer or TokenizerFlags()
    if os.path.isdir(path) and not os.path.isfile(os.path.join(path, folder.CONFIG)):
        return _of_checkpoint(run_network.checkpoint_folder(path, flag=flag), precision, given)
    return _of_transformers(folder.locate(path, flag=flag), precision, given)


def _of_transformers(path: str, precision: str | None, given: TokenizerFlags) -> LoadedModel:
    source = folder.ModelFolder(path)
    if precision is None:
        precision = "bf16" if source.dtypes() == {torch.bfloat16} else "fp32"
    config = _config_of_folder(path, precision)
    model = _build(config, source.network.vocab_size)
    load.load_weights(source, model)
    return _loaded(config, model, files=path, num_ids=source.network.vocab_size, given=given)


def _config_of_folder(path: str, precision: str) -> RunConfig:
    network = folder.read_architecture(path)
    words = ["--load-hf", path, "--seq-length", str(network.plain_positions), "--micro-batch-size", "1", "--lr", "1"]
    words += ["--train-iters", "1", "--mock-data", "--eval-iters", "0", "--bcd-num-blocks", "1"]
    words += ["--tokenizer-type", "ByteLevelTokenizer"]  # replaced; none is read here
    if precision != "fp32":
        words.append(f"--{precision}")
    return parse_run_config(words, prog="generation", defaults=FAMILY_DEFAULTS["gpt"], world_size=1)


def _of_checkpoint(path: str, precision: str | None, given: TokenizerFlags) -> LoadedModel:
    checkpoint = CoreCheckpoint(path)
    carried: str | None = os.path.join(path, convert.CARRIED)
    file = os.path.join(path, run_state.FILE_NAME)
    if os.path.isfile(file):
        carried = None
        with open(file, encoding="utf-8") as opened:
            state = run_state.from_json(opened.read(), path=file)
        config = _alone(run_config_from_dict(state.flags), precision)
    elif carried is not None and os.path.isdir(carried):
        stored = checkpoint.dtype(_EMBEDDING)
        config = _config_of_folder(carried, precision or ("bf16" if stored == torch.bfloat16 else "fp32"))
    else:
        raise ValueError(
            f"{path} has no {run_state.FILE_NAME} that describes the network: make a model in Hugging Face's format of "
            "it with tools/convert_checkpoint.py --config DIR"
        )
    if _EMBEDDING not in checkpoint.tensors:
        raise ValueError(f"{path} holds no {_EMBEDDING}: give a checkpoint of a whole model")
    rows = checkpoint.shape(_EMBEDDING)[0]
    model = _build(config, rows)
    _load_checkpoint(checkpoint, model)
    num_ids = rows if carried is None else folder.read_architecture(carried).vocab_size
    own = config.tokenizer if carried is None else None
    return _loaded(config, model, files=carried, num_ids=num_ids, given=given, own=own)


def _alone(config: RunConfig, precision: str | None) -> RunConfig:
    """The run's network, on one rank."""
    fields = {name: value for name, value in config.transformer.items() if not any(part in name for part in _NOT_HERE)}
    if precision is not None:
        fields |= {"bf16": precision == "bf16", "fp16": precision == "fp16"}
    parts = {name: None for name in vars(config.training) if name.startswith(("decoder_", "pipeline_model_"))}
    config = replace(config, transformer=fields).replace_section("training", **parts)
    config = config.replace_section(
        "training", account_for_embedding_in_pipeline_split=False, account_for_loss_in_pipeline_split=False
    )
    return config.replace_section("bcd", bcd_num_blocks=1, bcd_layout="spread")


def _build(config: RunConfig, num_rows: int) -> torch.nn.Module:
    return build_model(config, num_rows, implementation_here(config)).eval().requires_grad_(False)


@torch.no_grad()
def _load_checkpoint(checkpoint: CoreCheckpoint, model: torch.nn.Module) -> None:
    """Copy the checkpoint's weights into the whole model. Raises ValueError for a tensor that is missing."""
    sharded = unwrap_model(model).sharded_state_dict()
    apply_factories(sharded)
    for part in nested_values(sharded):
        if not isinstance(part, ShardedTensor):
            continue
        if part.key not in checkpoint.tensors:
            raise ValueError(f"{checkpoint.folder}: tensor {part.key} is missing")
        values = checkpoint.read(part.key, layer=part.global_offset[0] if part.prepend_axis_num else None)
        for dim, start in enumerate(part.global_offset[part.prepend_axis_num :]):
            values = values.narrow(dim, start, part.local_shape[dim])
        assert part.data is not None
        part.data.copy_(values)


# --- tokenizer and special tokens


def _loaded(
    config: RunConfig,
    model: torch.nn.Module,
    *,
    files: str | None,
    num_ids: int,
    given: TokenizerFlags,
    own: Any = None,
) -> LoadedModel:
    """`own`: the tokenizer's flags of the run that wrote a checkpoint."""
    if own is not None and own.tokenizer_type == "HuggingFaceTokenizer" and given.tokenizer_type is None:
        files = own.tokenizer_model
    tokenizer = _tokenizer(given, own, files)
    num_rows = num_ids
    if tokenizer is not None:
        num_ids = min(num_ids, tokenizer.vocab_size)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        files=files,
        precision=config.precision,
        num_ids=num_ids,
        num_rows=num_rows,
        max_length=config.model.seq_length if own is None else _positions(config),
        end_ids=_end_ids(files, tokenizer),
        turn_end_ids=_turn_end_ids(tokenizer),
        adds_special_tokens=own is None or config.data.sft,
    )


def _positions(config: RunConfig) -> int:
    return config.model.max_position_embeddings or config.model.seq_length


def _tokenizer(given: TokenizerFlags, own: Any, files: str | None) -> Tokenizer | None:
    """Raises ValueError naming a file that is absent."""
    if given.tokenizer_type is not None:
        flags: Any = given
    elif given != TokenizerFlags():
        raise ValueError("the flags of a tokenizer, such as --tokenizer-model, need --tokenizer-type")
    elif own is not None and own.tokenizer_type:
        flags = own
    elif files is not None and folder.has_tokenizer(files):
        flags = TokenizerFlags(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=files)
    else:
        return None
    try:
        return build_tokenizer(**vars(flags))
    except ValueError as error:
        if flags is given:
            raise
        raise ValueError(
            f"the model's own tokenizer can't be read ({error}); give --tokenizer-type and its files"
        ) from None


def _end_ids(files: str | None, tokenizer: Tokenizer | None) -> frozenset[int]:
    """What generation_config.json says, else config.json, else the tokenizer."""
    for name in (_GENERATION, folder.CONFIG):
        value = _json(files, name).get("eos_token_id")
        if value is not None:
            return frozenset(value if isinstance(value, list) else [value])
    return frozenset() if tokenizer is None else frozenset([tokenizer.eod])


def _turn_end_ids(tokenizer: Tokenizer | None) -> frozenset[int]:
    end = None if tokenizer is None else end_of_answer(tokenizer)
    return frozenset() if end is None else frozenset([end])


def _json(files: str | None, name: str) -> Mapping[str, Any]:
    """The content of a file of the folder; empty where there is none, or it is no JSON object."""
    try:
        with open(os.path.join(files or os.devnull, name), encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
