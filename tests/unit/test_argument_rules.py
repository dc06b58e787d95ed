"""Bad command lines give one line that names the flag, and write nothing. Flags without effect are accepted and
reported."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from support.command_line import BASE, parse

from megatron.bcd.arguments import read_command_line
from megatron.bcd.arguments.parse import ConfigurationError
from megatron.bcd.runtime import packages

WORDS = [word for pair in BASE.items() for word in pair]
VIRTUAL, LAYERS = "--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage"

# After BASE, by world size; the message must name the first flag of the line. All rules that are functions, and some
# rows of each table in arguments/validate.py.
BAD_RUNS = {
    1: """
--foo
--moe-grouped-gemm --num-experts 8
--moe-shared-expert-intermediate-size 16 --num-experts 8
--window-size 127,0
--position-embedding-type yarn
--moe-router-topk 5 --num-experts 4 --disable-bias-linear
--expert-model-parallel-size 2 --num-experts 4 --disable-bias-linear
--expert-tensor-parallel-size 2 --num-experts 4 --disable-bias-linear
--moe-layer-freq [0,1] --num-experts 4 --disable-bias-linear
--bcd-layers-on host --moe-layer-freq 2 --num-experts 4 --disable-bias-linear
--moe-expert-capacity-factor 2
--main-params-dtype fp16
--lr fast
--clip-grad inf
--min-lr 1
--hidden-dropout 1
--bcd-frozen embeddings
--bcd-frozen embedding --bcd-always-active head
--bcd-always-active none,norms
--bcd-head-phase
--bcd-head-phase --untie-embeddings-and-output-weights --bcd-frozen head
--bcd-head-phase --untie-embeddings-and-output-weights --bcd-always-active head,norms
--bcd-head-phase --untie-embeddings-and-output-weights --bcd-num-blocks 0 --bcd-inactive-update orthogonal
--hidden-size 66
--num-query-groups 3 --group-query-attention
--pipeline-model-parallel-size 2
--tensor-model-parallel-size 0
--num-layers 2
--num-layers 1000000000
--bcd-layout stage --bcd-num-blocks 3
--bcd-num-blocks 0
--bcd-num-blocks 0 --bcd-inactive-update orthogonal --bcd-always-active none
--bcd-num-blocks 0 --bcd-inactive-update orthogonal --bcd-layout submodel
--bcd-inactive-update orthogonal --bcd-num-blocks 1
--bcd-layers-on auto --bcd-inactive-update orthogonal --bcd-schedule bcd
--bcd-layers-on host --bcd-num-blocks 1 --bcd-schedule bcd
--bcd-layers-on host --bcd-layout stage
--optimizer-cpu-offload --bcd-layers-on host --bcd-num-blocks 1
--bcd-layers-on host --bcd-schedule stock
--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --bcd-schedule breadth-first
--recompute auto --recompute-memory-gib 1 --bcd-schedule breadth-first
--bcd-layers-per-pass 4 --bcd-schedule breadth-first
--bcd-layers-per-pass 0 --bcd-schedule breadth-first
--bcd-inactive-update sign
--bcd-inactive-update factored --loss-scale 128
--bcd-inactive-lr-ratio 0 --bcd-inactive-update factored
--bcd-embedding-update factored
--bcd-embedding-update factored --bcd-always-active head
--bcd-embedding-update factored --bcd-inactive-update factored --bcd-frozen embedding
--bcd-resident-layers 99 --bcd-layers-on host
--bcd-prefix-cache out/cache --bcd-sample-ratio 0.1
--bcd-prefix-cache out/./run --save out/run --bcd-sample-ratio 0.1 --hidden-dropout 0 --attention-dropout 0
--global-batch-size 3
--rampup-batch-size 3 2 10 --global-batch-size 8
--rampup-batch-size 2 4 10 --global-batch-size 8
--train-samples 100
--lr-warmup-iters 10
--lr-warmup-iters 5 --lr-decay-iters 4
--lr-wsd-decay-iters 11 --lr-decay-style WSD
--start-weight-decay 0.2 --weight-decay-incr-style linear --end-weight-decay 0.1
--optimizer-cpu-offload
--overlap-cpu-optimizer-d2h-h2d --optimizer-cpu-offload --bcd-num-blocks 1 --optimizer-offload-fraction 0.5 --bf16 \
--grad-reduce-in-bf16
--fp8-format hybrid --bf16
--fp8-format hybrid --fp8-recipe tensorwise
--micro-batch-size 2 --fp8-recipe tensorwise --fp8-format hybrid --bf16 --bcd-prefix-cache out/cache \
--bcd-sample-ratio 0.1 --hidden-dropout 0 --attention-dropout 0
--fp16-accumulation --bf16
--fp8-recipe tensorwise --fp8-format hybrid --bf16 --transformer-impl transformer_engine
--fp8-recipe tensorwise --fp8-format hybrid --bf16 --fp8-margin 1
--seq-length 64 --max-position-embeddings 32
--rotary-percent 0.05 --position-embedding-type rope
--no-position-embedding
--use-rotary-position-embeddings --position-embedding-type none
--swiglu --squared-relu
--recompute-granularity full --recompute-method uniform
--train-data-path x
--data-args-path absent
--dataloader-type cyclic
--bcd-prefix-cache-dtype bf16
--sft-refuse-long
--data-path 0.5 a b c
--data-path 0 a
--full-validation --data-path 1 a 2 b
--save-retain-interval 6 --save x --save-interval 4
--profile-step-end 3 --profile --profile-step-start 3
--num-virtual-stages-per-pipeline-rank 0
""",
    2: """
