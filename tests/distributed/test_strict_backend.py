"""The backend "strict" enforces NCCL's rules, and runs obey them."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import prefix_runs, schedule_mutants, worlds
from support.dist import RankError, World

from megatron.bcd.config import RunConfig

distributed = torch.distributed


@pytest.fixture(scope="module")
def strict2() -> Iterator[World]:
    """Two ranks under NCCL's rules with a short time limit."""
    world = World(2, backend="strict", hang_seconds=2)
    yield world
    world.close()


@pytest.fixture(scope="module")
def one_queue2() -> Iterator[World]:
    """Two ranks, each with one queue for all communicators."""
    world = World(2, backend="strict-one-queue", hang_seconds=4)
    yield world
    world.close()


def started() -> tuple[int, int]:
    worlds._cut_world(worlds.run_config(world_size=2, mock_data=True))
    return distributed.get_rank(), 1 - distributed.get_rank()


def every_operation() -> list[Any]:
    rank, peer = started()
    mine = torch.full((4,), float(rank + 1))
    summed, sent, received = mine.clone(), mine.clone(), torch.zeros(4)
    distributed.all_reduce(summed)
    work = distributed.isend(sent, peer) if rank == 0 else distributed.irecv(received, peer)
    work.wait()
    back = torch.zeros(4)
    batch = [distributed.P2POp(distributed.isend, mine, peer), distributed.P2POp(distributed.irecv, back, peer)]
    for work in distributed.batch_isend_irecv(batch):
        work.wait()
    gathered = [torch.zeros(4), torch.zeros(4)]
    distributed.all_gather(gathered, mine)
    together, share = torch.zeros(8), torch.zeros(2)
    distributed.all_gather_into_tensor(together, mine)
    distributed.reduce_scatter_tensor(share, mine)
    from_0 = mine.clone()
    distributed.broadcast(from_0, src=0)
    objects: list[Any] = [None, None]
    distributed.all_gather_object(objects, {"rank": rank})
    return [summed[0].item(), received[0].item(), back[0].item(), [t[0].item() for t in gathered],
            together.tolist(), share.tolist(), from_0[0].item(), objects]  # fmt: skip


def test_operations_give_what_gloo_gives(strict2: World, world2: World) -> None:
    assert strict2.run(every_operation) == world2.run(every_operation)


def connected() -> tuple[int, int]:
    """Return this rank and the other, after creating both communicators: the group's and the pair's."""
    rank, peer = started()
    distributed.barrier()
    tensor = torch.ones(1)
    message(rank, tensor).wait()
    return rank, peer


def message(rank: int, tensor: torch.Tensor) -> Any:
    """Send a message from rank 0 to rank 1."""
    return distributed.isend(tensor, 1) if rank == 0 else distributed.irecv(tensor, 0)


def read_early() -> list[list[float]]:
    """Return a received tensor and a sum, before and after waiting for them."""
    rank, peer = connected()
    received, summed = torch.ones(1), torch.ones(1)
    coming = message(rank, received)
    total = distributed.all_reduce(summed, async_op=True)
    early = [received.item(), summed.item()]
    total.wait()
    coming.wait()
    return [early, [received.item(), summed.item()]]


def test_nothing_is_there_before_it_was_waited_for(strict2: World) -> None:
    """An output is NaN until the operation was waited for. On gloo the data are mostly there before."""
    early, late = strict2.run(read_early)[1]
    assert all(math.isnan(value) for value in early) and late == [1.0, 2.0]


def send_before_receive() -> None:
    rank, peer = connected()
    tensors = torch.ones(1), torch.ones(1)
    works = [distributed.isend(tensors[0], peer), distributed.irecv(tensors[1], peer)]
    for work in works:
        work.wait()


def first_message_without_its_receiver() -> None:
    rank, peer = started()
    distributed.barrier()
    if rank == 0:
        distributed.isend(torch.ones(1), peer)
    distributed.barrier()
    if rank == 1:
        distributed.irecv(torch.ones(1), peer).wait()


def send_and_spoil() -> None:
    rank, _ = connected()
    first, second = torch.ones(1), torch.ones(4)
    if rank == 1:
        distributed.barrier()
    works = [message(rank, first), message(rank, second)]
    if rank == 0:  # the second still waits for the first, and that for its receiver
        second.zero_()
        distributed.barrier()
    for work in works:
        work.wait()


