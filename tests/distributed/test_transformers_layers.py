"""--transformer-impl transformers: any decoder, trained with its own layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from support import decoders, fine_tuning, texts, worlds
from support import huggingface_models as models
from support.dist import World
from support.planned import LINEAR

from megatron.bcd import data
from megatron.bcd.model.skeleton import Skeleton
from megatron.bcd.optim import phase_optimizer
from megatron.bcd.optim.matrix_optimizer import MatrixOptimizer
from megatron.bcd.planner import run_state
from megatron.bcd.runtime import device
from megatron.bcd.training.resolve import resolve_run

LENGTH = 24


def run_of(model: Path, data_path: str, *, pipeline: int = 1, replicas: int = 1, **flags: Any) -> Any:
    values: dict[str, Any] = {"load_hf": str(model), "data_path": data_path, "tokenizer_type": "ByteLevelTokenizer"}
    values |= {"transformer_impl": "transformers", "seq_length": LENGTH, "micro_batch_size": 1, "num_workers": 0}
    values |= {"global_batch_size": 2, "train_iters": 4, "lr": 1e-3, "eval_iters": 0, "log_interval": 1}
    values |= {"bcd_num_blocks": 2, "bcd_steps_per_block": 2, "pipeline_model_parallel_size": pipeline}
    return worlds.config_of(world_size=pipeline * replicas, **values | flags)


def logits_and_gradients(config: Any, tokens: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """Return the gradients of the mean loss of this rank's stage by names of checkpoints, and the logits [B, S, V]."""
    with worlds.started(config.replace_section("training", micro_batch_size=len(tokens))) as run:
        run.end_phase(is_end_of_run=True)  # Megatron Core's DDP would take the gradients
        model = worlds.unwrap_model(run.model).eval()
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        return _passes(model, tokens.to(device.current()))


def _passes(model: Any, tokens: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    shape = (tokens.size(1), len(tokens), model.config.hidden_size)
    if not model.pre_process:
        received = torch.empty(shape)
        torch.distributed.recv(received, src=0)
        model.set_input_tensor([received.requires_grad_()])
    output = model(tokens, None, None)
    result = output.detach().clone()  # Megatron Core's loss overwrites logits
    if model.post_process:
        model.compute_language_model_loss(tokens.roll(-1, 1), output).mean().backward()
        if not model.pre_process:
            torch.distributed.send(received.grad, dst=0)
    else:
        torch.distributed.send(result, dst=1)
        gradient = torch.empty_like(output)
        torch.distributed.recv(gradient, src=1)
        output.backward(gradient)
    keys = {name: part.key for name, part in model.sharded_state_dict().items()}
    gradients = {keys[name]: parameter.grad for name, parameter in model.named_parameters()}
    return {key: each for key, each in gradients.items() if each is not None}, result


DEFAULT = ("gemma3_text", "deepseek_v3", "qwen3_5_text", "phi3")
"""Models of the default suite: windows and scaled embeddings, experts behind latent attention, a hybrid, fused."""
MODELS = [pytest.param(name, marks=[] if name in DEFAULT else [pytest.mark.long]) for name in decoders.SETTINGS]


@pytest.fixture
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Write the model that the test's parameter names."""
    return decoders.write_model(request.getfixturevalue("name"), tmp_path / "given")


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(world1: World, world2: World, text_data: str, source: Path, name: str) -> None:
    """Logits and gradients are those of transformers' whole model, on one stage and on two."""
    tokens = torch.randint(0, decoders.VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    whole = transformers.AutoModelForCausalLM.from_pretrained(source)
    logits = whole(tokens).logits
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens.roll(-1, 1), reduction="none")
    losses.mean().backward()
    parameters = dict(whole.named_parameters())  # without the head of a tied model
    keys = {key: name for key, name, _ in Skeleton(whole.config).state() if name in parameters}
    wanted = {key: each for key, name in keys.items() if (each := parameters[name].grad) is not None}
    for world in (world1, world2):
        ranks = world.run(logits_and_gradients, run_of(source, text_data, pipeline=world.size), tokens)
        assert (ranks[-1][1] - logits).abs().max() < 5e-5
        ours: dict[str, torch.Tensor] = {}
        for stage, _ in ranks:
            for key, gradient in stage.items():
                ours[key] = ours.get(key, 0) + gradient  # a tied weight has two
        assert ours.keys() == wanted.keys()
        assert {key: each for key in ours if (each := (ours[key] - wanted[key]).abs().max()) > 5e-5} == {}


def trained(config: Any) -> dict[str, Any]:
    """Train, and return what is compared between runs."""
    with worlds.started(config) as run:
        run.train()
        return worlds.outcome(run)


HOST = {"bcd_schedule": "breadth-first", "bcd_layers_per_pass": 1}
WAYS: dict[str, dict[str, Any]] = {
    "blocks": {"bcd_layout": "strided"},
    "finetune": {"bcd_preset": "finetune", "bcd_num_blocks": 2},
    "pretrain": {"bcd_preset": "pretrain", "bcd_num_blocks": 2},
    "one block": {"bcd_num_blocks": 1, "clip_grad": 0.0},
    "no block": {"bcd_num_blocks": 0, "bcd_inactive_update": "factored"},
}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=[] if name in DEFAULT and index % len(WAYS) == place else [pytest.mark.long])
        for index, name in enumerate((*DEFAULT, *(name for name in decoders.SETTINGS if name not in DEFAULT)))
        for place, way in enumerate(WAYS)
    ],
)
def test_layers_on_host(world1: World, text_data: str, source: Path, tmp_path: Path, name: str, way: str) -> None:
    """Ten steps with layers and activations in host memory equal ten on the device that repeat forward passes, bit for
    bit, by every preset and with one block, though the run stops after five and resumes."""
    flags = HOST | WAYS[way] | {"train_iters": 10}
    [on_device] = world1.run(trained, run_of(source, text_data, bcd_layers_on="device", **flags))
    flags |= {"bcd_layers_on": "host", "bcd_saved_activations": "host"}
    [first] = world1.run(trained, run_of(source, text_data, save=str(tmp_path / "run"), exit_interval=5, **flags))
    [rest] = world1.run(trained, run_of(source, text_data, load=str(tmp_path / "run"), **flags))
    assert first["losses"] + rest["losses"] == on_device["losses"] and len(rest["losses"]) == 5
    assert on_device["losses"][0] != on_device["losses"][-1]
    assert models.differing(on_device["weights"], rest["weights"]) == []


