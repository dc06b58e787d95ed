"""With EMU_LATE=1: check the order between streams, for which a GPU relies on the program.

- Non-blocking copies of page-locked memory happen as late as possible: when the host or a kernel waits for them. A host
that reads too early finds NaN; one that overwrites the source too early sends the new values. - Kernels (and such
copies) on two streams that use the same memory, with at least one writing, must be ordered by an event or by the host.
Memory must not be reused while a kernel of another stream may still use it (record_stream). Otherwise the next kernel
raises RuntimeError "[emulated] RACE".

Freed memory is filled with NaN, like fresh memory in streams.h. The vector clocks of torch's sanitizer store which
stream has waited for what; the sanitizer itself ignores the host and freed memory.
"""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass, field

import torch
from torch._utils import CallbackRegistry
from torch.cuda import _gpu_trace, _sanitizer

for _registry in vars(_gpu_trace).values():
    if isinstance(_registry, CallbackRegistry):
        _registry.callback_list.clear()  # of the sanitizer, which takes a stack trace of each allocation once imported


@dataclass
class _Memory:
    """Kernels since the last write: the number of the last one by stream."""

    home: int
    """The stream to which the allocator returns it."""
    num_bytes: int = 0
    writes: dict[int, int] = field(default_factory=dict)
    reads: dict[int, int] = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)


@dataclass
class _Copy:
    """A requested copy that has not happened yet."""

    stream: int
    number: int
    device_memory: int | None
    host_memory: range
    make: object

    def shares_host_memory(self, other):
        return max(self.host_memory.start, other.host_memory.start) < min(self.host_memory.stop, other.host_memory.stop)


_clocks = _sanitizer.StreamSynchronizations()
_number = 0
_memory: dict[int, _Memory] = {}
_freed: dict[int, _Memory] = {}
_copies: list[_Copy] = []
_in_arena: list[_Copy] = []
"""Copies to and from registered memory, also those that have happened, until others of the same memory follow them."""
_races: list[str] = []
_had_kernels: set[int] = set()


def current_stream():
    return torch.cuda.current_stream().cuda_stream


def _pointer(tensor):
    return tensor.untyped_storage().data_ptr()


def _unordered(stream, uses):
    """Return those of `kernels`, by stream, for which `stream` has not waited."""
    return {other: n for other, n in uses.items() if other != stream and not _clocks.is_ordered_after(stream, n, other)}


def _make(copies):
    for copy in copies:
        _copies.remove(copy)
        if copy.device_memory is not None:  # reads what copies to the host have written
            _make([each for each in _copies if each.device_memory is None and each.shares_host_memory(copy)])
        copy.make()
        copy.make = None  # it has references to tensors


def before_kernel(name, tensors, writes):
    """For the current stream, check the order of the memory that it uses, and perform copies that it waited for."""
    if not is_on():
        return
    global _number
    _number += 1
    stream, written_to = current_stream(), {_pointer(tensor) for tensor in writes}
    _had_kernels.add(stream)
    _clocks.update_seq_num(stream, _number)
    for tensor in (tensor for tensor in tensors if tensor.is_cuda):
        pointer = _pointer(tensor)
        memory = _memory.setdefault(pointer, _Memory(stream))
        memory.num_bytes = tensor.untyped_storage().nbytes()
        if _unordered(stream, memory.writes) or (pointer in written_to and _unordered(stream, memory.reads)):
            _races.append(f"aten::{name} uses memory of a kernel on another stream that it did not wait for")
        if pointer in written_to:
            memory.writes, memory.reads = {stream: _number}, {}
        else:
            memory.reads[stream] = _number
        _make([copy for copy in _copies if copy.device_memory == pointer])
    if _races:
        race, _races[:] = _races[0], []
        raise RuntimeError(f"[emulated] RACE: {race}")


def written(tensor):
    """Record a kernel's result in new memory."""
    if is_on() and tensor.numel():
        num_bytes = tensor.untyped_storage().nbytes()
        _memory[_pointer(tensor)] = _Memory(current_stream(), num_bytes, {current_stream(): _number})