def write_early() -> None:
    rank, _ = connected()
    tensor = torch.ones(1)
    work = message(rank, tensor)
    if rank == 1:
        tensor.zero_()
    work.wait()


def collectives_in_other_order() -> None:
    rank, _ = started()
    distributed.all_reduce(torch.ones(4 + rank))


def tag() -> None:
    rank, peer = started()
    distributed.isend(torch.ones(1), peer, tag=1)


RANKS_QUEUES = r"the queues of all ranks:\nrank 0 .*\n( .*\n)*rank 1 "
BROKEN: dict[str, tuple[Callable[[], None], str]] = {
    "order": (send_before_receive, RANKS_QUEUES + r".*\n.*ranks 0 and 1 of it: send .* to rank 0; then receive"),
    "first_message": (first_message_without_its_receiver, RANKS_QUEUES),
    "changed": (send_and_spoil, "its buffer was changed before its turn came"),
    "written": (write_early, "what it writes was changed before it was waited for"),
    "collectives": (collectives_in_other_order, r"order of collectives: .*\[4\]; .*\[5\]"),
    "tag": (tag, "tag 1: NCCL's messages have none"),
}


def break_rule(name: str) -> None:
    BROKEN[name][0]()


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rules(strict2: World, name: str) -> None:
    """Each broken rule of NCCL ends the ranks with an error that names it."""
    with pytest.raises(RankError) as caught:
        strict2.run(break_rule, name)
    assert re.search(BROKEN[name][1], str(caught.value)), str(caught.value)


def cross() -> None:
    """Use two communicators, and issue their operations in another order on each rank."""
    rank, _ = connected()
    value, other = torch.ones(1), torch.ones(1)
    issue = [lambda: message(rank, value), lambda: distributed.all_reduce(other, async_op=True)]
    for work in [item() for item in (issue if rank == 0 else reversed(issue))]:
        work.wait()


def test_communicators_run_beside_each_other_unless_they_share_a_queue(strict2: World, one_queue2: World) -> None:
    strict2.run(cross)
    with pytest.raises(RankError, match=r"all communicators: send .* then all-reduce"):
        one_queue2.run(cross)


PIPELINE = worlds.PIPELINE | {"num_layers": 4, "bcd_layout": "submodel", "bcd_num_blocks": 2, "bcd_steps_per_block": 3}
PIPELINE |= {"train_iters": 12, "bcd_run_ahead": 1}


def losses_of(config: RunConfig, mutant: str | None = None) -> dict[str, Any]:
    with schedule_mutants.MUTANTS[mutant]() if mutant else contextlib.nullcontext():
        kept = worlds.train_run(config)
    return {name: kept[name] for name in ("losses", "evaluations")}


def test_a_run_keeps_the_rules(one_queue2: World, world2: World, text_data: str, tmp_path: Any) -> None:
    """Runs keep the rules with one queue for all communicators: phases with run-ahead, evaluations and checkpoints, and
    phases from the prefix cache."""
    for name, flags in {"ahead": {}, "cached": prefix_runs.FLAGS}.items():
        flags = PIPELINE | {"eval_iters": 1, "eval_interval": 5, "data_path": text_data} | flags
        more = {"save": str(tmp_path / name), "save_interval": 7}
        more |= {"bcd_prefix_cache": str(tmp_path / "cache")} if name == "cached" else {}
        strict = one_queue2.run(losses_of, worlds.run_config(**flags, **more))
        assert strict == world2.run(losses_of, worlds.run_config(**flags))


@pytest.mark.parametrize("mutant", schedule_mutants.MUTANTS)
def test_wrong_schedules_are_seen(one_queue2: World, text_data: str, mutant: str) -> None:
    """A faulty schedule that gloo mostly hides ends with an error or changes the losses."""
    config = worlds.run_config(data_path=text_data, **PIPELINE)
    if mutant == "swapped_sends":  # the messages of two microbatches look alike: another run is the judge
        assert one_queue2.run(losses_of, config, mutant) != one_queue2.run(losses_of, config)
        return
    with pytest.raises(RankError, match="the queues of all ranks"):
        one_queue2.run(losses_of, config, mutant)
