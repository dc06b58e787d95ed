"""The scripts of examples/ and tools/recipe.py: what they print, refuse, start, and that they run to the end."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import recipe
from support.fine_tuning import CHATML, tokenizer_folder, write_records

from megatron.bcd.arguments import FAMILY_DEFAULTS, parse_run_config
from megatron.bcd.blocks.partition import partition_from_config
from megatron.bcd.config import RunConfig
from megatron.bcd.planner.memory import fits
from megatron.bcd.planner.recipe import METHODS, Recipe
from megatron.bcd.planner.run_state import with_loss
from megatron.bcd.planner.tables import Cluster, read_table

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CLUSTERS = tuple(read_table(EXAMPLES / "clusters.csv", Cluster))
OFFLOAD = ["--optimizer-cpu-offload", "--optimizer-offload-fraction", "1.0"]
VARIABLES = ("NUM_GPUS", "NNODES", "GPUS_PER_NODE", "DATA_PATH", "TOKENIZER_ARGS", "MOCK_DATA", "SAVE", "TRAIN_ITERS",
             "MICRO_BATCH", "GLOBAL_BATCH", "PRECISION", "RECOMPUTE", "FORCE", "SCALE", "DRY_RUN", "OUT", "HEAD_NODE",
             "MASTER_PORT", "MODEL_DIR", "DATA", "EPOCHS", "LR", "PROMPT",
             "REPLICA_GROUPS", "REPLICA_ID", "LIGHTHOUSE")  # fmt: skip
SMALL = ("G-5.4B", "bcd", "rtx4090")
MUCH = ("--host-memory-gb", "1000")  # so that no plan depends on this machine's memory
SMALL_FITS = (*SMALL, *MUCH)
TEXT = {"DATA_PATH": "text_document", "TOKENIZER_ARGS": "--tokenizer-type ByteLevelTokenizer"}


def start(*words: str, cwd: Path, script: str = "pretrain.sh", **variables: str) -> subprocess.CompletedProcess[str]:
    """A recipe as a user starts it, from another folder, with no variable but these."""
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return subprocess.run(
        ["bash", str(EXAMPLES / script), *words],
        cwd=cwd,
        env=clean | {"BCD_PYTHON": sys.executable} | variables,
        capture_output=True,
        text=True,
        timeout=250,
    )


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH with a torch that has STUB_GPUS GPUs, and a launcher that says its words."""
    distributed = tmp_path / "stub" / "torch" / "distributed"
    distributed.mkdir(parents=True)
    (distributed.parent / "__init__.py").write_text(
        "import os\n"
        "class cuda:\n"
        "    device_count = staticmethod(lambda: int(os.environ['STUB_GPUS']))\n"
        "    is_available = staticmethod(lambda: int(os.environ['STUB_GPUS']) > 0)\n"
    )
    (distributed / "__init__.py").touch()
    (distributed / "run.py").write_text(
        "import json, signal\n"
        "class parse_args(list): module = True\n"
        "def run(words):\n"
        "    ignored = signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN\n"
        "    print(json.dumps({'words': words, 'ignores USR1': ignored}))\n"
    )
    errors = distributed / "elastic" / "multiprocessing" / "errors.py"
    errors.parent.mkdir(parents=True)
    errors.write_text("ChildFailedError = RuntimeError")
    (errors.parent / "__init__.py").write_text("SignalException = RuntimeError")
    return tmp_path / "stub"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder to start in, which holds what looks like tokenized text."""
    folder = tmp_path / "here"
    folder.mkdir()
    for suffix in ("bin", "idx"):
        (folder / f"text_document.{suffix}").touch()
    return folder


def parsed(words: list[str], *, form: str, world_size: int) -> RunConfig:
    """As the training script takes them."""
    return parse_run_config(words, prog="test", defaults=FAMILY_DEFAULTS[form], world_size=world_size)


def planned_for(words: Sequence[str], environment: Mapping[str, str]) -> Recipe:
    """The recipe that these words and variables come to."""
    return recipe.request_of(words, environment)[0]


def assert_agrees(config: RunConfig, planned: Recipe) -> None:
    """Check that the parser makes the planned configuration of the command line."""
    plan = planned.config
    order = config.bcd.bcd_order  # passed on to the training script; no estimate depends on it
    inputs = "host" if plan.bcd.bcd_saved_inputs == "host" else "auto"  # the run finds that they fit on the device
    expected = replace(plan.bcd, bcd_num_blocks=planned.config.bcd.num_blocks, bcd_order=order, bcd_saved_inputs=inputs)
    if not any(planned.memory.kept.values()):
        expected = replace(expected, bcd_saved_activations="recompute")
    assert config.bcd == expected
    config = with_loss(config, padded_vocab_size=planned.padded_vocabulary, has_plain_head=lambda: True)
    assert config.optimizer.optimizer == plan.optimizer.optimizer
    assert config.optimizer.optimizer_cpu_offload == plan.optimizer.optimizer_cpu_offload
    assert {name: config.transformer[name] for name in plan.transformer} == plan.transformer
    for section, fields in SAME_FIELDS.items():
        for field in fields.split():
            assert getattr(getattr(config, section), field) == getattr(getattr(plan, section), field), field
    assert config.precision == planned.precision
    assert config.training.adam_moments_dtype == plan.training.adam_moments_dtype
    assert planned.precision == "fp32" or config.ddp.grad_reduce_in_fp32
    assert (config.pipeline_size, config.num_chunks, config.has_linear_loss) == (
        plan.pipeline_size, plan.num_chunks, plan.has_linear_loss)  # fmt: skip
    assert partition_from_config(config) == planned.partition


SAME_FIELDS = {
    "model": "seq_length swiglu position_embedding_type max_position_embeddings untie_embeddings_and_output_weights "
    "make_vocab_size_divisible_by",
    "training": "micro_batch_size global_batch_size recompute",
}
"""The fields that the planner reads, by section."""


def arrays_of(text: str) -> dict[str, list[str]]:
    return {name: shlex.split(words) for name, words in re.findall(r"^(\w+)=\((.*)\)$", text, re.MULTILINE)}


def command_of(stdout: str) -> list[str]:
    """The words of the command that a dry run prints."""
    return shlex.split(stdout[stdout.index("\ntorchrun") :].split("\n\n")[0].replace("\\\n", ""))


def value_of(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


@pytest.mark.parametrize("model", ("G-5.4B", pytest.param("L-6.0B", marks=pytest.mark.long), "LLaMA-7B"))
def test_every_recipe_is_a_command_that_fits(model: str) -> None:
    """Every method and cluster has a plan that fits, and a command with the plan's configuration."""
    for method, cluster in itertools.product(METHODS, CLUSTERS):
        planned, values, extra = recipe.request_of([model, method, cluster], {})
        arrays = arrays_of(recipe.as_bash(planned, values, extra))
        assert fits(planned)
        assert (arrays["LAYOUT_ARGS"][-3:] == OFFLOAD) == (planned.method == "offload")
        words = [word for name in ("MODEL", "LAYOUT") for word in arrays[f"{name}_ARGS"]]
        words += ["--train-iters", "1", "--lr", "1", "--mock-data", "--vocab-size", "9"]
        assert_agrees(parsed(words, form=planned.model.form, world_size=planned.num_gpus), planned)


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (
            ("G-1.6B", "full", "a100"),
            {"PRECISION": "bf16", "NUM_GPUS": "8", "MICRO_BATCH": "4", "MOCK_DATA": "1", "TRAIN_ITERS": "7"},
        ),
        (
            ("L-11B", "full", "a100"),
            {"NNODES": "2", "GPUS_PER_NODE": "4", "HEAD_NODE": "first", "DATA_PATH": "0.3 a 0.7 b"},
        ),
        (("G-1.6B", "paper", "rtx4090"), {"REPLICA_GROUPS": "4", "REPLICA_ID": "b", "LIGHTHOUSE": "here:1"}),
    ],
)
def test_dry_run(words: tuple[str, ...], variables: dict[str, str], stub: Path, tmp_path: Path) -> None:
    """A dry run needs no torch, writes no file, and prints a command with the numbers of the plan above it."""
    (stub / "torch" / "__init__.py").write_text("raise ImportError('a dry run needs no torch')\n")
    done = start(*words, *MUCH, cwd=tmp_path, DRY_RUN="1", PYTHONPATH=str(stub), **variables)
    assert (done.returncode, done.stderr) == (0, "")
    planned = planned_for(words, variables)
    command = command_of(done.stdout)
    at = next(i for i, word in enumerate(command) if word.endswith("_bcd.py"))
    launcher = dict(zip(command[:at], command[1:at], strict=False))
    nodes = int(launcher.get("--nnodes", "1"))
    assert (nodes, int(launcher["--nproc-per-node"])) == (planned.num_nodes, planned.gpus_per_node)
    assert ("--standalone" in command) == (nodes == 1)
    config = parsed(command[at + 1 :], form=planned.model.form, world_size=planned.num_gpus)
    assert_agrees(config, planned)
    mock = "-mock" if "MOCK_DATA" in variables else ""  # a run on data would resume from it
    assert config.checkpoint.save == config.checkpoint.load == f"out/{planned.model.name}-{words[1]}-{words[2]}{mock}"
    if "HEAD_NODE" in variables:
        assert launcher["--rdzv-endpoint"] == "first:29500" and config.data.data_path == ("0.3", "a", "0.7", "b")
    if "MOCK_DATA" in variables:
        assert config.data.mock_data and config.training.train_iters == 7
    groups, name = config.groups, variables.get("REPLICA_ID")
    assert (groups.replica_groups, groups.replica_id, groups.lighthouse) == (
        int(variables.get("REPLICA_GROUPS", "1")), name, variables.get("LIGHTHOUSE"))  # fmt: skip
    assert name is None or str(config.report.metrics_file).endswith(f"-{name}.jsonl")
    assert os.listdir(tmp_path) == ["stub"]