@pytest.mark.parametrize("name", MODELS)
def test_export_and_resume(world2: World, text_data: str, source: Path, tmp_path: Path, name: str) -> None:
    """A run that ends after two of four steps resumes exactly on two stages. Its export loads in transformers, with the
    bytes of the given model where nothing was trained."""
    flags = {"bcd_layout": "interleaved", "bcd_frozen": "norms"}
    whole = run_of(source, text_data, pipeline=2, **flags, save_hf=str(tmp_path / "back"))
    first = run_of(source, text_data, pipeline=2, **flags, save=str(tmp_path / "run"), exit_interval=2)
    rest = run_of(source, text_data, pipeline=2, **flags, save=str(tmp_path / "run"), load=str(tmp_path / "run"))
    wanted = world2.run(trained, whole)
    world2.run(trained, first)
    for resumed, uninterrupted in zip(world2.run(trained, rest), wanted, strict=True):
        assert resumed["losses"] == uninterrupted["losses"][2:]
        assert models.differing(resumed["weights"], uninterrupted["weights"]) == []
    given, back = models.tensors_of(source), models.tensors_of(tmp_path / "back")
    changed = models.differing(given, back)
    assert given.keys() == back.keys() and len(changed) > decoders.LAYERS
    assert all(torch.equal(given[each], back[each]) for each in given if given[each].dim() == 1 and "norm" in each)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    before = transformers.AutoModelForCausalLM.from_pretrained(source).state_dict()
    assert [each for each in loaded if not torch.equal(loaded[each], before[each])]


def test_data_parallel(world1: World, world2: World, text_data: str, tmp_path: Path) -> None:
    """Two replicas have the losses and weights of one, within rounding."""
    source = decoders.write_model("gemma3_text", tmp_path / "given")
    [one] = world1.run(trained, run_of(source, text_data))
    for rank in world2.run(trained, run_of(source, text_data, replicas=2)):
        assert rank["losses"] == pytest.approx(one["losses"], abs=1e-5)
        for name, weight in one["weights"].items():
            assert (rank["weights"][name] - weight).abs().max() < 1e-5, name


