"""--optimizer-cpu-offload: the share in host memory, and resuming.

test_grid.py checks its steps against those on the device; test_bytes.py checks its bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import resumed_runs, worlds
from support.gpu_worlds import Worlds

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
