"""The test backend "strict": gloo's messages under NCCL's ordering rules.

gloo tolerates what hangs or corrupts data under NCCL, because each of its operations has its own thread and slot. Here

- the operations of a communicator run one after the other, in the order in which they were issued; "strict-one-queue"
does so for all communicators of a rank, which is stricter than CUDA_DEVICE_MAX_CONNECTIONS=1; - messages outside a
batch use one communicator per pair of ranks, for both directions; a batch uses the group's, and all its messages start
together and end together; - the first operation of a communicator blocks its caller until all its ranks have reached
it; - the output of an operation is NaN from its issue until it was waited for; - the input of an operation must be
there and unchanged when it runs; - collectives must agree across ranks in kind, element type, sizes and root; - tags
other than 0 are rejected, and operations start late by random times.

An operation or a first contact that takes longer than `backends.hang_seconds()` ends the rank and prints the queues of
all ranks.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import os
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ProcessGroupGloo, TCPStore
from torch.multiprocessing.reductions import StorageWeakRef

from support import backends

_PAIR_TAG, _BATCH_TAG = 1, 2  # of gloo's messages: a pair's and its group's communicator are separate
_TEXT_BYTES = 256  # of a collective's description
_MAX_DELAY_SECONDS = 2e-3
_DELAYED_SHARE = 0.1
_NUMBERS = itertools.count()


class StrictError(RuntimeError):
    """A rule is broken, or no operation makes progress."""


@functools.cache
def register() -> None:
    """Register the backend "strict" with `init_process_group`, `new_group` and batches."""
    torch.distributed.Backend.register_backend("strict", _create, devices=["cpu"])
    original = torch.distributed.batch_isend_irecv

    def batch_isend_irecv(operations: list[Any]) -> list[Any]:
        group = operations[0].group
        if not isinstance(group, StrictGroup):
            return original(operations)
        with group.batch() as work:
            for operation in operations:
                operation.op(operation.tensor, operation.peer, operation.group, operation.tag)
        return work

    torch.distributed.batch_isend_irecv = batch_isend_irecv


def _create(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> ProcessGroup:
    return StrictGroup(store, rank, size, timeout)


def check_finished() -> None:
    """Collective. Check after a run that no queue has an operation left, and that every receive was waited for.

    Raises:
        StrictError: with the remaining operations.
    """
    process = _process()
    torch.distributed.barrier()
    for item in process.open_operations():
        process.block(item.done.is_set, f"is done, and has left behind {item}")
    left = [
        f"rank {process.rank} never waited for {operation}"
        for operation in process.open_operations()
        if operation.is_receive
    ]
    process.open.clear()
    if left:
        raise StrictError("; ".join(left))


class _Input:
    """The input of an operation: its value when issued, and a check that it stays unchanged."""

    def __init__(self, tensor: Tensor) -> None:
        tensor = tensor.detach()
        self.value = tensor.clone(memory_format=torch.contiguous_format)
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._geometry = (tensor.storage_offset(), tensor.size(), tensor.stride())
        self._expected = self.value

    def expect_present(self) -> None:
        """Expect the current value, after outputs that share its memory were set to NaN."""
        live = self._live()
        assert live is not None
        self._expected = live.clone(memory_format=torch.contiguous_format)

    def check(self, what: str) -> None:
        live = self._live()
        if live is None:
            raise StrictError(f"{what}: its buffer was freed before its turn came")
        if not _same_bits(live, self._expected):
            raise StrictError(f"{what}: its buffer was changed before its turn came")

    def _live(self) -> Tensor | None:
        if self._storage.expired():
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None or storage.nbytes() == 0 < self.value.nbytes:
            return None
        offset, size, stride = self._geometry
        return torch.empty(0, dtype=self.value.dtype).set_(storage, offset, size, stride)


class _Output:
    """The output of an operation: NaN until it was waited for."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self.value = torch.empty_like(self._tensor, memory_format=torch.contiguous_format)
        self._tensor.fill_(_poison(tensor.dtype))
        self._poisoned = self._tensor.clone()

    def deliver(self, what: str) -> None:
        if not _same_bits(self._tensor, self._poisoned):
            raise StrictError(f"{what}: what it writes was changed before it was waited for")
        self._tensor.copy_(self.value)


