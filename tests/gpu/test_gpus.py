"""Faults that only GPUs can show: copies between devices, a missing compiler, packages with kernels for them, and
tools/check_machine.py, the first command on a machine with GPUs, on all of them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from _self_test import FLAGS, ONE_BLOCK, TOLERANCE, Runner, flag_words, losses

from megatron.bcd.model import fp8
from megatron.bcd.optim.bf16 import bf16_residual
from megatron.bcd.optim.update_rules import MatrixLayout, orthogonalize
from megatron.bcd.runtime import device

pytestmark = pytest.mark.timeout(1800)
SUBMODEL = {"bcd_num_blocks": 2, "bcd_layout": "submodel", "bcd_steps_per_block": 2, "train_iters": 8}


@pytest.fixture(scope="session")
def num_gpus() -> int:
    """Number of GPUs; skips the test if there is none."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return torch.cuda.device_count()


def one_gpu(folder: Path) -> Runner:
    """Runs the training script on one GPU, always from the weights that a CPU draws."""
    runner = Runner(folder=folder, num_ranks=1, on_gpu=True, flags=FLAGS)
    runner.prepare()
    return runner


@pytest.mark.parametrize("main_on", ["cpu", "cuda"])
def test_residuals_across_devices(num_gpus: int, main_on: str) -> None:
    """A main parameter is restored bit for bit from the weight on the GPU and its residual, on the GPU and in host
    memory."""
    main_param = torch.randn(1000, generator=torch.Generator().manual_seed(3)).to(main_on)
    weight = main_param.to("cuda", torch.bfloat16)
    residual = bf16_residual(main_param, weight, out=torch.empty(1000, dtype=torch.int16))
    restored = torch.zeros_like(main_param)
    residual.restore(weight, main_param=restored)
    assert torch.equal(restored, main_param)


