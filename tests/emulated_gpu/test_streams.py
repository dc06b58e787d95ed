"""Order between streams: the emulation reports errors; the product passes, and fails if one wait is removed.

Copies of page-locked memory happen as late as possible, NCCL's kernels start late and one at a time, and fresh or freed
memory is NaN.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import resumed_runs, worlds
from support.dist import RankError
from support.gpu_worlds import Worlds

from megatron.bcd.pipeline import p2p
from megatron.bcd.runtime import device

# ---- what the emulation reports


def _copy_to_host(side: torch.cuda.Stream, waits: bool) -> float:
    copy = torch.full((4,), 2.0, device="cuda").to("cpu", non_blocking=True)
    if waits:
        torch.cuda.current_stream().synchronize()
    return copy.sum().item()


def _source_overwritten(side: torch.cuda.Stream, waits: bool) -> float:
    source = torch.full((4,), 2.0).pin_memory()
    copy = source.to("cuda", non_blocking=True)
    if waits:
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
    source.fill_(0)
    return copy.sum().item()


def _freed_memory(side: torch.cuda.Stream, waits: bool) -> float:
    numbers = torch.full((4,), 2.0, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        total = numbers.sum()
    if waits:
        numbers.record_stream(side)
    del numbers
    torch.zeros(4, device="cuda").add_(1)
    side.synchronize()
    return total.item()


def outcomes() -> dict[str, list[Any]]:
    """Return the outcome of each case with and without the wait that it needs."""
    results: dict[str, list[Any]] = {}
    for case in (_copy_to_host, _source_overwritten, _freed_memory):
        for waits in (True, False):
            try:
                outcome: Any = case(torch.cuda.Stream(), waits)
            except RuntimeError as error:
                outcome = str(error)[:15]
            torch.cuda.synchronize()
            results.setdefault(case.__name__, []).append(outcome)
    return results


def test_a_missing_wait_is_reported(late: Worlds) -> None:
    """A missing wait is reported as a race, or changes what the host reads or sends. Kernels and copies to the device:
    `MUTANTS`."""
    [seen] = late(1).run(outcomes)
    assert seen.pop("_copy_to_host")[1] != 8
    assert seen == {"_source_overwritten": [8, 0], "_freed_memory": [8, "[emulated] RACE"]}


# ---- the product

PIPELINE = {"world_size": 2, "pipeline_model_parallel_size": 2}
OFFLOAD = {"bcd_num_blocks": 1, "optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True}
STREAMED = {"num_layers": 6, "bcd_num_blocks": 3, "bcd_layers_on": "host"}
STREAMED |= {"bcd_frozen": "embedding", "untie_embeddings_and_output_weights": True}
WRITTEN_BACK = {"num_layers": 6, "bcd_preset": "pretrain", "bcd_layers_on": "host", "world_size": 2, "bf16": True}
BREADTH_FIRST = {"world_size": 2, "bf16": True, "bcd_layers_on": "host", "bcd_saved_inputs": "host"}
BREADTH_FIRST |= {"bcd_saved_activations": "auto", "bcd_passes_on_host": 3, "recompute_memory_gib": 1e-6}
BREADTH_FIRST |= {"untie_embeddings_and_output_weights": True, "eval_iters": 1, "eval_interval": 2}
FACTORED = {"bcd_num_blocks": 0, "bcd_inactive_update": "factored", "bcd_steps_per_block": None}
SUBSET = {"bcd_sample_ratio": 0.007, "bcd_steps_per_block": 4, "global_batch_size": 8, "eval_iters": 1}
CASES: dict[str, dict[str, Any]] = {
    "cache_on_two_stages": SUBSET | PIPELINE | {"bcd_layout": "submodel", "train_iters": 8},
    "host_state": {"world_size": 2, "bf16": True, "bcd_optimizer_state": "host", "train_iters": 5},
    "offload": OFFLOAD,
    "streamed": STREAMED,
    "streamed_on_two_stages": STREAMED | PIPELINE | {"bcd_resident_layers": 1, "recompute_granularity": "selective"},
    "written_back": WRITTEN_BACK,
    "written_back_and_kept": {"num_layers": 3, "bcd_preset": "finetune", "bcd_layers_on": "host", "bf16": True},
    "forward_only_stage": PIPELINE | {"bcd_layout": "stage", "bcd_num_blocks": None},
    "run_ahead_on_four_stages": {"world_size": 4, "pipeline_model_parallel_size": 4, "bcd_layout": "stage"}
    | {"bcd_num_blocks": None, "bcd_steps_per_block": 3, "train_iters": 12, "eval_iters": 1}
    | {"eval_interval": 5},
    "interleaved": PIPELINE | {"bcd_layout": "interleaved"},
    "pretrain_on_two_stages": PIPELINE | {"bcd_preset": "pretrain"},
    "checkpoint_at_once": {},
    "checkpoint_in_background_streamed": STREAMED | {"world_size": 2, "bf16": True, "async_save": True},
    "checkpoint_in_background_written_back": WRITTEN_BACK | {"async_save": True},
    "overlap": {"world_size": 2, "overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 3000},
    "breadth_first": BREADTH_FIRST | {"bcd_preset": "pretrain", "overlap_grad_reduce": True},
    "breadth_first_factored": BREADTH_FIRST | FACTORED,
    "breadth_first_on_two_stages": BREADTH_FIRST
    | {"bcd_preset": "pretrain", "pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
    "breadth_first_muon": BREADTH_FIRST | {"bcd_num_blocks": 1, "optimizer": "muon", "clip_grad": 0.0},
    "breadth_first_adam": BREADTH_FIRST | {"bcd_num_blocks": 1, "clip_grad": 0.5},
    "breadth_first_experts": BREADTH_FIRST | FACTORED | worlds.EXPERTS | worlds.EXPERT2
    | {"moe_token_dispatcher_type": "alltoall", "sequence_parallel": None},
}  # fmt: skip

FOLDERS = {"bcd_prefix_cache": "cache", "save": "checkpoint"}


def config_of(case: str, text_data: str, folder: Path) -> Any:
    flags = {"num_layers": 4, "bcd_num_blocks": 2, "micro_batch_size": 1, "global_batch_size": 4, "train_iters": 4}
    flags |= {"data_path": text_data} | CASES[case]
    flags |= {flag: folder for flag, name in FOLDERS.items() if name == case.split("_")[0]}
    return worlds.run_config(**flags)


def steps_of(config: Any) -> list[Any]:
    """Return what a run reports of its steps and of its checkpoint."""
    outcome = worlds.train_run(config)
    return [outcome["losses"], outcome["grad_norms"], outcome["evaluations"]]


@pytest.mark.parametrize("case", [case for case in CASES if case != "streamed" and "checkpoint" not in case])
def test_late_is_the_same(late: Worlds, gpus: Worlds, text_data: str, tmp_path: Path, case: str) -> None:
    """Runs have the same results though copies and kernels are late."""
    size = CASES[case].get("world_size", 1)
    mine = late(size).run(steps_of, config_of(case, text_data, tmp_path / "mine"))
    assert mine == gpus(size).run(steps_of, config_of(case, text_data, tmp_path / "theirs"))


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("checkpoint")])
def test_late_checkpoint(late: Worlds, text_data: str, tmp_path: Path, case: str) -> None:
    """A run that saves from late copies, with shards in host memory and NCCL, resumes as the run without a save."""
    config, size = config_of(case, text_data, tmp_path), CASES[case].get("world_size", 1)
    assert late(size).run(resumed_runs.saved_in_passing, config, 2, str(tmp_path)) == [[]] * size


# ---- mutants: one wait less, a buffer on the wrong device


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _without_wait(self: p2p.Messages, tensor: torch.Tensor) -> None:
    self._coming.pop(id(tensor), None)


RACE, DEVICE = r"\[emulated\] RACE", "same device"
MUTANTS: dict[str, tuple[str, str, Any, str, Any]] = {
    "gradients of an offloaded optimizer": ("offload", RACE, torch.cuda.Event, "synchronize", _nothing),
    "weights of an offloaded optimizer": ("offload", RACE, torch.cuda.Event, "wait", _nothing),
    "layers before they are there": ("streamed", RACE, device.CopyStream, "wait", _nothing),
    "layers over others that are read": ("streamed", RACE, torch.cuda.Stream, "wait_stream", _nothing),
    "messages of the prefix": ("forward_only_stage", RACE, p2p.Messages, "wait_for", _without_wait),
    "messages between chunks": ("interleaved", RACE, p2p.Messages, "wait_for", _without_wait),
    "chunks before they are there": ("breadth_first_factored", RACE, device.CopyStream, "wait", _nothing),
    "a buffer on the host": ("interleaved", DEVICE, device, "current", lambda: torch.device("cpu")),
}
"""By name: the run, the error that a rank may end with, and what is replaced."""


def mutated(config: Any, mutant: str) -> Any:
    torch.zeros(1, device="cuda").add_(1)  # by now the emulation has replaced functions of torch
    with mock.patch.object(*MUTANTS[mutant][2:]):
        return steps_of(config)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_fails(late: Worlds, gpus: Worlds, text_data: str, tmp_path: Path, mutant: str) -> None:
    """The late mode reports the error, or has other results, if one wait of the program is missing or wrong."""
    case, error = MUTANTS[mutant][:2]
    size = CASES[case].get("world_size", 1)
    right = gpus(size).run(steps_of, config_of(case, text_data, tmp_path / "theirs"))
    try:
        assert late(size).run(mutated, config_of(case, text_data, tmp_path / "mine"), mutant) != right
    except RankError as raised:
        assert re.search(error, str(raised)), raised
