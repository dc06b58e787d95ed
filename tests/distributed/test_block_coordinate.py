"""BlockCoordinate on two ranks, in DistributedDataParallel and under FSDP2: parity with one process."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from support import worlds
from support.dist import World
from support.small_net import Net
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from megatron.bcd import BlockCoordinate

STEPS, PER_BLOCK, ROWS = 9, 2, 8


def two_ranks() -> AbstractContextManager[None]:
    return worlds.parallel(worlds.run_config(mock_data=True, split=None, world_size=2))


def optimizer_of(model: nn.Module, **settings: Any) -> BlockCoordinate:
    settings = {"lr": 0.01, "steps_per_block": PER_BLOCK, "keep_state": "host"} | settings
    return BlockCoordinate(model, torch.optim.AdamW, **settings)


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value.detach().clone()


def train(
    model: Any, optimizer: BlockCoordinate, *, start: int = 0, stop: int = STEPS, parts: int = 1, clip: bool = False
) -> list[Any]:
    """Train on this rank's rows of every batch, in `parts` backward passes; return the whole batch's loss and the
    block."""
    is_parallel = torch.distributed.is_initialized()
    rank, size = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if is_parallel else (0, 1)
    seen = []
    for step in range(start, stop):
        generator = torch.Generator().manual_seed(step)
        inputs, targets = (
            torch.randint(11, (ROWS, 2), generator=generator),
            torch.randint(3, (ROWS,), generator=generator),
        )
        rows = torch.arange(ROWS)[rank::size].chunk(parts)
        total = torch.zeros(())
        for number, part in enumerate(rows):
            waits = number < parts - 1 and isinstance(model, DistributedDataParallel)
            with model.no_sync() if waits else contextlib.nullcontext():
                loss = nn.functional.cross_entropy(model(inputs[part]), targets[part]) / parts
                loss.backward()
            total += loss.detach() / size
        if is_parallel:
            torch.distributed.all_reduce(total)
        if clip:
            torch.nn.utils.clip_grad_norm_(optimizer.active_parameters, 0.5)
        seen.append((float(total), optimizer.block))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def result(model: nn.Module, seen: list[Any]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    return seen, {name.removeprefix("module."): whole(value) for name, value in model.state_dict().items()}


def alone(dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    model = Net(3).to(dtype)
    return result(model, train(model, optimizer_of(model, **settings), clip=True))


def assert_parity(results: list[Any], reference: Any, *, rel: float = 1e-5, atol: float = 1e-6) -> None:
    losses, blocks = zip(*reference[0], strict=True)
    for seen, weights in results:
        assert tuple(block for _, block in seen) == blocks
        assert [loss for loss, _ in seen] == pytest.approx(losses, rel=rel)
        torch.testing.assert_close(weights, reference[1], rtol=1e-4, atol=atol)


def in_ddp(is_first: bool, parts: int, settings: dict[str, Any], how: dict[str, Any]) -> Any:
    with two_ranks():
        model = Net(3)
        if is_first:
            model = ddp = DistributedDataParallel(model, **how)
            optimizer = optimizer_of(model, **settings)
        else:
            optimizer = optimizer_of(model, **settings)
            ddp = DistributedDataParallel(model, **how)
        hooked = set()

        def hook(_, bucket):  # PyTorch checks annotations
            hooked.add(optimizer.block)
            return default_hooks.allreduce_hook(None, bucket)

        ddp.register_comm_hook(None, hook)
        seen = train(ddp, optimizer, parts=parts, clip=True)
        assert hooked == {0, 1, 2}
        active = sum(p.numel() for p in ddp.parameters() if p.requires_grad)
        ddp(torch.zeros(1, 2, dtype=torch.int64))  # the block after the last switch
        buckets = ddp._get_ddp_logging_data()["bucket_sizes"]
        assert sum(map(int, buckets.split(", "))) == 4 * active
        assert set(optimizer.state) <= set(optimizer.active_parameters)
        return result(ddp, seen)


@pytest.mark.parametrize(
    ("is_first", "parts", "settings", "how"),
    [
        (True, 1, {}, {"find_unused_parameters": True}),
        (False, 2, {"inactive_update": "orthogonal", "order": "random"}, {"gradient_as_bucket_view": True}),
        (False, 1, {"steps_per_block": 1, "always_active": ("norms",)}, {"static_graph": True}),
    ],
)
def test_ddp(world2: World, is_first: bool, parts: int, settings: dict[str, Any], how: dict[str, Any]) -> None:
    """Under DDP, wrapped before or after the optimizer is built, a run equals one process and reduces active gradients
    only."""
    assert_parity(world2.run(in_ddp, is_first, parts, settings, how), alone(**settings))


def sharded(
    settings: dict[str, Any], dtype: torch.dtype = torch.float32, *, is_first: bool = False
) -> tuple[Any, BlockCoordinate]:
    """Shard before the optimizer is built (`is_first`), or replace the optimizer's parameters afterwards, as Accelerate
    does."""
    model = Net(3).to(dtype)
    optimizer = None if is_first else optimizer_of(model, **settings)
    names = {p: name for name, p in model.named_parameters()}
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    if optimizer is None:
        return model, optimizer_of(model, **settings)
    new = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [new[names[p]] for p in group["params"]]
    return model, optimizer


def in_fsdp(settings: dict[str, Any], dtype: torch.dtype, folder: Path) -> Any:
    """Return a run, and one that continues from what its rank saved during it."""
    with two_ranks():
        model, optimizer = sharded(settings, dtype, is_first=True)
        file = folder / f"rank_{torch.distributed.get_rank()}.pt"
        seen = train(model, optimizer, stop=5, clip=True)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        seen += train(model, optimizer, start=5, clip=True)
        bytes_of = {p: 8 * p.to_local().numel() + 4 for p in optimizer.active_parameters}
        if dtype == torch.bfloat16:  # low bits
            bytes_of |= {
                p: bytes_of.get(p, 0) + 2 * p.to_local().numel() for p in model.parameters() if p.requires_grad
            }
        assert optimizer.optimizer_state_bytes == sum(bytes_of.values())
        resumed, optimizer = sharded(settings, dtype)
        loaded = torch.load(file, weights_only=True)
        resumed.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        assert train(resumed, optimizer, start=5, clip=True) == seen[5:]
        assert all(
            torch.equal(whole(p), whole(q)) for p, q in zip(resumed.parameters(), model.parameters(), strict=True)
        )
        return result(model, seen)


@pytest.mark.parametrize(("rule", "dtype"), [("none", torch.bfloat16), ("orthogonal", torch.float32)])
def test_fsdp2(world2: World, rule: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Under FSDP2 a run takes the steps of one process, each rank stores state of its shards only, and a resumed run
    equals it."""
    settings = {"inactive_update": rule}
    # the ranks' mean gradient rounds to bf16 in another way, so a step of Adam may have another sign
    tolerances = {} if dtype == torch.float32 else {"rel": 0.01, "atol": 0.02}
    assert_parity(world2.run(in_fsdp, settings, dtype, tmp_path), alone(dtype, **settings), **tolerances)


def blocks_of_rank() -> list[int]:
    """Return the blocks of a run whose seed depends on the rank."""
    with two_ranks():
        rank = torch.distributed.get_rank()
        model = Net(3)
        optimizer = optimizer_of(model, seed=rank, order="random", steps_per_block=2)
        ddp, blocks = DistributedDataParallel(model), []
        for _ in range(12):
            ddp(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
            blocks.append(optimizer.block)
            optimizer.step()
            optimizer.zero_grad()
        return blocks


def test_ranks_switch_together(world2: World) -> None:
    """All ranks switch at the same step to the same block, even if their seeds differ."""
    first, other = world2.run(blocks_of_rank)
    assert first == other and len(set(first)) == 3


def error_of_step() -> str:
    with two_ranks():
        model = Net(3)
        optimizer = optimizer_of(model)
        model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
        with pytest.raises(ValueError) as raised:
            optimizer.step()
        return str(raised.value)


def test_gradients_that_nothing_averages_are_refused(world2: World) -> None:
    """A step on two ranks without DistributedDataParallel is refused in one line."""
    for error in world2.run(error_of_step):
        assert "DistributedDataParallel" in error and "\n" not in error
