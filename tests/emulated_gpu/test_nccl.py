"""The requests to ProcessGroupNCCL, read from the trace of the emulated NCCL."""

from __future__ import annotations

import itertools
import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from support import worlds
from support.gpu_worlds import Worlds
from support.issue_order import Case, Event, Issued, record

from megatron.bcd.blocks.partition import partition_from_config
from megatron.bcd.planner.run_state import head_passes
from megatron.bcd.runtime.distributed import MAX_WAITING_CTAS

LINE = re.compile(r"(\w+) comm (\S+) rank (\d+)/(\d+) type (\d+) count (\d+) op (\d+) peer (\d+) blocks (-?\d+)")
CASES: dict[str, dict[str, Any]] = {
    "stage": {"bcd_layout": "stage", "bcd_num_blocks": None},
    "interleaved": {"bcd_layout": "interleaved", "bcd_num_blocks": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_agree_on_every_communicator(text_data: str, tmp_path: Path, case: str) -> None:
    """Ranks issue a communicator's collectives in one order, and each send has a receive of its size. Messages that
    wait have a group without other kernels, because waiting blocks may fill the GPU."""
    flags = {"world_size": 2, "pipeline_model_parallel_size": 2, "num_layers": 4, "data_path": text_data}
    traced = Worlds("nccl", EMU_TRACE=str(tmp_path / "trace"))
    try:
        traced(2).run(worlds.train_run, worlds.run_config(**flags, **CASES[case]))
    finally:
        traced.close()
    issued: dict[str, dict[int, list[tuple[Any, ...]]]] = defaultdict(lambda: defaultdict(list))
    limited: set[str] = set()
    for path in tmp_path.glob("trace.*"):
        for kind, name, rank, size, *numbers, peer, blocks in LINE.findall(path.read_text()):
            issued[name][int(rank)].append((kind, *numbers, int(peer)))
            if size == "2" and blocks == str(MAX_WAITING_CTAS):
                limited.add(name)
    messages = 0
    for name, ranks in issued.items():
        collectives = [[item for item in calls if item[0] not in ("send", "receive")] for calls in ranks.values()]
        assert all(calls == collectives[0] for calls in collectives), name
        assert name not in limited or not collectives[0], "a collective where messages wait"
        for rank, calls in ranks.items():
            sent = [call[1:-1] for call in calls if call[0] == "send"]
            taken = [call[1:-1] for call in ranks.get(1 - rank, []) if call[0] == "receive"]
            assert sent == taken, (name, rank)
            messages += len(sent)
    assert messages > 10 and len(issued) >= 2
    assert bool(limited) == (case != "interleaved"), "messages of the prefix have a separate group"


def calls_in_steps(config: Any) -> tuple[list[int], list[Any]]:
    """Return every step's block, and this rank's NCCL calls in the steps, beginning with their first message."""
    path = Path(f"{os.environ['EMU_TRACE']}.{os.getpid()}")
    marks: list[int] = []

    def mark(run: worlds.RecordedRun) -> None:
        marks.append(len(LINE.findall(path.read_text())))

    with worlds.started(config, before_step=mark, after_step=mark) as run:
        run.train()
    calls = LINE.findall(path.read_text())
    inside = [
        itertools.dropwhile(lambda call: call[0] not in ("send", "receive"), calls[first:last])
        for first, last in zip(marks[::2], marks[1::2], strict=True)
    ]
    return [result["block"] for result in run.results], list(itertools.chain(*inside))


def without_repeats(issued: list[Any]) -> list[Any]:
    """Merge consecutive collectives of a group into one, because a model has several buffers."""
    return [two for item, two in itertools.pairwise([None, *issued]) if item != two or two[0] != "collective"]


def test_steps_are_what_the_checker_records(text_data: str, tmp_path: Path) -> None:
    """Steps issue the collectives and messages that the proof that nothing hangs (unit/test_issue_order.py) records, in
    the same groups and order."""
    flags = {"world_size": 4, "pipeline_model_parallel_size": 2, "num_layers": 4, "bcd_layout": "stage"}
    flags |= {"bcd_num_blocks": None, "bcd_steps_per_block": 2, "train_iters": 4, "micro_batch_size": 1}
    traced = Worlds("nccl", EMU_TRACE=str(tmp_path / "trace"))
    try:
        config = worlds.run_config(**flags, global_batch_size=8, data_path=text_data)
        outcomes = traced(4).run(calls_in_steps, config)
    finally:
        traced.close()
    members: dict[str, dict[str, int]] = defaultdict(dict)
    for me, (_, calls) in enumerate(outcomes):
        for _, name, rank, *_ in calls:
            members[name][rank] = me
    events = tuple(Event("train", block) for block in outcomes[0][0])
    case = Case(
        num_stages=2,
        data_size=2,
        num_microbatches=4,
        events=events,
        partition=partition_from_config(config),
        head_passes=head_passes(config, padded_vocab_size=worlds.PADDED_VOCABULARY),
    )
    for program, (_, calls) in zip(record(case), outcomes, strict=True):
        seen: list[Any] = []
        for kind, name, _, size, *_, peer, _ in calls:
            if kind in ("send", "receive"):
                seen.append((kind, members[name][peer]))
            elif size != "1":
                seen.append(("collective", sorted(members[name].values())))
        recorded: list[Any] = []
        for step in program.steps:
            if isinstance(step, Issued) and step.peer is not None:
                recorded.append(("send" if step.is_send else "receive", step.peer))
            elif (
                isinstance(step, Issued) and step.what != "all-reduce"
            ):  # before the first step, ranks make the first contact
                recorded.append(("collective", sorted(step.members)))
        assert without_repeats(seen) == without_repeats(recorded)
