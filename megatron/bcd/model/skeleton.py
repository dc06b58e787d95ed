"""transformers' own model without weights: the places of its parts, and its `forward` around layers that run elsewhere.

The mechanism knows no family. transformers builds the model with parameters on the meta device and all buffers. A slot
takes the place of each layer in the model's list, so the model's own `forward` decides what a layer is given: position
embeddings, the mask of its kind of attention, scaled embeddings.

Tensor shapes: S sequence length, B micro-batch size, H hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.bcd.model import texts
from megatron.bcd.runtime.compat import transformers as compat

EMBEDDING, LAYERS = "embedding.word_embeddings", "decoder.layers"
FINAL_NORM, HEAD = "decoder.final_layernorm", "output_layer"
"""Modules of a stage by the names of Megatron Core's GPTModel."""
TRUSTED: set[str] = set()
"""Names and folders of the models whose own code may run in this process (--trust-remote-code)."""
_TEXT = (".json", ".txt", ".jinja", ".model", ".md", ".py")
"""Ends of names of files beside the weights."""


def has_weights(path: str) -> bool:
    """Return whether a folder, or a model on the hub, has weights. A folder with config.json alone has none."""
    return not os.path.isdir(path) or any(not name.endswith(_TEXT) for name in os.listdir(path))


def read_config(path: str, *, is_quantised: bool = False) -> Any:
    """Return transformers' configuration of a model in a folder, of a config.json, or of a name on the hub.

    Its text part, which is trained, is ``get_text_config()``. With `is_quantised` the weights may be quantised: they
    will not be read. Code that comes with the model runs only if TRUSTED has `path`.

    Raises:
        ValueError: the configuration can't be read, or such a model can't be trained here. One line.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=path in TRUSTED)
        compat.register_code(config, path, is_trusted=path in TRUSTED)
    except Exception as error:  # transformers and its configurations can raise many types
        reason = " ".join(str(error).split())[:200]
        if "trust_remote_code" in str(error):
            reason = "its code comes with the model, and runs in training only, with --trust-remote-code"
        raise ValueError(f"{path}: transformers can't read its config.json ({reason})") from None
    text = config if config.is_encoder_decoder else config.get_text_config()
    if type(text) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING or config.is_encoder_decoder:
        what = "has an encoder" if config.is_encoder_decoder else "is no decoder of AutoModelForCausalLM"
        raise ValueError(f"{path}: {config.model_type} {what}. Give a model that generates text alone.")
    if not hasattr(text, "num_hidden_layers"):
        raise ValueError(f"{path}: {config.model_type} has no single list of layers. Give another model.")
    if is_quantised:
        vars(text).pop("quantization_config", None)
    elif getattr(config, "quantization_config", None):
        raise ValueError(f"{path}: quantization_config: quantised weights can't be trained. Give the original ones.")
    elif text is not config and not has_weights(path):
        raise ValueError(
            f"{path}: {config.model_type} reads more than text, and random weights would have no other "
            "parts. Give its text_config as config.json, or a folder with weights."
        )
    text.tie_word_embeddings = config.tie_word_embeddings  # the whole model's decides
    return config


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Inside the context, new modules put their parameters, but not their buffers, on the meta device."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class Refused(ValueError):
    """A model that the mechanism does not support."""


class _EndOfPass(Exception):
    """Leaves the model's `forward` behind the last layer of a pass, with its output [B, S, H]."""

    def __init__(self, hidden_states: Tensor) -> None:
        self.hidden_states = hidden_states


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The part of the model that a call runs. Layers have their numbers in the model."""

    layers: range
    received: Tensor | None = None
    """Input of the first layer [B, S, H]; None if the embedding makes it."""
    has_head: bool
    recomputed: range = range(0)
    """Layers whose activations the backward pass computes again."""
    ends_before_head: bool = False
    """Whether to return the head's input in place of its logits."""


_IDLE = Pass(layers=range(0), has_head=False)


class _Slot(nn.Module):
    """Takes the place of a layer, and runs it if the pass has it. Attributes that the model reads are the layer's."""

    def __init__(self, skeleton: Skeleton, number: int) -> None:
        super().__init__()
        # not a submodule: the layer's parameters belong to the stage
        self.__dict__ |= {"skeleton": skeleton, "number": number, "layer": skeleton.layers[number]}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        now, number = self.skeleton.now, self.number
        output = hidden_states = args[0] if args else kwargs.pop("hidden_states")
        if now.received is not None and (number == now.layers.start or not now.layers):
            output = hidden_states = now.received
        if number in now.recomputed:
            output = checkpoint(self.layer, hidden_states, *args[1:], use_reentrant=False, **kwargs)
        elif number in now.layers:
            output = self.layer(hidden_states, *args[1:], **kwargs)
        elif self.skeleton.tuple_length:
            output = (hidden_states, *[None] * (self.skeleton.tuple_length - 1))
        if number in now.layers:
            self.skeleton.tuple_length = len(output) if isinstance(output, tuple) else 0
        if number == now.layers.stop - 1 and not now.has_head:
            raise _EndOfPass(output[0] if isinstance(output, tuple) else output)
        return output


