"""The folder of --save at the start of a run, on a shared disk. Two jobs: e2e/test_checkpoint_faults."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from support import worlds
from support.dist import World

from megatron.bcd.checkpoint.saver import claim_save_folder


def claim(*roots: str) -> str:
    """Claim the folder that `roots` names for this rank and release it; return the messages."""
    with worlds.parallel(worlds.run_config(mock_data=True, split=None, world_size=2)):
        try:
            folder_claim = claim_save_folder(roots[torch.distributed.get_rank() % len(roots)])
            folder_claim.release()
            return f"claimed {list(folder_claim.warnings)}"
        except ValueError as refused:
            return str(refused)


def test_another_disk_on_one_node(world2: World, tmp_path: Path) -> None:
    """All ranks refuse a --save folder that is not on the same disk for all of them."""
    roots = [str(tmp_path / "here"), str(tmp_path / "elsewhere")]
    os.mkdir(roots[1])
    first, second = world2.run(claim, *roots)
    assert first.replace(roots[0], roots[1]) == second and first.startswith(f"--save {roots[0]}: ")
    assert os.listdir(roots[1]) == []


@pytest.mark.parametrize("name", ["a_file/saved", "/proc/saved"])
def test_a_folder_that_can_not_be_made(world2: World, tmp_path: Path, name: str) -> None:
    """All ranks refuse a folder that can't be made, with the same error."""
    (tmp_path / "a_file").write_text("")
    root = str(tmp_path / name)
    first, second = world2.run(claim, root)
    assert first == second and first.startswith(f"--save {root}")
