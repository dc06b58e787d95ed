"""The planner's figures for the small runs of `worlds`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.bcd.blocks.partition import Partition
from megatron.bcd.planner.cost import ModelShape
from megatron.bcd.planner.memory import rank_memory, recomputation
from megatron.bcd.planner.recipe import Recipe, make_recipe
from megatron.bcd.planner.state import RankMemory
from megatron.bcd.planner.tables import Cluster, Model, read_table
from megatron.bcd.planner.tensors import stage_tensors
from support import worlds

CLUSTER = read_table(Path(__file__).resolve().parents[2] / "examples" / "clusters.csv", Cluster)["rtx4090"]
TWO = {"world_size": 2}
PRETRAIN = {"bcd_preset": "pretrain"}
BREADTH_FIRST = {"bcd_preset": "finetune", "bcd_num_blocks": None, "bcd_inactive_update": "factored", "bf16": True}
BREADTH_FIRST |= {"bcd_schedule": "breadth-first"}
LINEAR = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 96, "disable_bias_linear": True, "bf16": True}
EXPERTS |= {"moe_grouped_gemm": True}  # as the planner plans them
EXPERTS |= {"moe_token_dispatcher_type": "alltoall"}
BIASES = {"num_experts": 4, "moe_ffn_hidden_size": 96, "moe_token_dispatcher_type": "alltoall"}
FP8 = {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "tensorwise"}
RUNS: dict[str, dict[str, Any]] = {
    "one": {},
    "texts_bf16": {"bf16": True, "reset_attention_mask": True},
    "masks": {"reset_attention_mask": True, "bcd_num_blocks": 1},
    "linear_loss_bf16_pipeline2": TWO | {"bf16": True, "pipeline_model_parallel_size": 2} | LINEAR,
    "data2_bf16": TWO | {"bf16": True},
    "like_qwen": {"kv_channels": 16, "qk_layernorm": True, "disable_bias_linear": True, "add_qkv_bias": True}
    | {"untie_embeddings_and_output_weights": True, "bcd_always_active": "head"},
    "data2_bf16_offload": TWO
    | {"bf16": True, "bcd_num_blocks": 1, "optimizer_cpu_offload": True, "no_pin_cpu_grads": True},
    "pretrain_data2_bf16": TWO | PRETRAIN | {"bf16": True},
    "finetune_factored_bf16": {"bcd_preset": "finetune", "bcd_num_blocks": None, "bf16": True}
    | {"bcd_inactive_update": "factored"},
    "streamed": {"bf16": True, "bcd_layers_on": "host", "bcd_num_blocks": 3},
    "breadth_first_streamed_kept": BREADTH_FIRST | {"bcd_layers_on": "host", "bcd_saved_activations": "device"},
    "breadth_first_streamed_on_host": BREADTH_FIRST | {"bcd_layers_on": "host", "bcd_saved_activations": "host"},
    "breadth_first_streamed_pipeline2": TWO
    | BREADTH_FIRST
    | {"bcd_layers_on": "host", "bcd_saved_activations": "device", "pipeline_model_parallel_size": 2},
    "breadth_first_streamed": BREADTH_FIRST | {"bcd_layers_on": "host", "bcd_resident_layers": 1},
    "breadth_first_streamed_data2": TWO
    | BREADTH_FIRST
    | {"bcd_layers_on": "host", "bcd_saved_inputs": "host", "untie_embeddings_and_output_weights": True},
    "adam_streamed_pipeline2": TWO
    | {"bcd_num_blocks": 1, "bcd_layers_on": "host", "bf16": True, "num_layers": 12, "pipeline_model_parallel_size": 2},
    "muon8_streamed": {"bcd_num_blocks": 1, "bcd_layers_on": "host", "bf16": True, "optimizer": "muon"}
    | {"muon_momentum_dtype": "int8"},
    "muon8_breadth_first": {"bcd_num_blocks": 1, "bf16": True, "optimizer": "muon", "muon_momentum_dtype": "int8"}
    | BREADTH_FIRST,
    "fp8": FP8,
    "fp8_streamed": BREADTH_FIRST | FP8 | {"bcd_layers_on": "host", "bcd_layers_per_pass": 2},
    "head_phase_pipeline2": TWO
    | {"pipeline_model_parallel_size": 2, "bf16": True}
    | {"untie_embeddings_and_output_weights": True, "bcd_head_phase": True},
    "expert_biases_bf16_pipeline2": TWO | BIASES | {"bf16": True, "pipeline_model_parallel_size": 2},
    "experts_divided_streamed": TWO | EXPERTS | worlds.EXPERT2 | BREADTH_FIRST | {"bcd_layers_on": "host"},
    "pipeline2_submodel": TWO | {"pipeline_model_parallel_size": 2, "bcd_layout": "submodel", "num_layers": 7},
}


def recipe_of(flags: dict[str, Any], model: Model | None = None) -> Recipe:
    """Return the planner's view of a small run, or of one on transformers' layers of this model."""
    model = model or Model(
        name="small",
        form="gpt",
        layers=flags["num_layers"],
        hidden=flags["hidden_size"],
        heads=4,
        groups=flags.get("num_query_groups", 4),
        ffn=4 * flags["hidden_size"],
        vocabulary=257,
        sequence=flags.get("seq_length", 32),
        source="",
        head_dim=flags.get("kv_channels", 0),
        tied=not flags.get("untie_embeddings_and_output_weights"),
        biases="qkv" if flags.get("add_qkv_bias") else "none" if flags.get("disable_bias_linear") else "",
        qk_norm=flags.get("qk_layernorm"),
        experts=flags.get("num_experts", 0),
        expert_ffn=flags.get("moe_ffn_hidden_size", 0),
    )
    names = (
        "bcd_layout", "bcd_inactive_update", "bcd_layers_on", "bcd_resident_layers", "bcd_frozen",
        "bcd_always_active", "bcd_head_phase", "adam_moments_dtype", "cross_entropy_fusion_impl", "bcd_schedule",
        "bcd_layers_per_pass", "bcd_saved_inputs", "bcd_saved_activations", "bcd_passes_on_host", "optimizer",
        "muon_momentum_dtype", "pipeline_model_parallel_size", "context_parallel_size", "bcd_order",
        "expert_model_parallel_size",
    )  # fmt: skip
    method = "offload" if flags.get("optimizer_cpu_offload") else flags.get("bcd_preset", "bcd")
    return make_recipe(
        model=model,
        cluster=CLUSTER,
        num_gpus=flags.get("world_size", 1),
        method=method,
        precision="fp8" if flags.get("fp8_format") else "bf16" if flags.get("bf16") else "fp32",
        task="sft" if flags.get("reset_attention_mask") else "pretrain",  # plans packed records
        bcd_num_blocks=flags.get("bcd_num_blocks", 3),
        micro_batch_size=flags.get("micro_batch_size", 2),
        global_batch_size=flags.get("global_batch_size", 8),
        make_vocab_size_divisible_by=flags.get("make_vocab_size_divisible_by", worlds.PADDED_VOCABULARY),
        **{name: flags.get(name) for name in names},
    )


def shape_of(form: str = "gpt", *, tied: bool | None = None, **sizes: int) -> ModelShape:
    """Return the planner's model: a GPT-2, or a LLaMA with `ffn`; heads are as wide as the model unless head_dim is
    given."""
    given = {"heads": 1, "groups": sizes.get("heads", 1), "ffn": 4 * sizes["hidden"], "vocabulary": 50257} | sizes
    length = sizes.get("positions", 1024)
    model = Model(name="any", form=form, sequence=length, source="", tied=tied, **given)  # type: ignore[arg-type]
    return make_recipe(model=model, cluster=CLUSTER, num_gpus=1, bcd_num_blocks=1).shape


def stage_parameters(shape: ModelShape, partition: Partition, *, padded: int) -> tuple[int, ...]:
    """Return the number of parameters of each pipeline stage, including a tied head's copy."""
    stages = [stage_tensors(shape, partition, stage, padded_vocabulary=padded) for stage in range(partition.num_stages)]
    return tuple(sum(tensor.size for tensor in tensors) for tensors in stages)


