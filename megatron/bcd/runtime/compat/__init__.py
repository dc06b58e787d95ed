"""Every use of what Megatron Core and PyTorch keep private: wrappers and workarounds.

tests/unit/test_compat.py has the table of them and compares each entry with the installed source. It also finds
underscore names of both packages that stand elsewhere.
"""
