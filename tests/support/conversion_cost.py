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
from safetensors.torch import save_file

from megatron.bcd.huggingface import convert, run_network
from megatron.bcd.huggingface.architecture import Architecture, config_of
from megatron.bcd.huggingface.core_format import CoreCheckpoint
from megatron.bcd.huggingface.folder import ModelFolder
from megatron.bcd.huggingface.tensors import rows_of


def network_of(layers: int, hidden: int) -> Architecture:
    """A LLaMA with grouped queries, an FFN of 2.75 x hidden and 32,000 ids."""
    return Architecture(
        family="llama",
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=hidden * 11 // 4,
        num_attention_heads=hidden // 64,
        num_query_groups=max(1, hidden // 512),
        head_size=64,
        vocab_size=32000,
        max_positions=2048,
        norm_epsilon=1e-5,
        tied=False,
        rotary_base=10000,
    )


def write_model(folder: Path, network: Architecture, shard_bytes: int) -> None:
    """Random bf16 weights in files of at most `shard_bytes`."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_of(network, dtype="bfloat16")))
    shards: list[dict[str, torch.Tensor]] = [{}]
    table, held = {}, 0

    def flush() -> None:
        name = f"model-{len(table):05d}.safetensors"
        save_file(shards[0], folder / name)
        table.update(dict.fromkeys(shards[0], name))
        shards[0] = {}

    for row in rows_of(network):
        for layer in range(network.num_layers if row.is_stacked else 1):
            for name, shape in zip(row.names_of(layer), row.shapes, strict=True):
                tensor = torch.randint(-(2**14), 2**14, shape, dtype=torch.int16).view(torch.bfloat16)
                if held + tensor.nbytes > shard_bytes and shards[0]:
                    flush()
                    held = 0
                shards[0][name] = tensor
                held += tensor.nbytes
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


def _memory(field: str) -> int:
    """Bytes of this process, from /proc: ``VmRSS`` now, ``VmHWM`` at its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status")


def cost_of(action: Callable[[], Any]) -> dict[str, float]:
    """Peak of memory beyond what was held before, and seconds."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, started = _memory("VmRSS"), time.monotonic()
    action()
    return {"bytes": _memory("VmHWM") - before, "seconds": round(time.monotonic() - started, 1)}


def costs(folder: Path, *, layers: int, hidden: int, shard_bytes: int) -> dict[str, Any]:
    """Costs of both directions, and the size of the largest file of each."""
    network = network_of(layers, hidden)
    write_model(folder / "model", network, shard_bytes)
    warm = folder / "warm"  # what is imported, and what allocators keep, is not the model's
    write_model(warm, network_of(1, 64), shard_bytes)
    _both_ways(warm, folder / "warm_out", shard_bytes)
    to_core, back = _both_ways(folder / "model", folder / "out", shard_bytes)
    largest = max(file.stat().st_size for file in (folder / "model").glob("*.safetensors"))
    written = max(file.stat().st_size for file in (folder / "out" / "back").glob("*.safetensors"))
    count = sum(
        torch.Size(s).numel() * (layers if row.is_stacked else 1) for row in rows_of(network) for s in row.shapes
    )
    return {"parameters": count, "to_core": to_core | {"file": largest}, "back": back | {"file": written}}


def _both_ways(model: Path, out: Path, shard_bytes: int) -> tuple[dict[str, Any], dict[str, Any]]:
    root = str(out / "checkpoint")
    there = cost_of(lambda: convert.to_core(ModelFolder(str(model)), root, padded_vocab_size=32000))

    def back() -> None:
        path = run_network.checkpoint_folder(root, flag="--input")
        described = run_network.description_of(path)
        convert.to_hugging_face(CoreCheckpoint(path), str(out / "back"), described, max_shard_bytes=shard_bytes)

    return there, cost_of(back)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    for name in ("layers", "hidden", "shard-bytes"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    found = costs(options.folder, layers=options.layers, hidden=options.hidden, shard_bytes=options.shard_bytes)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
