"""Every part of PyTorch 2.13 in use here that it does not document for users, or that is replaced without a GPU."""

from __future__ import annotations

from megatron.bcd.runtime.compat.private_api import PrivateApi

TORCH_APIS = (
    PrivateApi(
        "torch._C",
        "TensorBase.cuda",
        used_in="runtime.compat.cpu",
        use="replaced on a machine without a GPU; in C++, see test_tensor_shims",
    ),
    PrivateApi(
        "torch._C",
        "TensorBase.type",
        used_in="runtime.compat.cpu",
        use="replaced on a machine without a GPU; in C++, see test_tensor_shims",
    ),
    PrivateApi(
        "torch.cuda",
        "current_device",
        used_in="runtime.compat.cpu",
        use="replaced on a machine without a GPU",
        parameters="",
    ),
    PrivateApi(
        "torch.cuda",
        "set_device",
        used_in="runtime.compat.cpu",
        use="replaced on a machine without a GPU",
        parameters="device",
    ),
    PrivateApi(
        "torch.cuda",
        "synchronize",
        used_in="runtime.compat.cpu",
        use="replaced on a machine without a GPU",
        parameters="device",
    ),
    PrivateApi(
        "torch.cuda.memory",
        "empty_cache",
        used_in="runtime.compat.cpu",
        use="replaced on a machine without a GPU",
        parameters="",
    ),
    PrivateApi(
        "torch.cuda.random",
        "get_rng_state",
        used_in="runtime.compat.cpu",
        use="replaced by the CPU's generator",
        parameters="device",
    ),
    PrivateApi(
        "torch.cuda.random",
        "manual_seed",
        used_in="runtime.compat.cpu",
        use="replaced by the CPU's generator",
        parameters="seed",
    ),
    PrivateApi(
        "torch.cuda.random",
        "set_rng_state",
        used_in="runtime.compat.cpu",
        use="replaced by the CPU's generator",
        parameters="new_state, device",
    ),
    PrivateApi(
        "torch._weights_only_unpickler",
        "Unpickler.__init__",
        used_in="runtime.compat.checkpoint_reading",
        use="reads .metadata, in the opcodes of protocol 2",
        parameters="self, file, encoding",
    ),
    PrivateApi(
        "torch.distributed.checkpoint.filesystem",
        "FileSystem.create_stream",
        used_in="runtime.compat.checkpoint_reading",
        use="wrapped during a load",
        parameters="self, path, mode",
    ),
    PrivateApi(
        "torch.distributed.checkpoint.filesystem",
        "FileSystemReader.read_metadata",
        used_in="runtime.compat.checkpoint_reading",
        use="`pickle` of its module replaced during a load",
        parameters="self, *args, **kwargs",
        source=("pickle.load(",),
    ),
    PrivateApi(
        "torch.distributed.checkpoint.filesystem",
        "_StorageInfo",
        used_in="runtime.compat.checkpoint_reading",
        use="class that .metadata may hold",
    ),
    PrivateApi(
        "torch.distributed.checkpoint.metadata",
        "_MEM_FORMAT_ENCODING",
        used_in="runtime.compat.checkpoint_reading",
        use="class that .metadata may hold",
    ),
    PrivateApi(
        "torch.distributed.distributed_c10d",
        "_new_process_group_helper",
        used_in="runtime.compat.gloo",
        use="how it creates gloo groups",
        source=("ProcessGroupGloo(",),
    ),
    PrivateApi(
        "torch.serialization",
        "load",
        used_in="runtime.compat.checkpoint_reading",
        use="replaced during a load",
        parameters="f, map_location, pickle_module, weights_only, mmap, **pickle_load_args",
        source=("weights_only",),
    ),
)
