"""examples/finetune.sh: what it prints and refuses, and that it runs to the end."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "finetune.sh"
VARIABLES = ("NUM_GPUS", "NNODES", "GPUS_PER_NODE", "HEAD_NODE", "MODEL_DIR", "DATA", "EPOCHS",
             "LR", "PROMPT", "SAVE", "MICRO_BATCH", "GLOBAL_BATCH",
             "PRECISION", "RECOMPUTE", "FORCE", "SCALE", "DRY_RUN", "OUT")  # fmt: skip


def start(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The recipe as a user starts it, from another folder, with no variable but these."""
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return subprocess.run(
        ["bash", str(SCRIPT), *words],
        cwd=cwd,
        env=clean | {"BCD_PYTHON": sys.executable} | variables,
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.parametrize(("model", "num_gpus"), [("LLaMA-7B", "1"), ("LLaMA-7B", "4"), ("L-1.5B", "1")])
def test_bill_and_command(tmp_path: Path, model: str, num_gpus: str) -> None:
    """A recipe that does not fit, or whose command is not the plan's."""
    done = start(model, "rtx4090", cwd=tmp_path, DRY_RUN="1", NUM_GPUS=num_gpus)
    assert (done.returncode, done.stderr) == (0, "")
    words = done.stdout.split()
    for flag, value in (("--nproc-per-node", num_gpus), ("--bcd-preset", "finetune"), ("--num-epochs", "3")):
        assert words[words.index(flag) + 1] == value
    assert {"--sft", "--bf16", "--load-hf", "--save-hf"} <= set(words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("numbers", [{"NUM_GPUS": "12"}, {"NNODES": "2", "GPUS_PER_NODE": "6"}])
def test_several_nodes(tmp_path: Path, numbers: dict[str, str]) -> None:
    """A plan for the GPUs of two nodes above a command that starts those of one."""
    done = start("LLaMA-7B", "rtx4090", cwd=tmp_path, DRY_RUN="1", **numbers)
    assert (done.returncode, done.stderr) == (0, "")
    words = done.stdout.split()
    for flag, value in (("--nproc-per-node", "6"), ("--nnodes", "2"), ("--rdzv-endpoint", "HEAD_NODE:29500")):
        assert words[words.index(flag) + 1] == value
    assert "--standalone" not in words


def test_flags_of_the_user(tmp_path: Path) -> None:
    """A default of the recipe's beside a rival with which the training script refuses it."""
    flags = ("--train-iters", "4", "--lr-warmup-iters=2", "--valid-data-path", "v.jsonl")
    done = start("LLaMA-7B", "rtx4090", *flags, cwd=tmp_path, DRY_RUN="1", DATA="d.jsonl")
    assert (done.returncode, done.stderr) == (0, "")
    words = done.stdout.split()
    assert not {"--num-epochs", "--lr-warmup-fraction", "--data-path"} & set(words)
    assert words[words.index("--train-data-path") + 1] == "d.jsonl"


def test_a_model_that_needs_a_setting(tmp_path: Path) -> None:
    """A config.json that is not planned from, a remedy that the recipe refuses in turn, or one that gets lost."""
    (tmp_path / "my-8b").mkdir()
    sizes = {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
    sizes |= {"head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936, "max_position_embeddings": 40960}
    names = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (tmp_path / "my-8b" / "config.json").write_text(json.dumps(names | sizes))
    done = start("my-8b", "rtx4090", cwd=tmp_path, DRY_RUN="1")
    assert done.returncode == 0 and "does NOT fit" in done.stdout
    flags = ("--bcd-frozen", "embedding,head", "--adam-moments-dtype", "int8", "--bcd-always-active", "none")
    assert " ".join(flags[:2]) in done.stdout.split("note: ")[1]
    done = start("my-8b", "rtx4090", *flags, cwd=tmp_path, DRY_RUN="1")
    words = shlex.split(done.stdout.split("\ntorchrun")[1])
    assert done.returncode == 0 and "does NOT fit" not in done.stdout
    assert words[words.index("--load-hf") + 1] == "my-8b"
    for flag, value in zip(flags[::2], flags[1::2], strict=True):
        assert words.count(flag) == 1 and words[words.index(flag) + 1] == value


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        (("LLaMA-7B",), {}, "CLUSTER"),
        (("LLaMA-8B", "rtx4090"), {}, "MODEL LLaMA-8B"),
        (("G-1.6B", "rtx4090"), {}, "MODEL G-1.6B"),
        (("LLaMA-7B", "rtx4090"), {}, "MODEL_DIR"),
        (("LLaMA-7B", "rtx4090"), {"MODEL_DIR": "m"}, "DATA"),
        (("LLaMA-7B", "rtx4090"), {"MODEL_DIR": "m", "DATA": "no.jsonl"}, "DATA=no.jsonl"),
        (("LLaMA-7B", "rtx4090", "--bcd-frozen", "everything"), {}, "--bcd-frozen everything"),
        (("no-model/config.json", "rtx4090"), {}, "config.json"),
        (("LLaMA-7B", "rtx4090", "--save=s"), {}, "--save"),
        (("LLaMA-7B", "rtx4090"), {"MODEL_DIR": "m", "DATA": str(SCRIPT), "NUM_GPUS": "12"}, "HEAD_NODE"),
        (("L-23B", "rtx4090"), {"MODEL_DIR": "m", "DATA": str(SCRIPT)}, "1 x RTX 4090"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, words: tuple[str, ...], variables: dict[str, str], message: str) -> None:
    """A traceback, or a run that starts all the same."""
    done = start(*words, cwd=tmp_path, **variables)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_tiny(tmp_path: Path) -> None:
    """A recipe that ends before the model was trained, exported, asked, or loaded by transformers."""
    done = start("LLaMA-7B", "rtx4090", cwd=tmp_path, SCALE="tiny", OUT="out", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    saved = tmp_path / "out" / "LLaMA-7B-finetune-rtx4090"
    steps = [json.loads(line) for line in Path(f"{saved}.jsonl").read_text().splitlines()]
    assert len({step["block"] for step in steps if "learning_rate" in step}) > 1
    assert (Path(f"{saved}-hf") / "config.json").exists()
    assert "LlamaForCausalLM" in done.stdout


def test_a_training_that_was_stopped(tmp_path: Path) -> None:
    """A run that has stopped and saved as it was asked to, and then fails because there is no model to ask."""
    flags = ("--train-iters", "4", "--lr-warmup-iters", "1", "--exit-interval", "2", "--eval-iters", "0")
    done = start("LLaMA-7B", "rtx4090", *flags, cwd=tmp_path, SCALE="tiny", OUT="out", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    saved = tmp_path / "out" / "LLaMA-7B-finetune-rtx4090"
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "2"