--ffn-hidden-size 5 --tensor-model-parallel-size 2
--seq-length 34 --context-parallel-size 2
--seq-length 31 --sequence-parallel --tensor-model-parallel-size 2
--attention-backend unfused --context-parallel-size 2
--num-experts 4 --tensor-model-parallel-size 2 --sequence-parallel
--num-layers 5 --pipeline-model-parallel-size 2
--bcd-num-blocks 4 --num-layers 4 --pipeline-model-parallel-size 2
--recompute auto --pipeline-model-parallel-size 2 --bcd-schedule stock --recompute-memory-gib 1
--num-experts 3 --expert-model-parallel-size 2 --disable-bias-linear
--expert-model-parallel-size 2 --num-experts 4 --disable-bias-linear --pipeline-model-parallel-size 2
--expert-model-parallel-size 2 --num-experts 4 --disable-bias-linear --bcd-prefix-cache c
--expert-model-parallel-size 2 --num-experts 4 --disable-bias-linear --use-cpu-initialization
--expert-tensor-parallel-size 1 --num-experts 4 --disable-bias-linear --tensor-model-parallel-size 2 --sequence-parallel
--fp8-format hybrid --bf16 --bcd-layout submodel --pipeline-model-parallel-size 2 --bcd-num-blocks 2
--num-layers-per-virtual-pipeline-stage 2 --pipeline-model-parallel-size 2
--num-layers-per-virtual-pipeline-stage 1 --num-virtual-stages-per-pipeline-rank 3 --pipeline-model-parallel-size 2
--num-virtual-stages-per-pipeline-rank 3 --bcd-layout spread --pipeline-model-parallel-size 2
--bcd-layers-per-pass 2 --pipeline-model-parallel-size 2 --bcd-schedule breadth-first
--bcd-layers-per-pass 1 --num-virtual-stages-per-pipeline-rank 3 --pipeline-model-parallel-size 2 --bcd-schedule \
breadth-first
--bcd-layout spread --pipeline-model-parallel-size 2 --bcd-schedule breadth-first
--bcd-schedule stock --num-virtual-stages-per-pipeline-rank 3 --pipeline-model-parallel-size 2
--pipeline-cut auto --account-for-loss-in-pipeline-split --pipeline-model-parallel-size 2
""",
    3: """
--tensor-model-parallel-size 3
--pipeline-model-parallel-size 2
--context-parallel-size 2
""",
    4: """
--num-query-groups 2 --group-query-attention --tensor-model-parallel-size 4 --optimizer muon
--global-batch-size 3 --context-parallel-size 2
--cp-comm-type a2a+p2p --context-parallel-size 4
--hierarchical-context-parallel-sizes 2 3 --context-parallel-size 4
--adam-moments-dtype int8 --pipeline-model-parallel-size 2
--bcd-schedule breadth-first --pipeline-model-parallel-size 2 --context-parallel-size 2
""",
    8: """
