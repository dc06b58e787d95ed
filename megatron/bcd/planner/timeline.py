"""Lay out the computation and the copies of one step, piece by piece, if layers are in host memory.

The order is that of `pipeline.breadth_first` and `model.frozen_weights`. When a piece begins, the copy of the next one
starts. It replaces the piece that was used longest ago, and waits until this one is written back.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.bcd.planner.recipe import Recipe
from megatron.bcd.planner.step_time import num_head_passes, pass_seconds, phase_seconds, piece_seconds


@dataclass(frozen=True, kw_only=True)
class Span:
    """A computation or copy. Times are seconds from the step's start."""

    kind: str
    """forward, head, backward, update; load or write back. The copies of each direction have a stream of their own."""
    piece: int
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class _Visit:
    """The work on a piece between two others, and its copies in bytes."""

    piece: int
    work: tuple[tuple[str, float], ...]
    weights: float
    state: float = 0.0
    written: float = 0.0


def step(recipe: Recipe, block: int) -> list[Span]:
    """Return the spans of a step that follows another one. The run must have one stage."""
    passes, speed = [visits for visits in _passes(recipe, block) if visits], 1e9 * recipe.cluster.copy_gb_per_s
    num_buffers = 3 + recipe.config.bcd.bcd_resident_layers // recipe.config.bcd.bcd_layers_per_pass
    ready: dict[int, float] = {}
    """By piece in buffers, when its copy ends. The piece that was used last comes last."""
    written: dict[int, float] = {}
    spans, begin, now, loaded, stored = list[Span](), 0.0, 0.0, 0.0, 0.0

    def add(kind: str, piece: int, start: float, seconds: float) -> float:
        if seconds:
            spans.append(Span(kind=kind, piece=piece, start=start - begin, end=start + seconds - begin))
        return start + seconds

    for number, visits in enumerate([*passes, *passes]):
        if number == len(passes):
            spans, begin = [], now
        for visit, coming in zip(visits, [*visits[1:], None], strict=True):
            for each in (visit if visit is visits[0] else None, coming):
                if each is None or not each.weights:  # layers that are active are not copied
                    continue
                start, weights = max(loaded, now), each.weights if each.piece not in ready else 0.0
                if weights and len(ready) == num_buffers:
                    replaced = next(piece for piece in ready if piece != visit.piece)
                    del ready[replaced]
                    start = max(start, written.get(replaced, 0.0))
                loaded = add("load", each.piece, start, (weights + each.state) / speed)
                ready[each.piece] = max(ready.pop(each.piece, 0.0), loaded * bool(weights + each.state))
            if visit.weights:
                ready[visit.piece] = now = max(now, ready.pop(visit.piece))
            for kind, seconds in visit.work:
                now = add(kind, visit.piece, now, seconds)
            if visit.written:
                written[visit.piece] = stored = add("write back", visit.piece, max(stored, now), visit.written / speed)
    return spans


def _passes(recipe: Recipe, block: int) -> tuple[list[_Visit], list[_Visit]]:
    """Return the visits of pieces in a step, and those of updates that wait for the norm."""
    state, config, number = recipe.state, recipe.config, recipe.num_microbatches
    seconds, first = piece_seconds(recipe, block), recipe.memory.schedule_shape(block).first_trainable
    head = number * sum(num_head_passes(recipe, block)) * pass_seconds(recipe)[1]
    layers, update = state.streamed[0], ("update", phase_seconds(recipe, block).optimizer / len(state.pieces))
    is_updated = config.bcd.bcd_inactive_update != "none" or state.steps_block_by_piece
    by_piece = is_updated and not config.clips_by_piece
    sizes = [layers.padded * sum(not layers.is_active[block][each] for each in piece) for piece in state.pieces]
    weights = [recipe.bytes_per_element * size for size in sizes]
    of_state = [state.layer_state_bytes * size / recipe.num_replicas for size in sizes]
    pieces = range(len(sizes))
    forward = [("forward", number * seconds[piece][0]) for piece in pieces]
    visits = [_Visit(piece=piece, work=(forward[piece],), weights=weights[piece]) for piece in pieces[:-1]]
    for piece in reversed(pieces[first:]):
        heads = [("head", head)] * (piece == pieces[-1])
        work = (forward[piece], *heads, ("backward", number * seconds[piece][1]), *[update] * by_piece)
        kept = of_state[piece] * by_piece
        written = (weights[piece] + kept) * by_piece
        visits.append(_Visit(piece=piece, work=work, weights=weights[piece], state=kept, written=written))
    return visits, [
        _Visit(piece=p, work=(update,), weights=weights[p], state=of_state[p], written=weights[p] + of_state[p])
        for p in (pieces if config.clips_by_piece else ())
    ]
