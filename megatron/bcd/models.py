"""The model of one pipeline stage, and which of its parameters belong to which block.

Tensor shapes: S sequence length, B micro-batch size, N attention heads and G query groups on this tensor-parallel
rank, D head size, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.bcd import platform
from megatron.bcd.blocks import Partition, divide
from megatron.bcd.config import RunConfig

SCALED_DOT_PRODUCT = "scaled_dot_product_attention"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """Which modules and kernels this machine offers, and so which the model is made of."""

    layers: str  # "transformer_engine" or "local"
    attention: str
    norm: str
    optimizer: str

    def describe(self) -> str:
        return f"layers {self.layers}, attention {self.attention}, norm {self.norm}, optimizer {self.optimizer}"


def choose_implementation(
    transformer_impl: str,
    *,
    attention_backend: str = "auto",
    normalization: str = "LayerNorm",
    precision: str = "bf16",
    transformer_engine: bool,
    apex: bool,
    optimizer: str,
) -> Implementation:
    """The fast path where it exists, else Megatron Core's local modules.

    Transformer Engine's fused attention is for 16-bit values: in fp32 it would keep the S x S scores of every head, so
    its layers get PyTorch's.

    Raises:
        ValueError: Transformer Engine is asked for by name and can't be used here.
    """
    if transformer_impl == "transformer_engine" and not transformer_engine:
        raise ValueError(
            "--transformer-impl transformer_engine needs Transformer Engine and a GPU; install it, or use auto or local"
        )
    if transformer_engine and transformer_impl != "local":
        takes_ours = precision == "fp32" and attention_backend != "unfused"
        return Implementation(
            layers="transformer_engine",
            attention=SCALED_DOT_PRODUCT if takes_ours else "Transformer Engine",
            norm="Transformer Engine",
            optimizer=optimizer,
        )
    attention = "Megatron Core unfused" if attention_backend == "unfused" else SCALED_DOT_PRODUCT
    norm = f"Apex fused {normalization}" if apex and normalization == "LayerNorm" else f"PyTorch {normalization}"
    return Implementation(layers="local", attention=attention, norm=norm, optimizer=optimizer)


def implementation_here(config: RunConfig) -> Implementation:
    """`choose_implementation` for this run on this machine."""
    return choose_implementation(
        config.model.transformer_impl,
        attention_backend=str(config.transformer.get("attention_backend", "auto")),
        normalization=str(config.transformer.get("normalization", "LayerNorm")),
        precision=config.precision,
        transformer_engine=platform.has_transformer_engine(),
        apex=platform.has_apex(),
        optimizer=platform.optimizer_implementation(),
    )


def transformer_config(config: RunConfig, implementation: Implementation) -> TransformerConfig:
    """Megatron Core's configuration: what the flags say, and what follows from precision, activation and machine.

    Raises:
        ValueError: Megatron Core refuses the combination.
    """
    fields = dict(config.transformer)
    dtype = DTYPES[config.precision]
    fields.update(params_dtype=dtype, pipeline_dtype=dtype, deallocate_pipeline_outputs=True)
    if "attention_backend" in fields:
        fields["attention_backend"] = AttnBackend[str(fields["attention_backend"])]
    if config.model.swiglu:
        fields.update(gated_linear_unit=True, activation_func=torch.nn.functional.silu)
    has_bias = fields.get("add_bias_linear", True)
    if not config.model.swiglu and (not platform.has_cuda() or not has_bias):  # SwiGLU's has a form for the CPU
        fields["bias_activation_fusion"] = False
    if config.model.openai_gelu and not fields["bias_activation_fusion"]:
        # the fused kernel computes this form in any case, and Megatron Core takes it for torch's own GELU only
        fields["activation_func"] = tanh_gelu
    if not platform.has_cuda():
        fields["bias_dropout_fusion"] = False
        fields["cross_entropy_loss_fusion"] = False
        fields["fused_single_qkv_rope"] = _rotates_plainly(config)
    if implementation.layers == "local":
        fields["persist_layer_norm"] = False
        fields["apply_rope_fusion"] = False
        if fields.get("layernorm_zero_centered_gamma") and not implementation.norm.startswith("Apex"):
            raise ValueError(
                "--apply-layernorm-1p needs the layer norms of Apex or Transformer Engine, which are not importable "
                "here; leave it out"
            )
        if fields.get("sequence_parallel") and not implementation.norm.startswith("Apex"):
            raise ValueError(
                "--sequence-parallel needs the layer norms of Apex or Transformer Engine, which are not importable "
                "here; leave it out"
            )
    # with Transformer Engine too: the output head is Megatron Core's own linear layer
    if not platform.has_cuda() or not platform.is_importable("fused_weight_gradient_mlp_cuda"):
        fields["gradient_accumulation_fusion"] = False
    if not platform.has_cuda() or not platform.is_importable("scaled_masked_softmax_cuda"):
        fields["masked_softmax_fusion"] = False
    if config.num_layers % config.pipeline_size:
        fields["pipeline_model_parallel_layout"] = _uneven_layout(config.num_layers, config.pipeline_size)
    try:
        return TransformerConfig(**fields)
    except AssertionError as error:
        raise ValueError(f"Megatron Core refuses these flags: {error}") from error


def _rotates_plainly(config: RunConfig) -> bool:
    """Whether this room's rotary embedding for a CPU (`platform.lean`) computes what the flags ask for."""
    fields = config.transformer
    groups = int(fields.get("num_query_groups") or fields["num_attention_heads"])
    is_plain = config.model.rotary_percent == 1.0 and not fields.get("rotary_interleaved")
    is_alone = not fields.get("qk_layernorm") and groups >= config.tensor_size  # nothing between product and rotation
    return config.model.position_embedding_type == "rope" and is_plain and is_alone


