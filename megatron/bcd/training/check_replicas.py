"""--check-weight-hash-across-dp-replicas-interval: do all data-parallel ranks hold the same weights?"""

from __future__ import annotations

import hashlib

import torch
from megatron.core import parallel_state

from megatron.bcd.model.builder import unwrap_model
from megatron.bcd.runtime import collectives
from megatron.bcd.training.setup import Components
from megatron.bcd.training.train_step import TrainingFailed


def check_replicas(components: Components, iteration: int) -> None:
    """Compare the bits of every weight after each multiple of the interval. A collective.

    Raises:
        TrainingFailed: they differ; names the first weight and two ranks.
    """
    interval = components.config.training.check_weight_hash_across_dp_replicas_interval
    if interval is None or iteration % interval:
        return
    place = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    with components.active.whole_parameters():
        ranks = collectives.gather_objects((place, _digests(components.model)))
    first: dict[tuple[int, int], int] = {}
    for rank, (held, digests) in enumerate(ranks):
        reference = first.setdefault(held, rank)
        for name, digest in digests.items():
            if digest != ranks[reference][1][name]:
                raise TrainingFailed(
                    f"iteration {iteration}: {name} of rank {rank} differs from that of rank {reference}, which should "
                    "be the same (--check-weight-hash-across-dp-replicas-interval); a device or a network may be faulty"
                )


def _digests(model: torch.nn.Module) -> dict[str, bytes]:
    return {
        name: hashlib.sha256(weight.detach().cpu().contiguous().view(torch.uint8).numpy()).digest()[:8]
        for name, weight in unwrap_model(model).named_parameters()
    }
