"""Random generators of Python, NumPy, PyTorch and Megatron Core's tracker: seeding like stock, saving and restoring."""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Iterator
from typing import NamedTuple

import numpy
import torch
from safetensors import safe_open
from safetensors.torch import save as safetensors_bytes

from megatron.bcd.runtime import device

_TRACKER = "tracker."


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy, PyTorch and Megatron Core's tracker like stock Megatron-LM. Each stage gets another seed."""
    from megatron.core import parallel_state, tensor_parallel

    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    state = torch.get_rng_state()
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.set_rng_state(state)  # on a CPU the tracker shares the generator that initialises the weights


class States(NamedTuple):
    """The states of PyTorch's generators and of Megatron Core's tracker."""

    tracker: dict[str, torch.Tensor]
    on_cpu: torch.Tensor
    on_device: torch.Tensor | None


def states() -> States:
    """Return copies of the present states."""
    from megatron.core import tensor_parallel

    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    on_device = torch.cuda.get_rng_state() if device.has_cuda() else None
    return States({name: state.clone() for name, state in tracker.items()}, torch.get_rng_state(), on_device)


def set_states(states: States) -> None:
    """Restore what `states` returned."""
    from megatron.core import tensor_parallel

    tensor_parallel.get_cuda_rng_tracker().set_states(states.tracker)
    torch.set_rng_state(states.on_cpu)
    if states.on_device is not None:
        torch.cuda.set_rng_state(states.on_device)


def all_states() -> bytes:
    """Return the state of every generator of this process, as the bytes of a safetensors file."""
    version, python_state, python_gauss = random.getstate()
    kind, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    assert version == 3 and kind == "MT19937" and isinstance(keys, numpy.ndarray)
    present = states()
    tensors = {
        "python": torch.tensor(python_state, dtype=torch.int64),
        "numpy": torch.from_numpy(keys.astype(numpy.int64)),
        "torch": present.on_cpu,
    }
    if present.on_device is not None:
        tensors["device"] = present.on_device
    tensors |= {_TRACKER + name: state for name, state in present.tracker.items()}
    numbers = {"python_gauss": python_gauss, "numpy": [position, has_gauss, gauss]}
    return safetensors_bytes(tensors, metadata={"numbers": json.dumps(numbers)})


def restore_all_states(path: str) -> None:
    """Set every generator of this process from a file of `all_states`.

    A process on the same kind of device must have written it, and its checksum must have been verified.
    """
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        numbers = json.loads(file.metadata()["numbers"])
    random.setstate((3, tuple(tensors["python"].tolist()), numbers["python_gauss"]))
    position, has_gauss, gauss = numbers["numpy"]
    numpy.random.set_state(("MT19937", tensors["numpy"].numpy().astype(numpy.uint32), position, has_gauss, gauss))
    tracker = {name.removeprefix(_TRACKER): state for name, state in tensors.items() if name.startswith(_TRACKER)}
    set_states(States(tracker, tensors["torch"], tensors.get("device")))


@contextlib.contextmanager
def repeating(earlier: States | None) -> Iterator[None]:
    """Inside the context, draw the numbers that followed `earlier`. With None, go on drawing new ones."""
    if earlier is None:
        yield
        return
    before = states()
    set_states(earlier)
    try:
        yield
    finally:
        set_states(before)


def use_deterministic_algorithms() -> None:
    """Restrict PyTorch to deterministic kernels (--deterministic-mode). It raises where none exists."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # read by Transformer Engine's attention
    torch.use_deterministic_algorithms(True)


def draw_like_stock_warm_up(
    *, seq_length: int, micro_batch_size: int, hidden_size: int, ffn_hidden_size: int, dtype: torch.dtype
) -> None:
    """Draw from the CPU's generator the numbers that stock Megatron-LM draws on a CPU before it builds the model.

    Stock warms up its fused functions (bias + GELU, bias + dropout + residual) on random tensors of its device, 5 times
    with and 5 times without gradient. On a CPU this advances the generator that initialises the weights. The same
    numbers must be drawn to get the same initial weights. ``ffn_hidden_size`` is this tensor-parallel rank's part.
    """
    torch.rand(ffn_hidden_size, dtype=dtype)
    torch.rand(seq_length, micro_batch_size, ffn_hidden_size, dtype=dtype)
    hidden = torch.rand(seq_length, micro_batch_size, hidden_size, dtype=dtype)
    torch.rand(seq_length, micro_batch_size, hidden_size, dtype=dtype)
    torch.rand(hidden_size, dtype=dtype)
    for _ in range(10):
        torch.nn.functional.dropout(hidden, p=0.1, training=True)