def tanh_gelu(x: Tensor) -> Tensor:
    """GELU in the tanh form of OpenAI's GPT-2, element by element (--openai-gelu)."""
    return torch.nn.functional.gelu(x, approximate="tanh")


def describe_activation(config: TransformerConfig) -> str:
    """What the feed-forward part computes on this machine."""
    if config.gated_linear_unit:
        return "SwiGLU"
    return "GELU (tanh form)" if config.bias_activation_fusion or config.activation_func is tanh_gelu else "GELU"


def _uneven_layout(num_layers: int, num_stages: int) -> list[list[str]]:
    """Megatron Core's layer layout for layers that don't divide by stages: the same cut as `blocks.divide`."""
    stages = [["decoder"] * len(layers) for layers in divide(num_layers, num_stages)]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages


class ScaledDotProductAttention(MegatronModule):
    """Core attention of the local layers on `torch.nn.functional.scaled_dot_product_attention`.

    Megatron Core's local DotProductAttention materialises the S x S scores of every head; this takes PyTorch's flash
    kernels on CPU and GPU. Causal where no mask is given. The signature is Megatron Core's.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Query [S, B, N, D], key and value [S, B, G, D], mask [B or 1, 1, S, S] with True = masked; returns [S, B, N
        * D]."""
        assert attention_bias is None and packed_seq_params is None, "not offered by the flags"
        dropout = self.dropout if self.training else 0.0
        heads_per_group = query.size(2) // key.size(2)
        if heads_per_group > 1 and query.dtype == torch.float32 and platform.has_cuda():
            # of PyTorch's kernels for GPUs none but the one that keeps S x S scores takes groups in fp32
            key, value = (x.repeat_interleave(heads_per_group, dim=2) for x in (key, value))
        arguments: dict[str, Any] = {
            "dropout_p": dropout,
            "scale": self.softmax_scale,
            "enable_gqa": key.size(2) != query.size(2),
        }
        if attention_mask is None:
            arguments["is_causal"] = (attn_mask_type or self.attn_mask_type) == AttnMaskType.causal
        else:
            arguments["attn_mask"] = ~attention_mask
        query_bnsd, key_bgsd, value_bgsd = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if dropout and not self.config.sequence_parallel:
            # each tensor-parallel rank drops its own heads' scores
            with tensor_parallel.get_cuda_rng_tracker().fork():
                context = torch.nn.functional.scaled_dot_product_attention(
                    query_bnsd, key_bgsd, value_bgsd, **arguments
                )
        else:
            context = torch.nn.functional.scaled_dot_product_attention(query_bnsd, key_bgsd, value_bgsd, **arguments)
        return context.permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), -1)