@pytest.mark.parametrize(
    ("variables", "nodes"), [({"NUM_GPUS": "4"}, None), ({"NNODES": "2", "GPUS_PER_NODE": "6"}, "2")]
)
def test_dry_run_of_fine_tuning(tmp_path: Path, variables: dict[str, str], nodes: str | None) -> None:
    """A dry run prints the plan's command for the GPUs of all nodes, without defaults that the user's flags replace."""
    flags = ("--train-iters", "4", "--valid-data-path", "v.jsonl") if nodes else ()
    environment = {"DRY_RUN": "1", "DATA": "d.jsonl"} | variables
    done = start("LLaMA-7B", "rtx4090", *MUCH, *flags, cwd=tmp_path, script="finetune.sh", **environment)
    assert (done.returncode, done.stderr) == (0, "")
    words = command_of(done.stdout)
    assert value_of(words, "--bcd-preset") == "finetune" and {"--sft", "--bf16", "--load-hf", "--save-hf"} <= {*words}
    if nodes:
        assert (value_of(words, "--nnodes"), value_of(words, "--nproc-per-node")) == (nodes, "6")
        assert value_of(words, "--rdzv-endpoint") == "HEAD_NODE:29500"
        assert value_of(words, "--train-data-path") == "d.jsonl" and not {"--num-epochs", "--data-path"} & {*words}
    else:
        assert value_of(words, "--nproc-per-node") == "4" and value_of(words, "--num-epochs") == "3"
    assert not list(tmp_path.iterdir())


