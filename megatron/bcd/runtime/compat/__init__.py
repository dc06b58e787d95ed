"""All uses of private APIs of Megatron Core and PyTorch: wrappers and workarounds.

tests/data/private_apis.txt lists them, and tests/unit/test_compat.py compares each with the installed source.
"""
