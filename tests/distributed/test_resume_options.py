"""--no-load-optim, --no-load-rng, --finetune, --exit-interval and --ckpt-step: what they load and what they skip."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import resumed_runs, worlds
from support.dist import RankError, World

from megatron.bcd.optim.active_block import ActiveBlock

STOP, LAST = 5, 8
PIPELINE = {"world_size": 2, "pipeline_model_parallel_size": 2, "bcd_layout": "submodel", "bcd_num_blocks": 2}


def config_of(text_data: str, **flags: Any) -> Any:
    base = {"data_path": text_data, "train_iters": LAST, "bcd_steps_per_block": 3, "eval_iters": 1, "eval_interval": 4}
    return worlds.run_config(**base | PIPELINE | flags)


def resumed(config: Any, root: str, **options: Any) -> dict[str, Any]:
    """Resume from `root`; return the outcome, where the run began, and Adam's state before its first step."""
    with worlds.started(resumed_runs.with_checkpoints(config, load=root, **options)) as run:
        states = [dict(state) for optimizer in run.active.core.optimizers() if not optimizer.is_stub_optimizer
                  for state in optimizer.optimizer.state.values()]  # fmt: skip
        begin = {
            "began_at": (run.iteration, run.state.consumed_samples, run.state.consumed_validation_samples),
            "began_in": run.state.phase_state.to_dict(),
            "adam_steps": sorted({float(state["step"]) for state in states}),
            "scheduler_steps": run.lr_scheduler.num_steps,
            "first_weights": worlds.weights_of(run.model),
        }
        run.train()
        return worlds.outcome(run) | begin | {"said": run.recorder.notes + run.recorder.warnings}


@pytest.fixture(scope="module")
def stopped(world2: World, text_data: str, tmp_path_factory: Any) -> dict[str, Any]:
    """A checkpoint inside a phase, with the uninterrupted run and the weights at the stop, by rank."""
    config = config_of(text_data, hidden_dropout=0.1, attention_dropout=0.1)
    root = str(tmp_path_factory.mktemp("stopped"))
    saving = resumed_runs.with_checkpoints(config, save=root, exit_interval=STOP)
    whole, first = world2.run(resumed_runs.one_part, config), world2.run(resumed_runs.one_part, saving)
    return {"config": config, "root": root, "whole": whole, "weights": [rank["weights"] for rank in first]}


def test_no_load_optim(world2: World, stopped: dict[str, Any]) -> None:
    """--no-load-optim starts with new moments, and continues with the run's weights, generators, data and learning
    rate."""
    result = world2.run(resumed, stopped["config"], stopped["root"], load_optim=False)
    assert [rank["adam_steps"] for rank in result] == [[], []]
    for rank, whole in zip(result, stopped["whole"], strict=True):
        assert rank["began_at"] == (STOP, STOP * 4, 4)
        assert (rank["began_in"]["phase"], rank["began_in"]["step_in_phase"]) == (1, 2)
        assert rank["losses"][0] == whole["losses"][STOP], "weights, generators and data are those of the run"
        assert rank["losses"][1] != whole["losses"][STOP + 1]
        assert [step["learning_rate"] for step in rank["steps"]] == [
            step["learning_rate"] for step in whole["steps"][STOP:]
        ]
    assert max(rank["adam_steps"] for rank in world2.run(resumed, stopped["config"], stopped["root"])) == [2.0]


def test_no_load_rng(world2: World, stopped: dict[str, Any]) -> None:
    """--no-load-rng continues the run with other dropout masks."""
    result = world2.run(resumed, stopped["config"], stopped["root"], load_rng=False)
    for rank, whole in zip(result, stopped["whole"], strict=True):
        assert rank["began_at"][0] == STOP
        assert rank["losses"] != whole["losses"][STOP:]
        assert rank["losses"] == pytest.approx(whole["losses"][STOP:], rel=0.1)


def test_finetune(world2: World, stopped: dict[str, Any]) -> None:
    """--finetune loads the weights only, and starts at iteration 0 with new moments and the first samples."""
    result = world2.run(resumed, stopped["config"], stopped["root"], finetune=True)
    for rank, weights, whole in zip(result, stopped["weights"], stopped["whole"], strict=True):
        assert rank["began_at"] == (0, 0, 0)
        assert (rank["began_in"]["phase"], rank["began_in"]["step_in_phase"]) == (0, 0)
        assert rank["adam_steps"] == [] and rank["scheduler_steps"] == 0
        assert worlds.same_bits(rank["first_weights"], weights) == []
        assert len(rank["losses"]) == LAST
        assert rank["losses"][0] < whole["losses"][0], "the weights are trained ones"