class _PassThrough(torch.nn.Module):
    """A layer that does nothing."""

    def forward(self, *, hidden_states: Tensor, context: Any = None, **others: Any) -> tuple[Tensor, Any]:
        return hidden_states, context


_pass_through = _PassThrough()


class BcdTransformerBlock(TransformerBlock):
    """Megatron Core's layers of one stage, which can begin behind a frozen prefix.

    With full activation recomputation: Megatron Core checkpoints with a re-entrant autograd function; where none of its
    inputs needs a gradient, its output has no graph, and the active layers inside would silently get none. So the
    prefix runs without a graph and is not recomputed, and the first active layer's input starts the graph.

    With a prefix cache: `first_layer` says which of this stage's layers is the first to run.
    """

    num_prefix_layers = 0

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        first_layer: int | None = None,
        behind_prefix: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """As Megatron Core's. With `first_layer`, counted on this stage, `hidden_states` [S, B, H] are its input, on
        any stage; with `behind_prefix` it is the first active layer."""
        if behind_prefix:
            first_layer = self._trainable_layers()[0]
        if first_layer is None:
            return super().forward(hidden_states, *args, **kwargs)
        self.input_tensor = hidden_states  # where a stage that is not the first looks for its input
        layers: torch.nn.ModuleList = self.layers  # type: ignore[has-type]
        # what does nothing stands in for the prefix: layers keep their places, by which recomputation asks for them
        self.layers = torch.nn.ModuleList([*[_pass_through] * first_layer, *layers[first_layer:]])
        try:
            return super().forward(hidden_states, *args, **kwargs)
        finally:
            self.layers = layers
            self.input_tensor = None

    def _trainable_layers(self) -> list[int]:
        """Of this stage, those with a parameter that is trained in this phase."""
        return [i for i, layer in enumerate(self.layers) if any(p.requires_grad for p in layer.parameters())]

    def _get_layer(self, layer_number: int) -> Any:
        # the last chunk of --recompute-num-layers layers may be longer than what is left behind the prefix
        index = self.num_prefix_layers + layer_number
        return self.layers[index] if index < len(self.layers) else _pass_through

    def _checkpointed_forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        context: Tensor,
        context_mask: Tensor,  # type: ignore[override]
        rotary_pos_emb: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        trainable = self._trainable_layers()
        # the recomputation in backward asks for layers again: these two stay as they are until the next forward, and
        # are the same for every microbatch of a phase
        self.num_prefix_layers = 0 if hidden_states.requires_grad else (trainable[0] if trainable else len(self.layers))
        self.num_layers_per_pipeline_rank = len(self.layers) - self.num_prefix_layers
        with torch.no_grad():
            for layer in self.layers[: self.num_prefix_layers]:
                hidden_states, context = layer(
                    hidden_states=hidden_states,
                    attention_mask=attention_mask,
                    context=context,
                    context_mask=context_mask,
                    rotary_pos_emb=rotary_pos_emb,
                )
        if not self.num_layers_per_pipeline_rank:
            return hidden_states
        if not hidden_states.requires_grad:
            hidden_states = hidden_states.detach().requires_grad_()
        return super()._checkpointed_forward(
            hidden_states, attention_mask, context, context_mask, rotary_pos_emb, *args, **kwargs
        )


