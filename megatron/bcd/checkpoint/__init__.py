"""Checkpoints: everything a run needs to go on exactly where it was.

A folder ``iter_0000007`` below --save holds Megatron Core's distributed checkpoint (weights under plain Megatron Core's
keys, optimizer state, also what is kept of other blocks, under ``optimizer.``), one file of random generators per rank,
``run_state.json`` (where the run stands, and its flags) and ``checksums.json``.
"""
