"""ATen's CUDA kernels, replaced by the CPU's on views of the same memory: device memory is host memory here.

Autograd, the caching allocator, streams, events, CUDA's generators and ProcessGroupNCCL stay torch's own. As on a GPU,
tensors of two devices in one operation are refused, and random numbers follow seed and offset of the device's generator
(but are other numbers).

EMU_LAG=1         order between streams is checked (emulated_order.py)
EMU_OPS_LOG=FILE  calls by operator and the host's waits for the device (EMU_SYNC_WHERE=1: by line), in FILE.PID at exit
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import ctypes
import hashlib
import os
import sys
import warnings

import emulated_order as order
import torch

_LIBRARY = torch.library.Library("aten", "IMPL")
_NATIVE = ctypes.CDLL(None)
_num_pending = ctypes.c_int.in_dll(_NATIVE, "emu_num_pending")
_wait_stream = _NATIVE.emu_wait_stream
_wait_stream.argtypes, _wait_stream.restype = [ctypes.c_void_p], None
_OWN_KERNELS = {"empty.memory_format", "empty_strided", "as_strided", "view", "_reshape_alias", "set_", "resize_"}
_OWN_KERNELS |= {"set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor", "is_set_to"}
_OWN_KERNELS |= {"is_pinned", "_pin_memory", "view_as_real", "view_as_complex", "record_stream", "_fused_sdp_choice"}
_OWN_KERNELS |= {"_efficientzerotensor", "_nested_view_from_buffer", "unfold"}
"""Of torch, for CUDA: they allocate memory, or look at no numbers."""
_TAKE_TWO_DEVICES = {"copy_", "_copy_from", "_copy_from_and_resize", "_foreach_copy_", "_unsafe_index"}
_TAKE_TWO_DEVICES |= {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"}
_RANDOM_WITHOUT_GENERATOR = {"native_dropout", "_fused_dropout", "rrelu_with_noise", "_sample_dirichlet"}
_WAIT_FOR_THE_DEVICE = {"nonzero", "masked_select", "_unique2", "unique_dim", "equal"}
_NONDETERMINISTIC = {"mm", "addmm", "bmm", "baddbmm", "addmv", "addbmm"}
calls: collections.Counter[str] = collections.Counter()
waits: collections.Counter[str] = collections.Counter()


def cpu_view(tensor):
    """The same memory as a tensor of the CPU."""
    if not tensor.is_cuda:
        return tensor
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), storage.nbytes())
    view = torch.empty(0, dtype=tensor.dtype)
    view.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())
    view = view.conj() if tensor.is_conj() else view
    return torch._neg_view(view) if tensor.is_neg() else view


def _on_cpu(value):
    if isinstance(value, torch.Tensor):
        return cpu_view(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_on_cpu(each) for each in value)
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _on_device(value, device):
    """A new tensor in the memory of `device`."""
    if isinstance(value, torch.Tensor):
        result = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
        if value.numel():
            cpu_view(result).copy_(value)
        order.written(result)
        return result
    return type(value)(_on_device(each, device) for each in value) if isinstance(value, (list, tuple)) else value


def _tensors_of(values, found):
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _tensors_of(value, found)
    return found


def _check_devices(name, tensors):
    gpus = {tensor.device for tensor in tensors if tensor.is_cuda}
    on_host = any(
        tensor.device.type == "cpu" and (tensor.dim() > 0 or name.startswith("_fused_")) for tensor in tensors
    )
    if (gpus and on_host) or len(gpus) > 1:
        each = ", ".join(f"{tensor.device}{tuple(tensor.shape)}" for tensor in tensors)
        raise RuntimeError(f"[emulated] Expected all tensors to be on the same device: aten::{name} of {each}")


def _check_deterministic(base):
    is_set = os.environ.get("CUBLAS_WORKSPACE_CONFIG") in (":4096:8", ":16:8")
    if base in _NONDETERMINISTIC and not is_set and torch.are_deterministic_algorithms_enabled():
        raise RuntimeError("[emulated] deterministic algorithms need CUBLAS_WORKSPACE_CONFIG=:4096:8 with CuBLAS")


def _note_wait(kind):
    """A wait of the host for the device, with EMU_SYNC_WHERE by the innermost lines of the program."""
    if "EMU_SYNC_WHERE" in os.environ:
        frame, lines = sys._getframe(2), []
        while frame is not None and len(lines) < 3:
            name = frame.f_code.co_filename
            if "megatron" in name or "/tools/" in name:
                lines.append(f"{name.split('/megatron/')[-1]}:{frame.f_lineno}")
            frame = frame.f_back
        kind = f"{kind} {' < '.join(lines)}"
    waits[kind] += 1


def _seed(generator, device, draws=4):
    """Of the CPU's draw, by the state of the device's generator, which goes on."""
    generator = generator or torch.cuda.default_generators[device.index]
    state = f"{generator.initial_seed()} {generator.get_offset()}"
    generator.set_offset(generator.get_offset() + draws)
    return int.from_bytes(hashlib.blake2b(state.encode(), digest_size=6).digest(), "little")


@contextlib.contextmanager
def _drawing(seed):
    saved = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(saved)


def _begin(name, reads, writes=()):
    """What comes before every kernel: NCCL's kernels that its stream waits for, and the order of streams."""
    calls[name] += 1
    device = next((tensor.device for tensor in (*writes, *reads) if tensor.is_cuda), None)
    device = device or torch.device("cuda", torch.cuda.current_device())
    if _num_pending.value:
        _wait_stream(torch.cuda.current_stream(device).cuda_stream)
    order.before_kernel(name, reads, writes)
    return device


