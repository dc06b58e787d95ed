"""The losses of routers of several runs in one process."""

from __future__ import annotations

from typing import Any

from support import worlds
from support.dist import World


def of_two_runs(first: Any, second: Any) -> list[Any]:
    """Train one run after the other on this rank, and return the router losses of the second."""
    worlds.train_run(first)
    return [step["router_losses"] for step in worlds.train_run(second)["metrics"]]


def test_a_run_after_one_with_fewer_layers(world1: World) -> None:
    """A run reports the losses of its routers only, also after a run with fewer layers in the same process."""
    flags = worlds.EXPERTS | {"mock_data": True, "split": None, "bcd_num_blocks": 2}
    small, large = (worlds.run_config(**flags, num_layers=number) for number in (2, 4))
    [after_large] = world1.run(of_two_runs, large, large)
    [after_small] = world1.run(of_two_runs, small, large)
    assert after_small == after_large and after_small[0]
