"""Frozen layers in host memory, copied to the device one by one (--bcd-layers-on host).

A phase only reads its frozen weights. The frozen layers of a stage are stored in one arena of page-locked host memory,
each as one flat piece. While a layer computes, the next one is copied to one of two device buffers on a separate CUDA
stream. A phase starts by loading the active layers, and the resident ones, which are frozen but stay on the device. At
its end the active layers are written back. If no phase trains the embedding, the CPU gathers and sends the rows of each
microbatch. Training is unchanged, bit for bit. See docs/frozen_weights.md.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    VocabParallelEmbedding,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.bcd.runtime import collectives, device, host_memory, memory
from megatron.bcd.runtime.compat import pytorch

_ALIGNMENT = 128
"""In elements. Kernels read vectors, and Transformer Engine requires matrices at multiples of 256 bytes."""

Use = tuple[int, str]
"""A layer's number, and the pass that reads it: forward, evaluation, recomputation or backward."""


class _Layer:
    """The streamed parameters of one layer, and their positions in a flat tensor."""

    def __init__(self, number: int, name: str, parameters: list[torch.nn.Parameter]) -> None:
        self.number, self.name = number, name
        self.parameters = parameters
        self.size = 0
        """Number of elements in the layer's flat tensor."""
        self._starts = []
        for parameter in parameters:
            self._starts.append(self.size)
            self.size += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        self.on_host: torch.Tensor
        """The layer's flat tensor in the arena. Set by `FrozenWeights.add`."""
        self.is_streamed = True
        """False while the layer is active or resident."""

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters' parts of a flat tensor."""
        return [
            flat[start : start + parameter.numel()].view(parameter.shape)
            for start, parameter in zip(self._starts, self.parameters, strict=True)
        ]

    @contextlib.contextmanager
    def name_copy_errors(self) -> Iterator[None]:
        """Add the layer's name to a RuntimeError of a copy to the device that starts inside the context."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(f"--bcd-layers-on: {self.name} can't be copied to the device: {error}") from error

    def place(self, flat: torch.Tensor) -> None:
        """Point the parameters to the parts of `flat`, which holds their values.

        A graph saves parameters, not their storage, so the storage may change between forward and backward.
        """
        for parameter, view in zip(self.parameters, self.views(flat), strict=True):
            parameter.data = view


class _Buffer:
    """Device memory for one layer at a time."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.flat = torch.empty(size, dtype=dtype, device=device.current())
        self.layer: _Layer | None = None
        self.copied: device.Copied = None
        self.last_use = 0


