"""Compare runs on GPUs with the same runs on a CPU under gloo: the same number of ranks and weights, other kernels.

With --optimizer-cpu-offload, the share in host memory too; test_bytes.py checks its bytes.
tests/distributed proves that a CPU's ranks take the steps of one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import resumed_runs, worlds
from support.gpu_worlds import Worlds

PIPELINE = {"pipeline_model_parallel_size": 2}
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "pipeline": (2, PIPELINE),
    "tensor": (2, TENSOR),
    "data": (2, {}),
    "context": (2, {"context_parallel_size": 2}),
}
FOUR: dict[str, tuple[int, dict[str, Any]]] = {
    "pipeline_tensor": (4, PIPELINE | TENSOR),
    "pipeline_data": (4, PIPELINE),
}
EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {
    "experts": (1, worlds.EXPERTS | {"no_bias_swiglu_fusion": True}),
    "expert2": (2, worlds.EXPERTS | worlds.EXPERT2 | {"no_bias_swiglu_fusion": True}),
}
"""Models with experts, on one rank and divided over two."""
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True, "initial_loss_scale": 256, "accumulate_allreduce_grads_in_fp32": True},
}
METHODS: dict[str, dict[str, Any]] = {
    "full": {"bcd_num_blocks": 1},
    "paper": {"bcd_preset": "paper"},
    "pretrain": {"bcd_preset": "pretrain"},
    "finetune": {"bcd_preset": "finetune", "bcd_inactive_update": "none"},
}
UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute": UNIFORM,
    "selective": {"recompute_granularity": "selective"},
    "auto": {"recompute": "auto", "recompute_memory_gib": 1},
    "cache": {"bcd_sample_ratio": 0.5, "bcd_prefix_cache": True},
    "host_state": {"bcd_optimizer_state": "host", "train_iters": 9},
    "offload": {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True},
    "overlap": {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 3000},
}
TOLERANCES = {"fp32": 2e-5, "bf16": 2e-3, "fp16": 2e-3}


NAMES = """
one-spread-fp32-full-offload
one-strided-bf16-pretrain-recompute
one-submodel-fp16-paper-cache
one-spread-bf16-finetune-overlap
pipeline-stage-fp32-paper-cache
pipeline-interleaved-bf16-pretrain-host_state
pipeline-submodel-fp16-finetune-selective
pipeline-spread-bf16-full-overlap
tensor-spread-fp32-full-host_state
tensor-strided-bf16-paper-auto
tensor-submodel-fp32-pretrain-overlap
data-spread-fp16-paper-overlap
data-strided-fp32-finetune-host_state
data-spread-bf16-full-offload
context-spread-bf16-pretrain-auto
context-submodel-fp32-paper-recompute
pipeline_tensor-interleaved-fp32-pretrain-plain
pipeline_data-submodel-fp32-paper-plain
expert2-spread-fp32-pretrain-plain
"""
CASES = [
    dict(zip(("cut", "layout", "precision", "method", "option"), name.split("-"), strict=True))
    for name in NAMES.split()
]


@pytest.fixture(scope="session")
def start(cpus: Worlds, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Flags that load weights drawn by a CPU, because a GPU's generator draws others; without and with experts."""
    flags = {}
    for cut in ("one", "experts"):
        folder = tmp_path_factory.mktemp("start")
        case = {"cut": cut, "layout": "spread", "precision": "fp32", "method": "full", "option": "plain"}
        cpus(1).run(worlds.save_initial_weights, config_of(case), str(folder))
        flags[cut] = {"load": folder, "finetune": True}
    return flags


def config_of(case: dict[str, str], folder: Path | None = None, **flags: Any) -> Any:
    size, cut = (CUTS | FOUR | EXPERTS)[case["cut"]]
    values: dict[str, Any] = {"num_layers": 4, "bcd_num_blocks": 2, "train_iters": 5, "micro_batch_size": 1}
    values |= {"global_batch_size": 4, "eval_iters": 1, "eval_interval": 3, "no_bias_gelu_fusion": True}
    # at ten times as much, the rounding of a CPU of another kind grows to a tenth
    values |= {"lr": 1e-3, "min_lr": 1e-4}
    if case["layout"] == "stage":
        values["bcd_num_blocks"] = None
    values |= cut | PRECISIONS[case["precision"]] | METHODS[case["method"]] | OPTIONS[case["option"]]
    if values.get("bcd_prefix_cache"):
        values["bcd_prefix_cache"] = folder
    values["bcd_layout"] = case["layout"]
    return worlds.run_config(world_size=size, mock_data=True, split=None, **values | flags)


