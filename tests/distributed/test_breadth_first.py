"""Breadth-first order (--bcd-schedule breadth-first): the same training as depth-first, bit for bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import resumed_runs, worlds
from support.dist import World

from megatron.bcd import trainer
from megatron.bcd.checkpoint import layout, optimizer_state
from megatron.bcd.optim.matrix_optimizer import MatrixOptimizer
from megatron.bcd.pipeline import schedule
from megatron.bcd.pipeline.breadth_first import BreadthFirstIteration
from megatron.bcd.pipeline.execute import Iteration

PIPELINE: dict[str, Any] = {"pipeline_model_parallel_size": 2, "num_layers": 12}
CUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tensor": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "data": (2, {}),
    "overlap": (2, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    "context": (2, {"context_parallel_size": 2}),
    "pipeline": (2, PIPELINE | {"global_batch_size": 12}),  # more microbatches than messages in flight
    "pipeline_tensor": (4, PIPELINE | {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pipeline_data": (4, PIPELINE | {"overlap_grad_reduce": True}),
    "pipeline_expert": (4, PIPELINE | worlds.EXPERT2),
}
ALONE = {"one", "tensor", "pipeline", "pipeline_tensor"}
"""Layouts in which no other rank has the same weights."""
FACTORS: dict[str, dict[str, dict[str, Any]]] = {
    "method": {
        "pretrain": {"bcd_preset": "pretrain"},
        "finetune": {
            "bcd_preset": "finetune",
            "bcd_num_blocks": 0,
            "bcd_steps_per_block": None,
            "bcd_inactive_update": "factored",
        },
        "paper": {"bcd_preset": "paper"},
        "orthogonal": {"bcd_inactive_update": "orthogonal", "bcd_order": "random", "bcd_optimizer_state": "host"},
        "head": {
            "bcd_inactive_update": "factored",
            "bcd_embedding_update": "factored",
            "bcd_always_active": "norms,biases,head",
        },
        "factored": {"bcd_inactive_update": "factored", "bcd_embedding_update": "factored", "swiglu": True},
        "experts": {"bcd_inactive_update": "factored", "bcd_always_active": "norms"}
        | worlds.EXPERTS
        | worlds.SHARED_EXPERT,
    },
    "precision": {"fp32": {}, "bf16": {"bf16": True}},
    "place": {"device": {}, "host": {"bcd_layers_on": "host"}},
    "layers": {"1": {}, "2": {}, "3": {}},
    "layout": {"spread": {}, "strided": {"bcd_layout": "strided"}},
    "recompute": {"none": {}, "selective": {"recompute_granularity": "selective"}},
}
DEFAULT = """
tensor-head-fp32-device-1-spread-none
context-paper-bf16-host-2-spread-none
pipeline_data-finetune-bf16-host-1-spread-none
overlap-experts-fp32-device-1-spread-none
"""
LONG = """
data-factored-bf16-host-2-strided-selective
one-orthogonal-fp32-host-3-spread-none
overlap-pretrain-bf16-device-3-strided-selective
pipeline-pretrain-fp32-device-1-spread-selective
pipeline-finetune-bf16-device-6-spread-none
pipeline_tensor-orthogonal-fp32-device-1-spread-none
pipeline_tensor-experts-bf16-host-1-spread-none
pipeline_expert-experts-bf16-device-2-spread-none
"""
CASES = [pytest.param(name) for name in DEFAULT.split()]
CASES += [pytest.param(name, marks=pytest.mark.long) for name in LONG.split()]
BREADTH_FIRST = {"bcd_schedule": "breadth-first"}


STREAMED: dict[str, dict[str, Any]] = {
    "clipped_adam": {"bcd_num_blocks": 1, "weight_decay": 0.1, "bcd_steps_per_block": None, "clip_grad": 0.5},
}
STREAMED["adam"] = STREAMED["clipped_adam"] | {"clip_grad": 0.0}
STREAMED["adam8"] = STREAMED["adam"] | {"adam_moments_dtype": "int8", "no_decoupled_weight_decay": True}
STREAMED["clipped_muon"] = STREAMED["clipped_adam"] | {"optimizer": "muon", "muon_use_nesterov": True}
STREAMED["muon8"] = STREAMED["clipped_muon"] | {"muon_momentum_dtype": "int8"}
"""Full training with one block, which streams on the host."""


def config_of(case: dict[str, str], **more: Any) -> Any:
    """Return the configuration of a depth-first run on the device, or with `more` flags of any other run."""
    size, cut = CUTS[case["cut"]]
    flags: dict[str, Any] = {"num_layers": 6, "mock_data": True, "split": None, "micro_batch_size": 1}
    flags |= {"global_batch_size": 4, "untie_embeddings_and_output_weights": True, "bcd_schedule": "bcd"} | cut
    flags |= {"eval_iters": 1, "eval_interval": 2, "train_iters": 3, "world_size": size}
    for name in ("method", "precision", "layout", "recompute"):
        choices = FACTORS[name] | (STREAMED if name == "method" else {})
        flags |= choices[case.get(name, next(iter(choices)))]
    if "pipeline_model_parallel_size" in cut and more.get("bcd_schedule", "bcd") == "bcd":
        flags["num_virtual_stages_per_pipeline_rank"] = 6 // int(case.get("layers", "1"))  # the chunks are chunks
    return worlds.run_config(**flags | more)


def breadth_first(case: dict[str, str]) -> dict[str, Any]:
    return BREADTH_FIRST | FACTORS["place"][case["place"]] | {"bcd_layers_per_pass": case["layers"]}


def tensors_of(world: World, folder: Path, iteration: int) -> dict[str, torch.Tensor]:
    [tensors] = world.run(resumed_runs.tensors_of, layout.iteration_folder(str(folder), iteration))
    return tensors


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits(world1: World, world2: World, world4: World, tmp_path: Path, name: str) -> None:
    """A breadth-first run and its checkpoint equal those in depth-first order bit for bit. Norms are rounded where
    other replicas own a matrix, because their parts add up in another order."""
    case = dict(zip(("cut", *FACTORS), name.split("-"), strict=True))
    world = {1: world1, 2: world2, 4: world4}[CUTS[case["cut"]][0]]
    left, right = tmp_path / "depth", tmp_path / "breadth"
    train = resumed_runs.one_part if case["cut"] in ALONE else resumed_runs.with_rounded_norm
    depth = world.run(train, config_of(case, save=left))
    breadth = world.run(train, config_of(case, save=right, **breadth_first(case)))
    for expected, other in zip(depth, breadth, strict=True):
        assert other["iteration"] == 3 and (case["method"] == "finetune" or len(set(other["blocks"])) > 1)
        assert resumed_runs.differences(expected, [other]) == []
    assert worlds.same_bits(tensors_of(world1, left, 3), tensors_of(world1, right, 3)) == []


def compiled_part(config: Any) -> dict[str, Any]:
    """Return `one_part` of a run that compiles in this process, because ranks of tests must not start processes."""
    with mock.patch("torch._inductor.config.compile_threads", 1):
        return resumed_runs.one_part(config)


@pytest.mark.long
@pytest.mark.parametrize("method", ["finetune", "muon8"])
def test_compiled_updates_have_the_same_bits_in_host_memory(world1: World, tmp_path: Path, method: str) -> None:
    """With --bcd-compile on, runs with layers on the device and in host memory do not differ by a bit, and their losses
    differ from those without by rounding only."""
    flags = {"method": method, "cut": next(iter(CUTS)), "precision": "bf16"}
    # clipping adds up the squares of gradients in another order in host memory
    rope = {"position_embedding_type": "rope", "bcd_schedule": "breadth-first", "clip_grad": 0.0}
    runs = {}
    for name, more in {
        "off": {},
        "on": {"bcd_compile": "on"},
        "host": {"bcd_compile": "on", "bcd_layers_on": "host", "bcd_saved_activations": "host"},
    }.items():
        config = config_of(flags, save=tmp_path / name, **rope | more)
        [runs[name]] = world1.run(compiled_part, config)
    assert resumed_runs.differences(runs["on"], [runs["host"]]) == []
    assert runs["on"]["losses"] == pytest.approx(runs["off"]["losses"], rel=1e-3)


def spoilt_steps(config: Any) -> tuple[list[set[int]], list[int], list[bool]]:
    """Spoil a gradient of chunk 2 in the second step, and the loss of the third step, on rank 1.

    Return by step the layers of this rank whose matrices changed, the number of skipped layers, and whether the step
    was skipped.
    """
    before: dict[str, torch.Tensor] = {}
    changed: list[set[int]] = []
    masked_loss = trainer.masked_loss

    def spoil_loss(*args: torch.Tensor) -> Any:
        loss, num_tokens, reported = masked_loss(*args)
        reported["lm loss"][0] = math.nan if torch.distributed.get_rank() == 1 else loss
        return loss, num_tokens, reported

    def before_step(run: worlds.RecordedRun) -> None:
        step_chunk, matrices = MatrixOptimizer.step_chunk, run.active.matrices

        def spoil_gradient(chunk: int, **options: Any) -> None:
            if torch.distributed.get_rank() == 1 and chunk == 2 and run.iteration == 1:
                [name, *_] = (name for name in matrices.matrices if "fc1" in name and run.active._chunk_of(name) == 2)
                matrices.matrices[name].parameter.main_grad[0, 0] = math.inf  # type: ignore[attr-defined]
            step_chunk(matrices, chunk, **options)

        matrices.step_chunk = spoil_gradient  # type: ignore[method-assign]
        trainer.masked_loss = spoil_loss if run.iteration == 2 else masked_loss
        before.update(state_of(run))

    def after_step(run: worlds.RecordedRun) -> None:
        trainer.masked_loss = masked_loss
        names = worlds.same_bits(before, state_of(run))
        changed.append({int(run.active.parameters.ownership(name.split()[0]).layer or 0) for name in names})

    def state_of(run: worlds.RecordedRun) -> dict[str, torch.Tensor]:
        with run.active.whole_parameters():
            weights = {name: weight for name, weight in worlds.weights_of(run.model).items() if ".linear_" in name}
            matrices = run.active.matrices.matrices.items()
            kinds = {(name, kind): matrix.get(kind) for name, matrix in matrices for kind in ("low_bits", "factors")}
        state = {f"{name} {kind}": tensor.clone() for (name, kind), tensor in kinds.items() if tensor is not None}
        state = {name: tensor[:-1] if name.endswith("factors") else tensor for name, tensor in state.items()}
        return {
            name: tensor for name, tensor in (weights | state).items() if ".layers." in name and ".bias" not in name
        }

    with worlds.started(config, before_step=before_step, after_step=after_step) as run:
        run.train()
        skipped_layers = [step.skipped_layers for step in run.recorder.steps]
        return changed, skipped_layers, [result["grad_norm"] is None for result in run.results]


def test_a_layer_that_is_not_finite_stays(world2: World, tmp_path: Path) -> None:
    """A layer whose gradient is not finite is skipped and counted once, and the others are stepped. A loss that is not
    finite skips the whole step on all ranks. The save that follows succeeds."""
    case = {"cut": "pipeline", "method": "finetune", "precision": "bf16", "place": "host", "layers": "1"}
    config = config_of(case, **breadth_first(case), global_batch_size=4, swiglu=True, save=tmp_path, train_iters=4)
    for rank, (changed, skipped_layers, are_skipped) in enumerate(world2.run(spoilt_steps, config)):
        layers = set(range(rank, 12, 2))
        assert changed == [layers, layers - {5}, set(), layers]
        assert (skipped_layers, are_skipped) == ([0, 1, 0, 0], [False, False, True, False])


HOST = BREADTH_FIRST | {"bcd_layers_on": "host"}
SLICES = BREADTH_FIRST | {"bcd_layers_per_pass": 2}


@pytest.mark.parametrize("method", ["pretrain", "adam"])
def test_resumes_with_another_schedule_and_place(world2: World, tmp_path: Path, method: str) -> None:
    """A run that resumes with another schedule and with layers in another place equals the uninterrupted run."""
    case = {"cut": "data", "method": method, "precision": "bf16"}
    whole = world2.run(resumed_runs.with_rounded_norm, config_of(case))
    seen, load = [], None
    for number, flags in enumerate(({}, HOST, {})):
        config = config_of(case, save=tmp_path, load=load, exit_interval=number + 1, **flags)
        seen.append(world2.run(resumed_runs.with_rounded_norm, config))
        load = tmp_path
    for expected, *by_part in zip(whole, *seen, strict=True):
        assert [part["iteration"] for part in by_part] == [1, 2, 3]
        assert resumed_runs.differences(expected, by_part) == []


def one_part_in_portions(config: Any) -> dict[str, Any]:
    """Run one part of a run, and resume it in portions of a few matrices."""
    with mock.patch.object(optimizer_state, "_PORTION", 17500):
        return resumed_runs.one_part(config)


def test_resumes_on_another_number_of_stages(world1: World, world2: World, tmp_path: Path) -> None:
    """A run that resumes on another number of stages, in portions, has the losses and the last checkpoint of the
    uninterrupted run."""
    case = {"cut": "pipeline", "method": "finetune", "precision": "bf16"}
    one = {"pipeline_model_parallel_size": 1, "world_size": 1, "num_virtual_stages_per_pipeline_rank": None}
    flags: dict[str, Any] = {"train_iters": 3, "global_batch_size": 4, "eval_iters": 0}
    flags["clip_grad"] = 0.0  # the norm of the gradient adds up in another order
    whole, _ = world2.run(resumed_runs.one_part, config_of(case, **flags, save=tmp_path / "whole"))
    parts = [(world2, HOST), (world1, one | HOST), (world2, SLICES)]
    losses, load = [], None
    for number, (world, more) in enumerate(parts):
        more = flags | {"save": tmp_path / "parts", "load": load, "exit_interval": number + 1} | more
        losses += world.run(one_part_in_portions, config_of(case, **more))[0]["losses"]
        load = tmp_path / "parts"
    assert losses == whole["losses"]
    assert worlds.same_bits(tensors_of(world1, tmp_path / "whole", 3), tensors_of(world1, load, 3)) == []


def test_a_tied_head_differs_by_rounding(world1: World) -> None:
    """A tied embedding trains as in depth-first order up to rounding, because the parts of its gradient add up in
    another order."""
    case = {"cut": "one", "method": "factored", "precision": "fp32"}
    tied: dict[str, Any] = {"untie_embeddings_and_output_weights": False, "global_batch_size": 4}
    [depth] = world1.run(resumed_runs.one_part, config_of(case, **tied))
    [breadth] = world1.run(resumed_runs.one_part, config_of(case, **tied | BREADTH_FIRST))
    for name, weight in depth["weights"].items():
        assert (breadth["weights"][name] - weight).abs().mean() < 5e-4, f"{name}: a step is 1e-2"
    assert breadth["losses"] == pytest.approx(depth["losses"], rel=1e-5)


def repeated_outputs(config: Any) -> tuple[list[bool], int, int]:
    """Return whether each repeated forward pass of a step has the output of the first one, bit for bit, the number of
    inputs that wait for none of the passes of a chunk, and the number of waiting outputs that hold a graph."""
    outputs: dict[tuple[int, int], torch.Tensor | None] = {}
    are_same: list[bool] = []
    num_waiting: list[int] = []

    class Recorded(BreadthFirstIteration):
        def _forward_once(self, action: Any, place: tuple[int, int]) -> None:
            super()._forward_once(action, place)
            if self._virtual(action) < self._shape.last:
                outputs[place] = self._outputs.get(place, self._inputs.get((place[0] + 1, place[1])))

        def _recompute(self, action: Any, place: tuple[int, int]) -> None:
            num_waiting.append(len(self._inputs))
            super()._recompute(action, place)

        def _free(self, output: torch.Tensor) -> None:
            [place] = [place for place, other in self._outputs.items() if other is output]
            are_same.append(torch.equal(output, outputs[place]))
            super()._free(output)

    with mock.patch.object(schedule, "BreadthFirstIteration", Recorded), worlds.started(config) as run:
        run.train()
    num_graphs = sum(output is not None and output.requires_grad for output in outputs.values())
    return are_same, sum(num_waiting), num_graphs


def test_dropout_is_repeated(world2: World) -> None:
    """The backward pass of a chunk repeats the dropout of its forward pass, and by then only saved inputs are on the
    device, without the graphs of bias and dropout."""
    case = {"cut": "pipeline", "method": "pretrain", "precision": "fp32", "place": "device", "layers": "1"}
    flags = {"hidden_dropout": 0.5, "attention_dropout": 0.5, "train_iters": 1, "eval_iters": 0, "global_batch_size": 4}
    results = world2.run(repeated_outputs, config_of(case, **breadth_first(case), **flags))
    for number, (are_same, num_waiting, num_graphs) in zip((6 * 4, 5 * 4), results, strict=True):
        assert len(are_same) == number and all(are_same) and num_waiting == num_graphs == 0


STREAMED_RUNS = """
one-clipped_muon-fp32 data-muon8-bf16 one-adam8-fp32 data-clipped_adam-bf16 one-adam-bf16-device
"""


@pytest.mark.parametrize("name", STREAMED_RUNS.split())
def test_full_training_by_streaming(world1: World, world2: World, tmp_path: Path, name: str) -> None:
    """Full training by streaming and its checkpoint equal those of depth-first training on the device bit for bit.
    Norms are rounded, because their parts add up in another order."""
    case = dict(zip(("cut", "method", "precision", "place"), name.split("-"), strict=False))
    flags = BREADTH_FIRST if "place" in case else HOST | {"bcd_schedule": None}
    world = (world1, world2)[CUTS[case["cut"]][0] - 1]
    left, right = tmp_path / "depth", tmp_path / "breadth"
    depth = world.run(resumed_runs.with_rounded_norm, config_of(case, save=left))
    breadth = world.run(resumed_runs.with_rounded_norm, config_of(case, save=right, **flags))
    for expected, other in zip(depth, breadth, strict=True):
        assert resumed_runs.differences(expected, [other]) == []
    assert worlds.same_bits(tensors_of(world1, left, 3), tensors_of(world1, right, 3)) == []


@pytest.mark.parametrize("place", FACTORS["place"])
def test_gradients_of_an_8_bit_momentum_are_not_clipped(world1: World, place: str) -> None:
    """With --muon-momentum-dtype int8 --clip-grad scales the gradients of vectors and embeddings, by the norm of all
    gradients, and leaves those of matrices, in both orders."""
    case = {"method": "muon8", "cut": "one"}
    flags = FACTORS["place"][place] | {"bcd_schedule": None, "adam_eps": 1.0, "train_iters": 1, "eval_iters": 0}
    runs = [world1.run(resumed_runs.one_part, config_of(case, **flags, clip_grad=clip))[0] for clip in (0.0, 1e-3)]
    changed = {name for name, weight in runs[0]["weights"].items() if not weight.equal(runs[1]["weights"][name])}
    assert changed == {name for name, weight in runs[0]["weights"].items() if weight.dim() == 1 or "layers" not in name}


DROPOUT = {"hidden_dropout": 0.5, "attention_dropout": 0.5}
KEPT_RUNS: dict[str, dict[str, Any]] = {
    "one-pretrain-bf16-device": {},
    "one-finetune-bf16-host": DROPOUT,
    "one-paper-bf16-host": {"recompute_granularity": "selective"},
    "one-experts-fp32-host": {"moe_grouped_gemm": True},
    "tensor-orthogonal-bf16-host": {},
    "pipeline-factored-bf16-host": DROPOUT,
}


@pytest.mark.parametrize("name", KEPT_RUNS)
def test_kept_activations_change_no_bit(world1: World, world2: World, tmp_path: Path, name: str) -> None:
    """With --bcd-saved-activations device or host no forward pass is repeated, with auto some are, and training is the
    same bit for bit."""
    case = dict(zip(("cut", "method", "precision", "place"), name.split("-"), strict=True)) | {"layers": "1"}
    some = {"bcd_saved_activations": "auto", "bcd_passes_on_host": 7, "recompute_memory_gib": 1e-6}
    choices: dict[str, dict[str, Any]] = {"some": some}
    choices |= {choice: {"bcd_saved_activations": choice} for choice in ("recompute", "device", "host")}
    runs, passes, weights = {}, {}, {}
    for choice, more in choices.items():
        config = config_of(case, **breadth_first(case) | KEPT_RUNS[name] | more, save=tmp_path / choice)
        ranks = (world1, world2)[CUTS[case["cut"]][0] - 1].run(count_forwards, config)
        runs[choice], passes[choice] = [run for run, _ in ranks], sum(number for _, number in ranks)
        weights[choice] = tensors_of(world1, tmp_path / choice, 3)
    assert passes["device"] == passes["host"] < passes["some"] < passes["recompute"]
    for choice in ("some", "device", "host"):
        for expected, other in zip(runs["recompute"], runs[choice], strict=True):
            assert resumed_runs.differences(expected, [other]) == []
        assert worlds.same_bits(weights["recompute"], weights[choice]) == []


def count_forwards(config: Any) -> tuple[dict[str, Any], int]:
    """Return `one_part`, and the number of forward passes of a microbatch through a chunk."""
    with mock.patch.object(BreadthFirstIteration, "_forward", autospec=True, side_effect=Iteration._forward) as forward:
        return resumed_runs.one_part(config), forward.call_count
