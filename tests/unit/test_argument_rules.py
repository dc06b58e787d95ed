"""Every rule of a bad command line: one line that names the flag, and nothing written."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import pytest
from support.command_line import BASE, parse

from megatron.bcd.arguments import read_command_line
from megatron.bcd.arguments.refusals import RefusedFlags
from megatron.bcd.arguments.validate_model import check_core_accepts
from megatron.bcd.runtime import packages

# (flags beside BASE, world size, what the one line must contain)
BAD_RUNS: list[tuple[str, int, list[str]]] = [
    ("--bcd-frozen embeddings", 1, ["--bcd-frozen embeddings", "embedding, head, norms"]),
    (
        "--bcd-frozen norms --bcd-always-active norms,biases",
        1,
        ["--bcd-frozen and --bcd-always-active both name norms", "leave it out"],
    ),
    ("--bcd-frozen embedding --bcd-always-active head", 1, ["both name", "head", "a tied head is the embedding"]),
    (
        "--bcd-num-blocks 0 --bcd-resting-update orthogonal --bcd-always-active embedding --bcd-frozen embedding",
        1,
        ["--bcd-frozen", "--bcd-always-active"],
    ),
    ("--bcd-main-params drop", 1, ["--bcd-main-params drop", "--bf16"]),
    (
        "--bcd-main-params drop --bf16 --bcd-resting-update sign",
        1,
        ["--bcd-main-params drop", "--bcd-resting-update", "leave it out"],
    ),
    (
        "--num-layers 4 --bcd-num-blocks 4 --pipeline-model-parallel-size 2",
        2,
        ["at most --bcd-num-blocks 2", "--bcd-layout submodel --bcd-num-blocks 2, which is 4 blocks"],
    ),
    ("--hidden-size 66", 1, ["--hidden-size 66", "--num-attention-heads 4"]),
    ("--hidden-size 0", 1, ["--hidden-size 0", "at least 1"]),
    ("--num-layers -3", 1, ["--num-layers -3", "at least 1"]),
    ("--tensor-model-parallel-size 3", 3, ["--num-attention-heads 4", "--tensor-model-parallel-size 3"]),
    ("--tensor-model-parallel-size 0", 1, ["--tensor-model-parallel-size 0", "at least 1"]),
    (
        "--ffn-hidden-size 5 --tensor-model-parallel-size 2",
        2,
        ["--ffn-hidden-size 5", "--tensor-model-parallel-size"],
    ),
    (
        "--group-query-attention --num-query-groups 2 --tensor-model-parallel-size 4 --optimizer muon",
        4,
        ["--num-query-groups 2", "--tensor-model-parallel-size 4", "give --muon-no-split-qkv"],
    ),
    ("--group-query-attention --num-query-groups 3", 1, ["--num-query-groups 3", "--num-attention-heads 4"]),
    (
        "--pipeline-model-parallel-size 2",
        1,
        ["--pipeline-model-parallel-size 2", "world size 1", "multiple of 2"],
    ),
    ("--pipeline-model-parallel-size 2", 3, ["--pipeline-model-parallel-size 2", "world size 3"]),
    ("--context-parallel-size 0", 1, ["--context-parallel-size 0", "at least 1"]),
    ("--context-parallel-size 2", 3, ["--context-parallel-size 2", "world size 3", "multiple of 2"]),
    ("--context-parallel-size 2 --global-batch-size 3", 4, ["data parallel size 2", "multiple of 4"]),
    ("--context-parallel-size 2 --seq-length 34", 2, ["--seq-length 34", "--context-parallel-size 2", "multiple of 4"]),
    (
        "--context-parallel-size 2 --tensor-model-parallel-size 8 --num-attention-heads 8 --sequence-parallel "
        "--seq-length 36",
        16,
        ["--seq-length 36", "--context-parallel-size 2", "--sequence-parallel needs", "multiple of 16"],
    ),
    (
        "--context-parallel-size 2 --attention-backend unfused",
        2,
        ["--attention-backend unfused", "--context-parallel-size 2", "give auto"],
    ),
    ("--context-parallel-size 2 --cp-comm-type ring", 2, ["--cp-comm-type", "ring", "all_gather"]),
    ("--context-parallel-size 8 --cp-comm-type a2a", 8, ["--cp-comm-type a2a", "4 key-value heads", "give p2p"]),
    (
        "--context-parallel-size 4 --cp-comm-type a2a+p2p",
        4,
        ["--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes"],
    ),
    (
        "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 3",
        4,
        ["--hierarchical-context-parallel-sizes 2 3", "--context-parallel-size 4"],
    ),
    ("--num-layers 2", 1, ["--num-layers 2", "--bcd-num-blocks", "at least 3"]),
    ("--num-layers 5 --pipeline-model-parallel-size 2", 2, ["--num-layers 5", "at least 6"]),
    ("--bcd-layout stage --bcd-num-blocks 3", 1, ["--bcd-num-blocks 3", "--bcd-layout stage"]),
    ("--bcd-num-blocks -1", 1, ["--bcd-num-blocks -1", "at least 0"]),
    ("--bcd-num-blocks 0", 1, ["--bcd-num-blocks 0", "--bcd-resting-update orthogonal"]),
    (
        "--bcd-num-blocks 0 --bcd-resting-update sign --bcd-always-active none",
        1,
        ["--bcd-num-blocks 0", "--bcd-always-active none"],
    ),
    (
        "--bcd-num-blocks 0 --bcd-resting-update sign --bcd-layout submodel",
        1,
        ["--bcd-num-blocks 0", "--bcd-layout submodel"],
    ),
    ("--bcd-resting-update sign --bcd-resting-lr-ratio 0", 1, ["--bcd-resting-lr-ratio 0", "greater than 0"]),
    ("--bcd-resting-update sign --bcd-num-blocks 1", 1, ["--bcd-resting-update sign", "--bcd-num-blocks 2"]),
    ("--bcd-resting-update sign --fp16", 1, ["--bcd-resting-update sign", "--fp16", "--bf16"]),
    ("--bcd-steps-per-block 0", 1, ["--bcd-steps-per-block 0", "at least 1"]),
    ("--bcd-order best", 1, ["--bcd-order", "best", "greedy"]),
    ("--bcd-order greedy --bcd-greedy-microbatches 0", 1, ["--bcd-greedy-microbatches 0", "at least 1"]),
    ("--bcd-switch plateau --bcd-steps-per-block 5", 1, ["--bcd-steps-per-block", "--bcd-min-steps-per-block"]),
    ("--bcd-switch plateau --bcd-plateau-window 0", 1, ["--bcd-plateau-window 0", "at least 1"]),
    ("--bcd-switch plateau --bcd-plateau-min-improvement 1", 1, ["--bcd-plateau-min-improvement 1", "less than 1"]),
    (
        "--bcd-switch plateau --bcd-min-steps-per-block 5 --bcd-max-steps-per-block 4",
        1,
        ["--bcd-max-steps-per-block 4", "--bcd-min-steps-per-block 5"],
    ),
    ("--bcd-stop-cycle-improvement 0.1 --eval-iters 0", 1, ["--bcd-stop-cycle-improvement", "--eval-iters"]),
    ("--bcd-stop-cycle-improvement 2", 1, ["--bcd-stop-cycle-improvement 2", "less than 1"]),
    ("--bcd-phase-warmup-steps 100", 1, ["--bcd-phase-warmup-steps 100", "--bcd-steps-per-block"]),
    ("--bcd-block-lr-multipliers 1 2", 1, ["--bcd-block-lr-multipliers", "2 given", "3 blocks"]),
    ("--bcd-block-lr-multipliers 1 2 0", 1, ["--bcd-block-lr-multipliers 0", "above 0"]),
    ("--bcd-always-active norm", 1, ["--bcd-always-active norm", "norms, biases, embedding, head"]),
    ("--bcd-always-active none,norms", 1, ["--bcd-always-active none,norms", "norms, biases, embedding, head"]),
    ("--bcd-optimizer-state disk", 1, ["--bcd-optimizer-state", "disk", "host"]),
    ("--bcd-sample-ratio 0", 1, ["--bcd-sample-ratio 0", "greater than 0"]),
    ("--bcd-sample-ratio 1.5", 1, ["--bcd-sample-ratio 1.5", "at most 1"]),
    ("--bcd-prefix-cache out/cache", 1, ["--bcd-prefix-cache out/cache", "--bcd-sample-ratio"]),
    (
        "--bcd-switch plateau --bcd-plateau-window 5 --bcd-max-steps-per-block 10",
        1,
        ["--bcd-max-steps-per-block 10", "2 x --bcd-plateau-window 5"],
    ),
    (
        "--bcd-prefix-cache out/./run --save out/run --bcd-sample-ratio 0.1",
        1,
        ["--bcd-prefix-cache out/./run", "is the folder of --save"],
    ),
    ("--bcd-prefix-cache out/cache --bcd-sample-ratio 0.1", 1, ["--bcd-prefix-cache out/cache", "--hidden-dropout 0"]),
    ("--global-batch-size 3", 1, ["--global-batch-size 3", "--micro-batch-size 2", "multiple of 2"]),
    ("--global-batch-size 2", 2, ["--global-batch-size 2", "data parallel size 2", "multiple of 4"]),
    ("--micro-batch-size 0", 1, ["--micro-batch-size 0"]),
    ("--global-batch-size 8 --rampup-batch-size 3 2 10", 1, ["--rampup-batch-size 3 2 10", "divisible"]),
    (
        "--global-batch-size 8 --rampup-batch-size 2 4 10",
        1,
        ["--rampup-batch-size 2 4 10", "--global-batch-size 8"],
    ),
    ("--global-batch-size 8 --rampup-batch-size 0 4 10", 1, ["--rampup-batch-size 0", "greater than 0"]),
    ("--train-samples 100", 1, ["--train-iters", "--train-samples"]),
    ("--lr-decay-samples 100", 1, ["--lr-decay-samples", "--train-iters", "--lr-decay-iters"]),
    ("--lr-warmup-samples 100", 1, ["--lr-warmup-samples", "--lr-warmup-iters"]),
    ("--lr-warmup-iters 10", 1, ["--lr-warmup-iters 10", "--train-iters 10"]),
    ("--lr-warmup-iters 5 --lr-decay-iters 4", 1, ["--lr-warmup-iters 5", "--lr-decay-iters 4"]),
    ("--lr-warmup-iters 5 --lr-warmup-fraction 0.1", 1, ["--lr-warmup-fraction", "--lr-warmup-iters"]),
    ("--lr-warmup-fraction 1", 1, ["--lr-warmup-fraction 1.0", "less than 1"]),
    ("--min-lr 1", 1, ["--min-lr 1.0", "--lr 0.001"]),
    ("--lr 0", 1, ["--lr 0.0", "greater than 0"]),
    ("--lr nan", 1, ["--lr nan", "finite"]),
    ("--clip-grad inf", 1, ["--clip-grad inf", "finite"]),
    ("--lr-decay-style WSD", 1, ["--lr-decay-style WSD", "--lr-wsd-decay-iters"]),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 11", 1, ["--lr-wsd-decay-iters 11", "--train-iters 10"]),
    ("--start-weight-decay 0.1", 1, ["--start-weight-decay", "--weight-decay-incr-style"]),
    ("--weight-decay-incr-style linear", 1, ["--weight-decay-incr-style linear", "--end-weight-decay"]),
    ("--weight-decay -1", 1, ["--weight-decay -1.0", "at least 0"]),
    ("--adam-beta2 1", 1, ["--adam-beta2 1.0", "less than 1"]),
    ("--hidden-dropout 1", 1, ["--hidden-dropout 1.0", "less than 1"]),
    ("--fp16 --bf16", 1, ["--fp16", "--bf16"]),
    ("--bf16 --loss-scale 1024 --optimizer muon", 1, ["--optimizer muon", "--loss-scale"]),
    (
        "--pipeline-model-parallel-size 2 --bcd-schedule stock --recompute auto --recompute-memory-gib 1",
        2,
        ["--recompute auto", "--bcd-schedule bcd"],
    ),
    (
        "--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32",
        1,
        ["--grad-reduce-in-bf16", "both"],
    ),
    ("--seq-length 64 --max-position-embeddings 32", 1, ["--seq-length 64", "--max-position-embeddings 32"]),
    ("--position-embedding-type rope --rotary-percent 0.05", 1, ["--rotary-percent 0.05", "even"]),
    ("--no-position-embedding", 1, ["--no-position-embedding", "--position-embedding-type"]),
    ("--no-create-attention-mask-in-dataloader --reset-attention-mask", 1, ["--reset-attention-mask"]),
    ("--adam-moments-dtype int8 --pipeline-model-parallel-size 2", 4, ["--adam-moments-dtype int8", "tied", "bf16"]),
    ("--sequence-parallel --tensor-model-parallel-size 2 --seq-length 31", 2, ["--seq-length 31"]),
    ("--recompute-granularity full", 1, ["--recompute-granularity full", "--recompute-method"]),
    ("--recompute-granularity full --recompute-method uniform", 1, ["--recompute-num-layers"]),
    ("--recompute-activations --recompute-granularity full", 1, ["--recompute-activations", "both"]),
    (
        "--distribute-saved-activations --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --tensor-model-parallel-size 2",
        2,
        ["--distribute-saved-activations", "3 blocks", "--bcd-num-blocks 1"],
    ),
    ("--mock-data", 1, ["--mock-data", "--data-path", "both"]),
    ("--train-data-path x", 1, ["--data-path", "--train-data-path", "both"]),
    ("--data-path 0.5 a b c", 1, ["--data-path 0.5 a b c", "weight"]),
    ("--data-path nan a", 1, ["--data-path nan a", "nan", "./nan"]),
    ("--data-path 0.5 a inf b", 1, ["--data-path 0.5 a inf b", "./inf"]),
    ("--data-path 1E2 a b c", 1, ["--data-path 1E2 a b c", "weight"]),
    ("--split 95,5", 1, ["--split '95,5'", "three numbers"]),
    ("--split 95,5,x", 1, ["--split '95,5,x'", "three numbers"]),
    ("--split 0,0,0", 1, ["--split '0,0,0'"]),
    ("--eval-interval 0", 1, ["--eval-interval 0"]),
    ("--eval-iters -2", 1, ["--eval-iters -2", "at least 0"]),
    ("--log-interval 0", 1, ["--log-interval 0"]),
    ("--save x --save-interval 4 --save-retain-interval 6", 1, ["--save-retain-interval 6", "--save-interval 4"]),
    ("--swiglu --squared-relu", 1, ["--squared-relu", "--swiglu", "one activation"]),
    ("--quick-geglu --openai-gelu", 1, ["--quick-geglu", "--openai-gelu"]),
    ("--rope-scaling-factor 0", 1, ["--rope-scaling-factor 0.0", "greater than 0"]),
    ("--test-mode --qk-layernorm --normalization RMSNorm", 1, ["--test-mode", "--normalization LayerNorm"]),
    ("--seed 0", 1, ["--seed 0"]),
    ("--dataloader-type cyclic --bcd-sample-ratio 0.5", 1, ["--dataloader-type cyclic", "--bcd-sample-ratio"]),
    ("--data-args-path absent", 1, ["--data-args-path absent", "--data-path", "both"]),
    ("--profile --profile-step-start 3 --profile-step-end 3", 1, ["--profile-step-end 3", "more than"]),
    ("--bf16 --fp8-format hybrid", 1, ["--fp8-format hybrid", "Transformer Engine"]),
    ("--fp8-format hybrid", 1, ["--fp8-format hybrid", "--bf16"]),
    ("--bf16 --fp8-format hybrid --transformer-impl local", 1, ["--fp8-format", "--transformer-impl local"]),
    (
        "--bf16 --fp8-format hybrid --bcd-layout submodel --pipeline-model-parallel-size 2 --bcd-num-blocks 2",
        2,
        ["--fp8-format hybrid", "--bcd-layout spread"],
    ),
    ("--bf16 --fp8-format hybrid --fp8-recipe tensorwise", 1, ["--fp8-recipe", "delayed"]),
    ("--main-params-dtype fp16", 1, ["--main-params-dtype"]),
    ("--rotary-seq-len-interpolation-factor 2", 1, ["--rotary-seq-len-interpolation-factor"]),
]


@pytest.mark.parametrize(("extra", "world_size", "words"), BAD_RUNS, ids=[run[0] for run in BAD_RUNS])
def test_bad_run_is_one_line(
    extra: str, world_size: int, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would expose a rule that is missing, names no flag, speaks in several lines, or comes after writing."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as refusal:
        parse(
            "--metrics-file",
            "out/m.jsonl",
            "--tensorboard-dir",
            "out/tb",
            *extra.split(),
            world_size=world_size,
        )
    assert "\n" not in str(refusal.value)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flag", [*BASE])
def test_missing_flag_is_named(flag: str) -> None:
    """Would expose a required flag whose absence fails later, in words of another room."""
    with pytest.raises(ValueError, match=rf"^{flag}( \(or --train-samples\))? is missing: "):
        parse(without=(flag,))


def test_skip_train_needs_no_length() -> None:
    """Would expose an evaluation that is refused for want of what only training needs."""
    config = parse("--skip-train", without=("--train-iters", "--lr"))
    assert config.training.skip_train and config.training.train_iters is None


def test_train_samples() -> None:
    """Would expose sample-based runs that are measured in steps."""
    config = parse("--train-samples", "100", "--lr-warmup-samples", "10", without=("--train-iters",))
    assert config.schedule.lr_decay_samples == 100 and config.schedule.lr_decay_iters is None
    with pytest.raises(ValueError, match="--lr-decay-iters does not go with --train-samples"):
        parse("--train-samples", "100", "--lr-decay-iters", "10", without=("--train-iters",))
    with pytest.raises(ValueError, match="--lr-warmup-samples 100: must be less .* --train-samples 100"):
        parse("--train-samples", "100", "--lr-warmup-samples", "100", without=("--train-iters",))


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        ("--save", "file/below"),
        ("--save", "file"),
        ("--tensorboard-dir", "file/below/it"),
        ("--metrics-file", "file/m.jsonl"),
        ("--metrics-file", "."),
        ("--load", "file"),
        ("--wandb-save-dir", "file"),
    ],
)
def test_place_that_cannot_be_written(flag: str, name: str, tmp_path: Path) -> None:
    """Would expose a run that trains for hours and then can't save: permission bits alone don't stop root."""
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ValueError, match=f"^{flag} "):
        parse(flag, str(tmp_path / name))
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs Linux's /proc, where nobody can create a file")
def test_folder_that_refuses_files() -> None:
    """Would expose a check that asks for permission bits, which root always has, instead of writing."""
    with pytest.raises(ValueError, match=r"^--save /proc/self/x can't be written \("):
        parse("--save", "/proc/self/x")


def test_temporary_folder_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data workers whose first sample cannot be sent, so that the run waits for it without end."""
    folder = "/tmp/" + 71 * "x"
    monkeypatch.setattr(tempfile, "tempdir", folder)
    with pytest.raises(ValueError, match=f"^TMPDIR {folder} is too long .* at most 75 characters, or --num-workers 0"):
        parse("--num-workers", "1")
    parse("--num-workers", "0")
    monkeypatch.setattr(tempfile, "tempdir", folder[:-1])
    parse("--num-workers", "1")


