"""Inactive layers in host memory, copied to the device when they compute (--bcd-layers-on host).

The layers of a stage are stored in one arena of page-locked host memory, each as one flat chunk. The schedule
(--bcd-schedule breadth-first) loads chunks of consecutive layers to device buffers on a separate CUDA stream, with the
state of the matrices that the phase updates, and has these written back. See docs/layers_on_host.md.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    VocabParallelEmbedding,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.bcd.runtime import collectives, device, host_memory, memory

_ALIGNMENT = 128
"""In elements. Kernels read vectors, and Transformer Engine requires matrices at multiples of 256 bytes."""
LOW_BITS, GRADIENT = "low_bits", "gradient"
"""Kinds of state with separate rules: the bits that 16-bit weights lack of their fp32 values, and a gradient that
waits for the norm of all gradients."""
State = dict[str, torch.Tensor]
"""State of a parameter by kind, in the parameter's shape if it has as many elements."""


class _Layer:
    """The streamed parameters of one layer, and their positions in a flat tensor."""

    def __init__(self, number: int, parameters: list[torch.nn.Parameter]) -> None:
        self.number, self.parameters = number, parameters
        self.size = 0
        """Number of elements in the layer's flat tensor."""
        self._starts = []
        for parameter in parameters:
            self._starts.append(self.size)
            self.size += _aligned(parameter.numel())
        self.on_host: torch.Tensor
        """The layer's flat tensor in the arena. Set by `HostLayers.add`."""
        self.is_streamed = True
        """False while the layer is active."""
        self.state: dict[torch.nn.Parameter, torch.Tensor] = {}
        """The bytes of each parameter's state in the arena. A gradient comes last."""
        self.updated: list[torch.nn.Parameter] = []
        """Streamed parameters that this phase steps."""
        self.owned: list[torch.nn.Parameter] = []
        """Those whose state this rank loads and writes back."""
        self.kept: device.Copied = None
        """The last copy of a gradient to the arena."""

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters' parts of a flat tensor."""
        return [
            flat[start : start + parameter.numel()].view(parameter.shape)
            for start, parameter in zip(self._starts, self.parameters, strict=True)
        ]

    def state_parts(self, flat: torch.Tensor) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Return the parts of a buffer's state, one behind the other, of the parameters in `owned`."""
        sizes = [self.state[parameter].numel() for parameter in self.owned]
        return dict(zip(self.owned, flat[: sum(sizes)].split(sizes), strict=True))

    def place(self, flat: torch.Tensor) -> None:
        """Point the parameters to the parts of `flat`, which holds their values.

        A graph saves parameters, not their storage, so the storage may change between forward and backward.
        """
        for parameter, view in zip(self.parameters, self.views(flat), strict=True):
            parameter.data = view


class _Buffer:
    """Device memory for one layer at a time, and for the state of the parameters that this rank owns."""

    def __init__(self, size: int, dtype: torch.dtype, state_bytes: int) -> None:
        self.flat = torch.empty(size, dtype=dtype, device=device.current())
        self.state = torch.empty(state_bytes, dtype=torch.uint8, device=device.current())
        self.layer: _Layer | None = None
        self.has_state = False
        """Whether `state` has that of `layer`, or will after `copied`."""
        self.copied: device.Copied = None
        """The last copy to this buffer, until later kernels wait for it."""
        self.written: device.Copied = None
        """The last write-back, which reads this buffer. The next copy to the buffer waits for it, and so does the next
        update of a layer that stays here. A layer is copied again only after another has replaced it, so this copy does
        not read unfinished host memory either."""
        self.last_use = 0


