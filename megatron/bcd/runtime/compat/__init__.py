"""Every use of what Megatron Core and PyTorch keep private: wrappers, workarounds, and the table of them.

`private_apis.PRIVATE_APIS` lists what is used, with the module below megatron.bcd that depends on it, and
tests/unit/test_compat.py compares each entry with the installed source. The same file finds underscore names,
overridden private methods and patches of both packages that stand elsewhere.
"""

from megatron.bcd.runtime.compat.gloo import share_gloo_device
from megatron.bcd.runtime.compat.grad_norm import patch_grad_norm
from megatron.bcd.runtime.compat.norm_recomputation import patch_norm_recomputation
from megatron.bcd.runtime.compat.optimizer_offload import patch_optimizer_offload

__all__ = ["patch_grad_norm", "patch_norm_recomputation", "patch_optimizer_offload", "share_gloo_device"]