def compiled(config: Any) -> dict[str, Any]:
    """Return `trained` of a run that compiles in this process, with what it compiled, and put transformers back."""
    from transformers.models.gemma3 import modeling_gemma3 as code

    rotation = code.apply_rotary_pos_emb
    with (
        mock.patch("torch._inductor.config.compile_threads", 1),
        mock.patch.object(code, "apply_rotary_pos_emb", rotation),
    ):
        return trained(config) | {"compiled": [each.co_name for each in torch._dynamo.utils.get_compilation_metrics()]}


@pytest.mark.long
def test_compiled(world1: World, text_data: str, tmp_path: Path) -> None:
    """With --bcd-compile on, a run with layers in host memory has the losses of one without, but for rounding."""
    source = decoders.write_model("gemma3_text", tmp_path / "given")
    flags = {"bcd_preset": "finetune", "bcd_num_blocks": 2}
    [eager] = world1.run(trained, run_of(source, text_data, **flags))
    [result] = world1.run(compiled, run_of(source, text_data, **flags, bcd_compile="on", bcd_layers_on="host"))
    assert {"forward", "apply_rotary_pos_emb"} <= {*result["compiled"]}, "norms and rotation"
    assert result["losses"] == pytest.approx(eager["losses"], rel=1e-5)


def test_bf16(world1: World, text_data: str, tmp_path: Path) -> None:
    """A fine-tuning run in bf16 follows the one in fp32."""
    source = decoders.write_model("gemma3_text", tmp_path / "given")
    flags = {"bcd_preset": "finetune", "bcd_num_blocks": 2, "train_iters": 20, "lr": 1e-2}
    exact, rounded = (world1.run(trained, run_of(source, text_data, **flags, bf16=bf16))[0] for bf16 in (False, True))
    assert {each.dtype for each in rounded["weights"].values()} == {torch.bfloat16}
    assert rounded["losses"] == pytest.approx(exact["losses"], rel=0.02)
    assert exact["losses"][-1] < exact["losses"][0] - 0.3


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each == "gemma3" else [pytest.mark.long]) for each in decoders.MULTIMODAL]
)
def test_multimodal(world1: World, text_data: str, source: Path, tmp_path: Path, name: str) -> None:
    """The text part has the logits of the whole model and is trained; the export has the other parts as they were."""
    tokens = torch.randint(0, 200, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    wanted = transformers.AutoModelForImageTextToText.from_pretrained(source)(input_ids=tokens).logits
    [(_, logits)] = world1.run(logits_and_gradients, run_of(source, text_data), tokens)
    assert (logits - wanted).abs().max() < 5e-5
    (source / "processor_config.json").write_text("{}")
    world1.run(trained, run_of(source, text_data, save_hf=str(tmp_path / "back")))
    given, back = models.tensors_of(source), models.tensors_of(tmp_path / "back")
    assert given.keys() == back.keys()
    changed = set(models.differing(given, back))
    assert len(changed) > decoders.LAYERS and all("language_model" in each or "lm_head" in each for each in changed)
    assert {
        each for each in given if "layers.0" in each and "language_model" in each and each.endswith("proj.weight")
    } & changed
    transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "back")
    assert (tmp_path / "back" / "processor_config.json").exists()


CURVES: dict[str, dict[str, Any]] = {
    "paper": {"bcd_preset": "paper"},
    "one block": {"bcd_num_blocks": 1},
    "recomputed": {"bcd_preset": "paper", "recompute_granularity": "full", "recompute_method": "uniform"}
    | {"recompute_num_layers": 1},
    "pretrain": {"bcd_preset": "pretrain"},
    "finetune": {"bcd_preset": "finetune"},
    "instructions": {"bcd_preset": "finetune", "sft": True, "seq_length": 64, "split": "90,10,0"}
    | {"eval_interval": 10, "eval_iters": 1},
}
"""Runs that both implementations have."""


