"""--bcd-low-rank: adapters beside the matrices, alone and with blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import convert_checkpoint
import peft
import pytest
import torch
import transformers
from support import huggingface_models as models
from support import prefix_runs, resumed_runs, worlds
from support.dist import World

from megatron.bcd.huggingface import in_memory as in_memory_model
from megatron.bcd.model.builder import unwrap_model
from megatron.bcd.tokenizer import ByteLevelTokenizer

RANK, LR, DECAY = 4, 5e-3, 0.1
PADDED = 260
"""Rows of the embedding: one more than the models have, with a logit of 0."""
PARTS = {"linear_qkv": ("q_proj", "k_proj", "v_proj"), "linear_proj": ("o_proj",)}
PARTS |= {"linear_fc1": ("gate_proj", "up_proj"), "linear_fc2": ("down_proj",)}
OF_GPT2 = {"self_attention.linear_qkv": "attn.c_attn", "self_attention.linear_proj": "attn.c_proj"}
OF_GPT2 |= {"mlp.linear_fc1": "mlp.c_fc", "mlp.linear_fc2": "mlp.c_proj"}


def lora_config(model: Path, data_path: str, **flags: Any) -> Any:
    """Adapters alone beside the weights of `model`."""
    values: dict[str, Any] = {"load_hf": str(model), "data_path": data_path, "seq_length": 32, "micro_batch_size": 2}
    values |= {"global_batch_size": 4, "train_iters": 8, "lr": LR, "eval_iters": 0, "num_workers": 0, "log_interval": 1}
    values |= {"lr_decay_style": "constant", "weight_decay": DECAY, "tokenizer_type": "ByteLevelTokenizer"}
    values |= {"hidden_dropout": 0, "attention_dropout": 0, "bcd_num_blocks": 0, "bcd_low_rank": RANK}
    values |= {"make_vocab_size_divisible_by": PADDED // int(flags.get("tensor_model_parallel_size", 1))}
    return worlds.config_of(**values | flags)


def curve(config: Any) -> dict[str, Any]:
    """Losses of the steps, the first weights, the last ones, and the tokens and labels of each microbatch."""
    first: dict[str, Any] = {}
    batches: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(one: worlds.RecordedRun) -> None:
        first.update({} if first else worlds.weights_of(one.model))
        served = one._batches

        def watched() -> Iterator[Any]:
            for batch in served():
                batches.append((batch["tokens"].clone(), batch["labels"].clone()))
                yield batch

        one._batches = watched  # type: ignore[method-assign]

    with worlds.started(config) as one:
        keep(one)
        one.train()
        return worlds.outcome(one) | {"first": first, "batches": batches, "warnings": one.recorder.warnings}


def peft_model(model: Path, ours: dict[str, torch.Tensor], *, is_gpt2: bool) -> Any:
    """peft's adapters beside `model`, with A and B of ours."""
    described = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(model), described)
    named = dict(theirs.named_parameters())
    for name, a in ours.items():
        if not name.endswith("_adapter.a"):
            continue
        start, _, _ = name.partition("_adapter.a")
        layer, place = start.removeprefix("decoder.layers.").split(".", 1)
        b = [ours[key] for key in sorted(ours) if key.startswith(f"{start}_adapter.b.")]
        if is_gpt2:
            pairs = {f"transformer.h.{layer}.{OF_GPT2[place]}": (a, torch.cat(b))}
        else:
            module, matrix = place.split(".")
            where = "self_attn" if module == "self_attention" else "mlp"
            own = zip(PARTS[matrix], a.chunk(len(b)), b, strict=True)
            pairs = {f"model.layers.{layer}.{where}.{part}": (one_a, one_b) for part, one_a, one_b in own}
        for theirs_name, (one_a, one_b) in pairs.items():
            for letter, value in (("A", one_a), ("B", one_b)):
                parameter = named.pop(f"base_model.model.{theirs_name}.lora_{letter}.default.weight")
                assert parameter.shape == value.shape
                parameter.data.copy_(value)
    assert not [name for name in named if "lora_" in name], "each of peft's adapters is one of ours"
    return theirs


def peft_curve(theirs: Any, batches: list[Any], *, per_step: int) -> list[float]:
    trained = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    adam = torch.optim.AdamW(trained, lr=LR, weight_decay=DECAY)
    losses = []
    for start in range(0, len(batches), per_step):
        of_step = []
        for tokens, labels in batches[start : start + per_step]:
            logits = torch.nn.functional.pad(theirs(tokens).logits, (0, PADDED - models.VOCABULARY))
            of_step.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) / per_step)
            of_step[-1].backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        adam.step()
        adam.zero_grad()
        losses.append(sum(of_step).item())
    return losses