def _layer_spec(config: RunConfig, implementation: Implementation) -> ModuleSpec:
    qk_layernorm = bool(config.transformer.get("qk_layernorm", False))
    if implementation.layers == "transformer_engine":
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_layernorm)
    else:
        spec = get_gpt_layer_local_spec(
            qk_layernorm=qk_layernorm, normalization=config.transformer.get("normalization", "LayerNorm")
        )
    if implementation.attention == SCALED_DOT_PRODUCT:
        spec.submodules.self_attention.submodules.core_attention = ScaledDotProductAttention
    return spec


def build_model(config: RunConfig, padded_vocab_size: int, implementation: Implementation) -> torch.nn.Module:
    """This rank's stage of the model on its device, in the run's precision, all parameters trainable.

    Needs initialised parallel groups and random generators. Returns a GPTModel, inside a Float16Module in 16-bit
    precision.
    """
    stage_config = transformer_config(config, implementation)
    if not platform.has_cuda():
        platform.draw_as_stock_warm_up_does(
            seq_length=config.model.seq_length,
            micro_batch_size=config.training.micro_batch_size,
            hidden_size=stage_config.hidden_size,
            dtype=stage_config.params_dtype,
            ffn_hidden_size=stage_config.ffn_hidden_size // stage_config.tensor_model_parallel_size,
        )
    model: torch.nn.Module = GPTModel(
        config=stage_config,
        transformer_layer_spec=_layer_spec(config, implementation),
        vocab_size=padded_vocab_size,
        max_sequence_length=config.model.max_position_embeddings or config.model.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=config.tied,
        position_embedding_type=config.model.position_embedding_type,  # type: ignore[arg-type]
        rotary_percent=config.model.rotary_percent,
        rotary_base=config.model.rotary_base,
    )
    model.decoder.__class__ = BcdTransformerBlock
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    model.to(platform.device())
    if config.precision != "fp32":
        model = Float16Module(stage_config, model)
    return model


@torch.no_grad()
def broadcast_from_first_replica(model: torch.nn.Module) -> None:
    """Give every data-parallel rank the weights of the first, where each drew its own (--data-parallel-random-init)."""
    group = parallel_state.get_data_parallel_group()
    for parameter in model.parameters():
        torch.distributed.broadcast(parameter, src=parallel_state.get_data_parallel_src_rank(), group=group)


def gpt_of(model: torch.nn.Module) -> GPTModel:
    """The GPTModel inside its wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model  # type: ignore[return-value]


def is_active(name: str, *, partition: Partition, block: int, stage: int) -> bool:
    """Whether the parameter that GPTModel calls `name` on pipeline stage `stage` is updated while `block` is active.

    Raises:
        KeyError: no room of the model has a parameter of that name.
    """
    if is_always_active(name, partition=partition):
        return True
    room, _, rest = name.partition(".")
    if room == "embedding":
        return partition.embedding_active(block)
    if room == "output_layer":
        return partition.head_active(block)
    if name.startswith("decoder.final_layernorm."):
        return partition.final_norm_active(block)
    if name.startswith("decoder.layers."):
        layer = partition.stage_layers(stage).start + int(rest.split(".")[1])
        return layer in partition.active_layers(block, stage)
    raise KeyError(name)


def is_always_active(name: str, *, partition: Partition) -> bool:
    """Whether the parameter that GPTModel calls `name` is updated in every phase (--bcd-always-active)."""
    room = name.partition(".")[0]
    if room == "embedding":
        return partition.embedding_always_active
    if room == "output_layer":
        return partition.head_always_active
    # layernorm: the local layers' modules; layer_norm_weight: inside Transformer Engine's fused linear layers
    return partition.norms_always_active and ("layernorm" in name or "layer_norm" in name)


def count_parameters(model: torch.nn.Module) -> int:
    """Parameters of this stage over all its tensor-parallel ranks (split ones times the ranks, replicated ones
    once)."""
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    return sum(p.numel() * (ranks if getattr(p, "tensor_model_parallel", False) else 1) for p in model.parameters())
