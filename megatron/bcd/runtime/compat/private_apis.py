"""Every part of Megatron Core 0.16.1 and PyTorch 2.13 in use here that neither documents for users.

Underscore names, replaced functions, overridden methods and attributes. tests/unit/test_compat.py compares each entry
with the installed source: when a pin moves, its failures name what to read again and the module that depends on it.
"""

from __future__ import annotations

from megatron.bcd.runtime.compat.private_api import PrivateApi
from megatron.bcd.runtime.compat.private_megatron import MEGATRON_APIS
from megatron.bcd.runtime.compat.private_torch import TORCH_APIS

__all__ = ["PRIVATE_APIS", "PrivateApi"]

PRIVATE_APIS = MEGATRON_APIS + TORCH_APIS
