"""A model that can run a chunk of its layers: some consecutive ones, with what lies before or behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module


class Chunks:
    """A stage that can run one of its chunks, like a pipeline stage that holds this chunk only.

    The first chunk has the embedding, the last one the final norm, the head and the loss. The chunks between them map
    [S, B, H], which `set_input_tensor` sets, to [S, B, H].
    """

    chunk_layers: Sequence[range] = ()
    """The layers of each chunk, by their numbers on this stage."""
    _chunk: int | None = None
    post_process: bool

    def select_chunk(self, chunk: int | None) -> None:
        """Make `forward` run this chunk, or with None or without chunks the whole stage."""
        self._chunk = chunk if self.chunk_layers else None

    @property
    def ends_with_head(self) -> bool:
        """Whether `forward` runs the head."""
        return self.post_process and self._chunk in (None, len(self.chunk_layers) - 1)


class ChunkwiseModel(Chunks, GPTModel):
    """Megatron Core's GPTModel in chunks."""

    def select_chunk(self, chunk: int | None) -> None:
        """Make `forward` run this chunk, or with None the whole model."""
        super().select_chunk(chunk)
        self.decoder.chunk = None if self._chunk is None else self.chunk_layers[self._chunk]

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the selected chunk, or the whole model."""
        ends: tuple[bool, bool] = self.pre_process, self.post_process  # type: ignore[has-type]
        # GPTModel decides by these attributes whether to run embedding and head
        self.pre_process, self.post_process = self._chunk in (None, 0) and ends[0], self.ends_with_head
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.pre_process, self.post_process = ends

    def shared_embedding_or_output_weight(self) -> torch.Tensor | None:
        """Return this stage's tied weight, whichever chunk runs."""
        if hasattr(self, "embedding"):
            return self.embedding.word_embeddings.weight
        return super().shared_embedding_or_output_weight()


class ChunkwiseFloat16Module(Float16Module):
    """Megatron Core's Float16Module, which returns fp32 only behind the head."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model in 16 bits."""
        return super().forward(*inputs, fp32_output=getattr(self.module, "ends_with_head", True), **kwargs)
