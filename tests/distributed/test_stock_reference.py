"""With one block the run is stock Megatron-LM: its tokens, its curves, its checkpoint."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import preprocess_data
import pytest
from support import small_text, worlds
from support.dist import World

pytestmark = pytest.mark.timeout(900)
FIRST_STEPS = 4
"""Iterations of the runs that do not take the whole curve."""


@pytest.fixture(scope="module")
def data(bpe_files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Flags of the reference's tokenizer, and of its data, tokenized by our tool."""
    prefix = tmp_path_factory.mktemp("text") / "text"
    flags = worlds.argv_of(
        input=small_text.write_text(prefix.with_suffix(".txt")),
        output_prefix=prefix,
        tokenizer_type="GPT2BPETokenizer",
        append_eod=True,
        workers=1,
        **bpe_files,
    )
    assert preprocess_data.main(flags) == 0
    return {"data_path": f"{prefix}_text_document"} | bpe_files


def assert_is_stock(metrics: list[dict[str, Any]], evaluations: list[tuple[int, float]], stock: dict[str, Any]) -> None:
    """Compare losses within 1e-4 at every iteration; norms and learning rates to the digits that stock prints."""
    iterations = stock["iterations"][: len(metrics)]
    assert [line["iteration"] for line in metrics] == [line["iteration"] for line in iterations]
    for ours, theirs in zip(metrics, iterations, strict=True):
        assert ours["loss"] == pytest.approx(theirs["lm_loss"], rel=1e-4), ours["iteration"]
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], abs=6e-4), ours["iteration"]
        assert ours["learning_rate"] == pytest.approx(theirs["learning_rate"], rel=1e-6), ours["iteration"]
    # at the last iteration two evaluations take place: stock keeps the final one, on the next samples
    expected = {int(iteration): loss for iteration, loss in stock["validation_loss"].items()}
    assert dict(evaluations) == pytest.approx({at: expected[at] for at in expected if at <= len(metrics)}, rel=1e-4)


def test_stock_is_the_same_with_both_versions_of_megatron_core(reference: dict[str, Any], repo_root: Path) -> None:
    """Stock's curves are the same with 0.16.1 and with 0.19.2: the file has what the training program of 0.19.2's wheel
    printed."""
    curves = json.loads((repo_root / "tests" / "data" / "stock_core_0_19.json").read_text(encoding="utf-8"))
    assert curves.keys() == reference["runs"].keys()
    for run, stock in reference["runs"].items():
        assert curves[run]["loss"] == [line["lm_loss"] for line in stock["iterations"]]
        assert curves[run]["grad_norm"] == [line["grad_norm"] for line in stock["iterations"]]
        assert curves[run]["validation_loss"] == stock["validation_loss"]


@pytest.mark.parametrize(
    ("run", "num_steps"),
    [
        ("gpt_pp2", 10),
        ("gpt_dp2", FIRST_STEPS),
        ("gpt_tp2", FIRST_STEPS),
        ("llama_pp2", FIRST_STEPS),
        *(pytest.param(name, 20, marks=pytest.mark.long) for name in ("gpt_pp2", "gpt_full_recompute", "llama_pp1")),
    ],
)
def test_curve(
    world1: World, world2: World, data: dict[str, Any], reference: dict[str, Any], run: str, num_steps: int
) -> None:
    """The run has stock's losses within 1e-4, its gradient norms and learning rates, and its evaluations."""
    stock = reference["runs"][run]
    world = (world1, world2)[stock["world_size"] - 1]
    flags = reference["flags"] | stock["extra_flags"] | data | {"exit_interval": num_steps % 20 or None}
    flags |= {"num_workers": 0, "bcd_num_blocks": 1, "log_interval": 1}
    for outcome in world.run(worlds.train_run, worlds.config_of(world_size=world.size, **flags), timeout=840):
        assert len(outcome["metrics"]) == num_steps
        evaluations = [(iteration, loss) for iteration, _, loss in outcome["evaluations"]]
        assert_is_stock(outcome["metrics"], evaluations, stock)


@pytest.mark.parametrize("stages", [1, 2])
def test_stock_checkpoint(
    world1: World,
    world2: World,
    data: dict[str, Any],
    reference: dict[str, Any],
    repo_root: Path,
    tmp_path: Path,
    stages: int,
) -> None:
    """Stock's checkpoint has stock's validation loss here, on one stage and on two."""
    stock = reference["checkpoint"]
    with tarfile.open(repo_root / "tests" / "data" / f"{stock['folder']}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    flags = stock["flags"] | {"finetune": True, "skip_train": True, "num_workers": 0}
    flags["load"] = tmp_path / stock["folder"]
    cut = {"pipeline_model_parallel_size": stages, "bcd_num_blocks": 1}
    config = worlds.config_of(world_size=stages, **flags | cut | data)
    for outcome in (world1, world2)[stages - 1].run(worlds.train_run, config):
        assert [(iteration, split) for iteration, split, _ in outcome["evaluations"]] == [(10, "validation")]
        expected = stock["evaluated_by_stock"]["validation_loss"]
        assert outcome["evaluations"][0][2] == pytest.approx(expected, rel=1e-4)
        assert outcome["losses"] == []
