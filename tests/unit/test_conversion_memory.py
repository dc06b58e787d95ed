"""Memory of converting a checkpoint: that of its largest safetensors file, whatever the size of the model.

    PYTHONPATH=.:tests python tests/unit/test_conversion_memory.py FOLDER LAYERS HIDDEN SHARD_BYTES

writes a LLaMA of random weights below FOLDER as a checkpoint, converts it, and prints one JSON object.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import huggingface_models as models

from megatron.bcd.huggingface import convert, run_network
from megatron.bcd.huggingface.core_format import CoreCheckpoint

VOCABULARY = 32000
# for glibc: otherwise peaks depend on what it happens to keep, by 35 MB
RETURNED_AT_ONCE = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
SMALL_BUFFERS = 20_000_000
SIZES = (6, 512, 36_000_000)


def memory(field: str) -> int:
    """Return bytes of this process from /proc: ``VmRSS`` now, ``VmHWM`` at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def cost_of(action: Callable[[], Any], written: Path) -> dict[str, int]:
    """Return the additional peak memory, and the size of the largest safetensors file."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = memory("VmRSS")
    action()
    return {
        "bytes": memory("VmHWM") - before,
        "file": max(file.stat().st_size for file in written.glob("*.safetensors")),
    }


def converted(folder: Path, layers: int, hidden: int, shard_bytes: int) -> dict[str, Any]:
    """Convert the checkpoint of a LLaMA with grouped queries and an FFN of 2.75 x hidden, in bf16."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 512),
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model", max_shard_size=shard_bytes)
    count = sum(parameter.numel() for parameter in model.parameters())
    del model
    root = models.write_checkpoint(folder / "model", folder / "checkpoint")

    def back() -> None:
        path = run_network.checkpoint_folder(str(root), flag="--input")
        described = run_network.describe_checkpoint(path, config_folder=str(folder / "model"))
        convert.to_hugging_face(CoreCheckpoint(path), str(folder / "back"), described, max_shard_bytes=shard_bytes)

    return {"parameters": count, **cost_of(back, folder / "back")}


@pytest.mark.long
def test_peak(repo_root: Path, tmp_path: Path) -> None:
    """The largest file bounds the memory of a conversion."""
    command = [sys.executable, __file__, str(tmp_path), *map(str, SIZES)]
    env = {**os.environ, "PYTHONPATH": f"{repo_root}:{repo_root / 'tests'}", **RETURNED_AT_ONCE}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert result["parameters"] > SIZES[2]
    assert result["bytes"] <= 1.4 * result["file"] + SMALL_BUFFERS


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    # what is imported, and what allocators keep, is not the model's
    converted(Path(sys.argv[1]) / "warm", 1, 64, 10**6)
    print(json.dumps(converted(Path(sys.argv[1]) / "measured", *map(int, sys.argv[2:]))))
