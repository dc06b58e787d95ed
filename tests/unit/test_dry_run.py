"""--dry-run: its output, what it does not need, all refusals, and recipes of stock Megatron-LM that pass."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support import decoders
from support.bad_input_cases import write_dataset
from support.command_line import BASE, PROG

from megatron.bcd.arguments import parse_run_config, read_command_line

WORDS = [word for pair in BASE.items() for word in pair]
ACCEPTED = {"published": (14, 16), "stock_functional": (53, 62)}
"""Number of stock recipes, and how many of them pass with three blocks."""


def dry_run(*words: str, ranks: int) -> int:
    """Return the exit code of a dry run."""
    with pytest.raises(SystemExit) as left:
        read_command_line([*words, "--dry-run", "--dry-run-world-size", str(ranks)], prog=PROG)
    assert isinstance(left.value.code, int)
    return left.value.code


def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """The plan has the parameters of the run's layout. distributed/test_planned_bytes.py tests planned bytes."""
    assert dry_run(*WORDS, "--tensor-model-parallel-size", "2", "--log-energy", ranks=4) == 0
    text = capsys.readouterr().out
    assert "--log-energy" in text.splitlines()[-2]
    hidden, padded, positions = 64, 512, 32  # 257 bytes, padded to a multiple of 128 x 2
    layer = (12 * hidden**2 + 7 * hidden) // 2 + 6 * hidden  # whole: two biases, and weight and bias of two norms
    assert f"{6 * layer + (padded // 2 + positions) * hidden + 2 * hidden:,} parameters" in text


def test_a_published_model_has_its_own_vocabulary(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A dry run of --load-hf counts the rows of the model's embedding, whatever the tokenizer has."""
    source = str(decoders.write_model("llama", tmp_path))
    of_the_network = ("--num-layers", "--hidden-size", "--num-attention-heads")
    words = [word for flag, value in BASE.items() if flag not in of_the_network for word in (flag, value)]
    assert dry_run(*words, "--load-hf", source, ranks=1) == 0
    assert f"{decoders.model_of('llama').num_parameters():,} parameters" in capsys.readouterr().out


def test_needs_no_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A dry run reads no tokenizer and no data, and creates no folder."""
    absent = str(tmp_path / "absent")
    words = [*WORDS, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", absent, "--data-path", absent]
    assert dry_run(*words, "--load", absent, "--save", absent, "--tensorboard-dir", "/proc/absent", ranks=1) == 0
    assert f"data: not checked, because {absent}.idx does not exist here" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


HAS_TE = importlib.util.find_spec("transformer_engine") is not None


@pytest.mark.skipif(HAS_TE, reason="Transformer Engine imports them")
def test_imports_what_it_needs(repo_root: Path) -> None:
    """A dry run imports no compiler, TensorBoard, transformers or trainer."""
    program = "import runpy, sys; sys.argv = sys.argv[1:]\n"
    program += "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    program += (
        "finally: print({'torch._inductor', 'tensorboard', 'transformers', 'megatron.bcd.trainer'} & {*sys.modules})"
    )
    command = [sys.executable, "-c", program, PROG, *WORDS, "--dry-run"]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout.splitlines()[-1]) == (0, "", "set()")


@pytest.mark.skipif(HAS_TE, reason="Transformer Engine imports them")
def test_training_imports_what_it_needs(repo_root: Path) -> None:
    """A run on a CPU imports neither torch's compiler nor TensorBoard."""
    program = "import sys; from megatron.bcd.runtime.compat.imports import skip_unused_imports\n"
    program += "skip_unused_imports([]); import megatron.bcd.training.pretrain\n"
    program += "print({'torch._inductor.compile_fx', 'tensorboard'} & {*sys.modules})"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=repo_root, env=environment, capture_output=True, text=True)
    assert (done.stderr, done.stdout) == ("", "set()\n")


