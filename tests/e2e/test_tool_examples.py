"""Examples in the help of tools that train or measure, in short forms; unit/test_tool_language.py runs the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import huggingface_models
from support.cifar_folders import write_cifar
from support.tool_examples import commands

NETWORK = "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1"
SHORT = f"{NETWORK} --rounds 1 --steps 1"
EXAMPLES: dict[str, tuple[str, ...]] = {
    "benchmark": (SHORT, SHORT, "--seq-length 16 --rounds 1 --steps 1", SHORT, SHORT, SHORT),
    "compare_runs": ("--before HEAD --only grid", "--before HEAD --after REPOSITORY --only grid"),
    "convert_checkpoint": ("", ""),
    "train_tokenizer": ("--vocab-size 300",),
}
"""Flags that make each example of a tool's help short; they follow those of the example, and win."""
WITHOUT_GPU = {"offload": "--methods offload"}
"""What an example with these words is answered where there is no GPU."""


def prepare(folder: Path, repo_root: Path) -> None:
    """The files that examples read."""
    for name in ("tools", "studies", "examples", "docs", "megatron", "pretrain_gpt_bcd.py", "pretrain_llama_bcd.py"):
        (folder / name).symlink_to(repo_root / name)
    (folder / "out").mkdir()
    (folder / "corpus.txt").write_text("".join(f"{n} squared is {n * n}, and half of it {n / 2}\n" for n in range(999)))
    huggingface_models.write_model("llama_biases", folder / "DIR")
    write_cifar(folder / "cifar-10-batches-py", "cifar10", num_train=100, num_test=40)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tool", EXAMPLES)
def test_examples_in_short(repo_root: Path, tmp_path: Path, tool: str) -> None:
    """An example that ends in an error, or one that has no short form here."""
    prepare(tmp_path, repo_root)
    for words, short in zip(commands(tool), EXAMPLES[tool], strict=True):
        place = words.index(f"tools/{tool}.py")
        number = words[place - 1] if "torchrun" in words else None
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", number] if number else []
        command = [sys.executable, *launcher, *words[place:], *short.replace("REPOSITORY", str(repo_root)).split()]
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
        )
        refusals = (
            [] if torch.cuda.is_available() else [WITHOUT_GPU[flag] for flag in WITHOUT_GPU if flag in " ".join(words)]
        )
        assert done.returncode == (2 if refusals else 0), (command, done.stdout[-2000:], done.stderr[-3000:])
        assert all(text in done.stderr for text in refusals) if refusals else done.stdout.strip()
