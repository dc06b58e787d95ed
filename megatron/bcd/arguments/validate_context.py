"""Rules of context parallelism."""

from __future__ import annotations

import math

from megatron.bcd.arguments.rules import Run, refuse_unless


def check_context(run: Run) -> None:
    size, kind = run.context_parallel_size, run.cp_comm_type or "p2p"
    name = f"--context-parallel-size {size}"
    _check_hierarchy(run)
    if size == 1:
        return
    refuse_unless(
        run.seq_length % (2 * size) == 0,
        f"--seq-length {run.seq_length} is not divisible by 2 x {name}, the number of chunks that a sequence is cut "
        f"into: give a multiple of {2 * size}",
    )
    tensor = run.tensor_model_parallel_size
    refuse_unless(
        not run.sequence_parallel or run.seq_length % (size * tensor) == 0,
        f"--seq-length {run.seq_length} is not divisible by {name} x --tensor-model-parallel-size {tensor}, which "
        f"--sequence-parallel needs: give a multiple of {math.lcm(2 * size, size * tensor)}",
    )
    refuse_unless(
        run.attention_backend != "unfused",
        f"--attention-backend unfused does not go with {name}: it needs the scores of whole sequences; give auto",
    )
    if kind.startswith("a2a"):
        shared = size if kind == "a2a" else run.hierarchical_context_parallel_sizes[0]
        groups = max(1, (run.num_query_groups or run.num_attention_heads) // tensor)
        refuse_unless(
            groups % shared == 0,
            f"--cp-comm-type {kind} divides the {groups} key-value heads of a tensor parallel rank over {shared} "
            "context parallel ranks, evenly: give p2p or all_gather",
        )


def _check_hierarchy(run: Run) -> None:
    sizes, size = run.hierarchical_context_parallel_sizes, run.context_parallel_size
    if sizes is None:
        refuse_unless(
            run.cp_comm_type != "a2a+p2p" or size == 1,
            "--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes: the ranks of each of the two levels",
        )
        return
    words = " ".join(map(str, sizes))
    refuse_unless(
        len(sizes) == 2 and min(sizes) >= 1 and math.prod(sizes) == size,
        f"--hierarchical-context-parallel-sizes {words}: must be two numbers whose product is "
        f"--context-parallel-size {size}",
    )
