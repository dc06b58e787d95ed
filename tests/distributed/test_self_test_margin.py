"""The margin of the self-test's comparisons when sums are rounded differently: runs with flipped last bits are
compared."""

from __future__ import annotations

import pytest
from _self_test import FLAGS, LAYOUTS, ONE_BLOCK, SAME_BLOCKS, TOLERANCE, write_data
from support import worlds
from support.dist import World

pytestmark = pytest.mark.long
MARGIN = 5
RUNS = {
    "one_block": ONE_BLOCK,
    "bf16": ONE_BLOCK | {"bf16": True},
    **LAYOUTS,
    **{f"{name}_of_two_stages": LAYOUTS[name] | same for name, same in SAME_BLOCKS.items() if same},
}


@pytest.fixture(scope="module")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_data(tmp_path_factory.mktemp("walks"))


@pytest.mark.parametrize("name", RUNS)
def test_margin(world1: World, data_path: str, name: str) -> None:
    """Flipped last bits of the weights change the results of the self-test's runs by at most a fifth of its
    tolerance."""
    config = worlds.config_of(**(FLAGS | {"micro_batch_size": 2, "data_path": data_path} | RUNS[name]))
    [run], [perturbed] = world1.run(worlds.train_run, config), world1.run(worlds.perturbed_run, config)
    assert run["losses"][-1] < run["losses"][0] - 0.02
    tolerance = TOLERANCE["bf16" if name == "bf16" else "fp32"] / MARGIN
    assert perturbed["losses"] == pytest.approx(run["losses"], rel=tolerance)
    if name != "bf16":
        assert perturbed["grad_norms"] == pytest.approx(run["grad_norms"], rel=10 * tolerance)
    assert perturbed["losses"] != run["losses"] or perturbed["grad_norms"] != run["grad_norms"], "nothing was flipped"


def test_layouts_differ(world1: World, data_path: str) -> None:
    """The blocks of another layout lead to gradient norms outside the self-test's tolerance."""
    flags = FLAGS | {"micro_batch_size": 2, "data_path": data_path, "train_iters": 6}
    runs = [
        world1.run(worlds.train_run, worlds.config_of(**(flags | LAYOUTS[name])))[0] for name in ("spread", "strided")
    ]
    assert runs[0]["grad_norms"] != pytest.approx(runs[1]["grad_norms"], rel=100 * TOLERANCE["fp32"])
