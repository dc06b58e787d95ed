"""Private APIs of transformers: initial weights, element-wise code to compile, and the tensors in files that a tensor
in memory consists of."""

from __future__ import annotations

import copy
import functools
import sys
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.bcd.runtime.compat import pytorch

_ROTATION = "apply_rotary_pos_emb"
_compiled = functools.cache(functools.partial(pytorch.compiled, has_dynamic_shapes=True))


def initialize(model: Any, module: torch.nn.Module) -> None:
    """Draw the parameters of a module of a transformers model as the model's class does, without its submodules'."""
    model._init_weights(module)


def register_code(config: Any, path: str, *, is_trusted: bool) -> None:
    """Make the class of a model's own code that of its configuration, or, if it is not trusted, forget its name."""
    from transformers import AutoModelForCausalLM
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    code = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if code is not None and is_trusted:
        AutoModelForCausalLM.register(type(config), get_class_from_dynamic_module(code, path), exist_ok=True)
    else:
        vars(config).pop("auto_map", None)


def compile_elementwise(layer: torch.nn.Module) -> None:
    """Compile a layer's RMSNorms and, for the whole process, the rotation of queries and keys that its code calls.

    Layers of a class share compiled code. Results differ by rounding.
    """
    for module in layer.modules():
        kind = type(module)
        if kind.__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(_compiled(kind.forward), module)
        _compile_rotation(sys.modules[kind.__module__])


@functools.cache
def _compile_rotation(code: types.ModuleType) -> None:
    if hasattr(code, _ROTATION):
        setattr(code, _ROTATION, _compiled(getattr(code, _ROTATION)))


class Conversion:
    """transformers' conversion of a model's weights between files and memory, where it stacks experts, for example."""

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightConverter

        self._model = model
        steps = get_model_conversion_mapping(model, add_legacy=False)
        steps = [step for step in steps or [] if not isinstance(step, PrefixChange)]
        self._converters = [step for step in steps if isinstance(step, WeightConverter)]
        self._renamings = [step for step in steps if not isinstance(step, WeightConverter)]

    def to_files(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the tensors of files by name, given a tensor in memory."""
        if not self._converters and not self._renamings:
            return {name: tensor}
        from transformers.core_model_loading import revert_weight_conversion

        return dict(revert_weight_conversion(self._model, {name: tensor}))

    def from_files(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return a tensor in memory, given those of the files."""
        from transformers.core_model_loading import dot_natural_key, rename_source_key

        converter: Any = None
        for file_name in sorted(tensors, key=dot_natural_key):
            renamed, pattern = rename_source_key(file_name, self._renamings, self._converters)
            if pattern is None:
                return tensors[file_name]
            if converter is None:
                converter = copy.deepcopy(next(step for step in self._converters if pattern in step.source_patterns))
            converter.add_tensor(renamed, file_name, pattern, tensors[file_name])
        [result] = converter.convert(name, model=self._model, config=self._model.config).values()
        return result[0] if isinstance(result, list) else result