class HostLayers:
    """The streamed layers of one pipeline stage, in the order of `add`, and on the first stage the embedding.

    Args:
        num_layers: number of calls of `add` to come.
        embedding_size: number of elements that `add_embedding` will get; 0 if it is not called.
        num_buffers: number of layers that the device has memory for, at least three chunks of the schedule.
        dtype: dtype of the weights.
        state: kinds of state of each streamed parameter: dtype, and number of elements that share an entry.
        is_streamed: returns whether a parameter is streamed, given its name within a layer and itself.
        group: the ranks with the same weights, except experts. Those on one node share an arena.
        part: which part of the experts this rank has. Ranks with different parts have an arena each.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        embedding_size: int,
        num_buffers: int,
        dtype: torch.dtype,
        state: Mapping[str, tuple[torch.dtype, int]],
        is_streamed: Callable[[str, torch.nn.Parameter], bool],
        group: torch.distributed.ProcessGroup,
        part: tuple[int, ...] = (),
    ) -> None:
        self.places: dict[torch.nn.Parameter, State] = {}
        """Tensors in the arena, behind the layer's weights: for what `BlockStateStore` offloads or `MatrixOptimizer`
        steps."""
        self._num_layers, self._embedding_size, self._num_buffers = num_layers, embedding_size, num_buffers
        self._arena_bytes, self._used_bytes = 0, 0
        self._dtype, self._kinds = dtype, state
        self._is_streamed, self._group, self._part = is_streamed, group, part
        self._arena: host_memory.SharedMemory
        self._layers: list[_Layer] = []
        self._embedding: torch.nn.Parameter | None = None
        self._buffers: list[_Buffer] = []
        self._stream, self._back = device.CopyStream(), device.CopyStream()
        """To the device, and back: a write-back delays no load."""
        self.owned: Container[torch.nn.Parameter] = ()
        """Parameters whose state this rank loads and writes back if a phase steps them. Set before `begin_phase`."""
        self._loaded: set[int] = set()
        """Layers of the last `load`."""
        self._states: dict[torch.nn.Parameter, State] = {}
        """State on the device that the last `load` loaded."""
        self._written: device.Copied = None
        """The last write-back of this rank."""
        self._unfinished: set[int] = set()
        """Layers written back since the last `finish_step`."""
        self._clock = itertools.count(1)

    # --- construction

    def expect(self, modules: Sequence[torch.nn.Module]) -> None:
        """Prepare for calls of `add` with these layers, which may differ in size. By default they are equal."""
        self._arena_bytes = sum(sum(self._sizes(self._layer(each))) for each in modules)

    def _layer(self, module: Any) -> _Layer:
        named = [parameter for name, parameter in module.named_parameters() if self._is_streamed(name, parameter)]
        return _Layer(len(self._layers), named)

    def _sizes(self, layer: _Layer) -> list[int]:
        """Return the bytes of a layer in the arena: those of its weights, and of the state of each parameter."""
        state = [sum(self._state_sizes(each).values()) for each in layer.parameters]
        return [layer.size * self._dtype.itemsize, *state]

    @torch.no_grad()
    def add(self, module: torch.nn.Module) -> None:
        """Move a new layer's weights to the arena. For the first layer, a collective over all ranks."""
        layer = self._layer(module)
        sizes, named = self._sizes(layer), layer.parameters
        if not self._layers:
            total = self._arena_bytes or sum(sizes) * self._num_layers
            total += self._embedding_size * self._dtype.itemsize
            self._arena = host_memory.allocate(total, group=self._group, part=self._part, what="--bcd-layers-on host")
        weights, *state = self._arena.data[self._used_bytes :][: sum(sizes)].split(sizes)
        self._used_bytes += sum(sizes)
        layer.on_host = weights.view(self._dtype)
        layer.state = dict(zip(named, state, strict=True))
        self.places |= {parameter: self._views(parameter, part) for parameter, part in layer.state.items()}
        if self._arena.is_owner:
            self._write(layer)
        layer.place(layer.on_host)
        self._layers.append(layer)

    def _state_sizes(self, parameter: torch.nn.Parameter) -> dict[str, int]:
        """Return the bytes of each kind of a parameter's state."""
        size = parameter.numel()
        return {kind: _aligned(-(-size // shared)) * each.itemsize for kind, (each, shared) in self._kinds.items()}

    def _views(self, parameter: torch.nn.Parameter, flat: torch.Tensor) -> State:
        """Return a parameter's state by kind, given its bytes."""
        sizes, views = self._state_sizes(parameter), State()
        for (kind, (dtype, shared)), part in zip(self._kinds.items(), flat.split([*sizes.values()]), strict=True):
            entries = part.view(dtype)[: -(-parameter.numel() // shared)]
            views[kind] = entries.view(parameter.shape) if shared == 1 else entries
        return views

    @torch.no_grad()
    def add_embedding(self, module: torch.nn.Module) -> None:
        """Move an embedding that no phase trains to the arena, behind all layers."""
        weight: Any = module.weight
        on_host = self._arena.data[-weight.nbytes :].view(self._dtype).view(weight.shape)
        if self._arena.is_owner:
            on_host.copy_(weight)
        weight.data = on_host
        self._embedding = weight
        if isinstance(module, VocabParallelEmbedding):
            module.__class__ = EmbeddingOnHost

    def move_rest(self, model: torch.nn.Module) -> None:
        """Move to the device all weights that `add` and `add_embedding` have not moved to the arena."""
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            if not self.is_on_host(tensor):
                tensor.data = tensor.data.to(device.current())

    @property
    def is_used(self) -> bool:
        """Whether any layers are in host memory."""
        return bool(self._layers)

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is currently in the arena."""
        return self.is_used and _storage(tensor) == _storage(self._arena.data)

    # --- phases

    @torch.no_grad()
    def begin_phase(self, active: Container[torch.nn.Parameter], updated: Iterable[torch.nn.Parameter] = ()) -> None:
        """Collective over the group. Load the layers with an `active` parameter.

        The phase steps streamed parameters in `updated`, which are written back.
        It starts with a barrier, because ranks on a node read what others have written to their arena.
        """
        if not self.is_used:
            return
        collectives.gather_objects(None, self._group)
        updated = set(updated)
        for layer in self._layers:
            layer.is_streamed = not any(parameter in active for parameter in layer.parameters)
            layer.updated = [each for each in layer.parameters if each in updated] if layer.is_streamed else []
            layer.owned = [each for each in layer.updated if each in self.owned and self._kinds]
            if layer.is_streamed:
                layer.place(layer.on_host)
                continue
            for parameter in layer.parameters:
                parameter.data = parameter.data.to(device.current(), copy=True)

    @torch.no_grad()
    def end_phase(self) -> None:
        """Write the active layers back to the arena, and free their device memory."""
        if not self.is_used:
            return
        self.leave_buffers()
        for layer in self._layers:
            if not layer.is_streamed:
                if self._arena.is_owner:
                    self._write(layer)
                layer.place(layer.on_host)
                layer.is_streamed = True

    def leave_buffers(self) -> None:
        """Wait for all copies, of all ranks after `finish_step`, and point all streamed parameters to the arena.

        Their weights may then be changed there, by all ranks alike, because no buffer is used again.
        """
        if not self._buffers:
            return
        device.synchronize()  # until nothing reads the buffers any more
        self._loaded, self._states = set(), {}
        for buffer in self._buffers:
            if buffer.layer is not None:
                buffer.layer.place(buffer.layer.on_host)
            buffer.layer = buffer.copied = buffer.written = None

    def streamed_parameters(self) -> set[torch.nn.Parameter]:
        """Return the parameters that are in host memory in this phase."""
        parameters = {parameter for layer in self._layers if layer.is_streamed for parameter in layer.parameters}
        return parameters if self._embedding is None else parameters | {self._embedding}

    @property
    def are_updated(self) -> bool:
        """Whether this phase steps layers in host memory, so that each step changes the arena."""
        return any(layer.updated for layer in self._layers)

    def device_tensors(self) -> Iterator[torch.Tensor]:
        for buffer in self._buffers:
            yield from (buffer.flat, buffer.state)

    @property
    def is_shared_by_all(self) -> bool:
        """Whether all ranks of the group share one arena."""
        return self.is_used and self._arena.has_whole_group

    def bytes_on_host(self) -> int:
        """Return the bytes of the weights in the arena, or 0 if another rank owns it."""
        weights = [layer.on_host for layer in self._layers]
        weights += [] if self._embedding is None else [self._embedding]
        return sum(tensor.nbytes for tensor in weights) if self.is_used and self._arena.is_owner else 0

    # --- steps: the schedule says when

    @torch.no_grad()
    def load(self, layers: Sequence[int], *, with_state: bool = False) -> None:
        """Make the weights of these layers available to later kernels of the current stream, until the next `load`.

        With state, also that of the parameters that this phase steps and this rank owns (`state`).
        """
        self._loaded, self._states = set(layers), {}
        self.prefetch(layers, with_state=with_state)
        for layer in self._streamed(layers):
            buffer = self._find_buffer(layer)
            assert buffer is not None, "there are buffers for three chunks"
            self._stream.wait(buffer.copied)
            buffer.copied = None
            if with_state:  # an update follows
                self._back.wait(buffer.written)
            layer.place(buffer.flat)
            for parameter, part in layer.state_parts(buffer.state).items() if with_state else ():
                self._states[parameter] = self._views(parameter, part)

    @torch.no_grad()
    def prefetch(self, layers: Sequence[int], *, with_state: bool = False) -> None:
        """Start to copy layers that `load` will need, if there are buffers that no layer of the last `load` uses.

        The copies wait for the kernels launched so far, so call it before those of the loaded layers.
        """
        for layer in self._streamed(layers):
            buffer = self._find_buffer(layer) or self._fill_buffer(layer, kept=self._loaded.union(layers))
            if buffer is None:
                continue
            buffer.last_use = next(self._clock)
            if with_state and not buffer.has_state:
                buffer.has_state = True
                for parameter, part in layer.state_parts(buffer.state).items():
                    self._copy(layer, layer.state[parameter], to=part, buffer=buffer)

    def saved_by_graphs(self, pack_other: Callable[..., Any] | None = None) -> contextlib.AbstractContextManager[Any]:
        """Return a context whose graphs read the weights of the last `load` where they are in the backward pass.

        Between, the buffers have the weights of other layers. Of other tensors, graphs save what `pack_other` returns:
        the tensor, or a function that returns it.
        """
        layers = self._streamed([*self._loaded])
        starts = {each.data_ptr(): each for layer in layers for each in layer.parameters}
        buffers = {_storage(buffer.flat) for buffer in self._buffers}

        def pack(tensor: torch.Tensor) -> Any:
            if _storage(tensor) not in buffers:
                return tensor if pack_other is None else pack_other(tensor)
            start = max(start for start in starts if start <= tensor.data_ptr())
            offset = (tensor.data_ptr() - start) // tensor.element_size()
            return functools.partial(view, starts[start], tensor.size(), tensor.stride(), offset)

        def view(parameter: torch.Tensor, size: torch.Size, stride: tuple[int, ...], offset: int) -> torch.Tensor:
            if size == parameter.size() and stride == parameter.stride():
                return parameter
            return parameter.detach().as_strided(size, stride, parameter.storage_offset() + offset)

        if not starts and pack_other is None:
            return contextlib.nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved() if callable(saved) else saved)

    def state(self, parameter: torch.nn.Parameter) -> State:
        """Return the parameter's state, on the device after `load` with state if this rank owns it."""
        return self._states.get(parameter) or self.places.get(parameter, {})

    @torch.no_grad()
    def write_back(self, layers: Sequence[int]) -> None:
        """Start to copy the updated weights and state of the last `load` to host memory.

        The rank that allocated the arena writes the weights. It has them after all ranks have computed with the old
        ones, because it needs their gradients. So no rank still loads what it overwrites.
        """
        for layer in self._streamed(layers):
            if not layer.updated:
                continue
            buffer = self._find_buffer(layer)
            assert buffer is not None and layer.number in self._loaded, "load() comes first"
            self._unfinished.add(layer.number)
            if self._arena.is_owner:
                buffer.written = self._back.copy(buffer.flat[: layer.size], to=layer.on_host)
            for parameter, part in layer.state_parts(buffer.state).items():
                assert parameter in self._states, "load() with state comes first"
                size = part.numel() - self._state_sizes(parameter).get(GRADIENT, 0)
                buffer.written = self._back.copy(part[:size], to=layer.state[parameter][:size])
            buffer.has_state &= GRADIENT not in self._kinds  # the next step has another gradient
            self._written = buffer.written or self._written

    @torch.no_grad()
    def keep_gradient(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """Start to copy a gradient that this rank owns to host memory, for a later `load` with state."""
        [layer] = [self._layers[number] for number in self._loaded if parameter in self._layers[number].state]
        layer.kept = self._back.copy(gradient, to=self.places[parameter][GRADIENT])

    @torch.no_grad()
    def finish_step(self) -> None:
        """Collective over the group. Order later loads behind the write-backs of all ranks. The CPU does not wait.

        A load waits for this rank's write-back of its layer anyway.
        """
        if self._unfinished and self._group.size() > 1:
            self._back.wait(self._written)
            torch.distributed.all_reduce(torch.zeros(1, device=device.current()), group=self._group)
        self._unfinished = set()

    def _streamed(self, layers: Sequence[int]) -> list[_Layer]:
        return [self._layers[number] for number in layers if self.is_used and self._layers[number].is_streamed]

    def _fill_buffer(self, layer: _Layer, *, kept: Container[int]) -> _Buffer | None:
        """Start to copy a layer into the least recently used buffer without a layer in `kept`; None if there is none.

        Passes go up and down, so the layers at the turns are still in buffers.
        """
        if not self._buffers:
            states = (
                (part.numel() * (each in self.owned) for each, part in layer.state.items()) for layer in self._layers
            )
            state_bytes = max(map(sum, states))
            size = max(each.size for each in self._layers)
            number = min(self._num_buffers, len(self._layers))
            self._buffers = [_Buffer(size, self._dtype, state_bytes) for _ in range(number)]
        free = [buffer for buffer in self._buffers if buffer.layer is None or buffer.layer.number not in kept]
        if not free:
            return None
        buffer = min(free, key=lambda buffer: buffer.last_use)
        if buffer.layer is not None:
            buffer.layer.place(buffer.layer.on_host)
        buffer.layer, buffer.has_state = layer, False
        self._copy(layer, layer.on_host, to=buffer.flat[: layer.size], buffer=buffer)
        return buffer

    def _copy(self, layer: _Layer, source: torch.Tensor, *, to: torch.Tensor, buffer: _Buffer) -> None:
        """Start to copy a part of a layer to a buffer as soon as nothing reads the buffer any more."""
        assert layer.number not in self._unfinished or self._group.size() == 1, "finish_step() comes first"
        buffer.copied = self._stream.copy(source, to=to, after=(buffer.written, layer.kept))

    def _find_buffer(self, layer: _Layer) -> _Buffer | None:
        return next((buffer for buffer in self._buffers if buffer.layer is layer), None)

    def _write(self, layer: _Layer) -> None:
        for parameter, view in zip(layer.parameters, layer.views(layer.on_host), strict=True):
            view.copy_(parameter)


class StreamedLayer(TransformerLayer):
    """Megatron Core's transformer layer with frozen weights in host memory."""

    def __init__(self, *args: Any, host_layers: HostLayers, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        host_layers.add(self)


class EmbeddingOnHost(VocabParallelEmbedding):
    """Megatron Core's embedding with weights in host memory. The CPU gathers the rows of the tokens and sends them.

    The CPU waits for nothing if it has the tokens.
    """

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of tokens [B, S] on this process's device.

        The shape is [B, S, H], or [S / ranks, B, H] with `reduce_scatter_embeddings`.
        """
        tokens, is_split = input_.cpu().view(-1), self.tp_group.size() > 1
        if is_split:
            is_elsewhere = (tokens < self.vocab_start_index) | (tokens >= self.vocab_end_index)
            tokens = (tokens - self.vocab_start_index).masked_fill_(is_elsewhere, 0)
        rows = memory.empty_host_tensor(len(tokens) * self.embedding_dim, self.weight.dtype).view(len(tokens), -1)
        torch.index_select(self.weight.detach(), 0, tokens, out=rows)
        if is_split:
            rows[is_elsewhere] = 0
        output = rows.to(device.current(), non_blocking=True).view(*input_.shape, -1)
        if self.reduce_scatter_embeddings:
            output = output.transpose(0, 1).contiguous()
            return reduce_scatter_to_sequence_parallel_region(output, group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(output, group=self.tp_group)


def _aligned(num_elements: int) -> int:
    """Return the number of elements that a tensor takes in a flat one."""
    return -(-num_elements // _ALIGNMENT) * _ALIGNMENT


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
