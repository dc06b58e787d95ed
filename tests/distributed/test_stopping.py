"""Signals and --exit-duration-in-mins: all ranks save and stop together, and the resumed run equals the uninterrupted
one."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support import resumed_runs, worlds
from support.dist import World

from megatron.bcd.checkpoint import layout
from megatron.bcd.runtime.exit import SIGNALS

LAST, ASKED_AT = 9, 4
PIPELINE = {"world_size": 2, "pipeline_model_parallel_size": 2, "bcd_layout": "submodel", "bcd_steps_per_block": 3}


def config_of(text_data: str, **flags: Any) -> Any:
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    return worlds.run_config(data_path=text_data, train_iters=LAST, **PIPELINE | dropout | flags)


class Asking:
    """A hook that asks one rank to stop before the step after iteration ASKED_AT."""

    def __init__(self, how: str, *, rank: int) -> None:
        self._how = how
        self._is_asked = torch.distributed.get_rank() == rank

    def __call__(self, run: worlds.RecordedRun) -> None:
        if run.iteration != ASKED_AT or not self._is_asked:
            return
        if self._how == "time":
            run.stop._duration = 0.0
        else:
            signal.raise_signal(signal.Signals[self._how])


def stopped(config: Any, root: str, how: str, *, rank: int) -> dict[str, Any]:
    """Return the part up to the stop, and the differences of both parts from the whole run."""
    handlers = [signal.getsignal(number) for number in SIGNALS]
    whole = resumed_runs.one_part(config)
    with worlds.parallel(config):
        ask = Asking(how, rank=rank)
    first = resumed_runs.one_part(resumed_runs.with_checkpoints(config, save=root), before_step=ask)
    rest = resumed_runs.one_part(resumed_runs.with_checkpoints(config, load=root))
    assert handlers == [signal.getsignal(number) for number in SIGNALS]
    return {
        "said": first["notes"],
        "stopped": first["iteration"],
        "differences": resumed_runs.differences(whole, [first, rest]),
    }


@pytest.mark.parametrize(("how", "rank"), [("SIGUSR1", 1), ("time", 0)])
def test_one_rank_is_asked_to_stop(world2: World, text_data: str, tmp_path: Path, how: str, rank: int) -> None:
    """If one rank is asked to stop, both ranks save and stop after the same step, and the resumed run equals the
    uninterrupted one."""
    result = world2.run(stopped, config_of(text_data), str(tmp_path), how, rank=rank)
    assert [part["differences"] for part in result] == [[], []]
    # the first stage has run ahead with the step after the one in which it was asked
    assert result[0]["stopped"] == result[1]["stopped"] <= ASKED_AT + 2
    reason = "--exit-duration-in-mins" if how == "time" else how
    assert any(reason in line for line in result[0]["said"])
    assert layout.candidates(str(tmp_path)) == [result[0]["stopped"]]


def stopped_while_writing(config: Any, root: str) -> dict[str, Any]:
    """Send SIGTERM to rank 1 while the previous checkpoint is being written; writing resumes half a second later."""
    whole = resumed_runs.one_part(resumed_runs.with_checkpoints(config, save=None, async_save=False))
    with resumed_runs.writes_held_back() as release:
        ask = Asking("SIGTERM", rank=1)
        was_writing = []

        def ask_and_go_on(run: worlds.RecordedRun) -> None:
            if run.iteration == ASKED_AT:
                was_writing.append(run.saver is not None and run.saver.is_writing)
                threading.Timer(0.5, release.set).start()
            ask(run)

        first = resumed_runs.one_part(config, before_step=ask_and_go_on)
    rest = resumed_runs.one_part(resumed_runs.with_checkpoints(config, save=None, async_save=False, load=root))
    return {
        "was_writing": was_writing,
        "differences": resumed_runs.differences(whole, [first, rest]),
        "stopped": first["iteration"],
        "warnings": first["warnings"][1:],  # the first names blocks that 9 steps do not reach
    }


def test_sigterm_while_a_checkpoint_is_written(world2: World, text_data: str, tmp_path: Path) -> None:
    """The checkpoint under way is finished, and the stopped run writes one more."""
    config = config_of(text_data, save=tmp_path, save_interval=3, async_save=True)
    result = world2.run(stopped_while_writing, config, str(tmp_path))
    assert [part["was_writing"] for part in result] == [[True], [True]]
    assert [part["differences"] + part["warnings"] for part in result] == [[], []]
    saved = layout.candidates(str(tmp_path))
    assert saved == [result[0]["stopped"], 3] and 3 < saved[0] <= ASKED_AT + 2
    assert [layout.damage(layout.iteration_folder(str(tmp_path), item)) for item in saved] == [None, None]
    assert list(tmp_path.glob("*.incomplete")) == []
