"""The emulated GPUs compute the CPU's numbers, follow CUDA's rules, and report where a GPU would hang or be wrong. The
requests to ProcessGroupNCCL, read from the trace of the emulated NCCL."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from support import worlds
from support.dist import RankError
from support.gpu_worlds import Worlds
from torch import distributed, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megatron.bcd.runtime.distributed import MAX_WAITING_CTAS


class Network(nn.Module):
    """Embedding, norm, attention from PyTorch's operations, GELU, dropout and loss."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(64, 32), nn.LayerNorm(32)
        self.qkv, self.up, self.down = nn.Linear(32, 96), nn.Linear(32, 128), nn.Linear(128, 32)
        self.dropout = nn.Dropout(dropout)

    def layer(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.dropout((q @ k.transpose(1, 2) / 32**0.5).softmax(-1) @ v)
        return x + self.down(functional.gelu(self.up(x)))

    def forward(self, tokens: torch.Tensor, *, recomputes: bool = False) -> torch.Tensor:
        x = self.embedding(tokens)
        x = checkpoint(self.layer, x, use_reentrant=False) if recomputes else self.layer(x)
        return functional.cross_entropy((x @ self.embedding.weight.t()).flatten(0, 1), tokens.flatten())


def test_recomputation_repeats_dropout() -> None:
    """Random numbers follow the device's generator, so a recomputed layer has the same dropout and the next call
    another."""
    gradients = []
    for recomputes in (False, True):
        torch.manual_seed(1)
        network = Network(dropout=0.5).to("cuda")
        network(torch.arange(48, device="cuda").view(2, 24), recomputes=recomputes).backward()
        gradients.append([parameter.grad for parameter in network.parameters()])
    assert all(torch.equal(plain, again) for plain, again in zip(*gradients, strict=True))
    torch.manual_seed(1)
    first, second = (functional.dropout(torch.ones(100, device="cuda")) for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_attention(dtype: torch.dtype) -> None:
    """Fused attention stores no scores, and its outputs and gradients are those of the formula."""
    torch.manual_seed(1)
    query, key, value = (torch.randn(2, 4, 24, 16, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    results = []
    for is_fused in (True, False):
        if is_fused:
            before = torch.cuda.memory_allocated()
            out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            assert torch.cuda.memory_allocated() - before < 2 * out.nbytes, "the scores are kept"
        else:
            scores = (query @ key.transpose(-1, -2)).float() / 4
            causal = torch.ones(24, 24, dtype=torch.bool, device="cuda").triu(1)
            out = scores.masked_fill(causal, float("-inf")).softmax(-1).to(dtype) @ value
        results.append([out, *torch.autograd.grad(out.square().sum(), (query, key, value))])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(
            mine, theirs, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=4e-2 if dtype == torch.bfloat16 else 1e-5
        )


def test_mixed_devices_are_refused() -> None:
    """An operation on tensors of two devices is refused, as by CUDA's kernels, unless one is a number."""
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="cuda") + torch.ones(2)
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")
    assert (torch.ones(2, device="cuda") + torch.tensor(1.0)).tolist() == [2, 2], "numbers may be on the host"


def _init() -> None:
    from support import worlds

    worlds._cut_world(worlds.run_config(world_size=2, mock_data=True, split=None))


def mismatched(kind: str) -> None:
    _init()
    rank = distributed.get_rank()
    numbers = torch.ones(4 + (kind == "size") * rank, device="cuda")
    if kind == "collective" and rank:
        distributed.broadcast(numbers, 0)
    elif kind == "type" and rank:
        distributed.all_reduce(numbers.double())
    else:
        distributed.all_reduce(numbers)
    torch.cuda.synchronize()


@pytest.mark.parametrize("kind", ["size", "type", "collective"])
def test_a_mismatched_message_ends_the_process(gpus: Worlds, kind: str) -> None:
    """Ranks that disagree about a message end with an error, where NCCL would hang or write beyond the buffer."""
    with pytest.raises(RankError, match="exit code 86(.|\n)*NCCL MISMATCH"):
        gpus(2).run(mismatched, kind)


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