def _poison(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max


def _same_bits(left: Tensor, right: Tensor) -> bool:
    def bits(tensor: Tensor) -> Tensor:
        return tensor.contiguous().view(-1).view(torch.uint8)

    return left.numel() == 0 or torch.equal(bits(left), bits(right))


def _nothing() -> None: ...


class Operation:
    """One operation of a communicator; replaces torch's Work."""

    def __init__(
        self, what: str, inputs: Sequence[_Input], outputs: Sequence[_Output], run: Callable[[], None], is_receive: bool
    ) -> None:
        self.what, self.is_receive = what, is_receive
        self.done = threading.Event()
        self._inputs, self._outputs, self._run = inputs, outputs, run
        self._is_delivered = False

    def __str__(self) -> str:
        return self.what

    def execute(self) -> None:
        for item in self._inputs:
            item.check(self.what)
        self._run()

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self, timeout: Any = None) -> bool:
        process = _process()
        process.block(self.done.is_set, f"waits for {self.what}")
        process.raise_failure()
        if not self._is_delivered:
            self._is_delivered = True
            process.open.pop(id(self), None)
            for output in self._outputs:
                output.deliver(self.what)
            self._inputs, self._outputs, self._run = (), (), _nothing  # free copies that are no longer needed
        return True

    synchronize = wait


class _Queue:
    """Operations in the order of their issue, and the thread that runs them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._waiting: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._unfinished: deque[Operation] = deque()
        self._thread: threading.Thread | None = None

    def put(self, operation: Operation) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, daemon=True)
            self._thread.start()
        self._unfinished.append(operation)
        self._waiting.put(operation)

    def close(self) -> None:
        self._waiting.put(None)

    def describe(self) -> str | None:
        operations = [str(item) for item in tuple(self._unfinished)]
        return f"  {self.name}: {'; then '.join(operations)}" if operations else None

    def _serve(self) -> None:
        torch.set_num_threads(1)
        process = _process()
        while (operation := self._waiting.get()) is not None:
            process.delay()
            try:
                operation.execute()
            except BaseException as error:
                process.failure = process.failure or error
                return
            self._unfinished.popleft()
            done, operation = (
                operation.done,
                None,
            )  # otherwise this thread would keep its tensors until the next operation
            done.set()


class _Process:
    """State that this rank's groups share: queues, the first failure, and other ranks' reports of a hang."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.failure: BaseException | None = None
        self.open: dict[int, Operation] = {}
        self._queues: dict[str, _Queue] = {}
        self._random = random.Random(self.rank)
        self._state = "computes"
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store = TCPStore(
            *address, is_master=False, wait_for_workers=False
        )  # a separate store, because a store blocks its users
        threading.Thread(target=self._watch, args=(TCPStore(*address, is_master=False),), daemon=True).start()

    def queue(self, name: str) -> _Queue:
        name = "all communicators" if backends.chosen() == "strict-one-queue" else name
        return self._queues.setdefault(name, _Queue(name))

    def close(self, name: str) -> None:
        if name in self._queues:
            self._queues.pop(name).close()

    def open_operations(self) -> list[Operation]:
        return list(self.open.values())

    def delay(self) -> None:
        if self._random.random() < _DELAYED_SHARE:
            time.sleep(self._random.random() * _MAX_DELAY_SECONDS)

    def raise_failure(self) -> None:
        if self.failure is not None:
            self._tell_others()
            raise StrictError(f"rank {self.rank}: {self.failure}\n{self.describe()}") from self.failure

    def block(self, is_over: Callable[[], bool], state: str) -> None:
        """Return when `is_over`. Raise on a failure, or with all queues if it takes too long on any rank."""
        started, pause = time.monotonic(), 2e-5
        self._state = state
        while not is_over():
            self.raise_failure()
            time.sleep(pause)
            pause = min(2 * pause, 2e-3)
            waited = time.monotonic() - started
            if waited > backends.hang_seconds() or (waited > 1 and self._store.check(["strict/hang"])):
                self._raise_hang()
        self._state = "computes"

    def describe(self) -> str:
        queues = [line for item in tuple(self._queues.values()) if (line := item.describe())]
        state = self._state if self.failure is None else f"{self._state}; {self.failure}"
        return "\n".join([f"rank {self.rank} {state}", *(queues or ["  nothing is queued"])])

    def _raise_hang(self) -> None:
        self._tell_others()
        keys = [f"strict/queues/{rank}" for rank in range(self.size)]
        with contextlib.suppress(torch.distributed.DistStoreError):
            self._store.wait(keys, datetime.timedelta(seconds=3))
        reports = [self._store.get(key).decode() for key in keys if self._store.check([key])]
        raise StrictError("nothing moves any more; the queues of all ranks:\n" + "\n".join(reports))

    def _tell_others(self) -> None:
        self._store.set(f"strict/queues/{self.rank}", self.describe())
        self._store.set("strict/hang", "")

    def _watch(self, store: TCPStore) -> None:
        """Report this rank's queues when another rank hangs, even while this one computes."""
        with contextlib.suppress(torch.distributed.DistError):  # the world's store ends before its ranks
            while not store.check(["strict/hang"]):
                time.sleep(0.5)
            store.set(f"strict/queues/{self.rank}", self.describe())


