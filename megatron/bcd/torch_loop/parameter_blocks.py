"""Assign the parameters of a PyTorch model to blocks, or to the parameters that are active in every phase."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from megatron.bcd.blocks.partition import divide
from megatron.bcd.config.sections import ALWAYS_ACTIVE


@dataclass(frozen=True, kw_only=True)
class ParameterBlocks:
    """Names of a model's trainable parameters. Each name is in exactly one of the sets."""

    layers: tuple[tuple[int, ...], ...]
    """Indices of each block's layers, in the order of the model."""
    blocks: tuple[frozenset[str], ...]
    """Parameters of each block. Without blocks, one empty set."""
    always_active: frozenset[str]


def find_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules with parameters in the model's longest ``ModuleList`` or ``Sequential``.

    Raises:
        ValueError: no such list has at least two layers, or several are equally long.
    """
    chains = {
        name: layers
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and len(layers := [child for child in module if any(True for _ in child.parameters())]) > 1
    }
    longest = max(map(len, chains.values()), default=0)
    names = [name for name, layers in chains.items() if len(layers) == longest]
    if len(names) != 1:
        raise ValueError(
            f"layers: of the model's ModuleLists and Sequentials of at least two layers, {len(names)} are the longest, "
            "not one. Give layers=."
        )
    return chains[names[0]]


def divide_parameters(
    model: nn.Module,
    *,
    num_blocks: int,
    layout: str,
    layers: Iterable[nn.Module] | None,
    always_active: Sequence[str | type[nn.Module]],
) -> ParameterBlocks:
    """Assign every parameter of ``model`` that requires a gradient to a block.

    A parameter outside the layers belongs to the layer before it in the order of ``model.named_parameters()``, or to
    the first layer. Embeddings thus belong to the first layer, the final norm and the head to the last.

    Raises:
        ValueError: an argument does not fit the model. One line that names it.
    """
    chain = find_layers(model) if layers is None else list(layers)
    if not 0 <= num_blocks <= len(chain):
        raise ValueError(f"num_blocks {num_blocks}: must be 0 to {len(chain)}, the number of the model's layers")
    layer_numbers = {id(p): number for number, layer in reversed([*enumerate(chain)]) for p in layer.parameters()}
    names = {name: p for name, p in model.named_parameters() if p.requires_grad}
    always = frozenset(names) & _always_active(model, layer_numbers, always_active)
    numbers: tuple[tuple[int, ...], ...] = ((),)
    if layout == "strided" and num_blocks:
        numbers = tuple(tuple(range(block, len(chain), num_blocks)) for block in range(num_blocks))
    elif num_blocks:
        numbers = tuple(map(tuple, divide(len(chain), num_blocks)))
    blocks: tuple[set[str], ...] = tuple(set() for _ in numbers)
    layer_blocks = {layer: block for block, its_layers in enumerate(numbers) for layer in its_layers}
    layer = 0
    for name, parameter in names.items():
        layer = layer_numbers.get(id(parameter), layer)
        if name not in always and num_blocks:
            blocks[layer_blocks[layer]].add(name)
    return ParameterBlocks(layers=numbers, blocks=tuple(map(frozenset, blocks)), always_active=always)


def _always_active(
    model: nn.Module, layer_numbers: Mapping[int, int], entries: Sequence[str | type[nn.Module]]
) -> frozenset[str]:
    active: set[str] = set()
    for entry in entries:
        names = _entry_names(model, layer_numbers, entry)
        if not names and entry not in ALWAYS_ACTIVE:
            raise ValueError(
                f"always_active {entry!r}: matches no parameter. Give one of {', '.join(ALWAYS_ACTIVE)}, a module "
                "class, or a pattern of parameter names such as '*.router.*'."
            )
        active |= names
    return frozenset(active)


def _entry_names(model: nn.Module, layer_numbers: Mapping[int, int], entry: str | type[nn.Module]) -> set[str]:
    if entry == "biases":
        return {name for name, _ in model.named_parameters() if name.split(".")[-1] == "bias"}
    owners = [(module, p) for module in model.modules() for p in module.parameters(recurse=False)]
    norms = {id(p) for module, p in owners if "norm" in type(module).__name__.lower()}
    if not isinstance(entry, str):
        ids = {id(p) for module in model.modules() if isinstance(module, entry) for p in module.parameters()}
    elif entry == "norms":
        ids = norms
    elif entry == "embedding":
        ids = {id(p) for module, p in owners if isinstance(module, nn.Embedding)}
    elif entry == "head":
        ids = _head(model, layer_numbers) - norms
    else:
        return {name for name, _ in model.named_parameters() if fnmatchcase(name, entry)}
    return {name for name, p in model.named_parameters() if id(p) in ids}


def _head(model: nn.Module, layer_numbers: Mapping[int, int]) -> set[int]:
    """Return the ids of parameters after the last layer, and of a transformers model's output embedding."""
    ids = [id(p) for p in model.parameters()]
    last = max(place for place, identity in enumerate(ids) if identity in layer_numbers)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return {*ids[last + 1 :], *(id(p) for p in (head.parameters() if head is not None else ()))}