def test_finetune_with_flags_of_another_network(world2: World, stopped: dict[str, Any]) -> None:
    """--finetune and --skip-train refuse flags of another network; --finetune accepts another sequence length."""
    config = stopped["config"].replace_section("model", squared_relu=True, position_embedding_type="rope")
    result = "(?s)(?=.*--squared-relu False)(?=.*--position-embedding-type learned_absolute)"
    for way in ({"finetune": True}, {"skip_train": True}):
        other = config.replace_section("training", skip_train="skip_train" in way)
        with pytest.raises(RankError, match=result):
            world2.run(resumed, other, stopped["root"], finetune="finetune" in way)
    shorter = stopped["config"].replace_section("model", seq_length=16)
    hidden, heads = (shorter.transformer[name] for name in ("hidden_size", "num_attention_heads"))
    derived = {"ffn_hidden_size": 4 * hidden, "kv_channels": hidden // heads}  # where neither flag is given
    shorter = replace(shorter, transformer={**shorter.transformer, **derived})
    assert world2.run(resumed, shorter, stopped["root"], finetune=True)[0]["began_at"] == (0, 0, 0)


def exits_until_the_end(config: Any, root: str) -> list[int]:
    """Repeat the same command; return the iterations at which it stopped, and differences from one long run."""
    parts: list[dict[str, Any]] = []
    while not parts or parts[-1]["iteration"] < LAST:
        parts.append(
            resumed_runs.one_part(resumed_runs.with_checkpoints(config, save=root, load=root, exit_interval=3))
        )
    result = resumed_runs.differences(resumed_runs.one_part(config), parts)
    assert result == [], result
    return [part["iteration"] for part in parts]


def test_exit_interval_and_the_same_command_again(world2: World, text_data: str, tmp_path: Path) -> None:
    """The same command, repeated, stops at each exit interval and then at the end, and its parts equal one long run."""
    assert world2.run(exits_until_the_end, config_of(text_data), str(tmp_path)) == [[3, 6, LAST]] * 2
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == str(LAST)


def test_ckpt_step(world2: World, text_data: str, tmp_path: Path) -> None:
    """--ckpt-step loads the checkpoint of this iteration; if it is absent, the error names those that are there."""
    root = str(tmp_path)
    config = config_of(text_data)
    whole = world2.run(resumed_runs.one_part, resumed_runs.with_checkpoints(config, save=root, save_interval=3))
    for rank, first in zip(world2.run(resumed, config, root, ckpt_step=3), whole, strict=True):
        assert rank["began_at"][0] == 3 and rank["losses"] == first["losses"][3:]
    absent = resumed_runs.with_checkpoints(config, load=root, ckpt_step=4)
    with pytest.raises(RankError, match=r"--ckpt-step 4.* 3, 6, 8"):
        world2.run(resumed_runs.one_part, absent)


def test_weights_only(world2: World, stopped: dict[str, Any], tmp_path: Path) -> None:
    """--no-save-optim and --no-save-rng write the weights only, and a resume that asks for more names the flag that it
    needs."""
    root, config = str(tmp_path), stopped["config"]
    leaving_out = {"save": root, "exit_interval": STOP, "save_optim": False, "save_rng": False}
    saved = world2.run(resumed_runs.one_part, resumed_runs.with_checkpoints(config, **leaving_out))
    [folder] = tmp_path.glob("iter_*")
    assert not list(folder.glob("random_states_*"))
    for load_optim, load_rng, flag in ((True, False, "optim"), (False, True, "rng")):
        asking = resumed_runs.with_checkpoints(config, load=root, load_optim=load_optim, load_rng=load_rng)
        with pytest.raises(RankError, match=f"--no-load-{flag}"):
            world2.run(resumed_runs.one_part, asking)
    result = world2.run(resumed, config, root, load_optim=False, load_rng=False)
    for rank, first in zip(result, saved, strict=True):
        assert rank["began_at"][0] == STOP and rank["adam_steps"] == []
        assert worlds.same_bits(rank["first_weights"], first["weights"]) == []


def kept_after_resuming(config: Any, root: str, **options: Any) -> dict[int, set[str]]:
    """Return the offloaded state of each block before the first step: names of tensors, from any stage."""
    with worlds.started(resumed_runs.with_checkpoints(config, load=root, **options)) as run:
        run.active.dispose()
        kept_by_rank: list[dict[int, set[str]]] = [{}, {}]
        mine: dict[int, set[str]] = {}
        for name, part in run.active.offloaded.shards.items():
            mine.setdefault(run.active.parameters.ownership(name).block, set()).update(part.names())
        torch.distributed.all_gather_object(kept_by_rank, mine)
        return {
            block: set().union(*(rank.get(block, set()) for rank in kept_by_rank))
            for block in kept_by_rank[0] | kept_by_rank[1]
        }


def test_what_is_taken_of_what_was_kept(world2: World, text_data: str, tmp_path: Path) -> None:
    """Offloaded moments are restored with policy `host`, main parameters also with `reset`, and neither with
    --no-load-optim."""
    flags = PIPELINE | {"data_path": text_data, "bf16": True, "num_layers": 4}
    host, reset = (worlds.run_config(**flags, train_iters=6, bcd_optimizer_state=item) for item in ("host", "reset"))
    stopping = resumed_runs.with_checkpoints(host, save=str(tmp_path), exit_interval=3)  # blocks 0, 1 and 2 are done
    world2.run(resumed_runs.one_part, stopping)
    moments, main_param = {"exp_avg", "exp_avg_sq"}, {"master"}
    everything = moments | main_param
    result = world2.run(kept_after_resuming, host, str(tmp_path))[0]
    assert result == {0: everything, 1: everything, 2: everything, 3: main_param}
    assert world2.run(kept_after_resuming, reset, str(tmp_path))[0] == dict.fromkeys(range(4), main_param)
    assert world2.run(kept_after_resuming, host, str(tmp_path), load_optim=False)[0] == {3: main_param}


def builds_of_a_start(config: Any, root: str) -> int:
    """Return how many blocks a resumed run builds before its first step."""
    resumed_config = resumed_runs.with_checkpoints(config, load=root)
    with (
        mock.patch.object(ActiveBlock, "build", autospec=True, side_effect=ActiveBlock.build) as build,
        worlds.started(resumed_config),
    ):
        return build.call_count


def test_a_resume_builds_one_block(world2: World, text_data: str, tmp_path: Path) -> None:
    """A resume sets the offloaded state of all blocks without building their optimizers."""
    config = worlds.run_config(data_path=text_data, bf16=True, bcd_optimizer_state="host", world_size=2, train_iters=6)
    world2.run(resumed_runs.one_part, resumed_runs.with_checkpoints(config, save=str(tmp_path), exit_interval=3))
    assert world2.run(builds_of_a_start, config, str(tmp_path)) == [1, 1]
