"""The requests to ProcessGroupNCCL, read from the trace of the emulated NCCL."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from support import worlds
from support.gpu_worlds import Worlds

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
