"""Weights of a model folder into the stage of this rank (--load-hf). No collectives."""

from __future__ import annotations

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories
from torch import Tensor

from megatron.bcd.huggingface.folder import ModelFolder
from megatron.bcd.model.builder import unwrap_model


@torch.no_grad()
def load_weights(source: ModelFolder, model: torch.nn.Module) -> None:
    """Copy the weights of `source` into `model`, in the model's precision. Padding rows become zeros.

    Reads the tensors of this pipeline stage only, of embedding and head this tensor-parallel rank's rows only.

    Raises:
        ValueError: a file can't be read.
    """
    sharded = unwrap_model(model).sharded_state_dict()
    apply_factories(sharded)
    rows = {row.key: row for row in source.rows}
    last: tuple[str, int, Tensor] | None = None  # gate and up are two parts of one tensor
    for part in nested_values(sharded):
        if not isinstance(part, ShardedTensor):
            continue
        row = rows[part.key]
        layer = part.global_offset[0] if row.is_stacked else 0
        offsets = part.global_offset[part.prepend_axis_num :]
        if row.is_vocabulary:
            values = source.read_rows(row, offsets[0], offsets[0] + part.local_shape[0])
        else:
            if last is None or last[:2] != (part.key, layer):
                last = (part.key, layer, source.read(row, layer))
            values = last[2]
            for dim, (start, length) in enumerate(zip(offsets, part.local_shape, strict=True)):
                values = values.narrow(dim, start, length)
        assert part.data is not None
        part.data.copy_(values)
