"""How long an iteration of an interleaved plan takes; as `simulate`, with costs by virtual stage.

A send does not wait, unless MAX_MESSAGES_IN_FLIGHT of the stage have not arrived yet, and a receive is awaited by the
pass that needs it. The messages between two stages travel one after the other, in both directions together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from megatron.bcd.pipeline.actions import Action, Kind, Message, messages_of
from megatron.bcd.pipeline.chunk_shape import ChunkShape
from megatron.bcd.pipeline.interleaved import MAX_MESSAGES_IN_FLIGHT, ChunkPlan
from megatron.bcd.pipeline.simulate import ActionCosts, Span, Timeline


def chunk_costs(
    shape: ChunkShape,
    *,
    forward: Sequence[float],
    backward: Sequence[float],
    backward_input: Sequence[float],
    message: float = 0.0,
) -> ActionCosts:
    """Costs given by virtual stage; forward-only costs as much as forward. Raises ValueError as ActionCosts."""
    seconds: dict[tuple[int, Kind], float] = {}
    for virtual in range(shape.num_virtual):
        seconds[virtual, Kind.FORWARD] = seconds[virtual, Kind.FORWARD_ONLY] = forward[virtual]
        seconds[virtual, Kind.BACKWARD] = backward[virtual]
        seconds[virtual, Kind.BACKWARD_INPUT] = backward_input[virtual]
    return ActionCosts(seconds=seconds, message=message)


def simulate_chunk_plan(plan: ChunkPlan, costs: ActionCosts) -> Timeline:
    """When every action of a plan begins and ends; its critical path is not followed.

    Raises ValueError where a cost is missing, and for a plan in which stages wait for each other for ever
    (`validate_chunk_plan` says why).
    """
    return Timeline(plan=plan, spans=_Simulation(plan, costs).run(), critical_path=())


def needed_message(shape: ChunkShape, virtual: int, action: Action) -> Message | None:
    """The message without which the pass of a virtual stage can't begin."""
    if action.kind in (Kind.FORWARD, Kind.FORWARD_ONLY):
        return Message(virtual - 1, virtual, action.microbatch) if shape.needs_input(virtual) else None
    return Message(virtual + 1, virtual, action.microbatch) if virtual < shape.last else None


class _Simulation:
    """All stages, each as far as it gets until something that it waits for is not known."""

    def __init__(self, plan: ChunkPlan, costs: ActionCosts) -> None:
        self._plan = plan
        self._costs = costs
        self._spans: list[list[Span]] = [[] for _ in plan.stages]
        self._begun: dict[tuple[Message, bool], float] = {}
        """When each end of a message has begun; True: the receiver's."""
        self._arrived: dict[Message, float] = {}
        self._before: dict[Message, Message] = {}
        """The message before each one between its two stages."""
        self._in_flight: list[deque[Message]] = [deque(maxlen=MAX_MESSAGES_IN_FLIGHT) for _ in plan.stages]
        for stage, actions in enumerate(plan.stages):
            last: dict[int, Message] = {}
            for action in actions:
                for message in messages_of(plan.shape.virtual_stage(stage, action.chunk), action):
                    other = sum(map(plan.shape.stage_of, message[:2])) - stage
                    if other in last:
                        self._before[message] = last[other]
                    last[other] = message

    def run(self) -> tuple[tuple[Span, ...], ...]:
        """The spans of all stages."""
        stages = range(len(self._plan.stages))
        is_moving = True
        while is_moving:
            moved = [self._advance(stage) for stage in stages]
            is_moving = any(moved)
        for stage, actions in enumerate(self._plan.stages):
            if len(self._spans[stage]) < len(actions):
                action = actions[len(self._spans[stage])]
                raise ValueError(f"stage {stage} waits for ever in {action.kind} of microbatch {action.microbatch}")
        return tuple(map(tuple, self._spans))

    def _advance(self, stage: int) -> bool:
        """Whether at least one action of the stage has ended."""
        actions, spans = self._plan.stages[stage], self._spans[stage]
        num_before = len(spans)
        while len(spans) < len(actions):
            action = actions[len(spans)]
            start = self._start_of(stage, action, spans[-1].end if spans else 0.0)
            if start is None:
                break
            virtual = self._plan.shape.virtual_stage(stage, action.chunk)
            duration = self._costs.of(virtual, action.kind) if action.kind.computes else 0.0
            spans.append(Span(stage, action, start, start + duration))
        return len(spans) > num_before

    def _start_of(self, stage: int, action: Action, free: float) -> float | None:
        """When the stage's next action begins, None while that is not known."""
        virtual = self._plan.shape.virtual_stage(stage, action.chunk)
        if action.kind.computes:
            needed = needed_message(self._plan.shape, virtual, action)
            arrived = free if needed is None else self._arrival(needed)
            return None if arrived is None else max(free, arrived)
        [message] = messages_of(virtual, action)
        is_received = message.target == virtual
        if not is_received:
            in_flight = self._in_flight[stage]
            if len(in_flight) == MAX_MESSAGES_IN_FLIGHT:
                oldest = self._arrival(in_flight[0])
                if oldest is None:
                    return None
                free = max(free, oldest)
            in_flight.append(message)
        self._begun[message, is_received] = free
        return free

    def _arrival(self, message: Message) -> float | None:
        """When the message has arrived, None while that is not known."""
        todo = [message]
        while todo:  # a message waits for those before it
            one = todo[-1]
            before = self._before.get(one)
            if one in self._arrived:
                todo.pop()
            elif (one, False) not in self._begun or (one, True) not in self._begun:
                return None
            elif before is not None and before not in self._arrived:
                todo.append(before)
            else:
                free = 0.0 if before is None else self._arrived[before]
                begin = max(self._begun[one, False], self._begun[one, True], free)
                self._arrived[one] = begin + self._costs.message
        return self._arrived[message]