LLAMA = ("LLaMA-7B", "rtx4090", *MUCH)
QWEN3_8B = {"model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "head_dim": 128}
QWEN3_8B |= {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 12288, "vocab_size": 151936}
QWEN3_8B |= {"max_position_embeddings": 40960, "tie_word_embeddings": False, "rope_theta": 1000000}
TALK = [{"from": "human", "value": "What is 2 + 2?"}, {"from": "gpt", "value": "It is 4."}]
TUNED = {"MODEL_DIR": "m", "DATA": str(Path(__file__))}


@pytest.mark.parametrize(
    ("script", "words", "variables", "message"),
    [
        ("pretrain.sh", ("G-5.4B", "bcd"), {}, "CLUSTER"),
        ("pretrain.sh", SMALL_FITS, {}, "DATA_PATH"),
        ("pretrain.sh", SMALL_FITS, TEXT | {"DATA_PATH": "0.5 text_document 0.5 other"}, "other.bin"),
        ("pretrain.sh", SMALL, TEXT | {"NUM_GPUS": "2"}, "2 x RTX 4090"),
        ("pretrain.sh", SMALL_FITS, TEXT | {"STUB_GPUS": "2"}, "NUM_GPUS=2"),
        ("finetune.sh", LLAMA, {}, "MODEL_DIR"),
        ("finetune.sh", LLAMA, TUNED | {"DATA": "no.jsonl"}, "DATA=no.jsonl"),
    ],
)
def test_bad_input_is_one_line(
    script: str, words: tuple[str, ...], variables: dict[str, str], message: str, stub: Path, data: Path
) -> None:
    """Bad input is one line with a remedy and exit code 2, and no run starts or leaves a file."""
    before = sorted(os.listdir(data))
    done = start(*words, cwd=data, script=script, **{"PYTHONPATH": str(stub), "STUB_GPUS": "0"} | variables)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr and done.stderr.count("\n") == 1
    assert [line for line in done.stdout.splitlines() if not line.startswith("setup: using BCD_PYTHON")] == []
    assert sorted(os.listdir(data)) == before


def test_flags_of_the_user(tmp_path: Path) -> None:
    """Flags of the user replace the recipe's defaults and reach the command as they are, also if they look like the
    recipe's own words. A folder may end in a slash."""
    for flags, variables in (
        (["--train-samples", "640", "--lr-warmup-samples=64", "--bcd-switch=plateau"], {}),
        (["--bcd-switch", "plateau", "--lr-warmup-iters", "3"], {"TRAIN_ITERS": "7", "SAVE": "out/x/"}),
    ):
        command = command_of(start(*SMALL_FITS, *flags, cwd=tmp_path, DRY_RUN="1", **variables).stdout)
        at = next(i for i, word in enumerate(command) if word.endswith("_bcd.py"))
        config = parsed(command[at + 1 :], form="gpt", world_size=4)
        length = (config.training.train_iters, config.training.train_samples)
        assert length == ((7, None) if variables else (None, 640))
        assert config.bcd.bcd_switch == "plateau" and config.schedule.lr_warmup_fraction is None
        assert not variables or command[command.index("--metrics-file") + 1] == "out/x.jsonl"
    flags = ["--gpus-here", "2", "--tiny", "2", "here=2"]
    assert command_of(start(*SMALL_FITS, *flags, cwd=tmp_path, DRY_RUN="1").stdout)[-len(flags) :] == flags


@pytest.mark.parametrize(
    "words, variables",
    [
        (
            (*SMALL_FITS, "--seed", "7"),
            TEXT | {"STUB_GPUS": "2", "NNODES": "2", "GPUS_PER_NODE": "2", "HEAD_NODE": "n0"},
        ),
        (("L-6.0B", "full", "rtx4090"), TEXT | {"STUB_GPUS": "8", "NUM_GPUS": "2", "FORCE": "1"}),
    ],
)
def test_what_is_printed_is_what_is_started(
    words: tuple[str, ...], variables: dict[str, str], stub: Path, data: Path
) -> None:
    """A dry run prints the command that a start runs, and the launcher ignores the signal for the ranks."""
    environment = {"PYTHONPATH": str(stub)} | variables
    printed = start(*words, cwd=data, DRY_RUN="1", **environment)
    started = start(*words, cwd=data, **environment)
    assert (started.returncode, started.stderr) == (0, "")
    said = json.loads(started.stdout.splitlines()[-1])
    assert ["torchrun", *said["words"]] == command_of(printed.stdout)
    assert said["ignores USR1"]


@pytest.mark.long
def test_tiny(tmp_path: Path) -> None:
    """The recipe trains all of its blocks, evaluates and saves, in the planned pipeline."""
    words, out = ("G-5.4B", "bcd", "rtx4090"), tmp_path / "my recipes"
    done = start(*words, *MUCH, cwd=tmp_path, SCALE="tiny", OUT=str(out), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    planned = planned_for(words, {})
    stages, ranks = min(2, planned.pipeline_size), min(2, planned.num_gpus)
    saved = out / "-".join(words)
    lines = [json.loads(line) for line in Path(f"{saved}.jsonl").read_text().splitlines()]
    trained = [line["block"] for line in lines if "loss" in line and "learning_rate" in line]
    assert len(trained) == 6 and set(trained) == {0, 1, 2}
    assert any("validation_loss" in line for line in lines)
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "6"
    assert f"pipeline {stages} x tensor 1 x data {ranks // stages}" in done.stdout


@pytest.mark.parametrize("model", ["folder", pytest.param("L-1.5B", marks=pytest.mark.long)])
def test_tiny_fine_tuning(tmp_path: Path, model: str) -> None:
    """The recipe trains, exports and asks the model, and loads it with transformers. It uses the user's records and
    tokenizer and leaves them unchanged."""
    flags = (model, "rtx4090", *MUCH, "--train-iters", "2", "--lr-warmup-iters", "1", "--eval-iters", "0")
    flags += ("--seq-length", "128", "--num-workers", "0")  # workers import for seconds
    given = {"cwd": tmp_path, "script": "finetune.sh", "SCALE": "tiny", "OUT": "out", "CUDA_VISIBLE_DEVICES": ""}
    if model == "folder":
        tokenizer_folder(tmp_path / "folder", CHATML)
        (tmp_path / "folder" / "config.json").write_text(json.dumps(QWEN3_8B))
        given["DATA"] = write_records(tmp_path / "records.jsonl", [{"conversations": TALK}] * 40)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json*")}
    done = start(*flags, **given)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(path.read_bytes() == content for path, content in before.items())
    saved = tmp_path / "out" / f"{model}-finetune-rtx4090"
    if model == "folder":
        assert (Path(f"{saved}-hf") / "chat_template.jinja").exists()
    steps = [json.loads(line) for line in Path(f"{saved}.jsonl").read_text().splitlines()]
    assert {step["block"] for step in steps if "learning_rate" in step} == {0}, "every layer in every step"
    assert f"\n{model} on rtx4090: every layer in every step" in f"\n{done.stdout}"
    is_on_host = model == "folder"  # the card holds the other one
    assert ("in host memory, copied as they are read" in done.stdout) == is_on_host
    assert (Path(f"{saved}-hf") / "config.json").exists() and "ForCausalLM" in done.stdout


@pytest.mark.parametrize("code, is_signalled, requeued", [(0, True, True), (0, False, False), (3, False, False)])
def test_slurm(tmp_path: Path, code: int, is_signalled: bool, requeued: bool) -> None:
    """A job that is signalled lets the ranks save and is requeued, others are not, and the exit code is the run's."""
    for name, body in {
        "srun": f"""echo "$* $SRUN_CPUS_PER_TASK NNODES=$NNODES GPUS_PER_NODE=$GPUS_PER_NODE HEAD_NODE=$HEAD_NODE" >>log
            trap 'echo saved >> log; exit {code}' USR1
            touch running
            [ -n "$WAITS" ] || exit {code}
            for i in $(seq 1000); do sleep 0.05; done""",
        "scontrol": """if [ "$1" = show ]; then printf 'node7\\nnode8\\n'; else echo "scontrol $*" >> log; fi""",
    }.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8",
           "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "41", "SLURM_CPUS_PER_TASK": "32",
           "WAITS": "1" * is_signalled}  # fmt: skip
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    batch = subprocess.Popen(
        ["bash", EXAMPLES / "slurm.sh", "G-20B", "bcd", "rtx4090", "--seed", "7"],
        env=clean | job | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    if is_signalled:
        while not (tmp_path / "running").exists() and batch.poll() is None:
            time.sleep(0.02)
        batch.send_signal(signal.SIGUSR1)
    assert batch.wait(timeout=60) == code
    first, *rest = (tmp_path / "log").read_text().splitlines()
    assert "bash examples/pretrain.sh G-20B bcd rtx4090 --seed 7 32 NNODES=2 GPUS_PER_NODE=8 HEAD_NODE=node7" in first
    assert rest == ["saved"] * is_signalled + ["scontrol requeue 41"] * requeued


@pytest.mark.parametrize(
    ("environment", "nodes", "per_node"),
    [
        ({"NUM_GPUS": "4", "NNODES": "2"}, 2, 2),
        ({"NUM_GPUS": "8", "GPUS_PER_NODE": "2"}, 4, 2),
        ({"NNODES": "2"}, 2, 8),
    ],
)
def test_two_numbers_give_the_third(environment: dict[str, str], nodes: int, per_node: int) -> None:
    """Two numbers give the third, and a cluster's default fills in one that is missing."""
    found = planned_for(SMALL, environment)
    assert (found.num_nodes, found.gpus_per_node, found.num_gpus) == (nodes, per_node, nodes * per_node)


def test_where_a_recipe_runs() -> None:
    """A recipe takes the GPUs of its row in the method table, otherwise those that its flags need, and recomputes where
    memory is short."""
    for words, nodes, per_node in (
        (("G-20B", "bcd", "rtx4090"), 2, 8),
        (("L-8.0B", "full", "rtx4090"), 2, 6),
        (("G-5.4B", "offload", "rtx4090"), 1, 4),
    ):
        found = planned_for(words, {})
        assert (found.num_nodes, found.gpus_per_node, found.pipeline_size) == (nodes, per_node, nodes * per_node)
    for words, recompute in ((SMALL, "none"), (("G-5.4B", "full", "rtx4090"), "auto")):
        found = planned_for(words, {"PRECISION": "fp32"})
        assert fits(replace(found, recompute="none")) and found.recompute == recompute
    by_stage = ("--bcd-layout", "stage")
    for words, num_gpus, stages in (
        (("G-1.6B", "bcd", "a100", *by_stage), 2, 2),
        (("G-1.6B", "bcd", "rtx4090", *by_stage), 2, 2),
        (("G-1.6B", "bcd", "a100", *by_stage, "--bcd-num-blocks", "3"), 3, 3),
        (("G-1.6B", "bcd", "a100", "--pipeline-model-parallel-size", "4"), 4, 4),
    ):
        found = planned_for(words, {})
        assert (found.num_gpus, found.pipeline_size, fits(found)) == (num_gpus, stages, True), words
        tiny = recipe.scaled_down(found)
        assert tiny.partition.num_blocks == (2 if "stage" in words else 3)
    assert recipe.scaled_down(planned_for(SMALL, {"NNODES": "4", "GPUS_PER_NODE": "1"})).num_nodes == 1


FINE_TUNING = ("LLaMA-7B", "finetune", "rtx4090")


@pytest.mark.parametrize(
    ("words", "flag"),
    [(SMALL, "--kv-channels"), (SMALL, "--optimizer"), (FINE_TUNING, "--data-path"), (FINE_TUNING, "--save")],
)
def test_flags_that_the_recipe_sets(words: Sequence[str], flag: str) -> None:  # some of the tables in tools/recipe.py
    """A flag that the recipe sets is refused by name."""
    with pytest.raises(ValueError, match=flag):
        recipe.request_of([*words, f"{flag}=1"], {})
