"""What only GPUs can show, and has not been shown yet: kernels, the allocator, page-locked copies, NCCL."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from _self_test import ONE_BLOCK, TOLERANCE, Runner, flags_of

from megatron.bcd.optim.bf16 import bf16_residual

pytestmark = pytest.mark.timeout(1800)
SUBMODEL = {"bcd_num_blocks": 2, "bcd_layout": "submodel", "bcd_steps_per_block": 2, "train_iters": 8}
OFFLOAD = ONE_BLOCK | {"train_iters": 8} | {"optimizer_cpu_offload": True}
SPLITS = {
    2: ((2, 1), (1, 2), (1, 1)),
    4: ((2, 2), (4, 1), (2, 1), (1, 2)),
    8: ((2, 2), (4, 2), (4, 1)),
}
"""By number of GPUs, stages and tensor-parallel ranks; what is left is data parallel."""


@pytest.mark.parametrize(
    ("name", "num_ranks", "flags"),
    [
        ("async_save", 1, SUBMODEL | {"async_save": True}),
        ("kept_state", 1, SUBMODEL | {"bcd_optimizer_state": "host"}),
        ("kept_state_bf16", 1, SUBMODEL | {"bcd_optimizer_state": "host", "bf16": True}),
        ("offload_bf16", 1, OFFLOAD | {"bf16": True}),
        ("offload_bf16_data2", 2, OFFLOAD | {"bf16": True}),
    ],
)
def test_resumed_is_uninterrupted(
    runners: Callable[[int], Runner], tmp_path: Path, name: str, num_ranks: int, flags: dict[str, Any]
) -> None:
    """State that is copied to page-locked memory and back, or written beside the training, and loses a bit; a run that
    dies after its last checkpoint."""
    runner = runners(num_ranks)
    if name.startswith("offload") and not runner.on_gpu:
        pytest.skip("needs a CUDA GPU")
    saving = flags | {"save": tmp_path / "parts", "save_interval": 5}
    whole = runner.train(f"{name}_whole", saving | {"save": tmp_path / "whole"})
    runner.train(f"{name}_first", saving | {"exit_interval": 5})
    rest = runner.train(f"{name}_rest", saving | {"load": tmp_path / "parts"})
    assert rest.losses == whole.losses[5:] and len(rest.losses) == 3


@pytest.mark.parametrize("main_on", ["cpu", "cuda"])
def test_residuals_across_devices(num_gpus: int, main_on: str) -> None:
    """A main parameter in host memory, as with offload, whose weight on the GPU is taken for its neighbour."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    main_param = torch.randn(1000, generator=torch.Generator().manual_seed(3)).to(main_on)
    weight = main_param.to("cuda", torch.bfloat16)
    residual = bf16_residual(main_param, weight, out=torch.empty(1000, dtype=torch.int16))
    restored = torch.zeros_like(main_param)
    residual.restore(weight, main_param=restored)
    assert torch.equal(restored, main_param)


def test_no_compiler(repo_root: Path, num_gpus: int) -> None:
    """A run that dies in its first step, with the traceback of torch.compile on every rank."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    data = {"mock_data": True, "tokenizer_type": "NullTokenizer", "vocab_size": 256}
    sizes = {"num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "train_iters": 1}
    batch = {"micro_batch_size": 1, "global_batch_size": 1, "lr": 1e-3, "max_position_embeddings": 64}
    command = [sys.executable, "pretrain_gpt_bcd.py", *flags_of(data | sizes | batch)]
    environment = os.environ | {"CC": "/no/such/compiler", "TORCHDYNAMO_DISABLE": "0"}
    done = subprocess.run(command, cwd=repo_root, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "--no-bias-gelu-fusion" in done.stderr and "Traceback" not in done.stderr


def test_a_switch_frees_the_allocators_bytes(runners: Callable[[int], Runner]) -> None:
    """A reference to the old block's optimizer: what is allocated grows from visit to visit."""
    run = runners(1).train("switches", SUBMODEL | {"train_iters": 16, "micro_batch_size": 2})
    if not run.steps[0]["reserved_memory_bytes"][0]:
        pytest.skip("needs a CUDA GPU: a CPU has no allocator that counts")
    peaks: dict[int, list[int]] = {}
    for before, step in itertools.pairwise(run.steps):
        if step["cycle"] > 0 and step["phase"] == before["phase"]:  # a phase's first step makes the moments
            peaks.setdefault(step["block"], []).append(step["peak_memory_bytes"][0])
    assert all(max(of_block) <= 1.01 * min(of_block) for of_block in peaks.values()), peaks


@pytest.mark.parametrize(("num_ranks", "split"), [(number, split) for number in SPLITS for split in SPLITS[number]])
def test_parallel_layouts(runners: Callable[[int], Runner], num_ranks: int, split: tuple[int, int]) -> None:
    """Messages and reductions of NCCL in another order, or over other ranks: the losses of one process on the CPU."""
    stages, tensor = split
    sizes = {"pipeline_model_parallel_size": stages, "tensor_model_parallel_size": tensor}
    flags = ONE_BLOCK | {name: size for name, size in sizes.items() if size > 1}
    flags["make_vocab_size_divisible_by"] = 128 // tensor  # as many rows as on one rank
    run = runners(num_ranks).train(f"split_{num_ranks}_{stages}_{tensor}", flags)
    reference = runners(num_ranks).train("one_process", ONE_BLOCK, num_ranks=1, on_cpu=True)
    assert run.losses == pytest.approx(reference.losses, rel=TOLERANCE["tf32"])


def test_weights_across_implementations(runners: Callable[[int], Runner], tmp_path: Path) -> None:
    """Weights of Transformer Engine's modules that the others read wrongly, or the other way round: the first loss
    after the load is another one."""
    pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine", exc_type=ImportError)
    runner = runners(1)
    for writer in ("transformer_engine", "local"):
        folder = tmp_path / writer
        runner.train(f"written_by_{writer}", SUBMODEL | {"transformer_impl": writer, "save": folder})
        loaded = {"load": folder, "finetune": True, "train_iters": 1}
        first = [
            runner.train(f"{writer}_read_by_{reader}", SUBMODEL | loaded | {"transformer_impl": reader}).losses[0]
            for reader in ("transformer_engine", "local")
        ]
        assert first[0] == pytest.approx(first[1], rel=TOLERANCE["tf32"])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_apex(runners: Callable[[int], Runner], tmp_path: Path, precision: str) -> None:
    """Apex's norm or Adam that computes something else than PyTorch's, or is named in the banner and not taken: the
    CPU's losses. Megatron Core prefers Transformer Engine's Adam, so that package is hidden from these runs."""
    for module in ("apex.optimizers", "apex.normalization", "amp_C"):
        pytest.importorskip(module, reason="needs Apex", exc_type=ImportError)
    hidden = tmp_path / "transformer_engine"
    hidden.mkdir()
    (hidden / "__init__.py").write_text("raise ModuleNotFoundError('hidden from this run')\n")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    runner = replace(runners(1), environment={"PYTHONPATH": path})
    flags = ONE_BLOCK | {"bf16": precision == "bf16"}
    run = runner.train(f"apex_{precision}", flags)
    banner = " ".join((runner.folder / f"apex_{precision}.log").read_text().split())
    assert "layers local" in banner and "norm Apex fused LayerNorm, optimizer Apex fused Adam" in banner
    reference = runner.train(f"cpu_{precision}", flags, on_cpu=True)
    assert run.losses == pytest.approx(reference.losses, rel=TOLERANCE[precision])