class Skeleton:
    """A model of transformers whose parameters have no values, with its parts by GPTModel's names.

    Raises:
        ValueError: the model has no list of layers, or weights outside the known parts. One line.
    """

    def __init__(self, config: Any, *, dtype: torch.dtype = torch.float32, has_weights: bool = False) -> None:
        import transformers
        from transformers.initialization import no_init_weights

        transformers.AttentionInterface.register(texts.BY_TEXT, texts.attend)
        kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        self.name: str = kind.__name__
        self.masked_attention = "sdpa" if getattr(kind, "_supports_sdpa", False) else "eager"
        with contextlib.ExitStack() as stack:
            if not has_weights:
                stack.enter_context(no_init_weights())
                stack.enter_context(_parameters_on_meta())
            self.model = transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation=self.masked_attention, dtype=dtype
            )
        self.config = self.model.config
        lists = {
            name: each
            for name, each in self.model.named_modules()
            if isinstance(each, nn.ModuleList) and len(each) == config.num_hidden_layers
        }
        path = min(lists, key=lambda name: name.count("."), default=None)
        if path is None or sum(name.count(".") == path.count(".") for name in lists) > 1:
            raise self.refusal("has no single list of its layers")
        self.layers = [*lists[path]]
        """transformers' layers."""
        self.now = _IDLE
        self.tuple_length = 0
        """Length of the tuple that the model expects of a layer, or 0 if it expects a tensor."""
        self._products: Tensor | None = None
        self.attends_by_text = False
        """Whether attention takes the bounds of packed texts (`model.texts`) in place of masks."""
        self.has_plain_head = False
        """Whether the last run with a head returned logits that are the head's products and nothing else."""
        self.paths = {LAYERS: path} | self._find_outside(path)
        """Names in transformers by names in GPTModel: prefixes of the names of parameters."""

    def refusal(self, what: str) -> Refused:
        """Return the error for a model that can't be trained here."""
        return Refused(
            f"--transformer-impl transformers: {self.name} {what}. BlockCoordinate trains it on one GPU "
            "(docs/pytorch.md)."
        )

    def _find_outside(self, layers: str) -> dict[str, str]:
        """Return the paths of the modules outside the layers that have parameters of their own."""
        ends = {self.model.get_input_embeddings(): EMBEDDING, self.model.get_output_embeddings(): HEAD}
        paths, is_behind = dict[str, str](), False
        for name, module in self.model.named_modules():
            is_behind |= name == layers
            if name.startswith(f"{layers}.") or not [*module.parameters(recurse=False)]:
                continue
            ours = ends.get(module) or (FINAL_NORM if is_behind else f"embedding.{name.replace('.', '_')}")
            if ours in paths:
                raise self.refusal(f"has weights between its layers and its head: {paths[ours]} and {name}")
            paths[ours] = name
        if not {EMBEDDING, HEAD} <= paths.keys():
            raise self.refusal("has no word embedding or no head")
        ties = {f"{paths[HEAD]}.weight": f"{paths[EMBEDDING]}.weight"}
        for name, other in self.model.all_tied_weights_keys.items():
            if ties.get(name) != other:
                raise self.refusal(f"ties {name} to {other}, and a stage may have only one of both")
        head = self.model.get_submodule(paths[HEAD])
        head.register_forward_pre_hook(self._leave_before_head)
        head.register_forward_hook(self._note_products)
        return paths

    def _leave_before_head(self, _: nn.Module, args: Any) -> None:
        if self.now.ends_before_head:
            raise _EndOfPass(args[0])

    def _note_products(self, head: nn.Module, _: Any, output: Tensor) -> None:
        self._products = None if getattr(head, "bias", None) is not None else output

    @property
    def has_kernels_of_texts(self) -> bool:
        """Whether variable-length attention has kernels for the heads of all layers."""
        modules = (module for layer in self.layers for module in layer.modules())
        return all(texts.has_kernel(getattr(module, "head_dim", 8)) for module in modules)

    def attend_by_text(self) -> None:
        """Let attention take the bounds of packed texts in place of masks, if there are kernels."""
        self.attends_by_text = self.has_kernels_of_texts
        if self.attends_by_text:
            self.model.set_attn_implementation(texts.BY_TEXT)

    def module(self, ours: str) -> nn.Module:
        """Return transformers' module outside the layers, given GPTModel's name."""
        return self.model.get_submodule(self.paths[ours])

    def state(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield parameters and saved buffers before `fill`: GPTModel's name, transformers' name and the tensor."""
        by_path = {path: ours for ours, path in self.paths.items()}
        for name, tensor in self.model.state_dict().items():
            path = next(path for path in by_path if name.startswith(f"{path}."))
            yield by_path[path] + name.removeprefix(path), name, tensor

    def fill(self) -> None:
        """Put slots in the place of the layers."""
        slots = nn.ModuleList(_Slot(self, number) for number in range(len(self.layers)))
        self.model.set_submodule(self.paths[LAYERS], slots)

    def run(self, now: Pass, **inputs: Any) -> Tensor:
        """Run a part of the model after `fill`.

        Args:
            inputs: what transformers' `forward` takes. Without `received` tokens or their embeddings, otherwise
                nothing for them.

        Returns:
            The output of the last layer or the input of the head [B, S, H], or with `has_head` the logits [B, S, V].
        """
        if now.received is not None:
            inputs = inputs | {"input_ids": None, "inputs_embeds": now.received.detach()}
        self.now = now
        try:
            logits: Tensor = self.model(**inputs, use_cache=False).logits
            self.has_plain_head = logits is self._products
        except _EndOfPass as end:
            return end.hidden_states
        finally:
            self.now, self._products = _IDLE, None  # they hold tensors
        return logits

    def materialize(self, module: nn.Module, *, device: torch.device, seed: int | None) -> None:
        """Allocate the parameters of a part. Draw them as transformers does, or without a seed leave them open."""
        for each in module.modules():
            for name, parameter in each.named_parameters(recurse=False):
                setattr(each, name, nn.Parameter(torch.empty_like(parameter, device=device)))
        module.to(device)
        if seed is None:
            return
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            for each in module.modules():
                compat.initialize(self.model, each)
