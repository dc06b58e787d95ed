"""A checkpoint's files: which folder is complete and undamaged, and reading one without executing anything in it.

`folder` is what lies on disk (standard library only), `safe_loading` what may be read out of it (torch, Megatron Core).
Every rank of a run uses both; neither communicates.
"""