def test_good_places_are_left_alone(tmp_path: Path) -> None:
    """Would expose a check that leaves its probe behind, or makes folders before the run does."""
    parse("--save", str(tmp_path / "a/b"), "--metrics-file", str(tmp_path / "c/m.jsonl"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_attention_heads", 3), ("recompute_granularity", "some")],
)
def test_core_refusal_is_one_line(field: str, value: object) -> None:
    """Would expose an assertion of Megatron Core, in a rule that is not repeated here, as a traceback."""
    config = parse("--tensor-model-parallel-size", "2", world_size=2)
    transformer = {**config.transformer, field: value}
    with pytest.raises(ValueError, match="^Megatron Core refuses these flags: ") as refusal:
        check_core_accepts(dataclasses.replace(config, transformer=transformer))
    assert "\n" not in str(refusal.value)


def test_all_problems_at_once() -> None:
    """Would expose a command line whose refusals come one at a time, or a rule that is broken and not listed."""
    words = "--num-experts 8 --fim-data --multi-latent-attention --foo --global-batch-size 3 --clip-grad -1"
    with pytest.raises(RefusedFlags) as refusal:
        parse(*words.split())
    first = ("--num-experts", "--fim-data", "--multi-latent-attention", "unknown flag --foo", "--clip-grad")
    assert [text.startswith(name) for text, name in zip(refusal.value.problems, first, strict=True)] == [True] * 5
    assert all(problem in str(refusal.value) for problem in refusal.value.problems)
    with pytest.raises(RefusedFlags) as refusal:
        parse("--foo", "--global-batch-size", "3", "--min-lr", "1")
    assert [text.split()[0] for text in refusal.value.problems] == ["unknown", "--global-batch-size", "--min-lr"]


# (flags that belong together, flags that have no effect beside them)
WITHOUT_EFFECT = [
    ("", "--save-interval 5"),
    ("", "--save-retain-interval 6"),
    ("", "--overwrite-checkpoints"),
    ("", "--log-progress"),
    ("", "--keep-last-checkpoints 2"),
    ("", "--save-hf-interval 3"),
    ("", "--exit-on-missing-checkpoint"),
    ("", "--ckpt-step 3"),
    ("", "--finetune"),
    ("", "--num-query-groups 2"),
    ("", "--use-rope-scaling"),
    ("--position-embedding-type none", "--rotary-percent 0.5"),
    ("", "--recompute-method uniform"),
    ("--recompute-activations", "--recompute-num-layers 1"),
    ("", "--distribute-saved-activations"),
    ("", "--recompute-modules mlp"),
    ("", "--recompute-memory-gib 1"),
    ("", "--overlap-cpu-optimizer-d2h-h2d"),
    ("", "--no-pin-cpu-grads"),
    ("", "--sgd-momentum 0.5"),
    ("--optimizer sgd", "--adam-beta1 0.8"),
    ("--optimizer sgd", "--no-decoupled-weight-decay"),
    ("--optimizer sgd", "--adam-moments-dtype bf16"),
    ("", "--muon-momentum 0.9"),
    ("", "--muon-no-split-qkv"),
    ("", "--overlap-param-gather"),
    ("--overlap-grad-reduce --no-use-distributed-optimizer", "--overlap-param-gather"),
    ("", "--grad-reduce-in-bf16"),
    ("--bf16", "--fp8-amax-history-len 4"),
    ("", "--decoupled-min-lr 1e-5"),
    ("", "--no-data-sharding"),
    ("--eval-iters 0", "--eval-fixed"),
    ("--split 100,0,0", "--full-validation"),
    ("", "--no-sft-packing"),
    ("", "--bcd-plateau-window 5"),
    ("", "--bcd-greedy-microbatches 2"),
    ("", "--bcd-resting-lr-ratio 0.1"),
    ("", "--bcd-prefix-cache-dtype bf16"),
    ("", "--bcd-prefix-cache-max-gib 1"),
    ("", "--no-log-loss-scale-to-tensorboard"),
    ("", "--moe-router-topk=2"),
    ("", "--error-injection-rate 0"),
    ("", "--tp-comm-overlap-cfg a b"),
    ("", "--main-params-dtype fp32"),
]


@pytest.mark.parametrize(("beside", "flag"), WITHOUT_EFFECT, ids=lambda words: words)
def test_flag_without_effect(beside: str, flag: str) -> None:
    """A recipe of stock that is stopped, a flag that changes the run all the same, or one ignored in silence."""
    words = [*(word for pair in BASE.items() for word in pair), *beside.split()]
    with_it = read_command_line([*words, *flag.split()], prog="test", world_size=1)
    assert with_it.config == read_command_line(words, prog="test", world_size=1).config
    assert flag.split()[0].split("=")[0] in with_it.notes[0]


def test_mock_data_have_no_validation_split() -> None:
    """A recipe of stock that is stopped, or an evaluation without end."""
    mock = {"without": ("--data-path",)}
    assert parse("--mock-data", "--full-validation", **mock) == parse("--mock-data", **mock)
    with pytest.raises(ValueError, match="--eval-iters -1"):
        parse("--mock-data", "--eval-iters", "-1", **mock)


def test_flags_without_effect_are_one_line() -> None:
    """A log or a speed-up that the user asked for and does not get, without being told."""
    words = [word for pair in BASE.items() for word in pair]
    words += ["--log-energy", "--straggler-ctrlr-port", "2", "--sequence-parallel", "--context-parallel-size", "1"]
    words += ["--use-precision-aware-optimizer", "--exp-avg-sq-dtype", "fp32", "--save-interval", "3"]
    command = read_command_line(words, prog="test", world_size=1)
    named = (
        "--log-energy",
        "--straggler-ctrlr-port",
        "--save-interval",
        "--use-precision-aware",
        "--sequence-parallel",
    )
    (note,) = command.notes
    assert [name for name in named if name not in note] == []
    assert command.config == parse()
    for level, is_named in (("0", True), ("1", False)):
        timed = read_command_line([*words, "--log-timers-to-tensorboard", "--timing-log-level", level], prog="test")
        assert ("--log-timers-to-tensorboard" in timed.notes[0]) == is_named


def test_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A precision that is asked for and not what Megatron Core is told; weights of 8 bits that passes outside of a step
    read although they are outdated."""
    monkeypatch.setattr(packages, "has_transformer_engine", lambda: True)
    words = ("--bf16", "--fp8-format", "hybrid", "--fp8-amax-history-len", "16", "--fp8-amax-compute-algo", "max")
    found = parse(*words).transformer
    assert found == parse("--bf16").transformer | {
        "fp8": "hybrid",
        "fp8_amax_history_len": 16,
        "fp8_amax_compute_algo": "max",
        "disable_parameter_transpose_cache": True,
    }


PRECISION_AWARE = ["--bf16", "--use-precision-aware-optimizer"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--bf16", "--exp-avg-dtype", "bf16"], ["--exp-avg-dtype bf16 needs --use-precision-aware", "--adam-moments"]),
        (["--bf16", "--main-grads-dtype", "bf16"], ["--main-grads-dtype bf16 needs", "--grad-reduce-in-bf16"]),
        ([*PRECISION_AWARE[1:], "--exp-avg-sq-dtype", "bf16"], ["--exp-avg-sq-dtype bf16 needs --bf16"]),
        ([*PRECISION_AWARE, "--exp-avg-dtype", "fp8"], ["--exp-avg-dtype fp8", "--adam-moments-dtype int8"]),
        ([*PRECISION_AWARE, "--exp-avg-dtype", "bf16", "--optimizer", "muon"], ["--exp-avg-dtype", "--optimizer muon"]),
        (
            [*PRECISION_AWARE, "--exp-avg-dtype", "fp16", "--adam-moments-dtype", "int8"],
            ["--exp-avg-dtype fp16 does not go with --adam-moments-dtype int8"],
        ),
        (
            [*PRECISION_AWARE, "--main-grads-dtype", "bf16", "--accumulate-allreduce-grads-in-fp32"],
            ["--main-grads-dtype bf16 and --accumulate-allreduce-grads-in-fp32"],
        ),
        ([*PRECISION_AWARE, "--exp-avg-dtype", "bf16"], ["needs Transformer Engine 2.1", "--adam-moments-dtype bf16"]),
    ],
)
def test_precision_aware_optimizer_is_refused(words: list[str], named: list[str]) -> None:
    """A precision that is asked for and not what the optimizer has."""
    with pytest.raises(RefusedFlags) as refusal:
        parse(*words)
    assert all(name in str(refusal.value) for name in named), str(refusal.value)


@pytest.mark.parametrize("is_there", [False, True])
def test_precision_aware_optimizer_is_taken(monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    """Transformer Engine's Adam where it is not, or not where it is; gradients reduced in another precision."""
    monkeypatch.setattr(packages, "has_precision_aware_adam", lambda: is_there)
    config = parse(*PRECISION_AWARE)
    assert config.is_precision_aware == is_there and config.ddp.grad_reduce_in_fp32
    words = [*(word for pair in BASE.items() for word in pair), *PRECISION_AWARE]
    notes = read_command_line(words, prog="test", world_size=1).notes
    assert any("--use-precision-aware-optimizer" in note for note in notes) != is_there
    assert not parse(*PRECISION_AWARE, "--main-grads-dtype", "bf16").ddp.grad_reduce_in_fp32
    for more in (["--optimizer", "sgd"], ["--adam-moments-dtype", "int8"]):
        assert not parse(*PRECISION_AWARE, *more).is_precision_aware
    if is_there:
        config = parse(*PRECISION_AWARE, "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "fp16")
        assert config.moment_dtypes == ("bf16", "fp16") and config.kept_moment_dtypes == ("bf16", "fp32")


def test_parameters_are_not_gathered_in_passes_of_chunks() -> None:
    """An overlap that interleaved chunks do not have, and that is passed over in silence."""
    words = [*(word for pair in BASE.items() for word in pair), "--pipeline-model-parallel-size", "2"]
    words += ["--overlap-grad-reduce", "--overlap-param-gather"]
    for chunks, is_on in (("1", True), ("3", False)):
        command = read_command_line([*words, VIRTUAL, chunks], prog="test", world_size=2)
        assert command.config.ddp.overlap_param_gather == command.config.optimizer.overlap_param_gather == is_on
        assert any("--overlap-param-gather" in note for note in command.notes) != is_on


VIRTUAL, LAYERS = "--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage"


@pytest.mark.parametrize(
    ("words", "layout", "num_chunks"),
    [
        ((LAYERS, "3"), "spread", 1),
        ((LAYERS, "1"), "interleaved", 3),
        ((VIRTUAL, "1"), "spread", 1),
        ((VIRTUAL, "3", "--bcd-num-blocks", "1"), "interleaved", 3),
        ((VIRTUAL, "2"), "interleaved", 3),
        ((VIRTUAL, "5", "--num-layers", "12"), "interleaved", 3),
        ((VIRTUAL, "4", "--num-layers", "8", "--bcd-num-blocks", "2"), "interleaved", 4),
        (("--bcd-layout", "interleaved"), "interleaved", 3),
        (("--bcd-layout", "interleaved", VIRTUAL, "2", "--bcd-num-blocks", "2"), "interleaved", 2),
    ],
)
def test_chunks_of_a_stage(words: tuple[str, ...], layout: str, num_chunks: int) -> None:
    """Would expose interleaving that is dropped, a virtual stage as long as the stage that is taken for it, chunks that
    belong to two blocks, or another number of them than was asked for without being told."""
    base = (word for pair in BASE.items() for word in pair)
    command = read_command_line([*base, "--pipeline-model-parallel-size", "2", *words], prog="test", world_size=2)
    assert (command.config.bcd.bcd_layout, command.config.num_chunks) == (layout, num_chunks)
    is_rounded = words[0] == VIRTUAL and int(words[1]) != num_chunks
    assert bool(command.notes) == is_rounded


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((LAYERS, "2"), "^--num-layers-per-virtual-pipeline-stage 2: must divide the layers of a pipeline stage"),
        ((LAYERS, "1", VIRTUAL, "3"), "say the same: give one of them"),
        ((VIRTUAL, "3", "--bcd-layout", "spread"), "do not go with --bcd-layout spread"),
        ((VIRTUAL, "3", "--bcd-schedule", "stock"), "does not go with --bcd-schedule stock"),
        ((VIRTUAL, "3", "--bcd-run-ahead", "1"), "does not go with --bcd-run-ahead"),
        ((VIRTUAL, "0"), "^--num-virtual-stages-per-pipeline-rank 0: must be at least 1"),
    ],
)
def test_refused_chunks(words: tuple[str, ...], message: str) -> None:
    """Would expose chunks that belong to two blocks, or a flag that is taken and ignored."""
    with pytest.raises(ValueError, match=message):
        parse("--pipeline-model-parallel-size", "2", *words, world_size=2)


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--num-key-value-heads", "--num-query-groups"),
        ("--zero-stage", "--use-distributed-optimizer"),
        ("--learning-rate", "did you mean --lr?"),
        ("--hiden-size", "did you mean --hidden-size?"),
        ("--wombat", "--help lists all flags"),
    ],
)
def test_suggestions(flag: str, words: str) -> None:
    """Would expose a suggestion that has nothing to do with the flag, or a known name without one."""
    with pytest.raises(ValueError, match=f"^unknown flag {flag}; ") as refusal:
        parse(flag, "1")
    assert words in str(refusal.value)


@pytest.mark.parametrize("flag", ["--num-layers", "--hidden-size", "--bcd-num-blocks", "--seed"])
def test_absurd_number_is_one_line(flag: str) -> None:
    """Would expose a number too large for Python's ranges that ends in a traceback."""
    with pytest.raises(ValueError, match=f"^{flag} 9+: must be at most"):
        parse(flag, "9" * 20)
