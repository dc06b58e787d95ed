"""The cost of a checkpoint: bytes on disk, and objects that stay in the process."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import psutil
import torch
from support import worlds
from support.dist import World

NUM_SAVES, NUM_BEFORE = 8, 3
PIPELINE = {"world_size": 2, "pipeline_model_parallel_size": 2, "bcd_layout": "submodel", "bcd_steps_per_block": 100}


def config_of(text_data: str, root: Path, **flags: Any) -> Any:
    return worlds.run_config(data_path=text_data, train_iters=2, save=root, keep_last_checkpoints=2, **PIPELINE | flags)


def save_once_more(run: worlds.RecordedRun) -> None:
    """Save a checkpoint with a new number."""
    run.state.iteration += 1
    torch.distributed.barrier()
    assert run.outputs.save()


def needed_bytes(config: Any) -> int:
    """Return this rank's weights and the active block's state after a run that saved at its end."""
    with worlds.started(config) as run:
        run.train()
        state = run.active.state_bytes()["optimizer_state_bytes"]
        return sum(weight.nbytes for weight in run.model.parameters()) + state


def test_bytes_on_disk(world2: World, text_data: str, tmp_path: Path) -> None:
    """A checkpoint takes at most 5 % more bytes than the weights and the active block's state."""
    untied = {"untie_embeddings_and_output_weights": True}  # a tied head is a copy, and not saved
    config = config_of(text_data, tmp_path, hidden_size=256, bcd_layout="spread", bf16=True, **untied)
    needed = sum(world2.run(needed_bytes, config))
    on_disk = sum(path.stat().st_size for path in (tmp_path / "iter_0000002").rglob("*") if path.is_file())
    assert needed > 2 * 2**20
    assert needed <= on_disk < 1.05 * needed


def what_is_alive() -> dict[str, int]:
    gc.collect()
    process = psutil.Process()
    objects = gc.get_objects()
    tensors = [thing for thing in objects if issubclass(type(thing), torch.Tensor)]
    return {
        "threads": threading.active_count(),
        "threads of the system": len(os.listdir("/proc/self/task")),
        "processes": len(process.children(recursive=True)),
        "files": len(os.listdir("/proc/self/fd")),
        "tensors": len(tensors),
        "tensor bytes": sum(tensor.nbytes for tensor in tensors),
        "objects": len(objects),
    }


def alive_before_and_after(config: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Return the live bytes before and after some saves; the first saves fill caches."""
    with worlds.started(config) as run:
        run.train()
        gc.unfreeze()  # the run has frozen what was there: it would not be looked at
        for _ in range(NUM_BEFORE):
            save_once_more(run)
        assert run.saver is not None and run.saver.finish()
        before = what_is_alive()
        for _ in range(NUM_SAVES):
            save_once_more(run)
        assert run.saver.finish()
        return before, what_is_alive()


def test_nothing_stays_behind(world2: World, text_data: str, tmp_path: Path) -> None:
    """Repeated saves leave no thread, process, open file or tensor behind."""
    config = config_of(text_data, tmp_path, async_save=True, hidden_size=128)
    for before, after in world2.run(alive_before_and_after, config):
        more = {name: after[name] - before[name] for name in after}
        assert more.pop("objects") < NUM_SAVES
        assert set(more.values()) == {0}, more
    assert len(list(tmp_path.glob("iter_*"))) == 2
