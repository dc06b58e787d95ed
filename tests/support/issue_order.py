"""Check in one process whether NCCL can run what the pipeline issues: the real issue order against a model of NCCL.

`record` drives `PipelineSchedule` of every rank through a run. Plans, executor and messages are real; passes and groups
are stubs that record what they request from torch.distributed. `simulate` then runs these programs against each other.
NCCL's rules: a communicator runs its operations one after the other in the order of their issue (with `one_queue` all
communicators of a rank together), its first operation waits for all its ranks, and messages use one communicator per
pair of ranks. Every message is followed to the pass that uses it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch

from megatron.bcd.blocks.chunks import virtual_chunks
from megatron.bcd.blocks.partition import Partition, partition
from megatron.bcd.pipeline import breadth_first, execute, schedule
from megatron.bcd.pipeline.schedule import PipelineSchedule
from megatron.bcd.runtime import device


class OrderError(AssertionError):
    """A hang with every queue, or a message that its receiver takes for another one."""


class Event(NamedTuple):
    """One step of the training loop, the same on every rank."""

    what: Literal["train", "evaluate", "checkpoint", "fill"]
    block: int = 0
    """For training and fills: the first trainable stage."""
    is_served: bool = False
    """For training: the prefix comes from the cache."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout and the events of a run."""

    num_stages: int
    num_microbatches: int
    events: tuple[Event, ...]
    run_ahead: int | None = None
    tensor_size: int = 1
    data_size: int = 1
    overlaps_reduction: bool = False
    num_chunks: int = 1
    """Chunks per stage. More than 1: an interleaved plan with as many blocks, and `Event.block` is a block."""
    is_breadth_first: bool = False
    """An interleaved plan of one block and pieces that are all updated, in breadth-first order."""
    frozen_suffix: bool = False
    """Stages after the first trainable one have no weight gradients."""
    partition: Partition | None = None
    """Replaces one layer per stage; with it the number of passes that the head is worth."""
    head_passes: float = 1.0


@dataclass(eq=False)
class Issued:
    """An operation of a communicator: a collective, or a rank's half of a message."""

    communicator: tuple[Any, ...]
    members: frozenset[int]
    what: str
    peer: int | None = None
    """For a message: the rank at the other end."""
    is_send: bool = False
    label: Any = None
    """What the sender sends; in a simulation also what was received."""
    is_done: bool = False

    def restart(self) -> None:
        self.is_done = False
        self.label = self.label if self.is_send else None

    def wait(self) -> None:
        _CURRENT[-1].steps.append(Wait(self))

    def __str__(self) -> str:
        return f"{self.what} on {' '.join(map(str, self.communicator))}"


class Wait(NamedTuple):
    """The rank continues when the operation is done."""

    operation: Issued


class Use(NamedTuple):
    """A pass uses a received tensor as `label`."""

    operation: Issued
    label: Any


class _Group:
    """A process group as Megatron Core queries it; ranks are those of the world."""

    def __init__(self, name: tuple[Any, ...], ranks: Sequence[int], me: int) -> None:
        self.name, self.ranks, self._me = name, tuple(ranks), me

    def rank(self) -> int:
        return self.ranks.index(self._me)

    def size(self) -> int:
        return len(self.ranks)


