"""Dependencies on the inside of Megatron Core and PyTorch: workarounds, and the table of all such uses.

`private_apis.PRIVATE_APIS` also lists those that stay where they are used: methods overridden in a subclass, functions
replaced on machines without a GPU (runtime.cpu, runtime.cpu_kernels) or during a load (checkpoint.safe_loading).
"""

from megatron.bcd.runtime.compat.megatron_core import checkpoint_results_in_process, patch_optimizer_offload
from megatron.bcd.runtime.compat.torch_private import share_gloo_device

__all__ = ["checkpoint_results_in_process", "patch_optimizer_offload", "share_gloo_device"]
