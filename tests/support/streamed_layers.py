"""Steps through layers in host memory as a breadth-first schedule makes them: forward, backward with updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.bcd.model.host_layers import HostLayers
from megatron.bcd.optim import bf16
from megatron.bcd.runtime import device
from support import worlds

SIZE, MICROBATCHES = 24, 3


class Layer(torch.nn.Module):
    """Two matrices that are streamed, and a scale that is not."""

    def __init__(self, number: int, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.layer_number = number + 1
        for name in ("up", "down"):
            values = torch.randn(SIZE, SIZE, generator=generator) / SIZE
            setattr(self, name, torch.nn.Parameter(values.to(dtype), requires_grad=False))
        self.scale = torch.nn.Parameter(torch.ones(SIZE, dtype=dtype), requires_grad=False)

    @property
    def matrices(self) -> list[torch.nn.Parameter]:
        return [self.up, self.down]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ self.up.data) @ self.down.data * self.scale.data


class OnDevice:
    """The same layers on the device: what a run with HostLayers must equal."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        matrices = [matrix for layer in layers for matrix in layer.matrices]
        self._state: dict[torch.nn.Parameter, dict[str, torch.Tensor]] = {
            each: {}
            if each.dtype == torch.float32
            else {"low_bits": torch.zeros(each.shape, dtype=torch.int16, device=device.current())}
            for each in matrices
        }

    def state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        return self._state[parameter]

    def keep_gradient(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        self._state[parameter]["gradient"] = gradient

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def on_host(
    layers: Sequence[Layer], *, dtype: torch.dtype, chunk_layers: int, num_resident: int = 0, keeps: bool = False
) -> HostLayers:
    """Move the matrices of these layers to host memory. A collective."""
    state = {"low_bits": (torch.int16, 1)} if dtype == torch.bfloat16 else {}
    frozen = HostLayers(
        num_layers=len(layers), embedding_size=0, num_buffers=3 * chunk_layers + num_resident, dtype=dtype,
        state=state | ({"gradient": (torch.float32, 1)} if keeps else {}),
        is_streamed=lambda name, _: name != "scale", group=dist.group.WORLD,
    )  # fmt: skip
    for layer in layers:
        frozen.add(layer)  # type: ignore[arg-type]
    for layer in layers:
        frozen.move_rest(layer)
    return frozen


def optimizer_of(number: int) -> int:
    return number % dist.get_world_size()


class Run:
    """Steps of a small network. With `num_frozen`, the first layers are not updated. With `keeps`, gradients wait in
    host memory for updates in a separate pass."""

    def __init__(
        self, *, num_layers: int, chunk_layers: int = 1, dtype: torch.dtype = torch.bfloat16, is_on_host: bool = True,
        num_resident: int = 0, num_frozen: int = 0, keeps: bool = False,
    ) -> None:  # fmt: skip
        self.layers = [Layer(number, dtype) for number in range(num_layers)]
        self.chunks = [range(num_layers)[first : first + chunk_layers] for first in range(0, num_layers, chunk_layers)]
        self.matrices = [matrix for layer in self.layers for matrix in layer.matrices]
        self.owners = {matrix: optimizer_of(number) for number, matrix in enumerate(self.matrices)}
        self.updated = {matrix for layer in self.layers[num_frozen:] for matrix in layer.matrices}
        self.dtype, self.keeps = dtype, keeps
        if is_on_host:
            self.frozen: Any = on_host(
                self.layers, dtype=dtype, chunk_layers=chunk_layers, num_resident=num_resident, keeps=keeps
            )
        else:
            for layer in self.layers:
                layer.to(device.current())
            self.frozen = OnDevice(self.layers)
        self.frozen.owned = {matrix for matrix, owner in self.owners.items() if owner == dist.get_rank()}
        self.frozen.begin_phase((), self.updated)

    def step(self, number: int) -> None:
        self.backward(self.forward(number))

    def backward(self, inputs: Sequence[Sequence[torch.Tensor]]) -> None:
        """Update one chunk after the other, given the inputs of each."""
        frozen, updated = self.frozen, [place for place in range(len(self.chunks)) if self.matrices_of(place)]
        for place in reversed(updated):
            matrices = self.matrices_of(place)
            frozen.load(self.chunks[place], with_state=not self.keeps)
            if place > 0:
                frozen.prefetch(self.chunks[place - 1], with_state=not self.keeps)
            gradients = [torch.zeros(matrix.shape, device=device.current()) for matrix in matrices]
            for x in inputs[place]:
                for gradient, matrix in zip(gradients, matrices, strict=True):
                    gradient += (x.T @ torch.tanh(x @ matrix.data)).float()
            for gradient, matrix in zip(gradients, matrices, strict=True):
                dist.all_reduce(gradient)
                if not self.keeps:
                    self.update(matrix, gradient)
                elif self.owners[matrix] == dist.get_rank():
                    frozen.keep_gradient(matrix, gradient)
            if not self.keeps:
                frozen.write_back(self.chunks[place])
        for place in updated if self.keeps else ():
            frozen.load(self.chunks[place], with_state=True)
            if place < updated[-1]:
                frozen.prefetch(self.chunks[place + 1], with_state=True)
            for matrix in self.matrices_of(place):
                self.update(matrix, frozen.state(matrix).get("gradient"))
            frozen.write_back(self.chunks[place])
        frozen.finish_step()

    def matrices_of(self, place: int) -> list[torch.nn.Parameter]:
        """Return the matrices of a chunk that are updated."""
        matrices = [matrix for each in self.chunks[place] for matrix in self.layers[each].matrices]
        return [matrix for matrix in matrices if matrix in self.updated]

    def forward(self, number: int) -> list[list[torch.Tensor]]:
        """Return the inputs of each chunk."""
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        batch = torch.randn(MICROBATCHES, 8, SIZE, generator=generator).to(self.dtype).to(device.current())
        inputs = [list(batch)]
        for place, chunk in enumerate(self.chunks):
            self.frozen.load(chunk)
            if place + 1 < len(self.chunks):
                self.frozen.prefetch(self.chunks[place + 1])
            outputs = inputs[-1]
            for each in chunk:
                outputs = [self.layers[each](x) for x in outputs]
            inputs.append(outputs)
        return inputs

    def update(self, matrix: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        if self.owners[matrix] == dist.get_rank():
            bits, weight = self.frozen.state(matrix).get("low_bits"), matrix.data
            value = weight if bits is None else bf16.join(weight, bits)
            value.sub_(gradient, alpha=1e-3)
            if bits is not None:
                bf16.split(value, weight=weight, low_bits=bits)
        dist.broadcast(matrix.data, src=self.owners[matrix])

    def state(self) -> list[list[int]]:
        """Return the bits of all weights, and of the low bits that this rank owns."""
        if isinstance(self.frozen, OnDevice):
            return self._bits()
        self.frozen.leave_buffers()
        assert all(self.frozen.is_on_host(matrix) for matrix in self.matrices)
        return self._bits()

    def _bits(self) -> list[list[int]]:
        tensors = [matrix.data for matrix in self.matrices]
        owned = [each for each in self.matrices if self.owners[each] == dist.get_rank()]
        states = [self.frozen.state(each) for each in owned]
        tensors += [tensor for state in states for kind, tensor in state.items() if kind != "gradient"]
        return [tensor.cpu().view(torch.uint8).flatten().tolist() for tensor in tensors]


def state_at_end(steps: int = 3, **arguments: Any) -> list[list[int]]:
    """Return the state of a run after its last step. The CPU waits for the GPU at the end only."""
    with worlds.parallel(worlds.run_config(mock_data=True, split=None)):
        run = Run(**arguments)
        for number in range(steps):
            run.step(number)
        return run.state()