def assert_same_run(mine: list[dict[str, Any]], theirs: list[dict[str, Any]], tolerance: float) -> None:
    for left, other in zip(mine, theirs, strict=True):
        assert left["blocks"] == other["blocks"] and len(left["losses"]) >= 5
        assert left["losses"] == pytest.approx(other["losses"], rel=tolerance)
        largest = max(other["grad_norms"])
        assert left["grad_norms"] == pytest.approx(other["grad_norms"], abs=50 * tolerance * largest)
        evaluations = ([loss for *_, loss in run["evaluations"]] for run in (left, other))
        assert next(evaluations) == pytest.approx(next(evaluations), rel=tolerance)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case.values()))
def test_as_on_a_cpu(
    gpus: Worlds, cpus: Worlds, start: dict[str, dict[str, Any]], tmp_path: Path, case: dict[str, str]
) -> None:
    """A run on GPUs has the losses, gradient norms, evaluations and model state of the same run on a CPU."""
    size, weights = (CUTS | FOUR | EXPERTS)[case["cut"]][0], start["experts" if case["cut"] in EXPERTS else "one"]
    mine = gpus(size).run(worlds.train_run, config_of(case, tmp_path / "mine", **weights))
    on_cpu = {"optimizer_cpu_offload": False, "overlap_cpu_optimizer_d2h_h2d": False}
    theirs = cpus(size).run(worlds.train_run, config_of(case, tmp_path / "theirs", **weights, **on_cpu))
    # a GPU orthogonalises matrices in bf16, a CPU in fp32
    assert_same_run(mine, theirs, TOLERANCES["bf16" if case["method"] == "pretrain" else case["precision"]])
    if case["option"] != "offload":
        assert [run["model_state_bytes"] for run in mine] == [run["model_state_bytes"] for run in theirs]


RESUMED = ({"layout": "spread", "method": "paper", "option": "host_state"},
           {"layout": "submodel", "method": "pretrain", "option": "plain"})  # fmt: skip


@pytest.mark.parametrize(("precision", "first"), [("fp32", "gpu"), ("bf16", "cpu")])
@pytest.mark.parametrize("case", RESUMED, ids=lambda case: case["method"])
def test_the_other_device_goes_on(
    gpus: Worlds, cpus: Worlds, tmp_path: Path, case: dict[str, str], precision: str, first: str
) -> None:
    """A checkpoint of either device resumes on both, with the same losses."""
    case = case | {"cut": "pipeline", "precision": precision}
    places = {"cpu": cpus(2), "gpu": gpus(2)}
    save = {"save": tmp_path / "run", "no_load_rng": True}
    places[first].run(worlds.train_run, config_of(case, **save, exit_interval=3))
    rest = places.pop(first), places.popitem()[1]
    runs = [
        world.run(resumed_runs.one_part, config_of(case, load=tmp_path / "run", no_load_rng=True)) for world in rest
    ]
    for left, other in zip(*runs, strict=True):
        assert len(left["losses"]) == len(other["losses"]) >= 2
        tolerance = TOLERANCES["bf16" if case["method"] == "pretrain" else precision]
        assert left["losses"] == pytest.approx(other["losses"], rel=tolerance)


OFFLOAD = {"optimizer_cpu_offload": True, "bcd_num_blocks": 1, "bcd_schedule": "stock", "clip_grad": 0.5}
"""Flags of full training with the optimizer in host memory."""


def sizes_of(config: Any) -> tuple[list[int], int, int]:
    """Return the parameters' elements, and the bytes of model state on the device and in host memory after a run."""
    with worlds.started(config) as run:
        run.train()
        last = run.recorder.steps[-1]
        return (
            [weight.numel() for weight in run.model.parameters()],
            last.model_state_bytes[0],
            last.host_state_bytes[0],
        )


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_the_share_on_the_host(gpus: Worlds, text_data: str, fraction: float) -> None:
    """The share of --optimizer-offload-fraction is in host memory. Whole parameters move, so it holds within the
    largest of them."""
    config = worlds.run_config(data_path=text_data, optimizer_offload_fraction=fraction, **OFFLOAD)
    [(sizes, on_device, on_host)] = gpus(1).run(sizes_of, config)
    assert fraction * sum(sizes) <= on_host / 16 <= fraction * sum(sizes) + max(sizes)
    moments_on_device = 8 * sum(sizes) - on_host / 2
    assert on_device == pytest.approx(8 * sum(sizes) + moments_on_device, rel=0.02)


@pytest.mark.parametrize("flags", [{}, {"bf16": True, "overlap_cpu_optimizer_d2h_h2d": True}], ids=["fp32", "bf16"])
def test_it_goes_on_where_it_was(gpus: Worlds, text_data: str, tmp_path: Path, flags: dict[str, Any]) -> None:
    """A run with the optimizer in host memory resumes as the uninterrupted run, bit for bit."""
    config = worlds.run_config(data_path=text_data, world_size=2, **flags, **OFFLOAD)
    assert gpus(2).run(resumed_runs.stopped_and_resumed, config, [2, 3], str(tmp_path / "run")) == [[], []]