class _Kernel:
    """Of one operator."""

    def __init__(self, op):
        self.op, self.arguments, self.returns = op, op._schema.arguments, op._schema.returns
        self.name = op.name().removeprefix("aten::")
        self.base = self.name.partition(".")[0]
        self.places = {argument.name: place for place, argument in enumerate(self.arguments)}
        self.outs = {argument.name for argument in self.arguments if argument.is_out}
        self.written = [a.name for a in self.arguments if a.alias_info is not None and a.alias_info.is_write]
        self.is_random = "generator" in self.places or self.base in _RANDOM_WITHOUT_GENERATOR
        self.numbers = [place for place, argument in enumerate(self.arguments) if str(argument.type) == "Tensor"]
        self.returned = [
            next((a.name for a in self.arguments if self._is_same_memory(a, result)), None) for result in self.returns
        ]

    @staticmethod
    def _is_same_memory(argument, result):
        infos = argument.alias_info, result.alias_info
        return None not in infos and all(i.is_write for i in infos) and infos[0].before_set == infos[1].before_set

    def given(self, name, args, kwargs):
        place = self.places.get(name, len(args))
        return args[place] if place < len(args) else kwargs.get(name)

    def __call__(self, *args, **kwargs):
        tensors = _tensors_of(kwargs.values(), _tensors_of(args, []))
        writes = _tensors_of((self.given(name, args, kwargs) for name in self.written), [])
        device = _begin(self.name, tensors, writes)
        if self.base not in _TAKE_TWO_DEVICES:
            _check_devices(self.name, tensors)
        _check_deterministic(self.base)
        if self.base in _WAIT_FOR_THE_DEVICE:
            _note_wait(self.base)
        if self.base == "copy_" and args[0].is_cuda != args[1].is_cuda and self._copies_later(args, kwargs):
            return args[0]
        outs = {name: kwargs[name] for name in self.outs if name in kwargs}
        on_cpu = [_on_cpu(value) for value in args]
        for place in self.numbers:  # a number in a tensor's place
            if place < len(args) and isinstance(on_cpu[place], (int, float, bool)):
                on_cpu[place] = torch.tensor(on_cpu[place])
        named = {name: _on_cpu(value) for name, value in kwargs.items() if name not in outs}
        if self.base in ("_softmax", "_log_softmax") and on_cpu[2]:  # of 16 bit in fp32, which the CPU's lacks
            on_cpu[0], on_cpu[2] = on_cpu[0].float(), False
        drawing = contextlib.nullcontext()
        if self.is_random:
            drawing = _drawing(_seed(self.given("generator", args, kwargs), device))
            if self.places.get("generator", len(args)) < len(args):
                on_cpu[self.places["generator"]] = None
            named |= {"generator": None} if "generator" in named else {}
        with drawing:
            if outs:
                return self._into(outs, on_cpu, named)
            results = self.op(*on_cpu, **named)
        results = (results,) if len(self.returns) == 1 else results or ()
        results = tuple(
            _on_device(result, device) if name is None else self.given(name, args, kwargs)
            for name, result in zip(self.returned, results, strict=True)
        )
        return results[0] if len(results) == 1 else results or None

    def _into(self, outs, args, kwargs):
        """The form with out=, whose tensors the kernel may resize."""
        fresh = {name: torch.empty(0, dtype=out.dtype) for name, out in outs.items()}
        self.op(*args, **kwargs, **fresh)
        for name, out in outs.items():
            if out.size() != fresh[name].size():
                out.resize_(fresh[name].size())
            cpu_view(out).copy_(fresh[name])
        return tuple(outs.values()) if len(outs) > 1 else next(iter(outs.values()))

    def _copies_later(self, args, kwargs):
        """A copy between host and device; whether it is to come when it is waited for."""
        to, source = args[:2]
        host = source if to.is_cuda else to
        if self.given("non_blocking", args, kwargs) and host.is_pinned():
            return order.copy_later(to, source, cpu_view(to), cpu_view(source))
        _note_wait("copy to the device" if to.is_cuda else "copy to the host")
        order.host_waits_for_stream(torch.cuda.current_stream().cuda_stream)
        return False