class FrozenWeights:
    """The streamed layers of one pipeline stage, in the order of `add`, and on the first stage the embedding.

    Args:
        num_layers: number of calls of `add` to come.
        embedding_size: number of elements that `add_embedding` will get; 0 if it is not called.
        num_resident: keep the last N frozen layers on the device; backward passes read them, too.
        dtype: dtype of the weights.
        residual_dtype: dtype of the flat tensors in `residuals`; None if there are none.
        is_streamed: returns whether a parameter is streamed, given its name within a layer.
        group: the ranks with the same weights. Those on one node share an arena.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        embedding_size: int,
        num_resident: int,
        dtype: torch.dtype,
        residual_dtype: torch.dtype | None,
        is_streamed: Callable[[str], bool],
        group: torch.distributed.ProcessGroup,
    ) -> None:
        self.num_copies = 0
        """Number of copies of layers to buffers since the start."""
        self.residuals: dict[torch.nn.Parameter, torch.Tensor] = {}
        """Flat tensors in the arena, behind the layer's weights, for the bits that `BlockStateStore` offloads."""
        self._num_layers, self._embedding_size, self._num_resident = num_layers, embedding_size, num_resident
        self._dtype, self._residual_dtype = dtype, residual_dtype
        self._is_streamed, self._group = is_streamed, group
        self._arena: host_memory.SharedMemory
        self._layers: list[_Layer] = []
        self._embedding: torch.nn.Parameter | None = None
        self._resident: dict[int, torch.Tensor] = {}
        self._buffers: list[_Buffer] = []
        self._stream = device.CopyStream()
        self._clock = itertools.count(1)
        self._last: Use | None = None
        self._next: dict[Use, Use] = {}
        """The use that followed each use the last time. Passes repeat, so this predicts the next one."""

    # --- construction

    @torch.no_grad()
    def add(self, module: TransformerLayer) -> None:
        """Move a new layer's weights to the arena. For the first layer, a collective over all ranks."""
        named = [parameter for name, parameter in module.named_parameters() if self._is_streamed(name)]
        layer = _Layer(len(self._layers), f"layer {module.layer_number - 1}", named)
        sizes = [layer.size * (0 if dtype is None else dtype.itemsize) for dtype in (self._dtype, self._residual_dtype)]
        if not self._layers:
            total = sum(sizes) * self._num_layers + self._embedding_size * self._dtype.itemsize
            self._arena = host_memory.allocate(total, group=self._group, what="--bcd-layers-on host")
        assert not self._layers or layer.size == self._layers[0].size, "layers differ in size"
        weights, residuals = self._arena.data[layer.number * sum(sizes) :][: sum(sizes)].split(sizes)
        layer.on_host = weights.view(self._dtype)
        if self._residual_dtype is not None:
            views = layer.views(residuals.view(self._residual_dtype))
            self.residuals |= {parameter: view.view(-1) for parameter, view in zip(named, views, strict=True)}
        if self._arena.is_owner:
            self._write(layer)
        layer.place(layer.on_host)
        self._layers.append(layer)
        module.register_forward_pre_hook(lambda module, _: self._before_forward(layer, module))
        module.register_forward_hook(lambda _, __, output: self._after_forward(layer, output[0]))

    @torch.no_grad()
    def add_embedding(self, module: VocabParallelEmbedding) -> None:
        """Move an embedding that no phase trains to the arena, behind all layers."""
        weight = module.weight
        on_host = self._arena.data[-weight.nbytes :].view(self._dtype).view(weight.shape)
        if self._arena.is_owner:
            on_host.copy_(weight)
        weight.data = on_host
        self._embedding = weight
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
    def begin_phase(self, active: Container[torch.nn.Parameter]) -> None:
        """Collective over the group. Load the layers with an `active` parameter, and the resident ones.

        It starts with a barrier, because ranks on a node read what others have written to their arena.
        """
        if not self.is_used:
            return
        collectives.gather_objects(None, self._group)
        are_active = [any(parameter in active for parameter in layer.parameters) for layer in self._layers]
        frozen = [layer.number for layer, is_active in zip(self._layers, are_active, strict=True) if not is_active]
        resident = frozen[len(frozen) - min(self._num_resident, len(frozen)) :]
        self._resident = {number: flat for number, flat in self._resident.items() if number in resident}
        self._last = None
        for layer, is_active in zip(self._layers, are_active, strict=True):
            layer.is_streamed = not is_active and layer.number not in resident
            if is_active:
                with layer.name_copy_errors():
                    for parameter in layer.parameters:
                        parameter.data = parameter.data.to(device.current(), copy=True)
            elif layer.number in resident and layer.number not in self._resident:
                with layer.name_copy_errors():
                    self._resident[layer.number] = layer.on_host.to(device.current(), copy=True)
                layer.place(self._resident[layer.number])
            elif layer.is_streamed:
                layer.place(layer.on_host)

    @torch.no_grad()
    def end_phase(self) -> None:
        """Write the active layers back to the arena, and free their device memory."""
        if not self.is_used:
            return
        device.synchronize()  # until nothing reads the buffers any more
        for buffer in self._buffers:
            if buffer.layer is not None:
                buffer.layer.place(buffer.layer.on_host)
            buffer.layer = buffer.copied = None
        for layer in self._layers:
            if not layer.is_streamed and layer.number not in self._resident:
                if self._arena.is_owner:
                    self._write(layer)
                layer.place(layer.on_host)
                layer.is_streamed = True

    def streamed_parameters(self) -> set[torch.nn.Parameter]:
        """Return the parameters that are in host memory in this phase."""
        parameters = {parameter for layer in self._layers if layer.is_streamed for parameter in layer.parameters}
        return parameters if self._embedding is None else parameters | {self._embedding}

    def device_tensors(self) -> Iterator[torch.Tensor]:
        """Return the frozen tensors on the device: resident layers and buffers."""
        yield from self._resident.values()
        yield from (buffer.flat for buffer in self._buffers)

    @property
    def is_shared_by_all(self) -> bool:
        """Whether all ranks of the group share one arena."""
        return self.is_used and self._arena.has_whole_group

    def bytes_on_host(self) -> int:
        """Return the bytes of the weights in the arena, or 0 if another rank of the node owns it."""
        weights = [layer.on_host for layer in self._layers]
        weights += [] if self._embedding is None else [self._embedding]
        return sum(tensor.nbytes for tensor in weights) if self.is_used and self._arena.is_owner else 0

    @contextlib.contextmanager
    def all_on_host(self) -> Iterator[None]:
        """Inside the context, all frozen layers, including resident ones, are in the arena. Use it between steps."""
        resident = [(self._layers[number], flat) for number, flat in self._resident.items()]
        for layer in [*(layer for layer, _ in resident), *(buffer.layer for buffer in self._buffers if buffer.layer)]:
            layer.place(layer.on_host)
        yield
        for layer, flat in resident:
            layer.place(flat)

    # --- uses

    def _before_forward(self, layer: _Layer, module: torch.nn.Module) -> None:
        if pytorch.is_in_backward():
            self._use(layer, "recomputation")
        else:
            self._use(layer, "forward" if module.training else "evaluation")

    def _after_forward(self, layer: _Layer, output: torch.Tensor) -> None:
        if layer.is_streamed and output.requires_grad:
            output.register_hook(lambda _: self._use(layer, "backward"))

    @torch.no_grad()
    def _use(self, layer: _Layer, what: str) -> None:
        """Make the layer's weights available to later kernels, and start to copy the predicted next layer."""
        if not layer.is_streamed:
            return
        use = (layer.number, what)
        if self._last is not None:
            self._next[self._last] = use
        self._last = use
        buffer = self._find_buffer(layer) or self._load(layer)
        buffer.last_use = next(self._clock)
        self._stream.wait(buffer.copied)
        buffer.copied = None
        layer.place(buffer.flat)
        coming = self._layers[self._next.get(use, use)[0]]
        if coming.is_streamed and self._find_buffer(coming) is None:
            self._load(coming)

    def _find_buffer(self, layer: _Layer) -> _Buffer | None:
        return next((buffer for buffer in self._buffers if buffer.layer is layer), None)

    def _load(self, layer: _Layer) -> _Buffer:
        """Start to copy a layer into the least recently used buffer."""
        if not self._buffers:
            self._buffers = [_Buffer(layer.size, self._dtype) for _ in range(2)]
        buffer = min(self._buffers, key=lambda buffer: buffer.last_use)
        if buffer.layer is not None:
            buffer.layer.place(buffer.layer.on_host)
        buffer.layer = layer
        with layer.name_copy_errors():
            buffer.copied = self._stream.copy(layer.on_host, to=buffer.flat)
        self.num_copies += 1
        return buffer

    def _write(self, layer: _Layer) -> None:
        for parameter, view in zip(layer.parameters, layer.views(layer.on_host), strict=True):
            view.copy_(parameter)


class StreamedLayer(TransformerLayer):
    """Megatron Core's transformer layer with frozen weights in host memory."""

    def __init__(self, *args: Any, frozen_weights: FrozenWeights, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        frozen_weights.add(self)


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


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
