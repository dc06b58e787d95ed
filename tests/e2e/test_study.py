"""Studies of real trainings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from results import read_results

STUDY = """
program: pretrain_gpt_bcd.py
flags: >-
  --num-layers 3 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32
  --micro-batch-size 2 --global-batch-size 4 --train-iters {steps} --lr-decay-style cosine --min-lr {lr/10}
  --lr-warmup-iters 2 --weight-decay 0 --hidden-dropout 0 --attention-dropout 0 --tokenizer-type ByteLevelTokenizer
  --split 80,10,10 --num-workers 0 --eval-interval {steps/2} --eval-iters 2 --log-interval 1
  --bcd-num-blocks 3 --bcd-steps-per-block 2
checkpoint_flags: --save {folder} --load {folder} --save-interval 4
steps: 12
learning_rates: [1e-3]
seeds: [1]
jobs: 1
data:
  numbers: {text: numbers.txt}
methods:
  plain: {}
  badam: {program: studies/peer.py --peer badam, arithmetic_as: plain}
"""


def run(repo_root: Path, *words: str) -> None:
    subprocess.run(
        [sys.executable, "studies/study.py", *words], cwd=repo_root, check=True, capture_output=True, text=True
    )


@pytest.mark.long  # test_fine_tuning_study.py trains BAdam too
def test_plain_blocks_are_badam(repo_root: Path, tmp_path: Path) -> None:
    """A peer with another schedule, other samples or evaluations, whose row says nothing about BAdam; or bytes of
    state and arithmetic that are not those of the flags."""
    (tmp_path / "study.yaml").write_text(STUDY)
    (tmp_path / "numbers.txt").write_text("\n".join(f"{n} is {n % 7} modulo 7" for n in range(2000)))
    run(repo_root, str(tmp_path / "study.yaml"), "--output", str(tmp_path), "--data", str(tmp_path))
    plain, badam = read_results(tmp_path / "study.csv")
    assert badam.test == pytest.approx(plain.test, rel=1e-5)
    assert badam.validation == pytest.approx(plain.validation, rel=1e-5)
    assert badam.curve == tuple((step, pytest.approx(value, rel=1e-5)) for step, value in plain.curve)
    assert plain.state_bytes_per_parameter is not None and badam.state_bytes_per_parameter is not None
    assert 8 < plain.state_bytes_per_parameter < badam.state_bytes_per_parameter < 16


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_ten_minute_study_gives_its_committed_table(repo_root: Path, tmp_path: Path, shared_data: Path) -> None:
    """A table in the documents that the code of today does not give any more. (The small form: the test above.)"""
    path = repo_root / "studies" / "gpt_10_minutes.yaml"
    results = tmp_path / "results.csv"
    run(repo_root, str(path), "--output", str(tmp_path), "--data", str(shared_data), "--results", str(results))
    found, committed = ({one.key: one for one in read_results(file)} for file in (results, path.with_suffix(".csv")))
    assert found.keys() == {key for key, one in committed.items() if not one.rounds}
    for key, one in found.items():
        assert one.test == pytest.approx(committed[key].test, abs=0.05), key
        assert one.state_bytes_per_parameter == pytest.approx(committed[key].state_bytes_per_parameter, rel=0.01)
