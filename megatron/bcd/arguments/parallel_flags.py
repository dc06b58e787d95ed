"""The supported flags of Megatron-LM that say how a model is split over ranks: data only, as in `megatron_flags`."""

from __future__ import annotations

from megatron.bcd.arguments.core_flag import CoreFlag
from megatron.bcd.arguments.flag_groups import PARALLELISM

PARALLEL_FLAGS = (
    CoreFlag(field="tensor_model_parallel_size", group=PARALLELISM, help="ranks that share every layer"),
    CoreFlag(field="pipeline_model_parallel_size", group=PARALLELISM, help="pipeline stages"),
    CoreFlag(field="context_parallel_size", group=PARALLELISM, help="ranks that share every sequence"),
    CoreFlag(
        field="cp_comm_type",
        group=PARALLELISM,
        choices=("p2p", "all_gather", "a2a", "a2a+p2p"),
        help="what context parallel ranks exchange, in all layers, with Transformer Engine's attention (default: p2p); "
        "without it keys and values are gathered",
    ),
    CoreFlag(
        field="hierarchical_context_parallel_sizes",
        group=PARALLELISM,
        help="context parallel ranks that exchange by a2a, and by p2p, with --cp-comm-type a2a+p2p",
    ),
    CoreFlag(
        field="sequence_parallel",
        group=PARALLELISM,
        help="split norms and dropout over the tensor parallel ranks, along the sequence",
    ),
)