--cp-comm-type a2a --context-parallel-size 8
""",
    16: """
--seq-length 36 --context-parallel-size 2 --tensor-model-parallel-size 8 --num-attention-heads 8 --sequence-parallel
""",
}
BAD = [(ranks, line) for ranks, lines in BAD_RUNS.items() for line in lines.strip().splitlines()]


@pytest.mark.parametrize(("ranks", "line"), BAD, ids=[f"{ranks}: {line}" for ranks, line in BAD])
def test_bad_run(ranks: int, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad command line is refused in one line that names the flag, and writes nothing."""
    monkeypatch.chdir(tmp_path)
    words = line.split()
    with pytest.raises(ValueError) as error:
        parse("--metrics-file", "out/m.jsonl", "--tensorboard-dir", "out/tb", *words, world_size=ranks)
    assert "\n" not in str(error.value)
    assert words[0].split("=")[0] in str(error.value)
    assert not list(tmp_path.iterdir())


ADAPTERS = "removed. Train every layer with --bcd-preset finetune (6 bytes a parameter), or train LoRA with peft."
GONE = {f"{flag} 4": f"{flag}: {ADAPTERS}" for flag in ("--bcd-low-rank", "--save-adapters")} | {
    "--bcd-greedy-microbatches 4": "--bcd-greedy-microbatches: removed. Leave it out, and give --bcd-order ascending, "
    "descending or random.",
    "--cpu-kernels bcd": "--cpu-kernels: removed. Leave it out: a CPU runs Megatron Core's own functions.",
    "--bcd-resting-update orthogonal": "--bcd-resting-update: removed. Give --bcd-inactive-update.",
    "--bcd-frozen-weights host": "--bcd-frozen-weights: removed. Give --bcd-layers-on.",
    "--config run.yaml": "--config: removed. Write the flags into a script; --dry-run prints what would run.",
    "--bcd-order greedy": "--bcd-order: invalid choice: 'greedy' (choose from 'ascending', 'descending', 'random')",
}