class Rank:
    """One rank's program: what it issues, waits for and uses, in order."""

    def __init__(self, case: Case, stage: int, tensor: int, data: int) -> None:
        self.case, self.stage = case, stage
        self.steps: list[Issued | Wait | Use] = []
        self.me = self._number(stage, tensor, data)
        stages, tensors, replicas = range(case.num_stages), range(case.tensor_size), range(case.data_size)
        number = self._number
        world = [number(s, t, d) for s, t, d in itertools.product(stages, tensors, replicas)]
        self.groups = {
            "pp": self._group(("pp", tensor, data), [number(s, tensor, data) for s in stages]),
            "tp": self._group(("tp", stage, data), [number(stage, t, data) for t in tensors]),
            "dp": self._group(("dp", stage, tensor), [number(stage, tensor, d) for d in replicas]),
            "norm": self._group(("norm",), world),
            "embd": self._group(("embd", tensor, data), [number(s, tensor, data) for s in (0, case.num_stages - 1)]),
            "world": self._group(("world",), world),
        }
        self._known: dict[int, Issued] = {}
        self._labels: dict[int, Any] = {}
        self._alive: list[torch.Tensor] = []
        self._event = self._num_in_event = self.chunk = 0
        self._reduces, self._reduction = True, list[Issued]()

    def _number(self, stage: int, tensor: int, data: int) -> int:
        return (stage * self.case.data_size + data) * self.case.tensor_size + tensor

    def _group(self, name: tuple[Any, ...], ranks: Sequence[int]) -> _Group:
        return _Group(name, ranks, self.me)

    # requests to torch.distributed

    def message(self, is_send: bool, tensor: torch.Tensor, peer: int, group: Any) -> Issued:
        name = (*self._named(group).name, "pair", *sorted((peer, self.me)))
        label = self._labels.get(tensor.data_ptr()) if is_send else None
        what = f"{'send' if is_send else 'receive'} {label or ''} with {peer}"
        operation = Issued(name, frozenset((peer, self.me)), what, peer, is_send, label)
        self._alive.append(tensor)
        if not is_send:
            self._known[tensor.data_ptr()] = operation
            if tensor.numel() == 2:  # stages between the last and the first one send it again
                self._labels[tensor.data_ptr()] = ("loss", self._event)
        self.steps.append(operation)
        return operation

    def collective(self, what: str, group: Any, *, waits: bool = True) -> Issued | None:
        group = self._named(group)
        if group.size() == 1:
            return None
        operation = Issued(group.name, frozenset(group.ranks), what)
        self.steps.append(operation)
        if waits:
            self.steps.append(Wait(operation))
        return operation

    def _named(self, group: Any) -> _Group:
        return group if isinstance(group, _Group) else self.groups[group or "world"]

    # stubs of Megatron Core's passes

    def forward(self, *args: Any, current_microbatch: int, **others: Any) -> tuple[torch.Tensor, int]:
        shape, event, virtual = self.shape, self._event, self.chunk * self.case.num_stages + self.stage
        if shape.is_training and shape.is_one_way(virtual):  # run ahead with the next iteration
            event += self._num_in_event >= shape.num_microbatches - shape.done_ahead
        self._num_in_event += 1
        self._use(args[4], ("output", event, current_microbatch, virtual - 1))
        self._compute_collectives(2)
        return self._labelled(("output", event, current_microbatch, virtual)), 0

    def backward(self, received: Any, output: torch.Tensor, gradient: Any, *others: Any) -> torch.Tensor | None:
        *of, virtual = self._labels[output.data_ptr()][1:]
        self._use(gradient, ("gradient", *of, virtual + 1))
        self._compute_collectives(2)
        if self._reduces and self.case.overlaps_reduction and self._is_active:
            started = self.collective("gradients of a bucket", "dp", waits=False)
            self._reduction += [] if started is None else [started]
        return None if received is None else self._labelled(("gradient", *of, virtual))

    def _compute_collectives(self, number: int) -> None:
        for _ in range(number):
            self.collective("sum over tensor slices", "tp")

    def _use(self, tensor: torch.Tensor | None, label: Any) -> None:
        if tensor is not None:
            self.steps.append(Use(self._known[tensor.data_ptr()], label))

    def _labelled(self, label: Any) -> torch.Tensor:
        tensor = torch.zeros(1)
        self._alive.append(tensor)
        self._labels[tensor.data_ptr()] = label
        return tensor

    # a run

    @property
    def _is_active(self) -> bool:
        block = self.case.events[self._event].block
        return self.case.num_chunks > 1 or self.stage == block or self.stage > block and not self.case.frozen_suffix

    @contextlib.contextmanager
    def _no_sync(self) -> Iterator[None]:
        self._reduces = False
        yield
        self._reduces = True

    def _finalize(self, *args: Any, **others: Any) -> None:
        """Issue what Megatron Core's finalize_model_grads does: sums of gradients, sequence-parallel norms,
        embeddings."""
        for operation in self._reduction:
            operation.wait()
        if not self._reduction and self._is_active:
            self.collective("gradients", "dp")
        self._reduction.clear()
        if self._is_active:
            self.collective("gradients of norms", "tp")
        if self.case.events[self._event].block == 0 and self.stage in (0, self.case.num_stages - 1):
            self.collective("gradients of the embedding", "embd")

    def run(self) -> None:
        case = self.case
        config = SimpleNamespace(
            pipeline_dtype=torch.float32, timers=None, deallocate_pipeline_outputs=False,
            hidden_dropout=0.0, attention_dropout=0.0,
            calculate_per_token_loss=False, grad_sync_func=None, no_sync_func=self._no_sync,
            finalize_model_grads_func=self._finalize,
        )  # fmt: skip
        model = SimpleNamespace(config=config, parameters=lambda: (), host_layers=_HostLayers(self))
        blocks = self._partition()
        pipeline = PipelineSchedule(
            name="breadth-first" if case.is_breadth_first else "bcd",
            partition=blocks,
            run_ahead=case.run_ahead,
            head_passes=case.head_passes,
            chunks=virtual_chunks(blocks, 1) if case.is_breadth_first else (),
        )
        run_plan = pipeline.execute

        def noting_execute(shape: Any, *args: Any, **arguments: Any) -> Any:
            self.shape, self._num_in_event = shape, 0
            return run_plan(shape, *args, **arguments)

        pipeline.execute = noting_execute  # type: ignore[method-assign]
        arguments = {"model": model, "num_microbatches": case.num_microbatches, "forward_step_func": None,
                     "data_iterator": itertools.repeat(None), "seq_length": 1, "micro_batch_size": 1}  # fmt: skip
        for self._event, event in enumerate(case.events):
            if event.what == "train":
                self._train(pipeline, event, arguments)
            elif event.what == "evaluate":
                pipeline(**arguments)
                self.collective("losses", "pp")
            elif event.what == "fill":  # up to the first active layer
                num_stages, num_chunks = event.block + 1, 1
                if case.num_chunks > 1:
                    num_stages, num_chunks = case.num_stages, event.block
                pipeline.run_prefix_forward(num_stages=num_stages, num_chunks=num_chunks, **arguments)
                self.collective("errors of the fill", "world")
            else:
                self.collective("state of the run", "world")
                self.collective("checkpoint", "dp")

    def _partition(self) -> Any:
        case = self.case
        if case.partition is not None:
            return case.partition
        if case.num_chunks > 1 or case.is_breadth_first:
            num_layers, updates = case.num_chunks * case.num_stages, case.is_breadth_first
            return partition(num_layers=num_layers, num_stages=case.num_stages, num_parts=case.num_chunks, tied=True,
                             num_blocks=0 if updates else case.num_chunks, layout="interleaved",
                             has_inactive_updates=updates, always_active=frozenset({"norms"} if updates else ()),
                             )  # fmt: skip
        # one layer per stage, and a block of one layer or of all later ones; `phase_shape` needs these
        return SimpleNamespace(
            num_stages=case.num_stages,
            num_virtual_stages=case.num_stages,
            num_chunks=1,
            first_trainable_stage=lambda block: block,
            first_trainable_virtual_stage=lambda block: block,
            virtual_stage_active=lambda block, stage: stage == block or stage > block and not case.frozen_suffix,
            has_active_block=False,
            layers_updated_inactive=lambda block: range(block, block + 1 if case.frozen_suffix else case.num_stages),
            prefix_layers=range,
            chunk_layers=lambda stage, chunk: range(stage, stage + 1),
            head_active=lambda block: True,
        )

    def _train(self, pipeline: PipelineSchedule, event: Event, arguments: dict[str, Any]) -> None:
        events, number = self.case.events, self._event
        if number == 0 or events[number - 1] != event:
            pipeline.begin_phase(event.block, is_prefix_cached=event.is_served)
        is_followed = number + 1 < len(events) and events[number + 1] == event
        number_next = self.case.num_microbatches if is_followed else 0
        pipeline(step=_Step(self), num_microbatches_next=number_next, **arguments)  # type: ignore[arg-type]
        if self.stage == self.case.num_stages - 1:
            self.collective("losses of replicas", "dp")
        self.collective("losses and signals", "world")
        self.collective("norm of the gradient", "norm")
        if self._is_active:
            self.collective("parameters", "dp")


