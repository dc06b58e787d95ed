"""--optimizer-cpu-offload, the baseline with the optimizer in host memory, on a pretended GPU (`pretended_gpu`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import pretended_gpu, worlds
from support.dist import World

OFFLOAD: dict[str, Any] = {"optimizer_cpu_offload": True, "no_pin_cpu_grads": True}
DATA2 = {"world_size": 2}
PIPELINE2 = {"world_size": 2, "pipeline_model_parallel_size": 2}


def config_of(text_data: str, **flags: Any) -> Any:
    return worlds.run_config(data_path=text_data, bcd_num_blocks=1, bcd_schedule="stock", clip_grad=0.5, **flags)


@pytest.mark.parametrize(
    ("flags", "more"),
    [
        (DATA2, {"optimizer_offload_fraction": 0.5}),
        (DATA2 | {"bf16": True}, {"overlap_cpu_optimizer_d2h_h2d": True}),
        (PIPELINE2 | {"fp16": True, "initial_loss_scale": 1024, "accumulate_allreduce_grads_in_fp32": True}, {}),
    ],
    ids=["data2-fp32-half", "data2-bf16-overlap", "pipeline2-fp16"],
)
def test_it_steps_as_on_the_device(world2: World, text_data: str, flags: dict[str, Any], more: dict[str, Any]) -> None:
    """A gradient that is not clipped, decayed or copied, a main parameter that is rounded, a weight that is not
    stepped, a norm of the weights that leaves them out, and state on the device that is counted or planned though it
    has moved."""
    flags = flags | {"log_params_norm": True}
    ranks = world2.run(pretended_gpu.train_run, config_of(text_data, **flags, **OFFLOAD, **more))
    plain = world2.run(worlds.train_run, config_of(text_data, **flags))
    for rank, (one, other) in enumerate(zip(ranks, plain, strict=True)):
        assert one["losses"] == pytest.approx(other["losses"], rel=1e-4)
        assert one["grad_norms"] == pytest.approx(other["grad_norms"], rel=1e-3)
        norms = ([step["params_norm"] for step in run["metrics"]] for run in (one, other))
        assert next(norms) == pytest.approx(next(norms), rel=3e-3), "of the bf16 weights, and of the main parameters"
        assert sum(note.startswith("optimizer offloaded to the host") for note in one["notes"]) == 1
        if "optimizer_offload_fraction" not in more:  # else parameters move as a whole, and a plan says nothing of it
            assert one["model_state"][rank] == pytest.approx(one["planned"], rel=0.02)


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_the_share_on_the_host(world1: World, text_data: str, fraction: float) -> None:
    """--optimizer-offload-fraction that is ignored. Whole parameters move, so it is met within the largest of them."""
    config = config_of(text_data, optimizer_offload_fraction=fraction, **OFFLOAD)
    (one,) = world1.run(pretended_gpu.train_run, config)
    parameters = sum(weight.numel() for weight in one["weights"].values())
    largest = max(weight.numel() for weight in one["weights"].values())
    assert fraction * parameters <= one["host_bytes"] / 16 <= fraction * parameters + largest
    moments_on_device = 8 * parameters - one["host_bytes"] / 2
    assert one["model_state"][0] == pytest.approx(8 * parameters + moments_on_device, rel=0.02)


@pytest.mark.parametrize("flags", [{}, {"bf16": True, "overlap_cpu_optimizer_d2h_h2d": True}], ids=["fp32", "bf16"])
def test_it_goes_on_where_it_was(world2: World, text_data: str, tmp_path: Path, flags: dict[str, Any]) -> None:
    """Moments, main parameters or the step counter of the host that a checkpoint does not hold, or that are not taken
    up."""
    config = config_of(text_data, **DATA2, **flags, **OFFLOAD)
    assert world2.run(pretended_gpu.stopped_and_resumed, config, [2, 3], str(tmp_path / "run")) == [[], []]