@pytest.mark.parametrize("line", [*GONE])
def test_what_was_removed(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A removed flag or value ends the command with code 2 and one line that says what to use instead."""
    with pytest.raises(ValueError) as error:
        parse(*line.split())
    assert str(error.value) == GONE[line]
    with pytest.raises(SystemExit) as left:
        read_command_line([*WORDS, *line.split(), "--dry-run"], prog="test", world_size=1)
    assert left.value.code == 2 and capsys.readouterr().err == f"test: error: {GONE[line]}\n"


@pytest.mark.parametrize("flag", [*BASE])
def test_missing_flag_is_named(flag: str) -> None:
    """The error names the required flag that is missing."""
    with pytest.raises(ValueError, match=flag):
        parse(without=(flag,))


def test_temporary_folder_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A TMPDIR of 76 characters is refused if there are data workers."""
    folder = "/tmp/" + 71 * "x"
    monkeypatch.setattr(tempfile, "tempdir", folder)
    with pytest.raises(ValueError, match="TMPDIR"):
        parse("--num-workers", "1")
    parse("--num-workers", "0")
    monkeypatch.setattr(tempfile, "tempdir", folder[:-1])
    parse("--num-workers", "1")


def test_all_problems_at_once() -> None:
    """All problems of a command line are reported at once."""
    named = ["--mtp-num-layers", "--foo", "--global-batch-size", "--min-lr"]
    with pytest.raises(ConfigurationError) as error:
        parse(*["--mtp-num-layers", "8", "--foo", "--global-batch-size", "3", "--min-lr", "1"])
    assert [name in text for name, text in zip(named, error.value.problems, strict=True)] == [True] * 4
    assert all(problem in str(error.value) for problem in error.value.problems)


# flags that belong together | flags that have no effect beside them; of stock.BELONG_TO some rows
WITHOUT_EFFECT = """
 | --save-interval 5
 | --num-query-groups 2
--position-embedding-type none | --rotary-percent 0.5
--recompute-activations | --recompute-num-layers 1
 | --sequence-parallel
--bf16 | --use-precision-aware-optimizer
 | --no-data-sharding
 | --dataloader-type single
--eval-iters 0 | --eval-fixed
--split 100,0,0 | --full-validation
--split 100,0,0 | --eval-iters -1
 | --main-params-dtype fp32
"""


@pytest.mark.parametrize("line", WITHOUT_EFFECT.strip("\n").splitlines())
def test_flag_without_effect(line: str) -> None:
    """A flag without effect is accepted, leaves the configuration as it is, and is named in a note."""
    beside, flag = (half.split() for half in line.split("|"))
    with_it, notes = read_command_line([*WORDS, *beside, *flag], prog="test", world_size=1)
    assert with_it == read_command_line([*WORDS, *beside], prog="test", world_size=1)[0]
    assert flag[0].split("=")[0] in notes[0] or "no evaluation" in notes[0]


def test_mock_data_have_no_validation_split() -> None:
    """With --mock-data, --full-validation has no effect and --eval-iters -1 is refused."""
    mock = {"without": ("--data-path",)}
    assert parse("--mock-data", "--full-validation", **mock) == parse("--mock-data", **mock)
    with pytest.raises(ValueError, match="--full-validation"):
        parse("--mock-data", "--eval-iters", "-1", **mock)


def test_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The FP8 flags set Megatron Core's configuration and disable its cache of transposed weights."""
    monkeypatch.setattr(packages, "has_transformer_engine", lambda: True)
    words = ("--bf16", "--fp8-format", "hybrid", "--fp8-amax-history-len", "16", "--fp8-amax-compute-algo", "max")
    result = parse(*words).transformer
    assert result == parse("--bf16").transformer | {
        "fp8": "hybrid",
        "fp8_recipe": "delayed",
        "fp8_amax_history_len": 16,
        "fp8_amax_compute_algo": "max",
        "disable_parameter_transpose_cache": True,
    }


@pytest.mark.parametrize(
    ("words", "layout", "num_chunks"),
    [
        ((LAYERS, "3"), "spread", 1),
        ((LAYERS, "1"), "interleaved", 3),
        ((VIRTUAL, "1"), "spread", 1),
        ((LAYERS, "1", "--bcd-preset", "pretrain"), "interleaved", 3),
        ((VIRTUAL, "3", "--bcd-num-blocks", "1"), "interleaved", 3),
        ((VIRTUAL, "2"), "interleaved", 3),
        ((VIRTUAL, "5", "--num-layers", "12"), "interleaved", 3),
        ((VIRTUAL, "4", "--num-layers", "8", "--bcd-num-blocks", "2"), "interleaved", 4),
        (("--bcd-layout", "interleaved"), "interleaved", 3),
        (("--bcd-layout", "interleaved", VIRTUAL, "2", "--bcd-num-blocks", "2"), "interleaved", 2),
    ],
)
def test_chunks_of_a_stage(words: tuple[str, ...], layout: str, num_chunks: int) -> None:
    """Flags set the chunks of a stage; notes name a changed number of chunks and an overlap of gathers that is off."""
    overlap = ("--overlap-grad-reduce", "--overlap-param-gather")
    common = [*WORDS, "--pipeline-model-parallel-size", "2", *words]
    config, notes = read_command_line(common, prog="test", world_size=2)
    assert (config.bcd.bcd_layout, config.num_chunks) == (layout, num_chunks)
    assert bool(notes) == (words[0] == VIRTUAL and int(words[1]) != num_chunks)
    gathered, notes = read_command_line([*common, *overlap], prog="test", world_size=2)
    assert gathered.ddp.overlap_param_gather == gathered.optimizer.overlap_param_gather
    assert gathered.ddp.overlap_param_gather == (num_chunks == 1)
    assert ("--overlap-param-gather" in "".join(notes)) == (num_chunks > 1)


def test_advice_does_not_contradict_itself() -> None:
    """A conflict is reported once, by the flags that were given, without what a flag to leave out would need."""
    flags = ("--bcd-preset", "paper", "--fp8-format", "hybrid", "--bcd-layers-on", "host")
    with pytest.raises(ConfigurationError) as raised:
        parse(*flags)
    conflict, *others = raised.value.problems
    assert conflict == "--bcd-layers-on host and --fp8-format cannot be combined. Leave one of them out."
    assert all("delayed scaling needs" in other for other in others)