class _HostLayers:
    """Stub of `model.host_layers.HostLayers`."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def load(self, layers: range, *, with_state: bool) -> None:
        pass

    prefetch = load

    def finish_step(self) -> None:
        self._rank.collective("copies to host memory", "dp")


class _Step:
    """Stub of `optim.step.Step`."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def open(self, chunk: int) -> None:
        pass

    def reduce_loss(self, reported: list[Any]) -> torch.Tensor:
        self._rank.collective("losses of replicas", "dp")
        return self._rank._labelled(("loss", self._rank._event))

    def take_loss(self, loss: torch.Tensor) -> None:
        if loss.data_ptr() in self._rank._known:
            self._rank._use(loss, ("loss", self._rank._event))

    def update(self, chunk: int) -> None:
        for group in ("dp", "tp", "dp"):
            self._rank.collective(f"update of chunk {chunk}", group)


_CURRENT: list[Rank] = []


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """Record what schedule, links and Megatron Core's communicator request, for the rank in _CURRENT."""
    now = _CURRENT

    def groups() -> SimpleNamespace:
        communicators = now[-1].groups
        return SimpleNamespace(
            pp=communicators["pp"],
            tp=communicators["tp"],
            cp=_Group((), (now[-1].me,), now[-1].me),
            dp_cp=communicators["dp"],
        )

    stubs: list[tuple[Any, dict[str, Any]]] = [
        (torch.distributed, {
            "isend": lambda tensor, dst, group: now[-1].message(True, tensor, dst, group),
            "irecv": lambda tensor, src, group: now[-1].message(False, tensor, src, group),
            "all_reduce": lambda tensor, group=None: now[-1].collective("all-reduce", group),
            "get_global_rank": lambda group, rank: group.ranks[rank],
        }),
        (device, {"has_cuda": lambda: False}),
        (schedule, {
            "ProcessGroupCollection": SimpleNamespace(use_mpu_process_groups=lambda names: groups()),
            "get_model_config": lambda model: model.config,
        }),
        (breadth_first, {
            "select_chunk": lambda model, chunk: None,
            "sum_losses": lambda reported: _Step(now[-1]).reduce_loss(reported),
        }),
        (execute, {
            "select_chunk": lambda model, chunk: setattr(now[-1], "chunk", chunk),
            "forward_step": lambda *args, **others: now[-1].forward(*args, **others),
            "backward_step": lambda *args: now[-1].backward(*args),
            "get_tensor_shapes": lambda **others: [(1,)],
            "get_model_config": lambda model: model.config,
        }),
    ]  # fmt: skip
    with contextlib.ExitStack() as patches:
        for module, functions in stubs:
            for name, function in functions.items():
                patches.enter_context(mock.patch.object(module, name, function))
        yield