@functools.cache
def _process() -> _Process:
    return _Process()


class _Communicator:
    """The ranks of a group, or two of them. Its first operation blocks until all of them have one."""

    def __init__(self, name: str, store: Any, num_ranks: int) -> None:
        self.name = name
        self._store, self._num_ranks = store, num_ranks
        self._is_known = num_ranks == 1

    def issue(self, operation: Operation) -> Operation:
        process = _process()
        process.raise_failure()
        if not self._is_known:
            self._store.add("arrived", 1)
            process.block(self._all_have_come, f"is in the first contact of {self.name}, with {operation}")
            self._is_known = True
        process.open[id(operation)] = operation
        process.queue(self.name).put(operation)
        return operation

    def _all_have_come(self) -> bool:
        return self._store.add("arrived", 0) >= self._num_ranks


class StrictGroup(ProcessGroup):
    """A process group whose operations follow the rules above; gloo transports them."""

    def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = ProcessGroup(store, rank, size)
        self._gloo._set_default_backend(ProcessGroup.BackendType.GLOO)
        backend = ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._gloo._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
        self._store, self._rank, self._size = store, rank, size
        self._number = next(_NUMBERS)
        self._communicators: dict[str, _Communicator] = {}
        self._batch: list[tuple[str, Any]] | None = None

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _set_group_name(self, name: str) -> None:
        super()._set_group_name(name)
        self._name = name

    @property
    def group_name(self) -> str:  # torch asks for it when the backends are gone
        return self._name

    def getBackendName(self) -> str:
        return "strict"

    def shutdown(self) -> None:
        for communicator in self._communicators.values():
            _process().close(communicator.name)

    def _communicator(self, peer: int | None = None) -> _Communicator:
        """Return the communicator of the group, or of this rank and `peer`."""
        name = f"group {self._number} ({self.group_desc}, {self._size} ranks)"
        if peer is not None:
            name += f", ranks {min(peer, self._rank)} and {max(peer, self._rank)} of it"
        if name not in self._communicators:
            # ranks number their groups differently
            key = "group" if peer is None else f"{min(peer, self._rank)}-{max(peer, self._rank)}"
            store = torch.distributed.PrefixStore(f"communicator {key}", self._store)
            self._communicators[name] = _Communicator(name, store, self._size if peer is None else 2)
        return self._communicators[name]

    # messages between two ranks

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Operation:
        _check_tag(tag)
        value = _Input(tensors[0])

        def start(tag: int) -> Any:
            value.check(what)
            return self._gloo.send([value.value], peer, tag)

        what = f"send {_describe(tensors)} to rank {peer}"
        return self._message(what, peer, [value], [], start)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Operation:
        _check_tag(tag)
        output = _Output(tensors[0])
        what = f"receive {_describe(tensors)} from rank {peer}"
        return self._message(what, peer, [], [output], lambda tag: self._gloo.recv([output.value], peer, tag))

    def _message(self, what: str, peer: int, inputs: list[_Input], outputs: list[_Output], start: Any) -> Any:
        if self._batch is not None:
            self._batch.append((what, (inputs, outputs, start)))
            return None
        operation = Operation(what, inputs, outputs, lambda: start(_PAIR_TAG).wait(), bool(outputs))
        return self._communicator(peer).issue(operation)

    @contextlib.contextmanager
    def batch(self) -> Iterator[list[Operation]]:
        """Combine the messages inside into one operation of the group's communicator."""
        assert self._batch is None
        self._batch, work = [], []
        try:
            yield work
            messages = self._batch
        finally:
            self._batch = None

        def run() -> None:
            for element in [start(_BATCH_TAG) for _, (_, _, start) in messages]:
                element.wait()

        inputs = [item for _, (some, _, _) in messages for item in some]
        outputs = [entry for _, (_, some, _) in messages for entry in some]
        what = f"batch of {', '.join(what for what, _ in messages)}"
        work.append(self._communicator().issue(Operation(what, inputs, outputs, run, bool(outputs))))

    # collectives: `call` gets the copies of inputs and outputs

    def _collective(self, what: str, read: Sequence[Tensor], written: Sequence[Tensor], call: Any) -> Operation:
        assert self._batch is None, "a collective inside a batch of messages"
        inputs = [_Input(tensor) for tensor in read]
        outputs = [_Output(tensor) for tensor in written]
        for entry in inputs:
            entry.expect_present()

        def run() -> None:
            self._compare(what)
            call([item.value for item in inputs], [output.value for output in outputs]).wait()

        return self._communicator().issue(Operation(what, inputs, outputs, run, False))

    def _in_place(self, what: str, tensors: Sequence[Tensor], call: Any) -> Operation:
        def with_copies(values: list[Tensor], outputs: list[Tensor]) -> Any:
            for output, value in zip(outputs, values, strict=True):
                output.copy_(value)
            return call(outputs)

        return self._collective(f"{what} of {_describe(tensors)}", tensors, tensors, with_copies)

    def _compare(self, what: str) -> None:
        if self._size == 1:
            return
        mine = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
        text = what.encode()[:_TEXT_BYTES]
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        ranks = [torch.empty_like(mine) for _ in range(self._size)]
        self._gloo.allgather([ranks], [mine]).wait()
        seen = [bytes(rank.tolist()).rstrip(b"\0").decode() for rank in ranks]
        if len(set(seen)) > 1:
            lines = "; ".join(f"rank {rank} of the group: {item}" for rank, item in enumerate(seen))
            raise StrictError(f"ranks differ in the order of collectives: {lines}")

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Operation:
        return self._in_place(
            f"all-reduce ({opts.reduceOp.op.name})", tensors, lambda outputs: self._gloo.allreduce(outputs, opts)
        )

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Operation:
        return self._in_place(
            f"all-reduce ({opts.reduceOp.op.name})",
            tensors,
            lambda outputs: self._gloo.allreduce_coalesced(outputs, opts),
        )

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Operation:
        return self._in_place(
            f"broadcast from {opts.rootRank}", tensors, lambda outputs: self._gloo.broadcast(outputs, opts)
        )

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Operation:
        what = f"reduce ({opts.reduceOp.op.name}) to {opts.rootRank}"
        return self._in_place(what, tensors, lambda outputs: self._gloo.reduce(outputs, opts))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Operation:
        what = f"all-gather of {_describe(inputs)}"
        return self._collective(what, inputs, outputs[0], lambda i, o: self._gloo.allgather([o], i, opts))

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Operation:
        what = f"gather of {_describe(inputs)} on {opts.rootRank}"
        written = outputs[0] if outputs else []
        return self._collective(what, inputs, written, lambda i, o: self._gloo.gather([o] if outputs else [], i, opts))

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Operation:
        what = f"scatter of {_describe(outputs)} from {opts.rootRank}"
        read = inputs[0] if inputs else []
        return self._collective(what, read, outputs, lambda i, o: self._gloo.scatter(o, [i] if inputs else [], opts))

    def all_gather_single(self, output: Tensor, value: Tensor, opts: Any = None) -> Operation:
        return self.all_gather_single_coalesced([output], [value], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Operation:
        what = f"all-gather of {_describe(inputs)}"
        return self._collective(what, inputs, outputs, lambda i, o: self._gloo.all_gather_single_coalesced(o, i))

    def reduce_scatter_single(self, output: Tensor, value: Tensor, opts: Any = None) -> Operation:
        return self.reduce_scatter_single_coalesced([output], [value], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Operation:
        what = f"reduce-scatter ({opts.reduceOp.op.name}) of {_describe(inputs)}"
        return self._collective(
            what, inputs, outputs, lambda i, o: self._gloo.reduce_scatter_single_coalesced(o, i, opts)
        )

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Operation:
        return self._collective("all-to-all", inputs, outputs, lambda i, o: self._gloo.alltoall(o, i, opts))

    def barrier(self, opts: Any = None) -> Operation:
        return self._collective("barrier", [], [], lambda i, o: self._gloo.barrier(opts))


def _check_tag(tag: int) -> None:
    if tag:
        raise StrictError(f"tag {tag}: NCCL's messages have none")


def _describe(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for tensor in tensors[:8])
