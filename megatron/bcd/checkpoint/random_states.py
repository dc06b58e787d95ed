"""Save and restore a rank's random generators: Python's, NumPy's, PyTorch's and those of Megatron Core's tracker."""

from __future__ import annotations

import json
import random

import numpy
import torch
from safetensors import safe_open
from safetensors.torch import save as safetensors_bytes

from megatron.bcd.runtime import rng

_TRACKER = "tracker."


def file_name(rank: int) -> str:
    """Return the name of a rank's file in the folder of a checkpoint."""
    return f"random_states_{rank:05d}.safetensors"


def random_states() -> bytes:
    """Return the state of every generator of this process, as the bytes of a safetensors file."""
    version, python_state, python_gauss = random.getstate()
    kind, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    assert version == 3 and kind == "MT19937" and isinstance(keys, numpy.ndarray)
    states = rng.states()
    tensors = {
        "python": torch.tensor(python_state, dtype=torch.int64),
        "numpy": torch.from_numpy(keys.astype(numpy.int64)),
        "torch": states.on_cpu,
    }
    if states.on_device is not None:
        tensors["device"] = states.on_device
    tensors |= {_TRACKER + name: state for name, state in states.tracker.items()}
    numbers = {"python_gauss": python_gauss, "numpy": [position, has_gauss, gauss]}
    return safetensors_bytes(tensors, metadata={"numbers": json.dumps(numbers)})


def restore_random_states(path: str) -> None:
    """Set every generator of this process from a file of `random_states`.

    A process on the same kind of device must have written it, and its checksum must have been verified.
    """
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        numbers = json.loads(file.metadata()["numbers"])
    random.setstate((3, tuple(tensors["python"].tolist()), numbers["python_gauss"]))
    position, has_gauss, gauss = numbers["numpy"]
    numpy.random.set_state(("MT19937", tensors["numpy"].numpy().astype(numpy.uint32), position, has_gauss, gauss))
    tracker = {name.removeprefix(_TRACKER): state for name, state in tensors.items() if name.startswith(_TRACKER)}
    rng.set_states(rng.States(tracker, tensors["torch"], tensors.get("device")))