def record(case: Case) -> list[Rank]:
    """Return every rank's program."""
    ranks = []
    with _recording():
        for stage in range(case.num_stages):
            for data, tensor in itertools.product(range(case.data_size), range(case.tensor_size)):
                ranks.append(Rank(case, stage, tensor, data))
                _CURRENT.append(ranks[-1])
                try:
                    ranks[-1].run()
                finally:
                    _CURRENT.pop()
    return ranks


class _Running:
    """A rank's position in its program, and its queues."""

    def __init__(self, rank: Rank, *, one_queue: bool) -> None:
        self.rank, self._one_queue = rank, one_queue
        self.position = 0
        self.known: set[Any] = set()
        """Communicators that all their ranks have come to: a first contact waits for that."""
        self.queues: defaultdict[Any, deque[Issued]] = defaultdict(deque)
        self.unused: set[Issued] = set()
        """Receives that were not waited for."""

    @property
    def step(self) -> Any:
        return self.rank.steps[self.position] if self.position < len(self.rank.steps) else None

    def queue(self, communicator: Any) -> deque[Issued]:
        return self.queues[None if self._one_queue else communicator]

    def head(self, communicator: Any) -> Issued | None:
        queue = self.queue(communicator)
        return queue[0] if queue and queue[0].communicator == communicator else None

    def has_come_to(self, communicator: Any) -> bool:
        is_there = isinstance(self.step, Issued) and self.step.communicator == communicator
        return is_there or communicator in self.known

    def __str__(self) -> str:
        step = self.step
        waits_for = "nothing" if step is None else step if isinstance(step, Issued) else step.operation
        queued = "; ".join(str(operation) for queue in self.queues.values() for operation in queue)
        return f"rank {self.rank.me} waits at step {self.position} for {waits_for}; queued: {queued}"