@pytest.mark.parametrize("name", ["gpt2", "llama3"])
def test_alone_it_is_lora(world1: World, world2: World, text_data: str, tmp_path: Path, name: str) -> None:
    """Another scale, first values of another kind, queries taken for keys, a gate for an up; slices or gradients of
    another tensor-parallel rank; weights of the base that change."""
    given = models.write_model(name, tmp_path / "given")
    [found] = world1.run(curve, lora_config(given, text_data))
    first, last = found["first"], found["weights"]
    changed = {name for name in first if not torch.equal(first[name], torch.as_tensor(last[name]))}
    assert changed == {name for name in first if "_adapter." in name}
    theirs = peft_model(given, {name: torch.as_tensor(value) for name, value in first.items()}, is_gpt2=name == "gpt2")
    expected = peft_curve(theirs, found["batches"], per_step=2)
    assert found["losses"] == pytest.approx(expected, abs=1e-5)
    assert expected[0] - expected[-1] > 0.05
    for flags in ({"sequence_parallel": True}, {}):
        split = world2.run(curve, lora_config(given, text_data, world_size=2, tensor_model_parallel_size=2, **flags))
        assert split[0]["losses"] == pytest.approx(expected, abs=1e-5)


TWO = {"world_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor2": TWO | {"tensor_model_parallel_size": 2},
    "sequence_parallel": TWO | {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline2": TWO | {"pipeline_model_parallel_size": 2},
    "interleaved": TWO | {"pipeline_model_parallel_size": 2, "bcd_layout": "interleaved"},
    "data2": TWO,
    "context2": TWO | {"context_parallel_size": 2},
    "recomputed": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "norms_recomputed": {"recompute_granularity": "selective", "recompute_modules": "layernorm"},
    "on_host": {"bcd_frozen_weights": "host"},
    "suffix_submodel": TWO
    | {"pipeline_model_parallel_size": 2, "bcd_layout": "submodel", "bcd_low_rank_layers": "suffix"},
    "suffix_data2": TWO | {"bcd_low_rank_layers": "suffix", "bcd_head_phase": True},
    "suffix_recomputed": {"bcd_low_rank_layers": "suffix", "recompute_granularity": "full"}
    | {"recompute_method": "uniform", "recompute_num_layers": 1},
}
LLAMA = {"swiglu": True, "position_embedding_type": "rope", "group_query_attention": True, "num_query_groups": 2}
LLAMA |= {"normalization": "RMSNorm", "disable_bias_linear": True, "untie_embeddings_and_output_weights": True}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_with_adapters_in_every_layout(world1: World, world2: World, initial_weights: Any, layout: str) -> None:
    """A gradient that ends above the bottom, that is summed twice or not at all, a slice of another rank, adapters
    that a switch resets or leaves behind."""
    flags = initial_weights(**({} if layout == "pipeline2" else LLAMA))
    flags |= {"bcd_low_rank": 4, "bcd_low_rank_lr_ratio": 0.5, "train_iters": 6, "bcd_order": "descending"}
    of_blocks = ("bcd_layout", "bcd_low_rank_layers", "bcd_head_phase")
    given = {name: value for name, value in LAYOUTS[layout].items() if name in of_blocks}
    given |= {"bcd_num_blocks": 6, "bcd_layout": "spread"} if layout == "suffix_submodel" else {}
    given |= {"bcd_layout": "spread"} if layout == "interleaved" else {}
    stages = 2 if layout == "pipeline2" else None
    [one] = world1.run(worlds.train_run, worlds.run_config(**flags, **given), blocks_of_stages=stages)
    world = world2 if "world_size" in LAYOUTS[layout] else world1
    found = world.run(worlds.train_run, worlds.run_config(**flags, **LAYOUTS[layout]))[-1]
    assert found["losses"] == pytest.approx(one["losses"], rel=2e-5)
    assert found["grad_norms"] == pytest.approx(one["grad_norms"], rel=2e-4)


def blocks_stand_still(config: Any) -> dict[str, Any]:
    """A run whose blocks get no gradient."""

    def freeze(one: worlds.RecordedRun) -> None:
        one._is_switch_unchecked = False  # it would find that nothing changes
        for parameter in one.active.parameters.of_block(one.block).values():
            parameter.main_grad.zero_()

    with worlds.started(config, after_schedule=freeze) as one:
        one.train()
        return worlds.outcome(one)


@pytest.mark.parametrize(("size", "precision"), [(1, "fp32"), (2, "bf16")])
def test_state_lives_through_the_phases(
    world1: World, world2: World, text_data: str, size: int, precision: str
) -> None:
    """Moments, step counts or main parameters of adapters that a switch loses: with blocks that stand still, a run is
    that of adapters alone."""
    flags = {"data_path": text_data, "world_size": size, "bf16": precision == "bf16", "bcd_low_rank": 4}
    flags |= {"clip_grad": 0, "weight_decay": 0, "train_iters": 7, "bcd_steps_per_block": 2}
    world = {1: world1, 2: world2}[size]
    alone = world.run(worlds.train_run, worlds.run_config(**flags | {"bcd_num_blocks": 0}))[0]
    beside = world.run(blocks_stand_still, worlds.run_config(**flags))[0]
    assert beside["losses"] == alone["losses"] and alone["losses"][-1] < alone["losses"][0] - 0.02
    assert worlds.same_bits(beside["weights"], alone["weights"]) == []


def gradients_of_adapters(config: Any) -> dict[str, Any]:
    """By step the gradients of the adapters that have one, and first and last weights; blocks get no gradient."""
    steps: list[dict[str, torch.Tensor]] = []
    first: dict[str, torch.Tensor] = {}

    def look(one: worlds.RecordedRun) -> None:
        first.update({} if first else worlds.weights_of(one.model))
        one._is_switch_unchecked = False
        named = unwrap_model(one.model).named_parameters()
        active = {name: parameter.main_grad for name, parameter in named if hasattr(parameter, "main_grad")}
        steps.append({name: gradient.clone() for name, gradient in active.items() if "_adapter." in name})
        for name in active.keys() - steps[-1].keys():
            active[name].zero_()

    with worlds.started(config, after_schedule=look) as one:
        one.train()
        return {"steps": steps, "first": first, "last": worlds.weights_of(one.model)}


def test_adapters_rest_in_the_prefix(world1: World, text_data: str) -> None:
    """Adapters before the block that drift, or whose moments or step counts a phase without them loses or counts on."""
    flags = {"data_path": text_data, "bcd_low_rank": 4, "bcd_low_rank_layers": "suffix", "bcd_order": "random"}
    flags |= {"clip_grad": 0, "train_iters": 12, "bcd_steps_per_block": 2, "lr_decay_style": "constant"}
    found = world1.run(gradients_of_adapters, worlds.run_config(**flags))[0]
    assert len({len(step) for step in found["steps"]}) == 3
    for name, weight in found["first"].items():
        if "_adapter." in name:
            expected = torch.nn.Parameter(weight.clone())
            adam = torch.optim.AdamW([expected], lr=1e-2, weight_decay=0.01)
            for step in found["steps"]:
                expected.grad = step.get(name)
                adam.step()
            assert torch.allclose(found["last"][name], expected.detach(), atol=1e-6), name


def test_a_prefix_with_adapters_is_served(world1: World, text_data: str, tmp_path: Path) -> None:
    """Outputs of the prefix from before its adapters were trained."""
    flags = prefix_runs.FLAGS | {"data_path": text_data, "bcd_low_rank": 4, "bcd_low_rank_layers": "suffix"}
    computed = world1.run(worlds.train_run, worlds.run_config(**flags))[0]
    cached = worlds.run_config(**flags, bcd_prefix_cache=str(tmp_path / "cache"))
    served = world1.run(prefix_runs.served_run, cached)[0]
    assert served["losses"] == computed["losses"] and sum(served["hits"]) > 0


@pytest.mark.parametrize(
    "flags",
    [{"bf16": True, "bcd_low_rank_alpha": 3.0}, {"bcd_num_blocks": 0}]
    + [{"bf16": True, "bcd_low_rank_layers": "suffix", "bcd_optimizer_state": kept} for kept in ("reset", "host")],
)
def test_killed_and_resumed(world1: World, text_data: str, tmp_path: Path, flags: dict[str, Any]) -> None:
    """Adapters or their moments that a checkpoint lacks."""
    config = worlds.run_config(data_path=text_data, bcd_low_rank=4, **flags)
    assert world1.run(resumed_runs.stopped_and_resumed, config, (1, 4), str(tmp_path)) == [[]]


def test_the_other_weights_are_as_without(world1: World, text_data: str) -> None:
    """Adapters that draw from the generators of the weights or of dropout."""
    first = {
        rank: world1.run(worlds.initial_weights, worlds.run_config(data_path=text_data, bcd_low_rank=rank))[0]
        for rank in (None, 4)
    }
    assert {name for name in first[4] if "_adapter." not in name} == set(first[None])
    assert worlds.same_bits(first[None], {name: first[4][name] for name in first[None]}) == []


@pytest.mark.parametrize("name", ["gpt2", "llama3"])
def test_merged_and_alone(world1: World, world2: World, text_data: str, tmp_path: Path, name: str) -> None:
    """Weights of the base alone, an update of another matrix, layer or rank, or with another scale: in a model that is
    written at the end, in one that is made of a checkpoint, and in peft's folder."""
    given = models.write_model(name, tmp_path / "given")
    texts = torch.randint(0, models.VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(1))
    flags = {"world_size": 2, "tensor_model_parallel_size": 2, "save": str(tmp_path / "run"), "save_hf_interval": 4}
    config = lora_config(given, text_data, save_adapters=str(tmp_path / "adapters"), **flags)
    world2.run(worlds.train_run, config)
    flags = {"load": str(tmp_path / "run"), "save_adapters": str(tmp_path / "again")}
    world1.run(worlds.train_run, lora_config(given, text_data, **flags))  # trains nothing: the run is at its end
    flags = {"load": str(tmp_path / "run"), "save_hf": str(tmp_path / "merged")}
    flags |= {"save_adapters": str(tmp_path / "both")}
    [expected] = world1.run(logits_after, lora_config(given, text_data, **flags), texts)

    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model.eval()(texts).logits  # type: ignore[no-any-return]

    peft.PeftConfig.from_pretrained(tmp_path / "adapters" / "iter_0000004")
    for name in ("adapters", "again", "both"):
        base = transformers.AutoModelForCausalLM.from_pretrained(given)
        assert (logits(base) - expected).abs().max() > 0.1
        assert (logits(peft.PeftModel.from_pretrained(base, tmp_path / name)) - expected).abs().max() < 1e-4
    tool = ["--from", "bcd", "--to", "hf", "--input", str(tmp_path / "run"), "--config", str(given)]
    assert convert_checkpoint.main([*tool, "--output", str(tmp_path / "converted")]) == 0
    for path in (tmp_path / "merged", tmp_path / "converted"):
        assert (logits(transformers.AutoModelForCausalLM.from_pretrained(path)) - expected).abs().max() < 1e-4
    in_memory = in_memory_model.open_model(str(tmp_path / "run"), tokenizer=ByteLevelTokenizer()).model
    assert (logits(in_memory) - expected).abs().max() < 1e-4


def logits_after(config: Any, tokens: torch.Tensor) -> torch.Tensor:
    """[B, S, V] of the resumed model, which is written to --save-hf too."""
    with worlds.started(config) as one, torch.no_grad():
        assert one.exporter is not None and one.exporter.export(one.model)
        positions = torch.arange(tokens.size(1)).expand_as(tokens)
        logits: torch.Tensor = unwrap_model(one.model).eval()(tokens, positions, None)
        return logits[..., : models.VOCABULARY]


def test_checkpoints_of_other_adapters(world1: World, text_data: str, tmp_path: Path) -> None:
    """Adapters of another rank or scale that are loaded, or adapters that are dropped without a word; a base of which
    blocks were trained for adapters that are written alone."""
    given = models.write_model("llama3", tmp_path / "given")
    flags = {"train_iters": 2, "save": str(tmp_path / "run"), "bcd_num_blocks": 2, "bcd_steps_per_block": 1}
    world1.run(worlds.train_run, lora_config(given, text_data, **flags))
    found = {"load": str(tmp_path / "run"), "train_iters": 3}
    others: list[dict[str, Any]] = [
        {"bcd_low_rank": 2},
        {"bcd_low_rank_alpha": 1.0},
        {"finetune": True, "bcd_low_rank": 2},
    ]
    others += [{"finetune": True, "bcd_low_rank": None, "bcd_num_blocks": 2}]
    for other in others:
        assert "low-rank" in world1.run(refusal, lora_config(given, text_data, **found | other))[0]
    adapters = {"save_adapters": str(tmp_path / "adapters")}
    alone = {"save": str(tmp_path / "alone"), "bcd_num_blocks": 0}
    world1.run(worlds.train_run, lora_config(given, text_data, **found | alone))
    for load in ("run", "alone"):
        config = lora_config(given, text_data, **found | adapters | {"load": str(tmp_path / load), "train_iters": 4})
        assert "give --save-hf" in world1.run(refusal, config)[0]


def refusal(config: Any) -> str:
    """What a run says that does not begin."""
    with pytest.raises(ValueError) as raised, worlds.started(config):
        pass
    return str(raised.value)
