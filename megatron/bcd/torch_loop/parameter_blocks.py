"""Which parameters of a PyTorch model form which block, and which are active in every phase."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from megatron.bcd.blocks.partition import divide

KINDS = ("norms", "biases", "embedding", "head")


@dataclass(frozen=True, kw_only=True)
class ParameterBlocks:
    """Names of a model's trainable parameters, each in exactly one of the sets."""

    layers: tuple[tuple[int, ...], ...]
    """Numbers of each block's layers, in the order of the model."""
    blocks: tuple[frozenset[str], ...]
    """Each block's parameters; with no blocks one empty set."""
    always_active: frozenset[str]


def find_layers(model: nn.Module) -> list[nn.Module]:
    """The modules of the longest ``ModuleList`` or ``Sequential`` in ``model`` that hold parameters.

    Raises:
        ValueError: there is none of at least two, or several of the same length.
    """
    chains = {
        name: layers
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and len(layers := [child for child in module if any(True for _ in child.parameters())]) > 1
    }
    longest = max(map(len, chains.values()), default=0)
    found = [name for name, layers in chains.items() if len(layers) == longest]
    if not found:
        raise ValueError("the model has no ModuleList or Sequential of at least two layers: give layers=")
    if len(found) > 1:
        raise ValueError(
            f"{len(found)} lists of {longest} layers in the model ({found[0] or 'the model'}, {found[1]}, ...): "
            "give layers="
        )
    return chains[found[0]]


def divide_parameters(
    model: nn.Module,
    *,
    num_blocks: int,
    layout: str,
    layers: Iterable[nn.Module] | None,
    always_active: Sequence[str | type[nn.Module]],
) -> ParameterBlocks:
    """Assign every parameter of ``model`` that requires a gradient.

    A parameter outside of the layers goes with the layer before it in the order of ``model.named_parameters()``, or
    with the first layer if there is none: embeddings with the first, final norm and head with the last.

    Raises:
        ValueError: the arguments do not fit the model; one line that names the argument.
    """
    chain = find_layers(model) if layers is None else list(layers)
    if not 0 <= num_blocks <= len(chain):
        raise ValueError(f"num_blocks {num_blocks}: must be 0 to {len(chain)}, the number of the model's layers")
    of_layer = {id(p): number for number, layer in reversed([*enumerate(chain)]) for p in layer.parameters()}
    names = {name: p for name, p in model.named_parameters() if p.requires_grad}
    always = frozenset(names) & _always_active(model, of_layer, always_active)
    numbers = _block_layers(len(chain), num_blocks, layout)
    blocks: tuple[set[str], ...] = tuple(set() for _ in numbers)
    block_of_layer = {layer: block for block, held in enumerate(numbers) for layer in held}
    layer = 0
    for name, parameter in names.items():
        layer = of_layer.get(id(parameter), layer)
        if name not in always and num_blocks:
            blocks[block_of_layer[layer]].add(name)
    return ParameterBlocks(layers=numbers, blocks=tuple(map(frozenset, blocks)), always_active=always)


def _block_layers(num_layers: int, num_blocks: int, layout: str) -> tuple[tuple[int, ...], ...]:
    if num_blocks == 0:
        return ((),)
    if layout == "strided":
        return tuple(tuple(range(block, num_layers, num_blocks)) for block in range(num_blocks))
    return tuple(map(tuple, divide(num_layers, num_blocks)))


def _always_active(
    model: nn.Module, of_layer: Mapping[int, int], entries: Sequence[str | type[nn.Module]]
) -> frozenset[str]:
    found: set[str] = set()
    for entry in entries:
        names = _of_kind(model, of_layer, entry) if entry in KINDS else _matching(model, entry)
        if not names and entry not in KINDS:
            raise ValueError(
                f"always_active {entry!r} matches no parameter: must be one of {', '.join(KINDS)}, a class of modules, "
                "or a pattern of parameter names such as '*.router.*'"
            )
        found |= names
    return frozenset(found)


def _matching(model: nn.Module, entry: str | type[nn.Module]) -> set[str]:
    if isinstance(entry, str):
        return {name for name, _ in model.named_parameters() if fnmatchcase(name, entry)}
    held = {id(p) for module in model.modules() if isinstance(module, entry) for p in module.parameters()}
    return {name for name, p in model.named_parameters() if id(p) in held}


def _of_kind(model: nn.Module, of_layer: Mapping[int, int], kind: str | type[nn.Module]) -> set[str]:
    owners = [(module, p) for module in model.modules() for p in module.parameters(recurse=False)]
    norms = {id(p) for module, p in owners if "norm" in type(module).__name__.lower()}
    if kind == "norms":
        held = norms
    elif kind == "embedding":
        held = {id(p) for module, p in owners if isinstance(module, nn.Embedding)}
    elif kind == "head":
        held = _head(model, of_layer) - norms
    else:
        return {name for name, _ in model.named_parameters() if name.split(".")[-1] == "bias"}
    return {name for name, p in model.named_parameters() if id(p) in held}


def _head(model: nn.Module, of_layer: Mapping[int, int]) -> set[int]:
    """What follows the last layer, and the output embedding of a transformers model, which may be tied."""
    ids = [id(p) for p in model.parameters()]
    last = max(place for place, identity in enumerate(ids) if identity in of_layer)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return {*ids[last + 1 :], *(id(p) for p in (head.parameters() if head is not None else ()))}
