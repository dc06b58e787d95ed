"""Several chunks of the model on one pipeline stage (a virtual pipeline) as one module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import MegatronModule
from torch import Tensor


class ChunkedModel(MegatronModule):
    """The chunks of one stage, in depth order. One after the other they stand for the whole module: `select` says which
    one runs forward.

    One module for all of them gives a block one DDP wrapper, one set of gradient buffers and one optimizer, however
    many chunks it has.
    """

    def __init__(self, chunks: Sequence[GPTModel]) -> None:
        super().__init__(config=chunks[0].config)
        self.chunks = torch.nn.ModuleList(chunks)
        self.share_embeddings_and_output_weights = chunks[0].share_embeddings_and_output_weights
        self.model_type, self.vocab_size = chunks[0].model_type, chunks[0].vocab_size
        # what Megatron Core asks of the model when it sums gradients of tied embeddings
        self.pre_process, self.post_process = chunks[0].pre_process, chunks[-1].post_process
        self._selected: list[Any] = [chunks[0]]  # in a list, or it would be a submodule again

    def select(self, chunk: int) -> None:
        """Let `forward` and `set_input_tensor` be those of this chunk."""
        self._selected = [self.chunks[chunk]]

    @property
    def decoder(self) -> torch.nn.Module:
        """The selected chunk's layers, where Megatron Core notes the microbatch."""
        return self._selected[0].decoder  # type: ignore[no-any-return]

    def set_input_tensor(self, input_tensor: Tensor | None) -> None:
        """Of the selected chunk."""
        self._selected[0].set_input_tensor(input_tensor)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Of the selected chunk."""
        return self._selected[0](*args, **kwargs)

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """The tied weight that this stage holds: the embedding's on the first stage, its copy on the last."""
        return self.chunks[0 if self.pre_process else -1].shared_embedding_or_output_weight()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """As GPTModel's: the names are this module's, the keys in a checkpoint those of the whole model."""
        assert not prefix and not sharded_offsets, "only the whole of a stage is saved"
        return {
            f"chunks.{number}.{name}": entry
            for number, chunk in enumerate(self.chunks)
            for name, entry in chunk.sharded_state_dict(metadata=metadata).items()
        }
