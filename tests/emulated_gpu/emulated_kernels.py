"""Replace ATen's CUDA kernels by the CPU's, on views of the same memory: device memory is host memory here.

Autograd, the caching allocator, streams, events, CUDA's generators and ProcessGroupNCCL are torch's. As on a GPU, an
operation on tensors of two devices fails, and random numbers depend on seed and offset of the device's generator (but
differ from a GPU's). With EMU_LATE=1 the order between streams is checked (emulated_order.py).
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import hashlib
import os
import warnings

import emulated_order as order
import torch

_LIBRARY = torch.library.Library("aten", "IMPL")
_RUNTIME = ctypes.CDLL(None)
_PLAIN = ctypes.CDLL(os.environ["EMU_PLAIN_KERNELS"])
_OWN_KERNELS = {"empty.memory_format", "empty_strided", "as_strided", "view", "_reshape_alias", "set_", "resize_"}
_OWN_KERNELS |= {"set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor", "is_set_to"}
_OWN_KERNELS |= {"is_pinned", "_pin_memory", "view_as_real", "view_as_complex", "record_stream", "unfold"}
_OWN_KERNELS |= {"_fused_sdp_choice", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"}
_OWN_KERNELS |= {f"_scaled_dot_product_{kind}_attention_backward" for kind in ("flash", "efficient")}
"""Of torch, for CUDA: they allocate memory, look at no numbers, or call other operators."""
_TAKE_TWO_DEVICES = {"copy_", "_copy_from", "_copy_from_and_resize", "_foreach_copy_", "_unsafe_index"}
_TAKE_TWO_DEVICES |= {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"}
_WAIT_FOR_THE_DEVICE = {"nonzero", "masked_select", "_unique2", "unique_dim", "equal"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
_NONDETERMINISTIC = _PRODUCTS | {"addmv", "addbmm"}
_DIFFER_ON_THE_CPU = {"_fused_rms_norm_backward", "_softmax", "_log_softmax"}
calls: collections.Counter[str] = collections.Counter()
waits: collections.Counter[str] = collections.Counter()
"""Calls by operator, and the host's waits for the device by kind."""


def _map(function, value):
    """Apply `function` to a value, or to all values of a list."""
    if isinstance(value, (list, tuple)):
        return type(value)(_map(function, each) for each in value)
    return function(value)


def cpu_view(value):
    """Return a CPU tensor with the same memory."""
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if not isinstance(value, torch.Tensor) or not value.is_cuda:
        return value
    storage = value.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), storage.nbytes())
    view = torch.empty(0, dtype=value.dtype)
    view.set_(memory, value.storage_offset(), value.size(), value.stride())
    return view


def on_device(device, value):
    """Return a new tensor in the memory of `device`."""
    if not isinstance(value, torch.Tensor):
        return value
    result = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
    if value.numel():
        cpu_view(result).copy_(value)
    order.written(result)
    return result


def _tensors_of(values):
    results = []
    _map(lambda value: results.append(value) if isinstance(value, torch.Tensor) else None, list(values))
    return results


def _check_devices(name, tensors):
    gpus = {tensor.device for tensor in tensors if tensor.is_cuda}
    on_host = (t for t in tensors if t.device.type == "cpu" and (t.dim() > 0 or name.startswith("_fused_")))
    if len(gpus) > 1 or (gpus and any(True for _ in on_host)):
        each = ", ".join(f"{tensor.device}{tuple(tensor.shape)}" for tensor in tensors)
        raise RuntimeError(f"[emulated] Expected all tensors to be on the same device: aten::{name} of {each}")


def _check_deterministic(base):
    is_set = os.environ.get("CUBLAS_WORKSPACE_CONFIG") in (":4096:8", ":16:8")
    if base in _NONDETERMINISTIC and not is_set and torch.are_deterministic_algorithms_enabled():
        raise RuntimeError("[emulated] deterministic algorithms need CUBLAS_WORKSPACE_CONFIG=:4096:8 with CuBLAS")


def _wait(kind):
    waits[kind] += 1
    order.host_waits()


def seed_of(generator, device):
    """Return a seed for the CPU's draw from the device's generator, and advance that."""
    generator = generator or torch.cuda.default_generators[device.index]
    state = f"{generator.initial_seed()} {generator.get_offset()}"
    generator.set_offset(generator.get_offset() + 4)
    return int.from_bytes(hashlib.blake2b(state.encode(), digest_size=6).digest(), "little")


def begin(name, reads, writes=()):
    """Do what precedes every kernel: run NCCL kernels that its stream waits for, and check the order of streams."""
    calls[name] += 1
    device = next((tensor.device for tensor in (*writes, *reads) if tensor.is_cuda), None)
    device = device or torch.device("cuda", torch.cuda.current_device())
    _RUNTIME.cudaStreamSynchronize(ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(device.index)))
    order.before_kernel(name, reads, writes)
    return device


def _in_fp32(op, *args, **kwargs):
    """Multiply matrices of 16 bits with fp32 sums, as a GPU does. CPUs without AVX-512 take up to 60 times as long."""
    wide = [value.float() if isinstance(value, torch.Tensor) else value for value in args]
    return op(*wide, **kwargs).to(args[0].dtype)