def trained_by_matrix(config: Any) -> dict[str, Any]:
    """Return `trained`. Updates of whole matrices take Megatron Core's joint matrix of a gated MLP as two, as they take
    that of queries, keys and values as three."""

    def build(matrices: dict[str, Any], **settings: Any) -> Any:
        for name, (parameter, layout) in matrices.items():
            if name.endswith("linear_fc1.weight"):
                matrices[name] = parameter, replace(layout, parts=(len(parameter) // 2,) * 2)
        return MatrixOptimizer(matrices, **settings)

    with mock.patch.object(phase_optimizer, "MatrixOptimizer", build):
        return trained(config)


@pytest.mark.parametrize(
    "way", ["paper", *(pytest.param(way, marks=pytest.mark.long) for way in CURVES if way != "paper")]
)
def test_curves_of_both_implementations(world1: World, text_data: str, tmp_path: Path, way: str) -> None:
    """Thirty steps have the losses of the same run on Megatron Core's layers, within rounding."""
    source, flags = decoders.write_model("llama", tmp_path / "given"), {"train_iters": 30} | CURVES[way]
    if flags.get("sft"):
        text_data = fine_tuning.write_records(tmp_path / "data.jsonl", fine_tuning.questions(60))
    curves = []
    for implementation in ("local", "transformers"):
        [result] = world1.run(trained_by_matrix, run_of(source, text_data, transformer_impl=implementation, **flags))
        evaluations = [loss for *_, loss in result["evaluations"]]
        curves.append(torch.tensor([*result["losses"], *evaluations]))
    assert (curves[0] - curves[1]).abs().max() < 1e-4 and curves[0][29] < curves[0][0]


@pytest.mark.parametrize("stages", [1, 2])
def test_loss_without_logits(world1: World, world2: World, text_data: str, tmp_path: Path, stages: int) -> None:
    """The linear loss of a tied head computes the same, in every block and evaluation, and is the choice for large
    logits. Where a model changes its head's logits, the flags are refused."""
    source, world = decoders.write_model("gemma3_text", tmp_path / "given"), (world1, world2)[stages - 1]
    flags = {"pipeline": stages, "eval_interval": 2, "eval_iters": 1, "train_iters": 6}
    plain, linear = (world.run(trained, run_of(source, text_data, **flags, **loss)) for loss in ({}, LINEAR))
    chosen = world.run(with_large_logits, run_of(source, text_data, **flags))
    assert (torch.tensor(plain[-1]["losses"]) - torch.tensor(linear[-1]["losses"])).abs().max() < 1e-5
    assert chosen[-1] == linear[-1]["losses"]
    other = run_of(decoders.write_model("granite", tmp_path / "other"), text_data, pipeline=stages, **LINEAR)
    assert "changes its head's logits" in world.run(refusal_of, other)[-1]


def with_large_logits(config: Any) -> list[float]:
    """Return the losses of a run whose logits are larger than it may store."""
    with mock.patch.object(run_state, "_MOST_LOGITS", 0), worlds.started(config) as run:
        run.train()
        assert any("loss without the" in note for note in run.recorder.summary.notes)
        return worlds.outcome(run)["losses"]  # type: ignore[no-any-return]


def refusal_of(config: Any) -> str:
    """Return the error of a run that can't start."""
    with pytest.raises(ValueError) as error, worlds.started(config):
        pass
    return str(error.value)


def planned_and_counted(config: Any) -> list[tuple[int, int]]:
    """Return the planned and the counted bytes of model state in each phase."""
    with worlds.started(config) as run:
        run.train()
        state, blocks = resolve_run(config).memory.state, [step["block"] for step in run.results]
        planned = [state.rank(run.stage, block, 0).model_state for block in blocks]
        counted = [record.model_state_bytes[run.stage] for record in run.recorder.steps]
        return [*zip(planned, counted, strict=True)][-4:]  # the second cycle, when every block has its state


@pytest.mark.parametrize("name", ["deepseek_v3", pytest.param("gemma3_text", marks=pytest.mark.long)])
def test_planned_state(world2: World, text_data: str, source: Path, name: str) -> None:
    """The planned model state is the allocated one, for layers of several kinds on two stages."""
    flags = {"bcd_preset": "finetune", "bcd_num_blocks": 2, "bcd_layout": "interleaved", "train_iters": 8}
    for stage in world2.run(planned_and_counted, run_of(source, text_data, pipeline=2, **flags)):
        for planned, counted in stage:
            assert planned == pytest.approx(counted, rel=0.01)


def test_random_weights(world1: World, world2: World, text_data: str, tmp_path: Path) -> None:
    """A folder with config.json alone starts from random weights, equal for any number of stages, and exports them."""
    decoders.config_of("qwen3_moe").save_pretrained(tmp_path / "given")
    flags = {"bcd_num_blocks": 1, "train_iters": 3, "save_hf": None}
    losses = []
    for world in (world1, world2):
        flags["save_hf"] = str(tmp_path / f"back{world.size}")
        config = run_of(tmp_path / "given", text_data, pipeline=world.size, **flags)
        losses.append(torch.tensor(world.run(trained, config)[-1]["losses"]))
        transformers.AutoModelForCausalLM.from_pretrained(flags["save_hf"])
    assert (losses[0] - losses[1]).abs().max() < 1e-4 and 5 < losses[0][0] < 6


PACKED = ("gemma3_text", "deepseek_v3", "gpt_oss")
"""Models of the default suite: windows, masks that stay, and a refusal."""
MASKED = ("gemma2", "deepseek_v3", "gemma4_text", "nemotron", "llama4_text")
"""Models that keep masks: softcapping, values of another size, large heads, layers that are not given the bounds."""


@pytest.mark.parametrize("by_text", [False, True])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in PACKED else [pytest.mark.long]) for name in decoders.SETTINGS]
)
def test_packed_texts(world1: World, text_data: str, source: Path, name: str, by_text: bool) -> None:
    """Texts in one sequence have the losses and gradients of each text alone, windows included, or are refused."""
    flags = {"reset_position_ids": True, "reset_attention_mask": True, "recompute_granularity": "full"}
    flags |= {"recompute_method": "uniform", "recompute_num_layers": 1, "bf16": torch.cuda.is_available()}
    tokens = torch.randint(0, decoders.VOCABULARY, (2, LENGTH // 2), generator=torch.Generator().manual_seed(1))
    apart, packed, calls = world1.run(passes_of_texts, run_of(source, text_data, **flags), tokens, by_text=by_text)[0]
    assert ("carry one text into the next" in str(calls)) == (name in decoders.UNPACKED)
    if name not in decoders.UNPACKED:
        assert calls == (2 * decoders.LAYERS if by_text and name not in MASKED else 0), "twice with recomputation"
    for one, other in zip(apart, packed, strict=True):
        assert (one - other).abs().max() < (2e-2 if flags["bf16"] else 5e-5) * one.abs().max().clamp(min=1)


def passes_of_texts(
    config: Any, tokens: torch.Tensor, *, by_text: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor], Any]:
    """Return losses and gradients of texts [B, S / B], each for itself and as one sequence, and the calls of attention
    by text, or the run's refusal."""
    with texts.attention_of_texts(by_text=by_text) as attention:
        try:
            with worlds.started(config) as run:
                return *_passes_of_texts(run.model, tokens.to(device.current()), attention), attention.call_count
        except ValueError as error:
            return [], [], str(error)


def _passes_of_texts(
    model: Any, tokens: torch.Tensor, attention: mock.Mock
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    number, length = tokens.shape
    positions = torch.arange(length, device=tokens.device).expand_as(tokens)
    bounds = torch.arange(0, tokens.numel() + 1, length, dtype=torch.int32, device=tokens.device)
    batch = {"text_bounds": bounds, "longest_text": torch.tensor(length), "position_ids": positions.reshape(1, -1)}
    trained = [parameter for parameter in model.eval().parameters() if parameter.requires_grad]

    def run(shape: tuple[int, int], **inputs: Any) -> list[torch.Tensor]:
        attention.reset_mock()
        losses = model(tokens.view(shape), labels=tokens.roll(1, 1).view(shape), **inputs).view_as(tokens)
        gradients = torch.autograd.grad(losses.sum(), trained, allow_unused=True)  # of experts
        return [losses.detach(), *(each for each in gradients if each is not None)]

    apart = run((number, length), position_ids=positions, **data.attention_inputs(batch))
    return apart, run((1, -1), position_ids=batch["position_ids"], **data.attention_inputs(batch))