def active_parameters(shape: ModelShape, partition: Partition, block: int, *, padded: int) -> tuple[int, ...]:
    """Return each pipeline stage's number of parameters that are active in the block's phase."""
    stages = [stage_tensors(shape, partition, stage, padded_vocabulary=padded) for stage in range(partition.num_stages)]
    return tuple(sum(tensor.size for tensor in tensors if tensor.owned.is_active(block)) for tensors in stages)


def planned_memory(recipe: Recipe) -> list[list[RankMemory]]:
    """Return the planned memory by block and rank."""
    replicas = [rank_memory(recipe, replica=rank) for rank in range(recipe.num_replicas)]
    return [
        [
            memory
            for stage in range(recipe.pipeline_size)
            for replica in replicas
            for memory in replica
            if (memory.stage, memory.block) == (stage, block)
        ]
        for block in range(recipe.partition.num_blocks)
    ]


def planned_state(recipe: Recipe) -> list[list[int]]:
    """Return the planned bytes of model state by block and rank."""
    return [[memory.model_state for memory in ranks] for ranks in planned_memory(recipe)]


def planned_activations(recipe: Recipe) -> list[list[int]]:
    """Return the bytes that autograd is planned to keep, by block and rank."""
    return [
        [
            recipe.memory.activations(stage, block).saved_bytes(recomputation(recipe)[stage][block])
            for stage in range(recipe.pipeline_size)
            for _ in range(recipe.num_replicas)
        ]
        for block in range(recipe.partition.num_blocks)
    ]
