"""What converting a LLaMA of random weights costs: memory beyond the process's own, and seconds.

    PYTHONPATH=. python tests/support/conversion_cost.py FOLDER --layers 22 --hidden 2048 --shard-bytes 1000000000

writes the model below FOLDER, converts it to a checkpoint and back, and prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from megatron.bcd.huggingface import convert, run_network
from megatron.bcd.huggingface.core_format import CoreCheckpoint
from megatron.bcd.huggingface.folder import ModelFolder

VOCABULARY = 32000


def write_model(folder: Path, *, layers: int, hidden: int, shard_bytes: int) -> int:
    """A LLaMA with grouped queries and an FFN of 2.75 x hidden, in bf16; its number of parameters."""
    transformers.utils.logging.disable_progress_bar()
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 512),
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=shard_bytes)
    return sum(parameter.numel() for parameter in model.parameters())


def memory(field: str) -> int:
    """Bytes of this process, from /proc: ``VmRSS`` now, ``VmHWM`` at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def cost_of(action: Callable[[], Any], written: Path) -> dict[str, float]:
    """Peak of memory beyond what was held before, seconds, and the size of the largest safetensors file."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, started = memory("VmRSS"), time.monotonic()
    action()
    cost = {"bytes": memory("VmHWM") - before, "seconds": round(time.monotonic() - started, 1)}
    return cost | {"file": max(file.stat().st_size for file in written.glob("*.safetensors"))}


def both_ways(model: Path, out: Path, shard_bytes: int) -> dict[str, Any]:
    root = str(out / "checkpoint")

    def back() -> None:
        path = run_network.checkpoint_folder(root, flag="--input")
        described = run_network.description_of(path)
        convert.to_hugging_face(CoreCheckpoint(path), str(out / "back"), described, max_shard_bytes=shard_bytes)

    there = cost_of(lambda: convert.to_core(ModelFolder(str(model)), root, padded_vocab_size=VOCABULARY), model)
    return {"to_core": there, "back": cost_of(back, out / "back")}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    for name in ("layers", "hidden", "shard-bytes"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = parser.parse_args()
    shards = {"shard_bytes": given.shard_bytes}
    count = write_model(given.folder / "model", layers=given.layers, hidden=given.hidden, **shards)
    # what is imported, and what allocators keep, is not the model's
    write_model(given.folder / "warm", layers=1, hidden=64, **shards)
    both_ways(given.folder / "warm", given.folder / "warm_out", **shards)
    print(json.dumps({"parameters": count} | both_ways(given.folder / "model", given.folder / "out", **shards)))


if __name__ == "__main__":
    main()
