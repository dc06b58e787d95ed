"""Checkpoints: everything that a run needs to resume exactly.

A folder ``iter_0000007`` below --save has Megatron Core's distributed checkpoint (weights under Megatron Core's own
keys; optimizer state of the active block and offloaded state of the others under ``optimizer.``), one file of random
generators per rank, ``run_state.json`` (counters, phase and flags) and ``checksums.json``.
"""