class _Kernel:
    """The emulated kernel of one operator."""

    def __init__(self, op):
        arguments, returns = op._schema.arguments, op._schema.returns
        self.op = op
        self.name = op.name().removeprefix("aten::")
        self.base = self.name.partition(".")[0]
        self.places = {argument.name: place for place, argument in enumerate(arguments)}
        is_allowed = torch._C._should_allow_numbers_as_tensors(self.base)
        self.numbers = [i for i, each in enumerate(arguments) if str(each.type) == "Tensor" and not is_allowed]
        self.outs = [argument.name for argument in arguments if argument.is_out]
        self.is_random = "generator" in self.places or self.base == "native_dropout"
        self.written = {
            frozenset(a.alias_info.before_set): a.name for a in arguments if a.alias_info and a.alias_info.is_write
        }
        self.returned = [r.alias_info and self.written.get(frozenset(r.alias_info.before_set)) for r in returns]
        """The arguments that the operator returns; None stands for a new tensor."""

    @property
    def is_plain(self):
        """Whether plain_kernels.cpp emulates it: its CPU kernel on views of its arguments is all that it needs."""
        is_other = self.base in _TAKE_TWO_DEVICES | _WAIT_FOR_THE_DEVICE | _NONDETERMINISTIC | _DIFFER_ON_THE_CPU
        return not (is_other or self.outs or self.is_random)

    def given(self, name, args, kwargs):
        place = self.places.get(name, len(args))
        return args[place] if place < len(args) else kwargs.get(name)

    def __call__(self, *args, **kwargs):
        tensors = _tensors_of((*args, *kwargs.values()))
        writes = _tensors_of(self.given(name, args, kwargs) for name in self.written.values())
        device = begin(self.name, tensors, writes)
        if self.base not in _TAKE_TWO_DEVICES:
            _check_devices(self.name, tensors)
        _check_deterministic(self.base)
        if self.base in _WAIT_FOR_THE_DEVICE:
            _wait(self.base)
        if self.base == "copy_" and args[0].is_cuda != args[1].is_cuda and self._copies_later(args, kwargs):
            return args[0]
        on_cpu = [_map(cpu_view, value) for value in args]
        named = {name: _map(cpu_view, value) for name, value in kwargs.items()}
        for place in self.numbers:  # a number in a tensor's place, where PyTorch does not make it one
            if place < len(args) and isinstance(on_cpu[place], (int, float, bool)):
                on_cpu[place] = torch.tensor(on_cpu[place])
        if self.base == "_fused_rms_norm_backward":  # which the CPU lacks
            self.op = torch._decomp.decomposition_table.get(self.op, self.op)
        if self.base in ("_softmax", "_log_softmax") and on_cpu[2]:  # of 16 bit in fp32, which the CPU's lacks
            on_cpu[0], on_cpu[2] = on_cpu[0].float(), False
        with torch.random.fork_rng(devices=(), enabled=self.is_random):
            if self.is_random:
                torch.default_generator.manual_seed(seed_of(self.given("generator", args, kwargs), device))
                on_cpu = [None if isinstance(value, torch.Generator) else value for value in on_cpu]
                named.pop("generator", None)
            fresh = {name: torch.empty(0, dtype=kwargs[name].dtype) for name in self.outs if name in kwargs}
            if self.name in _PRODUCTS and on_cpu[0].dtype.itemsize == 2:
                results = _in_fp32(self.op, *on_cpu, **named)
            else:
                results = self.op(*on_cpu, **named | fresh)
        for name, value in fresh.items():  # of out=, which kernels may resize
            cpu_view(kwargs[name].resize_(value.size())).copy_(value)
        results = (results,) if len(self.returned) == 1 else results or ()
        results = tuple(
            self.given(name, args, kwargs) if name else _map(functools.partial(on_device, device), result)
            for name, result in zip(self.returned, results, strict=True)
        )
        return results[0] if len(results) == 1 else results or None

    def _copies_later(self, args, kwargs):
        """Return True for a copy between host and device that is delayed until something waits for it."""
        to, source = args[:2]
        host = source if to.is_cuda else to
        if self.given("non_blocking", args, kwargs) and (host.is_pinned() or _is_registered(host)):
            return order.copy_later(to, source, cpu_view(to), cpu_view(source))
        _wait("copy to the device" if to.is_cuda else "copy to the host")
        return False


_registered: dict[int, int] = {}
"""Memory that cudaHostRegister has page-locked (end by start), because FakeGPU does not remember it."""


def _is_registered(tensor):
    return any(start <= tensor.data_ptr() < end for start, end in _registered.items())


def _register(start, num_bytes, flags, original=torch._C._cudart.cudaHostRegister):
    _registered[start] = start + num_bytes
    return original(start, num_bytes, flags)


def _unregister(start, original=torch._C._cudart.cudaHostUnregister):
    del _registered[start]
    return original(start)


def _item(tensor):
    begin("_local_scalar_dense", [tensor])
    _wait("item")
    return cpu_view(tensor).item()


def install():
    """Replace the kernels of this process. torch calls this when it is imported, as emulated_gpu.sh names it as a
    plugin."""
    import emulated_attention

    warnings.filterwarnings("ignore", message="Warning only once for all operators")
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch._C._cudart.cudaHostRegister, torch._C._cudart.cudaHostUnregister = _register, _unregister
    special = {"_local_scalar_dense": _item, **emulated_attention.KERNELS}
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    names = {name.removeprefix("aten::") for name in registered if name.startswith("aten::")}
    plain = []
    for name in (names | {"copy_"}) - _OWN_KERNELS:
        base, _, overload = name.partition(".")
        with contextlib.suppress(AttributeError, RuntimeError):  # not a function of Python's
            kernel = special.get(name) or _Kernel(getattr(getattr(torch.ops.aten, base), overload or "default"))
            _LIBRARY.impl(name, kernel, "CUDA", allow_override=True)
            if isinstance(kernel, _Kernel) and kernel.is_plain:
                plain.append(name)
    if "EMU_LATE" not in os.environ:
        _PLAIN.emulate(" ".join(plain).encode())


def observe():
    """Let the kernels of this file emulate all operators, so that each call is counted and the order is checked."""
    _PLAIN.stop()
