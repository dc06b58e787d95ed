"""Load a model and its tokenizer as transformers' objects, from Hugging Face's format or from a checkpoint."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.bcd.huggingface import convert, folder, run_network
from megatron.bcd.huggingface.core_format import CoreCheckpoint
from megatron.bcd.runtime.device import DTYPES
from megatron.bcd.tokenizer import open_tokenizer


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """transformers' model and tokenizer."""

    model: Any
    tokenizer: Any

    @property
    def positions(self) -> int:
        """Maximum number of tokens in a text."""
        return int(self.model.config.max_position_embeddings)


def open_model(path: str, *, precision: str | None = None, device: str = "cpu") -> LoadedModel:
    """Load a model.

    Args:
        path: a model in Hugging Face's format (a folder, or a name on the hub), a folder of --save (its newest
            checkpoint is used), or one checkpoint.
        precision: a key of `DTYPES`; None for that of the weights.
        device: the device of the model.

    Raises:
        ValueError: a file is missing or damaged, or there is no tokenizer. One line.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    dtype = None if precision is None else DTYPES[precision]
    if os.path.isdir(path) and not os.path.isfile(os.path.join(path, folder.CONFIG)):
        return _load_checkpoint(run_network.checkpoint_folder(path, flag="--model"), dtype, device)
    path = folder.locate(path, flag="--model")
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype or "auto", use_safetensors=True, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers, its models and safetensors can raise many types
        raise ValueError(f"--model {path}: can't be read ({' '.join(str(error).split())[:200]})") from None
    return LoadedModel(model=model.eval().to(device), tokenizer=_open_tokenizer(path))


def _load_checkpoint(path: str, dtype: torch.dtype | None, device: str) -> LoadedModel:
    """Load a checkpoint tensor by tensor, so that only the model needs memory."""
    import transformers
    from transformers.initialization import no_init_weights

    description = run_network.describe_checkpoint(path)
    checkpoint = CoreCheckpoint(path)
    convert.check_checkpoint(checkpoint, description)
    with tempfile.TemporaryDirectory() as beside:
        network = description.network
        if network.num_experts or network.source:  # transformers may join tensors in memory, and only it knows how
            convert.to_hugging_face(checkpoint, beside, description)
            loaded = open_model(beside, device=device)
            return loaded if dtype is None else replace(loaded, model=loaded.model.to(dtype))
        convert.write_description(beside, description)
        config = transformers.AutoConfig.from_pretrained(beside, local_files_only=True)
        with torch.device(device), no_init_weights():
            stored = next(iter(checkpoint.tensors))
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype or checkpoint.dtype(stored))
        if os.path.isfile(os.path.join(beside, folder.GENERATION)):
            model.generation_config = transformers.GenerationConfig.from_pretrained(beside)
        loaded = LoadedModel(model=model.eval(), tokenizer=_open_tokenizer(beside))
    model.tie_weights()
    weights = model.state_dict()
    for name, tensor in convert.read_tensors(checkpoint, convert.list_units(description.network)):
        weights[name].copy_(tensor)
    return loaded


def _open_tokenizer(path: str) -> Any:
    """Return transformers' tokenizer for a model's folder. Raises ValueError."""
    if not folder.has_tokenizer(path):
        raise ValueError("--model: has no tokenizer that reads text. Give a folder with the tokenizer's files.")
    return open_tokenizer(path)
