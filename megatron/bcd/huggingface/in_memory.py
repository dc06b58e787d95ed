"""A model and its tokenizer as transformers has them, from a folder in Hugging Face's format or from a checkpoint."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from typing import Any

import torch

from megatron.bcd.huggingface import convert, folder, run_network, tokenizer_export
from megatron.bcd.huggingface.core_format import CoreCheckpoint
from megatron.bcd.tokenizer import HuggingFaceTokenizer, Tokenizer, open_tokenizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By the name that --precision has for it."""


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """transformers' objects."""

    model: Any
    tokenizer: Any

    @property
    def positions(self) -> int:
        """The most tokens of a text."""
        return int(self.model.config.max_position_embeddings)


def open_model(
    path: str, *, precision: str | None = None, device: str = "cpu", tokenizer: Tokenizer | None = None
) -> LoadedModel:
    """The model in `path`: a model in Hugging Face's format (a folder, or a name on the hub), a folder of --save (its
    newest checkpoint) or one checkpoint.

    Args:
        path: see above.
        precision: of `DTYPES`; None for that of the weights.
        device: where the model shall be.
        tokenizer: in place of the model's own.

    Raises:
        ValueError: a file is missing or damaged, or there is no tokenizer; one line.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    dtype = None if precision is None else DTYPES[precision]
    if os.path.isdir(path) and not os.path.isfile(os.path.join(path, folder.CONFIG)):
        return _of_checkpoint(run_network.checkpoint_folder(path, flag="--model"), dtype, device, tokenizer)
    path = folder.locate(path, flag="--model")
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype or "auto", use_safetensors=True, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers, its models and safetensors raise many types
        raise ValueError(f"--model {path} can't be read ({' '.join(str(error).split())[:200]})") from None
    return LoadedModel(model=model.eval().to(device), tokenizer=_tokenizer_of(path, tokenizer))


def _of_checkpoint(path: str, dtype: torch.dtype | None, device: str, tokenizer: Tokenizer | None) -> LoadedModel:
    """One tensor at a time: memory is that of the model."""
    import transformers
    from transformers.initialization import no_init_weights

    described = run_network.description_of(path, tokenizer=tokenizer)
    checkpoint = CoreCheckpoint(path)
    convert.check_checkpoint(checkpoint, described)
    with tempfile.TemporaryDirectory() as beside:
        convert.write_description(beside, described)
        config = transformers.AutoConfig.from_pretrained(beside, local_files_only=True)
        with torch.device(device), no_init_weights():
            stored = next(iter(checkpoint.tensors))
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype or checkpoint.dtype(stored))
        if os.path.isfile(os.path.join(beside, folder.GENERATION)):
            model.generation_config = transformers.GenerationConfig.from_pretrained(beside)
        own = None if described.tokenizer is tokenizer else tokenizer  # it is in the folder
        loaded = LoadedModel(model=model.eval(), tokenizer=_tokenizer_of(beside, own))
    model.tie_weights()
    weights = model.state_dict()
    for name, tensor in convert.tensors_of(checkpoint, convert.units_of(described.network), described):
        weights[name].copy_(tensor)
    return loaded


def _tokenizer_of(path: str, own: Tokenizer | None) -> Any:
    """transformers' reader of the tokenizer in a model's folder, or of `own`. Raises ValueError."""
    if own is not None:
        with tempfile.TemporaryDirectory() as exported:
            for name, content in tokenizer_export.files_of(own, adds_special_tokens=True).items():
                with open(os.path.join(exported, name), "wb") as file:
                    file.write(content)
            reader = _tokenizer_of(exported, None)
        if isinstance(own, HuggingFaceTokenizer):  # a template may be a file beside the tokenizer's
            reader.chat_template = own.engine.chat_template
        return reader
    if not folder.has_tokenizer(path):
        raise ValueError("the model comes without a tokenizer that reads text: give --tokenizer-type and its files")
    try:
        return open_tokenizer(path)
    except ValueError as error:
        raise ValueError(f"{error}; give --tokenizer-type") from None
