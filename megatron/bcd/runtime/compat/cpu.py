"""Megatron Core on a CPU: shims for its CUDA calls."""

from __future__ import annotations

import ctypes
import importlib
import logging
import types
from typing import Any

import torch

_FACTORIES = ("empty", "full", "ones", "rand", "randn", "tensor", "zeros")
_MODULES_FOR_CUDA = (
    "megatron.core.models.common.embeddings.rope_utils",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.grad_scaler",
    "megatron.core.optimizer.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.tensor_parallel.cross_entropy",
    "megatron.core.transformer.utils",
    "megatron.core.utils",
)


class _TorchOnCpu(types.ModuleType):
    """A stand-in for `torch` in Megatron Core's modules: factory calls with device="cuda" return CPU tensors."""

    def __init__(self) -> None:
        super().__init__("torch")
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Any) -> Any:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)  # only a GPU has page-locked memory
        return factory(*args, **kwargs)

    return make


def _type_name_as_cuda(tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Return Tensor.type() in the form that Megatron Core's optimizers compare with."""
    result = _tensor_type(tensor, dtype, *args, **kwargs)
    if dtype is None and isinstance(result, str):
        return result.replace("torch.", "torch.cuda.", 1)
    return result


_tensor_type = torch.Tensor.type


def _return_counts(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """Return the tokens of each expert, which are on the CPU already, and make lists of the counts by rank."""
    if point == "before_ep_alltoall" and dispatcher.ep_size > 1:
        dispatcher.input_splits, dispatcher.output_splits = (
            splits.tolist() for splits in (dispatcher.input_splits, dispatcher.output_splits)
        )
    return tokens_per_expert


def _exchange(parts: torch.Tensor, sizes: Any, received: Any, group: Any) -> torch.Tensor:
    """Send `sizes` rows to each rank of the group, and return the rows received from each."""
    output = parts.new_empty((sum(received), *parts.shape[1:]))
    torch.distributed.all_to_all_single(output, parts.contiguous(), received, sizes, group=group)
    return output


def _patch_uneven_collectives() -> None:
    """Gather and reduce-scatter different numbers of tokens by rank, which gloo's own collectives do not support."""
    from megatron.core.tensor_parallel import mappings

    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_uneven(part: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(part, group, output_split_sizes, use_global_buffer)
        copies = part.repeat(group.size(), *[1] * (part.dim() - 1))
        return _exchange(copies, [len(part)] * group.size(), output_split_sizes, group)

    def scatter_uneven(whole: Any, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return scatter(whole, group, input_split_sizes, use_global_buffer)
        size = input_split_sizes[group.rank()]
        received = _exchange(whole, input_split_sizes, [size] * group.size(), group)
        return received.view(group.size(), size, *whole.shape[1:]).sum(0)

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather_uneven, scatter_uneven


def _skip_collectives_of_one_rank() -> None:
    """Leave out the reduce-scatter of gradients and the all-gather of weights of one rank. gloo would copy a buffer to
    itself, 4 % of a step's time."""
    from megatron.core.distributed import param_and_grad_buffer as buffers

    def skipping(collective: Any) -> Any:
        def call(output: Any, given: Any, *, group: Any, async_op: bool, **options: Any) -> Any:
            if group.size() == 1 and not async_op:  # a handle would be waited for
                return None
            return collective(output, given, group=group, async_op=async_op, **options)

        return call

    buffers.dist_reduce_scatter_func = skipping(buffers.dist_reduce_scatter_func)
    buffers.dist_all_gather_func = skipping(buffers.dist_all_gather_func)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h."""


def patch_megatron_core() -> None:
    """Make Megatron Core run on a CPU. Call it only if there is no GPU. Permanent.

    CUDA's random generator becomes the CPU's, its current device the CPU, and streams and synchronisation do nothing.
    """
    from megatron.core import utils

    if isinstance(utils.torch, _TorchOnCpu):
        return

    for name in ("set_device", "current_stream", "synchronize", "empty_cache"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)  # one each: torch.compile refuses a function twice
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed)  # type: ignore[assignment,return-value]
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign,assignment]
    torch.Tensor.type = _type_name_as_cuda  # type: ignore[method-assign,assignment]
    from megatron.core.tensor_parallel import random as megatron_random

    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # its tracker warns if the CPU's generator advances while the GPU's is in use, but here they are the same
    logging.getLogger(megatron_random.__name__).addFilter(lambda record: "CPU RNG state" not in record.getMessage())
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = megatron_random  # any object: no stream is created or used
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _return_counts
    _patch_uneven_collectives()
    _skip_collectives_of_one_rank()
    _keep_freed_memory()
    torch_on_cpu = _TorchOnCpu()
    for name in _MODULES_FOR_CUDA:
        importlib.import_module(name).torch = torch_on_cpu  # type: ignore[attr-defined]


def _keep_freed_memory() -> None:
    """Reuse freed memory until `return_freed_memory`. glibc would return it to the system, which clears each page anew,
    up to 4 % of a step's time. Tensors above 32 MiB, glibc's limit, still go back."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_TRIM_THRESHOLD, -1)  # never
        library.mallopt(_MMAP_THRESHOLD, 2**25)  # stays at 128 KiB otherwise, once a threshold is set


def return_freed_memory() -> None:
    """Return freed memory to the system, so that a later peak does not count it. Does nothing without glibc."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