def simulate(ranks: Sequence[Rank], *, one_queue: bool) -> None:
    """Run the programs against each other.

    Raises:
        OrderError: they hang, differ in their collectives, leave an operation over, or use a wrong message.
    """
    for operation in (step for rank in ranks for step in rank.steps if isinstance(step, Issued)):
        operation.restart()
    running = {rank.me: _Running(rank, one_queue=one_queue) for rank in ranks}
    is_moving = True
    while is_moving:
        is_moving = False
        for entry in running.values():
            is_moving |= _advance(entry, running)
            for queue in tuple(entry.queues.values()):
                while queue and _meet(queue[0], running):
                    is_moving = True
    if any(item.step is not None or any(item.queues.values()) for item in running.values()):
        raise OrderError("nothing moves any more:\n" + "\n".join(map(str, running.values())))
    for entry in running.values():
        for operation in entry.unused:
            raise OrderError(f"rank {entry.rank.me} never waited for {operation}")


def _advance(rank: _Running, running: dict[int, _Running]) -> bool:
    """Let the rank continue as far as it can; return True if it moved."""
    start = rank.position
    while (step := rank.step) is not None:
        if isinstance(step, Issued):
            if not all(running[member].has_come_to(step.communicator) for member in step.members):
                break
            rank.known.add(step.communicator)
            rank.queue(step.communicator).append(step)
            if step.peer is not None and not step.is_send:
                rank.unused.add(step)
        elif isinstance(step, Wait):
            if not step.operation.is_done:
                break
            rank.unused.discard(step.operation)
        elif step.operation.label != step.label:
            raise OrderError(f"rank {rank.rank.me} takes {step.operation.label} for {step.label}: {step.operation}")
        rank.position += 1
    return rank.position > start


def _meet(operation: Issued, running: dict[int, _Running]) -> bool:
    """Match the head of a queue with those of other ranks; return True if they are done."""
    heads = {rank: running[rank].head(operation.communicator) for rank in operation.members}
    if operation.peer is not None:
        other = heads[operation.peer]
        if other is None or other.is_send == operation.is_send:
            return False
        operation.label = other.label = operation.label if operation.is_send else other.label
    elif any(head is None for head in heads.values()):
        return False
    elif len({head.what for head in heads.values() if head is not None}) > 1:
        raise OrderError(f"ranks differ in the order of collectives: {', '.join(map(str, heads.values()))}")
    for rank, head in heads.items():
        assert head is not None
        head.is_done = True
        running[rank].queue(operation.communicator).popleft()
    return True
