"""Ranges of layers: how a number of layers is divided. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise


def divide(total: int, parts: int) -> tuple[range, ...]:
    """Divide ``range(total)`` into ``parts`` contiguous ranges, as even as possible, larger ones first.

    Parts are empty where ``parts`` exceeds ``total``. Raises ValueError if ``parts`` < 1 or ``total`` < 0.
    """
    if parts < 1 or total < 0:
        raise ValueError(f"cannot divide {total} layers into {parts} parts: at least 0 layers, 1 part")
    size, larger = divmod(total, parts)
    return consecutive([size + (part < larger) for part in range(parts)])


def consecutive(sizes: Sequence[int]) -> tuple[range, ...]:
    """Ranges of these sizes, one after the other from 0 on."""
    return tuple(range(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0)))


def divide_into_pieces(total: int, *, parts: int, stages: int) -> tuple[tuple[range, ...], ...]:
    """Divide ``range(total)`` into ``parts`` as ``divide``, and each part into a piece per stage; by part and stage.

    The parts do not depend on the number of stages. Of a part that the stages do not divide, the stages with the fewest
    layers so far take one more.
    """
    held = [0] * stages
    sizes: list[int] = []
    for part in divide(total, parts):
        size, larger = divmod(len(part), stages)
        with_more = sorted(range(stages), key=held.__getitem__)[:larger]
        for stage in range(stages):
            sizes.append(size + (stage in with_more))
            held[stage] += sizes[-1]
    pieces = consecutive(sizes)
    return tuple(pieces[part * stages : (part + 1) * stages] for part in range(parts))


def describe_layers(layers: Sequence[int]) -> str:
    """Ascending layer numbers in short form: ``(0, 1, 2, 5)`` becomes ``"0-2, 5"``, none becomes ``""``."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