def copy_later(to, source, to_view, source_view):
    """Delay a copy that `before_kernel` knows; return True if it is delayed."""
    if not is_on():
        return False
    host = source if to.is_cuda else to
    places = _pointer(to) if to.is_cuda else None, range(host.data_ptr(), host.data_ptr() + host.nbytes)
    if not to.is_cuda:
        source, to_view = source_view.clone(), to.detach()
        to_view.view(torch.uint8).fill_(0xFF) if to.is_contiguous() and to.dim() else to_view.fill_(-1)
    _copies.append(_Copy(current_stream(), _number, *places, lambda: to_view.copy_(source)))
    if not host.is_pinned():  # torch's allocator waits before it reuses the memory that it pins
        _check_arena(_copies[-1])
    return True


def _check_arena(copy):
    """Check that a copy follows those that share its host memory, if one of them writes. It replaces them."""
    for other in [each for each in _in_arena if each.shares_host_memory(copy)]:
        writes = other.device_memory is None or copy.device_memory is None
        if writes and _unordered(copy.stream, {other.stream: other.number}):
            _races.append("a copy uses host memory of a copy on another stream that it did not wait for")
        if writes or other.stream == copy.stream:
            _in_arena.remove(other)
    _in_arena.append(copy)


def _host_waits(note, *what):
    """Perform the copies for which the host waits; `note` records the wait in the clocks."""
    note(*what)
    done = _clocks.host_sync_state
    _make([copy for copy in _copies if copy.number <= done.get(copy.stream, -1)])


_host_waits_for_event = functools.partial(_host_waits, _clocks.all_streams_wait_for_event)
_host_waits_for_stream = functools.partial(_host_waits, _clocks.all_streams_wait_for_stream)


def host_waits():
    """Let the host wait for the current stream."""
    if is_on():
        _host_waits_for_stream(current_stream())


def _stream_waits_for_event(event, stream):
    _clocks.stream_wait_for_event(stream, event)
    done = _clocks.current_sync_states[stream]
    copies = [copy for copy in _copies if copy.stream != stream and copy.number <= done.get(copy.stream, -1)]
    # another process may read an arena behind a collective on this stream; NCCL's kernels are invisible here
    _make([copy for copy in copies if copy.device_memory is None and copy in _in_arena])
    if stream not in _had_kernels:  # NCCL's stream
        _make([copy for copy in copies if copy.device_memory is not None])


def _allocated(pointer):
    stream = current_stream()
    _memory[pointer] = _Memory(stream)
    for freed, memory in list(_freed.items()):
        if not _unordered(memory.home, memory.reads):
            del _freed[freed]
        elif memory.home == stream and freed <= pointer < freed + memory.num_bytes:
            _races.append("memory was freed, and is used again, before a kernel of another stream was done with it")


def _was_freed(pointer):
    memory = _memory.pop(pointer, None)
    if memory is None:
        return
    _make([copy for copy in _copies if copy.device_memory == pointer])
    uses = {stream: n for stream, n in (memory.writes | memory.reads).items() if stream not in memory.recorded}
    if uses := _unordered(memory.home, uses):
        _freed[pointer] = _Memory(memory.home, memory.num_bytes, reads=uses)
    elif torch.cuda.current_stream().query():
        ctypes.memset(pointer, 0xFF, memory.num_bytes)


@functools.cache
def is_on():
    """Return True if this process checks. From the first kernel on it listens to torch's streams, events and
    allocations."""
    if "EMU_LATE" not in os.environ:
        return False
    torch._C._activate_gpu_trace()
    _gpu_trace.register_callback_for_event_record(_clocks.record_state)
    _gpu_trace.register_callback_for_event_wait(_stream_waits_for_event)
    _gpu_trace.register_callback_for_event_synchronization(_host_waits_for_event)
    _gpu_trace.register_callback_for_stream_synchronization(_host_waits_for_stream)
    _gpu_trace.register_callback_for_device_synchronization(functools.partial(_host_waits, _clocks.sync_all_streams))
    _gpu_trace.register_callback_for_memory_allocation(_allocated)
    _gpu_trace.register_callback_for_memory_deallocation(_was_freed)
    record_stream, query = torch.Tensor.record_stream, torch.cuda.Event.query

    def recording(tensor, stream):
        _memory.setdefault(_pointer(tensor), _Memory(current_stream())).recorded.add(stream.cuda_stream)
        record_stream(tensor, stream)

    def querying(event):
        is_done = query(event)
        if is_done and event.cuda_event in _clocks.recorded_sync_states:
            _host_waits_for_event(event.cuda_event)
        return is_done

    torch.Tensor.record_stream, torch.cuda.Event.query = recording, querying
    return True