def test_no_compiler(repo_root: Path, num_gpus: int) -> None:
    """Without a compiler, a run ends with exit code 2 and names --no-bias-gelu-fusion, without a traceback."""
    data = {"mock_data": True, "tokenizer_type": "NullTokenizer", "vocab_size": 256}
    sizes = {"num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "train_iters": 1}
    batch = {"micro_batch_size": 1, "global_batch_size": 1, "lr": 1e-3, "max_position_embeddings": 64}
    command = [sys.executable, "pretrain_gpt_bcd.py", *flag_words(data | sizes | batch)]
    environment = os.environ | {"CC": "/no/such/compiler", "TORCHDYNAMO_DISABLE": "0"}
    done = subprocess.run(command, cwd=repo_root, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "--no-bias-gelu-fusion" in done.stderr and "Traceback" not in done.stderr


def test_weights_across_implementations(num_gpus: int, tmp_path: Path) -> None:
    """Transformer Engine and Megatron Core's own layers have the same first loss with each other's weights."""
    pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine", exc_type=ImportError)
    runner = one_gpu(tmp_path)
    for writer in ("transformer_engine", "local"):
        folder = tmp_path / writer
        runner.train(f"written_by_{writer}", SUBMODEL | {"transformer_impl": writer, "save": folder})
        loaded = {"load": folder, "finetune": True, "train_iters": 1}
        first = [
            runner.train(f"{writer}_read_by_{reader}", SUBMODEL | loaded | {"transformer_impl": reader})[0]["loss"]
            for reader in ("transformer_engine", "local")
        ]
        assert first[0] == pytest.approx(first[1], rel=TOLERANCE["tf32"])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_apex(num_gpus: int, tmp_path: Path, precision: str) -> None:
    """Runs with Apex's norm and Adam, which the run summary names, have the losses of a CPU. Transformer Engine is
    hidden from these runs, because Megatron Core would prefer its Adam."""
    for module in ("apex.optimizers", "apex.normalization", "amp_C"):
        pytest.importorskip(module, reason="needs Apex", exc_type=ImportError)
    hidden = tmp_path / "transformer_engine"
    hidden.mkdir()
    (hidden / "__init__.py").write_text("raise ModuleNotFoundError('hidden from this run')\n")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    runner = replace(one_gpu(tmp_path), environment={"PYTHONPATH": path})
    flags = ONE_BLOCK | {"bf16": precision == "bf16"}
    run = runner.train(f"apex_{precision}", flags)
    summary = " ".join((runner.folder / f"apex_{precision}.log").read_text().split())
    assert "layers local" in summary and "norm Apex fused LayerNorm, optimizer Apex fused Adam" in summary
    reference = runner.train(f"cpu_{precision}", flags, on_cpu=True)
    assert losses(run) == pytest.approx(losses(reference), rel=TOLERANCE[precision])


@pytest.mark.parametrize("shape", [(64, 256), (512, 128)])
@pytest.mark.parametrize("smallest", [1.0, 1e-2, 1e-4])
def test_singular_values(num_gpus: int, shape: tuple[int, int], smallest: float) -> None:
    """An orthogonalised matrix has the singular values of fp32: through the Gram matrix, in fp16, within 0.01, and by
    the usual iteration, in bf16, within 0.1."""
    left, _, right = torch.linalg.svd(torch.randn(1, *shape), full_matrices=False)
    matrix = left * torch.logspace(0, math.log10(smallest), min(shape)) @ right
    expected = torch.linalg.svdvals(orthogonalize(matrix))
    for is_gram_iterated, limit in ((True, 0.01), (False, 0.1)):
        result = orthogonalize(matrix.cuda(), MatrixLayout(is_gram_iterated=is_gram_iterated))
        errors = torch.linalg.svdvals(result.float().cpu()) - expected
        assert errors.abs().max() < limit * math.sqrt(max(shape))


@pytest.mark.parametrize("grad_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_products(num_gpus: int, grad_dtype: torch.dtype) -> None:
    """FP8 products and their gradients on a GPU are those of a CPU, apart from the rounding of sums."""
    if not device.can_multiply_fp8():
        pytest.skip("needs compute capability 8.9")
    results = []
    for place in ("cpu", "cuda"):
        torch.manual_seed(1)
        x, weight, grad = (torch.randn(size, dtype=torch.bfloat16) for size in ((2, 32, 64), (48, 64), (2, 32, 48)))
        x, weight = (each.to(place).requires_grad_() for each in (x, weight))
        output = fp8._product(fp8.Weights(grad_dtype), "", x, weight)
        output.backward(grad.to(place))
        results.append([each.detach().cpu().float() for each in (output, x.grad, weight.grad)])
    for on_cpu, on_gpu in zip(*results, strict=True):
        assert (on_gpu - on_cpu).norm() < 0.005 * on_cpu.norm()


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_check_machine(
    repo_root: Path, tmp_path: Path, pytestconfig: pytest.Config, num_gpus: int, num_ranks: int
) -> None:
    """No part of the check fails: losses as on the CPU, layouts, resuming, prefix cache and offload."""
    if num_ranks > num_gpus:
        pytest.skip(f"needs {num_ranks} CUDA GPUs, here are {num_gpus}")
    is_emulated = "BCD_EMULATED_GPU" in os.environ  # whose times mean nothing
    if is_emulated and not pytestconfig.getoption("--long"):
        pytest.skip("takes minutes on emulated GPUs; --long runs it")
    report = tmp_path / "report.json"
    words = ["--json", str(report), "--output", str(tmp_path / "out"), "--num-ranks", str(num_ranks)]
    command = [sys.executable, "tools/check_machine.py", *words, *([] if is_emulated else ["--calibrate"])]
    # no more emulated GPUs than cores, or check_machine reports too few cores
    environment = os.environ | ({"FAKEGPU_DEVICE_COUNT": str(num_ranks)} if is_emulated else {})
    done = subprocess.run(command, cwd=repo_root, env=environment, capture_output=True, text=True)
    failures = [check for check in json.loads(report.read_text())["checks"] if check["verdict"] == "FAIL"]
    assert done.returncode == 0 and failures == [], failures