def _item(tensor):
    _begin("_local_scalar_dense", [tensor])
    _note_wait("item")
    order.host_waits_for_stream(torch.cuda.current_stream().cuda_stream)
    return cpu_view(tensor).item()


def _rms_norm_backward(grad, x, shape, rstd, weight, mask):
    """Which has no kernel for the CPU."""
    device = _begin("_fused_rms_norm_backward", [each for each in (grad, x, rstd, weight) if each is not None])
    g, normed, r = cpu_view(grad).float(), cpu_view(x).float() * cpu_view(rstd).float(), cpu_view(rstd).float()
    last, first = tuple(range(-len(shape), 0)), tuple(range(x.dim() - len(shape)))
    scaled = g if weight is None else g * cpu_view(weight).float()
    dx = (scaled - normed * (scaled * normed).mean(last, keepdim=True)) * r
    return (
        _on_device(dx.to(x.dtype), device) if mask[0] else None,
        _on_device((g * normed).sum(first).to(weight.dtype), device) if weight is not None and mask[1] else None,
    )


def install():
    """Replace the kernels of this process."""
    warnings.filterwarnings("ignore", message=".*Overriding a previously registered.*")
    torch.backends.cuda.enable_cudnn_sdp(False)
    from emulated_attention import KERNELS

    own = {"_local_scalar_dense": _item, "_fused_rms_norm_backward": _rms_norm_backward, **KERNELS}
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    names = {name.removeprefix("aten::") for name in registered if name.startswith("aten::")}
    for name in sorted(names - _OWN_KERNELS - set(own)) + ["copy_"]:
        base, _, overload = name.partition(".")
        with contextlib.suppress(AttributeError, RuntimeError):  # not a function of Python's
            _LIBRARY.impl(
                name,
                _Kernel(getattr(getattr(torch.ops.aten, base), overload or "default")),
                "CUDA",
                allow_override=True,
            )
    for name, kernel in own.items():
        _LIBRARY.impl(name, kernel, "CUDA", allow_override=True)
    if "EMU_OPS_LOG" in os.environ:
        atexit.register(_write_log)


def _write_log():
    names = ("event_sync", "stream_sync", "device_sync", "memcpy_async", "launches")
    counts = zip(names, (ctypes.c_long * 5).in_dll(_NATIVE, "emu_counts"), strict=True)
    with open(f"{os.environ['EMU_OPS_LOG']}.{os.getpid()}", "w") as file:
        file.writelines(f"{name} {number}\n" for name, number in sorted(calls.items()))
        file.writelines(f"SYNC {kind} {number}\n" for kind, number in waits.most_common())
        file.write("COUNTS " + " ".join(f"{name} {number}" for name, number in counts) + "\n")
