"""A model that can run a piece of its layers: some consecutive ones, with what lies before or behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module


class PiecewiseModel(GPTModel):
    """Megatron Core's GPTModel. After `select_piece` it runs like a pipeline stage that holds this piece only.

    The first piece has the embedding, the last one the final norm, the head and the loss. The pieces between them map
    [S, B, H], which `set_input_tensor` sets, to [S, B, H].
    """

    pieces: Sequence[range] = ()
    """The layers of each piece."""
    _piece: int | None = None

    def select_piece(self, piece: int | None) -> None:
        """Make `forward` run this piece, or with None the whole model."""
        self._piece = piece
        self.decoder.piece = None if piece is None else self.pieces[piece]

    @property
    def ends_with_head(self) -> bool:
        """Whether `forward` runs the head."""
        return self.post_process and self._piece in (None, len(self.pieces) - 1)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the selected piece, or the whole model."""
        ends: tuple[bool, bool] = self.pre_process, self.post_process  # type: ignore[has-type]
        # GPTModel decides by these attributes whether to run embedding and head
        self.pre_process, self.post_process = self._piece in (None, 0) and ends[0], self.ends_with_head
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.pre_process, self.post_process = ends

    def shared_embedding_or_output_weight(self) -> torch.Tensor | None:
        """Return this stage's tied weight, whichever piece runs."""
        if hasattr(self, "embedding"):
            return self.embedding.word_embeddings.weight
        return super().shared_embedding_or_output_weight()


class PiecewiseFloat16Module(Float16Module):
    """Megatron Core's Float16Module, which returns fp32 only behind the head."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model in 16 bits."""
        return super().forward(*inputs, fp32_output=getattr(self.module, "ends_with_head", True), **kwargs)