def test_balanced_cut_needs_no_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A dry run of --pipeline-cut auto reads no tokenizer, and names the flag where it cannot balance the cut."""
    words = [*WORDS, "--pipeline-model-parallel-size", "2", "--num-layers", "12", "--pipeline-cut", "auto"]
    bpe = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "absent.json", "--merge-file", "absent.txt"]
    assert dry_run(*words, *bpe, ranks=2) == 0
    known = capsys.readouterr().out
    assert "stage 1: layers 9-11" in known, "the head of 50,257 tokens is most of the work"
    absent = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path / "absent")]
    assert dry_run(*words, *absent, ranks=2) == 0
    unknown = capsys.readouterr().out
    assert "--pipeline-cut auto" in unknown and "stage 1: layers 6-11" in unknown


def test_world_size(capsys: pytest.CaptureFixture[str]) -> None:
    """A world size without ranks is refused by its flag."""
    assert dry_run(*WORDS, ranks=0) == 2
    assert "--dry-run-world-size" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ACCEPTED)
def test_stock_recipes(kind: str, repo_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The expected number of stock recipes pass with three blocks, and each refusal names a flag."""
    recipes = json.loads((repo_root / "tests" / "data" / "recipes" / f"{kind}.json").read_text())
    refused = {}
    for recipe in recipes:
        code = dry_run(*recipe["flags"], "--bcd-num-blocks", "3", ranks=recipe["world_size"])
        error = capsys.readouterr().err
        assert (code == 0) == (not error) and all("--" in line for line in error.splitlines()), recipe["name"]
        if code:
            refused[recipe["name"]] = error
    print("\n".join(f"{name}: {error}" for name, error in refused.items()))  # pytest -rP shows it
    assert (len(recipes) - len(refused), len(recipes)) == ACCEPTED[kind], [*refused]


def test_the_command_of_the_readme(repo_root: Path) -> None:
    """The README's first command parses, and stores its checkpoints where it loads them."""
    readme = (repo_root / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    (command,) = re.findall(
        r"^python tools/launch.py --nproc-per-node 2 pretrain_gpt_bcd.py (.*)$", readme, re.MULTILINE
    )
    config = parse_run_config(shlex.split(command), prog=PROG, world_size=2)
    assert config.checkpoint.save == config.checkpoint.load is not None


def test_records_are_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A dry run of --sft counts the records, and ends with 2 and the report of bad ones; it writes nothing."""
    path = tmp_path / "records.jsonl"
    words = [*WORDS, "--sft", "--data-path", str(path)]
    assert dry_run(*words, ranks=1) == 0
    assert f"records: not counted, because {path} does not exist here" in capsys.readouterr().out
    good = [{"prompt": "p" * 4, "completion": "c" * 4}] * 5 + [{"prompt": "p", "completion": "c" * 50}]
    path.write_text("\n".join(json.dumps(record) for record in [*good, {"prompt": "p", "completion": ""}]))
    assert dry_run(*words, ranks=1) == 2
    counts = "records: 6 examples, 97 tokens in 3 sequences of 32; longest 52, 1 longer than a sequence, 1 bad\n"
    said = capsys.readouterr()
    assert counts in said.out and "line 7 has an empty answer" in said.err and said.err.count("\n") == 1
    assert dry_run(*words, "--sft-skip-bad-records", ranks=1) == 0
    assert counts in capsys.readouterr().out
    assert [*tmp_path.iterdir()] == [path]


def test_datasets_are_checked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A dry run counts the sequences of a dataset that is here, and ends with 2 where the run would refuse it."""
    path = tmp_path / "text_document"
    words = [*WORDS, "--split", "80,20,0", "--data-path", str(path)]
    write_dataset(path, [[5] * 33] * 10)
    assert dry_run(*words, ranks=1) == 0
    assert "data: an epoch has 8 sequences of 32 tokens\n" in capsys.readouterr().out
    path.with_suffix(".bin").write_bytes(b"half")
    assert dry_run(*words, ranks=1) == 2
    said = capsys.readouterr().err
    assert f"--data-path {path}: {path}.bin has 4 bytes" in said and said.count("\n") == 1
