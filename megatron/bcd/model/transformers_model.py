"""A pipeline stage with transformers' own layers (--transformer-impl transformers).

Tensor shapes: S sequence length, B micro-batch size, H hidden size, V vocabulary.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron.bcd.blocks.partition import partition_from_config
from megatron.bcd.config import RunConfig
from megatron.bcd.model.chunks import Chunks
from megatron.bcd.model.host_layers import HostLayers
from megatron.bcd.model.linear_loss import linear_cross_entropy
from megatron.bcd.model.skeleton import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    LAYERS,
    Pass,
    Skeleton,
    has_weights,
    read_config,
)
from megatron.bcd.model.split_check import check_split
from megatron.bcd.model.texts import text_arguments
from megatron.bcd.runtime import device, packages
from megatron.bcd.runtime.compat.transformers import compile_elementwise


class TransformersModel(Chunks, LanguageModule):
    """A stage of a decoder of transformers, with the interface of `ChunkwiseModel` and its names of parameters.

    Layers, embedding, final norm and head are transformers' modules. Their `forward` is that of the whole model
    (`Skeleton`), which is no submodule: its slots run the layers of this stage, and pass on what other stages compute.

    Args:
        stage_config: Megatron Core's configuration, for its schedules.
        chunk: number of the chunk of this rank's stage.
        seed: draws the weights, equal for any number of stages; None if they will be loaded.
    """

    def __init__(
        self,
        config: RunConfig,
        stage_config: TransformerConfig,
        skeleton: Skeleton,
        host_layers: HostLayers,
        *,
        chunk: int,
        seed: int | None,
    ) -> None:
        super().__init__(config=stage_config)
        pre_process = parallel_state.is_pipeline_first_stage() and chunk == 0
        post_process = parallel_state.is_pipeline_last_stage() and chunk == config.num_chunks - 1
        stage, is_on_host = parallel_state.get_pipeline_model_parallel_rank(), config.bcd.bcd_layers_on == "host"
        layers = partition_from_config(config).chunk_layers(stage, chunk)
        self.pre_process, self.post_process = pre_process, post_process
        self.vp_stage = chunk if config.num_chunks > 1 else None
        self.model_type, self.share_embeddings_and_output_weights = ModelType.encoder_or_decoder, config.tied
        self.vocab_size = skeleton.config.vocab_size
        self._has_linear_loss = config.has_linear_loss
        self.first_layer = layers.start
        self.input_tensor: Tensor | None = None
        self.__dict__["skeleton"] = skeleton

        def build(module: nn.Module, number: int, *, on_host: bool = False) -> nn.Module:
            drawn = None if seed is None else seed + number
            where = torch.device("cpu") if on_host else device.current()
            skeleton.materialize(module, device=where, seed=drawn)
            return module

        if pre_process:
            self.embedding = nn.Module()
        for ours in skeleton.paths:
            if ours.startswith("embedding.") and pre_process:
                setattr(self.embedding, ours.removeprefix("embedding."), build(skeleton.module(ours), 0))
            elif ours.startswith("embedding.") and ours != EMBEDDING:  # runs on every stage; its result is not used
                build(skeleton.module(ours), 0).requires_grad_(False)
        own = [skeleton.layers[number] for number in layers]
        for number, layer in zip(layers, own, strict=True):
            build(layer, 1 + number, on_host=is_on_host)
            if packages.compiles(config.bcd.bcd_compile):
                compile_elementwise(layer)
            if is_on_host:
                host_layers.add(layer)
        self.decoder, last = nn.Module(), 1 + len(skeleton.layers)
        self.decoder.layers = nn.ModuleList(own)
        if post_process and FINAL_NORM in skeleton.paths:
            self.decoder.final_layernorm = build(skeleton.module(FINAL_NORM), last)
        if post_process:
            head = skeleton.module(HEAD)
            if config.tied and pre_process:
                head.weight = self.embedding.word_embeddings.weight
                self.__dict__["output_layer"] = head  # no submodule: its weight is the embedding's
            else:
                self.output_layer = build(head, last + 1)
        skeleton.fill()
        for buffer in skeleton.model.buffers():
            buffer.data = buffer.data.to(device.current())
        self.setup_embeddings_and_output_layer()

    # --- forward

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Set the input [S, B, H] of a stage or chunk without the embedding."""
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        *,
        labels: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Run the stage, or the selected chunk of it.

        Args:
            input_ids: tokens [B, S]; read by the embedding.
            position_ids: [B, S]; read for packed texts, where they start again with each.
            attention_mask: None; where a mask is needed, transformers makes it from positions.
            labels: [B, S].
            packed_seq_params: bounds of texts (`data.attention_inputs`); each text attends to itself alone.

        Returns:
            The output [S, B, H]; on the last stage losses [B, S], or without labels the logits [B, S, V].
        """
        own = range(len(self.decoder.layers)) if self._chunk is None else self.chunk_layers[self._chunk]  # type: ignore[arg-type]
        layers = range(self.first_layer + own.start, self.first_layer + own.stop)
        received = None if self.pre_process and self._chunk in (None, 0) else self.input_tensor
        inputs: dict[str, Any] = {"position_ids": None if packed_seq_params is None else position_ids}
        if packed_seq_params is not None and self.skeleton.attends_by_text:
            inputs |= text_arguments(packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q)
        if received is not None:
            received = received.transpose(0, 1).contiguous()  # some layers view it
        elif self.embedding.word_embeddings.weight.device != device.current():  # in host memory, where the tokens are
            embedded = self.embedding.word_embeddings(input_ids)
            inputs["inputs_embeds"] = embedded.to(device.current(), non_blocking=True)
        else:
            inputs["input_ids"] = input_ids
        recomputes = self.config.recompute_granularity == "full" and torch.is_grad_enabled()
        most = self.config.recompute_num_layers if self.config.recompute_method == "block" else None
        now = Pass(
            layers=layers,
            received=received,
            has_head=self.ends_with_head,
            recomputed=layers[:most] if recomputes else range(0),
            ends_before_head=self._has_linear_loss and labels is not None,
        )
        output: Tensor = self.skeleton.run(now, **inputs)
        if not now.has_head:  # a copy, because Megatron Core frees it when it is sent
            return output.transpose(0, 1).clone(memory_format=torch.contiguous_format)
        return output if labels is None else self.compute_language_model_loss(labels, output)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the losses [B, S], fp32, of labels [B, S]. With the linear loss `logits` is the head's input."""
        if self._has_linear_loss:
            return linear_cross_entropy(logits, self.skeleton.module(HEAD).weight, labels, self.pg_collection.tp)
        losses: Tensor = tensor_parallel.vocab_parallel_cross_entropy(logits.float(), labels)
        return losses

    # --- state

    def train(self, mode: bool = True) -> TransformersModel:
        """Set the mode of the stage's modules and of those that the skeleton has outside of them, such as dropout."""
        self.skeleton.model.train(mode)
        return super().train(mode)

    def half(self) -> TransformersModel:
        """Return the model: parameters have their precision, and buffers (frequencies, corrections) keep fp32."""
        return self

    bfloat16 = half

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the stage's state. Keys in a checkpoint are those of the whole model, with a key for each layer."""
        assert not prefix and not sharded_offsets, "stages are saved as a whole"
        replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        entries = {}
        for name, tensor in self.state_dict(keep_vars=True).items():
            is_copy = name == f"{HEAD}.weight" and self.share_embeddings_and_output_weights
            key = re.sub(rf"^{LAYERS}\.(\d+)", lambda match: f"{LAYERS}.{self.first_layer + int(match[1])}", name)
            key = f"{EMBEDDING}.weight" if is_copy else key
            entries[name] = ShardedTensor.from_rank_offsets(key, tensor, replica_id=(int(is_copy), 0, replica))
        return entries


