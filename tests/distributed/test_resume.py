"""Invariant 7: a run that was saved and resumed equals the uninterrupted one, bit for bit.

The suite tests combinations in which each option value occurs; `--long` runs those for each pair (`pairwise`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import resumed_runs, worlds
from support.dist import World
from support.pairwise import Combination, pairwise

PIPELINE = worlds.PIPELINE
CUTS = {name: worlds.CUTS[name] for name in ("pipeline2", "data2", "tensor2")}
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "cut": CUTS,
    "blocks": {
        "spread": {},
        "stage": {"bcd_layout": "stage", "bcd_num_blocks": None},
        "submodel": {"bcd_layout": "submodel"},
        "one_block": {"bcd_num_blocks": 1},  # its moments go on where a phase ends
    },
    "precision": {"fp32": {}, "bf16": {"bf16": True}},
    "optimizer": {
        "sharded": {},
        "moments_int8": {"adam_moments_dtype": "int8"},
        "muon": {"optimizer": "muon", "muon_use_nesterov": True, "muon_momentum_dtype": "int8"},
        "factored": {"bcd_inactive_update": "factored"},
        "orthogonal": {"bcd_inactive_update": "orthogonal", "adam_moments_dtype": "int8"},
    },
    "state": {
        "reset": {},
        "host": {"bcd_optimizer_state": "host"},
        "host_embedding": {"bcd_optimizer_state": "host", "bcd_always_active": "norms,embedding"},
    },
    "length": {"iterations": {}, "rampup": {"rampup_batch_size": (4, 4, 16), "global_batch_size": 8}},
    # the first step of a run and of a phase, a switch; inside a phase and inside a log interval
    "stops": dict.fromkeys(("stopped_1_4", "saved_at_5", "async_at_6"), {}),
}


def allowed(case: Combination) -> bool:
    return (case["blocks"] != "stage" or case["cut"] == "pipeline2") and (
        case["blocks"] != "one_block"
        or (case["state"] == "reset" and case["optimizer"] not in ("orthogonal", "factored"))
    )


DEFAULT = """
tensor2-spread-bf16-sharded-host-rampup-stopped_1_4
tensor2-submodel-bf16-muon-reset-iterations-async_at_6
data2-spread-fp32-moments_int8-host_embedding-iterations-stopped_1_4
data2-one_block-bf16-moments_int8-reset-iterations-saved_at_5
pipeline2-stage-fp32-sharded-host-iterations-async_at_6
pipeline2-submodel-bf16-factored-host-iterations-stopped_1_4
data2-submodel-fp32-orthogonal-host-rampup-saved_at_5
"""
CASES = [dict(zip(OPTIONS, line.split("-"), strict=True)) for line in DEFAULT.split()]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" not in metafunc.fixturenames:
        return
    cases = CASES
    if metafunc.function is test_more_resumed_runs:  # to find the pairs takes a second
        is_long = metafunc.config.getoption("--long")
        cases = [case for case in pairwise(OPTIONS, allowed) if case not in CASES] if is_long else []
    cases = sorted(cases, key=lambda case: [*CUTS].index(case["cut"]))  # groups of ranks are kept from case to case
    metafunc.parametrize("case", cases, ids=["-".join(case.values()) for case in cases])


def check(case: Combination, world2: World, text_data: str, folder: Path) -> None:
    flags: dict[str, Any] = {"data_path": text_data, "micro_batch_size": 2, "num_layers": 4, "bcd_num_blocks": 2}
    flags |= {"bcd_steps_per_block": 2, "train_iters": 8, "log_interval": 3, "lr_warmup_fraction": 0.1, "lr": 3e-3}
    flags |= {"hidden_dropout": 0.1, "attention_dropout": 0.1, "eval_iters": 1, "eval_interval": 4, "save": folder}
    for factor, name in case.items():
        flags |= OPTIONS[factor][name]
    how, *at = case["stops"].split("_")
    config = worlds.run_config(**flags, async_save=how == "async")
    if how == "stopped":
        result = world2.run(resumed_runs.stopped_and_resumed, config, tuple(map(int, at)), str(folder))
    else:
        result = world2.run(resumed_runs.saved_in_passing, config, int(at[-1]), str(folder))
    assert result == [[]] * 2


def test_resumed_equals_uninterrupted(world2: World, text_data: str, tmp_path: Path, case: Combination) -> None:
    """With each option value, a run that stops, or saves while it goes on, resumes as the uninterrupted run, bit for
    bit."""
    check(case, world2, text_data, tmp_path)


@pytest.mark.long
def test_more_resumed_runs(world2: World, text_data: str, tmp_path: Path, case: Combination) -> None:
    """With each pair of option values, runs resume bit for bit."""
    check(case, world2, text_data, tmp_path)


PLATEAU = {"bcd_switch": "plateau", "bcd_steps_per_block": None, "bcd_plateau_window": 2}
PLATEAU |= {"bcd_plateau_min_improvement": 0.05}
MUON = {"optimizer": "muon", "muon_momentum_dtype": "bf16", "muon_grad_dtype": "bf16", "bcd_optimizer_state": "host"}
FINETUNE = {"bcd_preset": "finetune", "num_layers": 4, "bcd_num_blocks": None, "bcd_steps_per_block": 2, "bf16": True}
LLAMA = {"form": "llama", "ffn_hidden_size": 88, "group_query_attention": True, "num_query_groups": 2, "bf16": True}
LLAMA |= {"bcd_optimizer_state": "host", "bcd_always_active": "norms,head", "recompute_granularity": "selective"}
FACTORED = {"bf16": True, "bcd_inactive_update": "factored", "bcd_embedding_update": "factored"}
FACTORED |= {"bcd_always_active": "norms,biases,embedding,head"}
RUNS: dict[str, dict[str, Any]] = {
    "random_subset": CUTS["data2"] | {"bcd_order": "random", "bcd_sample_ratio": 0.002},
    "plateau": PIPELINE | {"bcd_layout": "submodel", "train_iters": None, "train_samples": 67} | PLATEAU,
    "muon_bf16": CUTS["data2"] | MUON | {"bf16": True, "bcd_always_active": "norms,biases", "bcd_frozen": "embedding"},
    "factored_no_block": CUTS["tensor2"] | LLAMA | FACTORED | {"bcd_num_blocks": 0, "bcd_layout": "strided"},
    "finetune_dropped": CUTS["data2"] | FINETUNE | {"bcd_order": "descending", "bcd_optimizer_state": "host"}
    | {"bcd_frozen": "norms", "bcd_main_params": "drop"},
    "experts_divided": CUTS["data2"] | FACTORED | worlds.EXPERTS | worlds.EXPERT2,
    "context2": CUTS["data2"] | {"context_parallel_size": 2, "bf16": True, "bcd_preset": "pretrain"}
    | {"bcd_optimizer_state": "host"},
    "interleaved": PIPELINE | {"bcd_layout": "interleaved", "bcd_optimizer_state": "host", "bcd_steps_per_block": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_resumed_runs_of_other_kinds(world2: World, text_data: str, tmp_path: Path, name: str) -> None:
    """Runs with subsets, plateaus, experts and other optimizer state resume as the uninterrupted run, bit for bit."""
    flags = {"data_path": text_data, "micro_batch_size": 2, "hidden_dropout": 0.1, "train_iters": 7, "eval_iters": 1}
    flags |= {"bcd_steps_per_block": 3, "eval_interval": 3, "save": tmp_path} | RUNS[name]
    config = worlds.run_config(**flags)
    assert world2.run(resumed_runs.stopped_and_resumed, config, (4,), str(tmp_path)) == [[]] * 2


def test_fp16_goes_on_with_its_loss_scale(world2: World, text_data: str, tmp_path: Path) -> None:
    """An fp16 run resumes with its loss scale, growth counter and count of overflows: the same gradients, the same
    skips."""
    flags = PIPELINE | {"bcd_layout": "submodel", "data_path": text_data, "bcd_steps_per_block": 3, "save": tmp_path}
    flags |= {"fp16": True, "initial_loss_scale": 2**19, "min_loss_scale": 1, "loss_scale_window": 2, "hysteresis": 2}
    config = worlds.run_config(**flags, micro_batch_size=2, lr_warmup_fraction=0.1, train_iters=9)
    whole = world2.run(resumed_runs.one_part, resumed_runs.with_checkpoints(config, save=None))[0]
    scales, skips = [step["loss_scale"] for step in whole["steps"]], [norm is None for norm in whole["grad_norms"]]
    assert skips[:2] == [True, True] and not skips[-1] and scales[1] < scales[0] > min(scales) < scales[-1], scales
    assert world2.run(resumed_runs.stopped_and_resumed, config, (2, 6), str(tmp_path)) == [[], []]
