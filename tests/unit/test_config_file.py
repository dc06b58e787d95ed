"""--config and --print-config: flags in a YAML file."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from support.command_line import BASE, PROG

from megatron.bcd.arguments import FAMILY_DEFAULTS, parse_run_config, read_command_line

WORDS = [word for pair in BASE.items() for word in pair]
FILE = {
    **{flag[2:]: value for flag, value in BASE.items() if flag not in ("--lr", "--num-layers")},
    "num_layers": 6,
    "lr": 0.001,
}


def written(folder: Path, content: object) -> str:
    path = folder / "run.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return str(path)


def printed(capsys: pytest.CaptureFixture[str], *words: str, form: str = "gpt", ranks: int = 1) -> str:
    with pytest.raises(SystemExit) as left:
        read_command_line([*words, "--print-config"], prog=PROG, defaults=FAMILY_DEFAULTS[form], world_size=ranks)
    assert left.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "form, ranks, words",
    [
        ("gpt", 1, ()),
        ("gpt", 8, ("--bcd-preset", "pretrain", "--log-params-norm", "--pipeline-model-parallel-size", "2")),
        ("gpt", 1, ("--no-masked-softmax-fusion", "--bcd-block-lr-multipliers", "1", "0.1", "1e-05")),
        ("gpt", 1, ("--no-use-distributed-optimizer", "--rampup-batch-size", "2", "2", "8", "--split", "9,1,0")),
        ("gpt", 1, ("--use-checkpoint-opt_param-scheduler", "--load", "x: #y", "--save", "2026-01-01")),
        ("llama", 2, ("--no-swiglu", "--group-query-attention", "--num-query-groups", "2", "--data-path", "1", "a")),
    ],
)
def test_round_trip(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, form: str, ranks: int, words: tuple[str, ...]
) -> None:
    """A printed configuration starts the same run from its file, and is printed alike again."""
    text = printed(capsys, *WORDS, *words, form=form, ranks=ranks)
    file = written(tmp_path, text)
    common = {"prog": PROG, "defaults": FAMILY_DEFAULTS[form], "world_size": ranks}
    assert read_command_line(["--config", file], **common) == read_command_line([*WORDS, *words], **common)
    assert printed(capsys, "--config", file, form=form, ranks=ranks) == text


def test_the_command_line_wins(tmp_path: Path) -> None:
    """A flag of the command line overrides the file."""
    file = written(tmp_path, FILE | {"swiglu": True, "eval-iters": 7, "bcd-preset": "pretrain"})
    config = parse_run_config(["--lr", "0.5", "--config", file, "--bcd-steps-per-block", "9"], prog=PROG, world_size=1)
    assert (config.optimizer.lr, config.training.eval_iters, config.model.swiglu) == (0.5, 7, True)
    assert (config.bcd.bcd_steps_per_block, config.bcd.bcd_inactive_update) == (9, "orthogonal")


def test_switches(tmp_path: Path) -> None:
    """A false value in the file turns a switch off, and the command line undoes every switch of the file."""
    file = written(tmp_path, FILE | {"swiglu": False, "no-masked-softmax-fusion": False, "async-save": False})
    config = parse_run_config(["--config", file], prog=PROG, defaults=FAMILY_DEFAULTS["llama"], world_size=1)
    assert config.model.swiglu is False and config.transformer["masked_softmax_fusion"] is True
    switched = dict.fromkeys(("bf16", "swiglu", "group_query_attention", "log-params-norm"), True)
    file = written(tmp_path, FILE | switched | {"rope-fusion": False})
    off = ("--no-bf16", "--no-swiglu", "--no-group-query-attention", "--disable-log-params-norm", "--rope-fusion")
    result = parse_run_config([*off, f"--config={file}"], prog=PROG, world_size=1)
    assert parse_run_config(["--config", file], prog=PROG, world_size=1).precision == "bf16"
    assert (result.precision, result.model.swiglu, result.report.log_params_norm) == ("fp32", False, False)
    assert result.transformer.get("num_query_groups") is None


@pytest.mark.parametrize(
    "content, named",
    [
        (FILE | {"bcd-blocks": 3}, "bcd-blocks"),
        (FILE | {"lr": "fast"}, "lr"),
        (FILE | {"train-iters": True}, "train-iters"),
        (FILE | {"swiglu": "yes"}, "swiglu"),
        (FILE | {"config": "other.yaml"}, "config"),
        (FILE | {"data-path": ["--save", "x"]}, "data-path"),
        (FILE | {"rope-fusion": True, "no-rope-fusion": False}, "rope-fusion"),
        ("num-layers: 6\nnum-layers: 7\n", "num-layers"),
        ("seq-length: 2026-13-45\n", ""),
        ("save: " + "[" * 3000, ""),
    ],
)
def test_refused(tmp_path: Path, content: object, named: str) -> None:
    """A bad file is refused in one line that names the file and, where there is one, the key."""
    with pytest.raises(ValueError, match=rf"run\.yaml.*{named}") as error:
        parse_run_config(["--config", written(tmp_path, content)], prog=PROG, world_size=1)
    assert "\n" not in str(error.value)


def test_absent_file() -> None:
    """A missing file or a folder is refused by its path."""
    for path in ("/absent/run.yaml", "/tmp"):
        with pytest.raises(ValueError, match=path):
            parse_run_config(["--config", path], prog=PROG, world_size=1)
