"""What ProcessGroupNCCL is asked for, read from the trace of the emulated NCCL."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from support import worlds
from support.gpu_worlds import Worlds

from megatron.bcd.runtime.distributed import MOST_CTAS

LINE = re.compile(r"(\w+) comm (\S+) rank (\d+)/(\d+) type (\d+) count (\d+) op (\d+) peer (\d+) blocks (-?\d+)")
CASES: dict[str, dict[str, Any]] = {
    "stage": {"bcd_layout": "stage", "bcd_num_blocks": None},
    "submodel": {"bcd_layout": "submodel", "bcd_num_blocks": 2},
    "interleaved": {"bcd_layout": "interleaved", "bcd_num_blocks": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_agree_on_every_communicator(text_data: str, tmp_path: Path, case: str) -> None:
    """Collectives of a communicator in another order on another rank, a send without a receive of its size, messages
    that wait in a group that may fill a GPU with them, and other kernels in the group that they have."""
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
            if size == "2" and blocks == str(MOST_CTAS):
                limited.add(name)
    messages = 0
    for name, ranks in issued.items():
        collectives = [[one for one in own if one[0] not in ("send", "receive")] for own in ranks.values()]
        assert all(own == collectives[0] for own in collectives), name
        assert name not in limited or not collectives[0], "a collective where messages wait"
        for rank, own in ranks.items():
            sent = [one[1:-1] for one in own if one[0] == "send"]
            taken = [one[1:-1] for one in ranks.get(1 - rank, []) if one[0] == "receive"]
            assert sent == taken, (name, rank)
            messages += len(sent)
    assert messages > 20 and len(issued) >= 2
    assert bool(limited) == (case != "interleaved"), "messages of the prefix have a group of their own"