def build_chunks(
    config: RunConfig, stage_config: TransformerConfig, host_layers: HostLayers
) -> list[TransformersModel]:
    """Build the chunks of this rank's stage. Layers are read later; without weights in --load-hf they are drawn.

    Raises:
        ValueError: transformers' model can't be trained layer by layer. One line.
    """
    path, stage = str(config.checkpoint.load_hf), parallel_state.get_pipeline_model_parallel_rank()
    seed = None if has_weights(path) else config.training.seed
    hf_config = read_config(path).get_text_config()
    checked = check_split(hf_config, is_packed=config.data.reset_attention_mask)
    if config.has_linear_loss and not checked.has_plain_head:
        raise checked.refusal("changes its head's logits, so --cross-entropy-fusion-impl linear can't omit them")
    chunks = []
    for chunk in range(config.num_chunks):
        skeleton = Skeleton(hf_config, dtype=stage_config.params_dtype)
        if checked.attends_by_text and config.can_attend_by_text and device.has_variable_length_attention():
            skeleton.attend_by_text()
        skeleton.tuple_length = checked.tuple_length
        if chunk == 0:
            numbers = partition_from_config(config).stage_layers(stage)
            host_layers.expect([skeleton.layers[number] for number in numbers])
        chunks.append(TransformersModel(config, stage_config, skeleton, host_layers, chunk=chunk, seed=seed))
    return chunks
