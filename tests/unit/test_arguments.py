"""Flags: generated ones, derived values, presets, those of a checkpoint, and the defaults of the LLaMA script."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import PROG, parse

from megatron.bcd.arguments import FAMILY_DEFAULTS, parse_run_config, run_config_from_dict, run_config_to_dict
from megatron.bcd.arguments.flags import CORE_SECTIONS, dashed, generate_flags
from megatron.bcd.arguments.stock import UNSUPPORTED, stock_flags, why_unsupported
from megatron.bcd.arguments.validate import CONFLICTS
from megatron.bcd.checkpoint.layout import RUN_STATE
from megatron.bcd.checkpoint.run_state import (
    FORMAT_VERSION,
    RunState,
    check_same_network,
    check_same_weights,
    from_json,
    has_same_optimizers,
)
from megatron.bcd.config import RunConfig
from megatron.bcd.config.sections import ALWAYS_ACTIVE
from megatron.bcd.model.implementation import available_implementation
from megatron.bcd.model.transformer_config import build_transformer_config, describe_activation, tanh_gelu
from megatron.bcd.runtime import device, packages


def test_stock_defaults() -> None:
    """The defaults are those of stock Megatron-LM core_v0.16.1."""
    config = parse()
    transformer = config.transformer
    expected = {
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "init_method_std": 0.02,
        "layernorm_epsilon": 1e-5,
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "attention_softmax_in_fp32": False,
        "masked_softmax_fusion": True,
        "bias_dropout_fusion": True,
        "gradient_accumulation_fusion": True,
        "persist_layer_norm": True,
        "apply_rope_fusion": False,
        "bias_activation_fusion": True,
        "attention_backend": "auto",
    }
    assert {field: transformer[field] for field in expected} == expected
    assert not {"ffn_hidden_size", "kv_channels", "num_query_groups", "recompute_modules"} & set(transformer)
    optimizer = {"weight_decay": 0.01, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8, "clip_grad": 1.0}
    optimizer |= {"min_lr": 0.0, "initial_loss_scale": 2.0**32, "min_loss_scale": 1.0, "hysteresis": 2}
    assert {field: getattr(config.optimizer, field) for field in optimizer} == optimizer
    assert config.ddp.grad_reduce_in_fp32 is False and config.ddp.check_for_nan_in_grad is False
    assert config.training.global_batch_size == 2 and config.training.seed == 1234
    assert config.training.eval_iters == 100 and config.data.num_workers == 2
    assert config.schedule.lr_decay_style == "linear" and config.schedule.lr_decay_iters == 10
    assert config.schedule.start_weight_decay == config.schedule.end_weight_decay == 0.01
    assert config.model.max_position_embeddings == 32


@pytest.mark.parametrize(
    ("extra", "section", "field", "value"),
    [
        (["--swiglu"], "transformer", "ffn_hidden_size", 128),
        (["--bf16"], "ddp", "grad_reduce_in_fp32", True),
        (["--bf16", "--grad-reduce-in-bf16"], "ddp", "grad_reduce_in_fp32", False),
        (["--bf16"], "optimizer", "bf16", True),
        (["--fp16"], "ddp", "grad_reduce_in_fp32", False),
        (["--fp16"], "training", "check_for_nan_in_loss_and_grad", False),
        (["--fp16", "--loss-scale", "128"], "training", "check_for_nan_in_loss_and_grad", True),
        (["--swiglu", "--no-bias-gelu-fusion"], "transformer", "bias_activation_fusion", True),
        (["--swiglu", "--no-bias-swiglu-fusion"], "transformer", "bias_activation_fusion", False),
        (["--group-query-attention"], "transformer", "num_query_groups", 1),
        (["--recompute-activations"], "transformer", "recompute_granularity", "selective"),
        (["--use-rotary-position-embeddings"], "model", "position_embedding_type", "rope"),
        (["--no-check-for-nan-in-loss-and-grad"], "training", "check_for_nan_in_loss_and_grad", False),
        (["--disable-check-for-nan-in-loss-and-grad"], "training", "check_for_nan_in_loss_and_grad", False),
        (["--hidden-dropout=0"], "transformer", "hidden_dropout", 0.0),
        (["--accumulate-allreduce-grads-in-fp32"], "ddp", "grad_reduce_in_fp32", True),
        (["--overlap-grad-reduce", "--ddp-bucket-size", "7"], "ddp", "bucket_size", 7),
        (["--mock-data", "--vocab-size", "99"], "tokenizer", "tokenizer_type", "NullTokenizer"),
        (["--save", "out", "--persistent-save-interval", "3"], "checkpoint", "save_interval", 3),
    ],
)
def test_derived_values(extra: list[str], section: str, field: str, value: object) -> None:
    """Each flag sets the fields that are derived from it."""
    without = ("--data-path", "--tokenizer-type") if "--mock-data" in extra else ()
    values = getattr(parse(*extra, without=without), section)
    assert (values[field] if section == "transformer" else getattr(values, field)) == value


OURS = {name for flag in generate_flags() for name in (*flag.names, *flag.off_names)}


def test_every_flag_of_stock_is_accepted_or_in_the_table() -> None:
    """Each stock flag is accepted or refused by name, and each entry of the table matches a flag that exists."""
    for name in sorted(stock_flags() - OURS - {"--no-position-embedding"})[::13]:
        if why_unsupported(name) is None:
            assert parse(name, "1") == parse(), name
        else:
            with pytest.raises(ValueError, match=f"^{name} "):
                parse(name, "9")
    starts = " ".join(UNSUPPORTED.values()).split()
    fields = [dashed(field.name) for core, _ in CORE_SECTIONS.values() for field in dataclasses.fields(core)]
    assert [start for start in starts if not any(name.startswith(start) for name in (*stock_flags(), *fields))] == []


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("--tokenizer-modle", "--tokenizer-model"),
        ("--export-foo", ""),
        ("--spectral", ""),
        ("--num-expert", "--num-experts"),
    ],
)
def test_a_misspelt_flag_is_unknown(name: str, meant: str) -> None:
    """A misspelt flag is called unknown, even if a stock flag begins alike."""
    with pytest.raises(ValueError, match=f"^unknown flag {name}; .*{meant}"):
        parse(name, "1")


def test_run_config_survives_json() -> None:
    """A configuration survives JSON, and a field that another version had is left out."""
    config = parse("--global-batch-size", "4", "--rampup-batch-size", "2", "2", "8", "--data-path", "1", "a", "2", "b")
    assert run_config_from_dict(json.loads(json.dumps(run_config_to_dict(config)))) == config
    older = run_config_to_dict(config)
    older["bcd"]["bcd_flavour"] = 1
    assert run_config_from_dict(older) == config


def test_help_shows_every_flag(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """--help shows every flag in narrow and wide terminals, in lines of at most 120 columns."""
    for columns in ("60", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        with pytest.raises(SystemExit) as left:
            parse_run_config(["--foo", "--help"], prog=PROG)
        assert left.value.code == 0
        text = capsys.readouterr().out
        assert all(flag.shown in text for flag in generate_flags())
        assert max(len(line) for line in text.splitlines()) <= 120


def test_the_whole_validation_split_by_its_other_name() -> None:
    """--eval-iters -1 means --full-validation, and has no effect without a validation split."""
    assert parse("--eval-iters", "-1") == parse("--full-validation")
    assert parse("--eval-iters", "-1", "--split", "100,0,0") == parse("--split", "100,0,0")
    weighted = ["--train-data-path", "1", "a", "2", "b", "--valid-data-path", "c", "d"]  # of training data alone
    assert parse("--full-validation", *weighted, without=("--data-path",)).training.full_validation


def test_preset_sets_what_is_not_given() -> None:
    """A preset sets only the flags that are not given."""
    plain, pretrain = parse().bcd, parse("--bcd-preset", "pretrain")
    assert (plain.bcd_preset, plain.bcd_inactive_update) == (None, "none")
    assert pretrain.bcd.bcd_inactive_update == "orthogonal" and pretrain.optimizer.optimizer == "muon"
    assert pretrain.bcd.always_active == {"norms", "biases", "embedding", "head"}
    overridden = parse("--bcd-preset", "pretrain", "--optimizer", "adam", "--bcd-steps-per-block", "7")
    assert (overridden.optimizer.optimizer, overridden.bcd.bcd_steps_per_block) == ("adam", 7)
    assert overridden.bcd.bcd_inactive_update == "orthogonal" and not overridden.optimizer.muon_use_nesterov
    full = parse("--bcd-preset", "pretrain", "--bcd-num-blocks", "1")
    assert full.bcd.bcd_inactive_update == "none" and full.optimizer.optimizer == "muon"


def test_rate_of_inactive_updates_fits_their_rule() -> None:
    """The default rate of inactive updates is that of their rule, also under a preset."""
    for words, ratio in (
        (("--bcd-inactive-update", "factored"), 1.0),
        (("--bcd-preset", "pretrain", "--bcd-inactive-update", "factored"), 1.0),
        (("--bcd-preset", "pretrain"), 0.2),
        (("--bcd-inactive-update", "factored", "--bcd-inactive-lr-ratio", "0.5"), 0.5),
    ):
        assert parse(*words).bcd.bcd_inactive_lr_ratio == ratio


def state_of(flags: dict[str, Any]) -> str:
    """Return the text of a run_state.json with these flags."""
    state = {field.name: 0 for field in dataclasses.fields(RunState)}
    return json.dumps(state | {"flags": flags, "format_version": FORMAT_VERSION})


def test_state_that_updates_share() -> None:
    """A checkpoint's optimizer state is used by runs whose updates have the same kinds of state only."""
    words = ("--bcd-inactive-update", "orthogonal", "--bcd-inactive-grad-dtype", "fp32")
    saved = from_json(state_of(run_config_to_dict(parse(*words))), path="run_state.json")
    assert has_same_optimizers(saved, parse(*words, "--bf16")) and not has_same_optimizers(saved, parse("--bf16"))
    assert not has_same_optimizers(saved, parse(*words, "--bcd-embedding-update", "factored"))


@pytest.mark.parametrize(
    ("words", "schedule"),
    [
        ("", "bcd"),
        ("--bcd-layers-on host", "breadth-first"),
        ("--bcd-layers-on auto --bcd-num-blocks 1", "bcd"),
        ("--bcd-inactive-update factored", "bcd"),
        ("--bcd-inactive-update factored --bcd-layers-on host", "breadth-first"),
        ("--bcd-inactive-update orthogonal --bcd-layers-on auto", "breadth-first"),
        ("--bcd-schedule breadth-first", "breadth-first"),
    ],
)
def test_default_schedule(words: str, schedule: str) -> None:
    """The default schedule is breadth-first where layers may be in host memory, otherwise bcd."""
    config = parse(*words.split())
    assert config.bcd.bcd_schedule == schedule and config.is_breadth_first == (schedule == "breadth-first")


@pytest.mark.parametrize(
    ("words", "chunks", "size", "num_blocks"),
    [
        ("--bcd-schedule breadth-first", 6, 1, 3),
        ("--bcd-preset pretrain --bcd-schedule breadth-first --bcd-layers-per-pass 2 --bcd-num-blocks 3", 3, 2, 3),
        ("--bcd-schedule breadth-first --bcd-num-blocks 4", 4, 2, 4),
        ("--bcd-schedule breadth-first --num-virtual-stages-per-pipeline-rank 3", 3, 2, 3),
        ("--bcd-schedule breadth-first --num-layers-per-virtual-pipeline-stage 2", 3, 2, 3),
        ("--bcd-preset finetune --bcd-layers-on host --num-layers 13", 6, 2, 0),
        ("--bcd-preset finetune --bcd-layers-on host --bcd-layers-per-pass 6", 1, 6, 0),
    ],
)
def test_chunks_of_several_stages(words: str, chunks: int, size: int, num_blocks: int) -> None:
    """Flags and defaults set the chunks, the layers per pass, the blocks and the layout of a breadth-first pipeline."""
    config = parse("--num-layers", "12", "--pipeline-model-parallel-size", "2", *words.split(), world_size=2)
    assert (config.num_chunks, config.bcd.bcd_layers_per_pass, config.is_breadth_first) == (chunks, size, True)
    blocks = 3 if config.bcd.bcd_num_blocks is None else config.bcd.bcd_num_blocks
    assert blocks == num_blocks and config.bcd.bcd_layout == ("interleaved" if chunks > 1 else "spread")


def test_checkpoint_of_another_version() -> None:
    """A checkpoint with another format or other entries is refused with one line, which names the flag that helps."""
    values = json.loads(state_of(run_config_to_dict(parse())))
    without_name = {name: value for name, value in values.items() if name != "run"}
    for other, problem in ((values | {"format_version": 1}, "format version 1"), (without_name, r"entries \['run'\]")):
        with pytest.raises(ValueError, match=f"^run_state.json: {problem}.*--finetune"):
            from_json(json.dumps(other), path="run_state.json")


@pytest.mark.parametrize("name, value", [("window_size", [127, 0]), ("no_rope_freq", [1])])
def test_checkpoint_of_a_removed_network(name: str, value: Any) -> None:
    """A checkpoint of layers that only transformers has now is refused by name, for every use of its weights."""
    flags = run_config_to_dict(parse())
    flags["transformer"][name] = value
    problem = f"is of another network or optimizer .*--{name.replace('_', '-')} .*, here not given"
    with pytest.raises(ValueError, match=problem):
        check_same_network(flags, parse(), source="run_state.json")
    with pytest.raises(ValueError, match=problem):
        check_same_weights(state_of(flags), parse(), source="run_state.json")


ROPE, EXPERTS = "--position-embedding-type rope", "--num-experts 4 --disable-bias-linear"


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (ROPE, "--rotary-percent 0.5"),
        (ROPE, "--use-rope-scaling"),
        (ROPE + " --use-rope-scaling", "--rope-scaling-factor 32.0"),
        (EXPERTS, "--moe-router-score-function sigmoid"),
        (EXPERTS, "--moe-layer-freq 2"),
    ],
)
def test_weights_of_another_network_are_refused(words: str, flag: str) -> None:
    """--finetune, --skip-train and a resume refuse each flag of the network that the saving run had and this one lacks,
    or the other way round."""
    without, name = parse(*words.split()), flag.split()[0]
    with_flag = parse(*words.split(), *flag.split())
    for saved, now in ((without, with_flag), (with_flag, without)):
        flags = run_config_to_dict(saved)
        with pytest.raises(ValueError, match=f"is of another network or optimizer .*{name} "):
            check_same_weights(state_of(flags), now, source="run_state.json")
        with pytest.raises(ValueError, match=f"is of another network or optimizer .*{name} "):
            check_same_network(flags, now, source="run_state.json")
        check_same_weights(state_of(flags), saved, source="run_state.json")


def test_paper_preset_is_the_default() -> None:
    """Preset paper equals the defaults."""
    named = parse("--bcd-preset", "paper")
    assert (
        dataclasses.replace(named, bcd=dataclasses.replace(named.bcd, bcd_preset=None, bcd_always_active=None))
        == parse()
    )


BLOCKS = ("--bcd-preset", "finetune", "--bcd-inactive-update", "none")


def test_preset_finetune_with_blocks() -> None:
    """Preset finetune with blocks has one block per layer of a stage, and freezes a tied head with its embedding; given
    flags win."""
    finetune = parse(*BLOCKS, "--num-layers", "8")
    assert finetune.bcd.bcd_num_blocks == 8 and finetune.bcd.frozen == {"embedding", "head"}
    assert finetune.bcd.always_active == set()
    untied = parse(*BLOCKS, "--untie-embeddings-and-output-weights").bcd
    assert untied.frozen == {"embedding"} and untied.always_active == {"head"}
    words = (*BLOCKS, "--untie-embeddings-and-output-weights", "--bcd-frozen", "embedding,head")
    assert parse(*words).bcd.always_active == set()
    assert parse(*words[:5], "--bcd-head-phase").bcd.always_active == set()
    assert (finetune.bcd.bcd_order, finetune.bcd.bcd_optimizer_state) == ("random", "reset")
    words = (*BLOCKS, "--num-layers", "7", "--pipeline-model-parallel-size", "2")
    assert parse(*words, world_size=2).bcd.bcd_num_blocks == 3
    assert parse(*BLOCKS, "--bcd-num-blocks", "2").bcd.bcd_num_blocks == 2


@pytest.mark.parametrize(
    ("words", "embedding_update"),
    [
        ((), "factored"),
        (("--bcd-num-blocks", "0"), "factored"),
        (("--pipeline-model-parallel-size", "2"), "factored"),
        (("--decoupled-lr", "1e-4"), "adam"),
        (("--bcd-always-active", "norms"), "adam"),
        (("--bcd-embedding-update", "adam"), "adam"),
    ],
)
def test_preset_finetune(words: tuple[str, ...], embedding_update: str) -> None:
    """Preset finetune trains every part, and updates the embedding by factored updates unless a flag excludes them."""
    bcd = parse("--bcd-preset", "finetune", *words, world_size=2).bcd
    assert (bcd.bcd_num_blocks, bcd.bcd_inactive_update, bcd.bcd_inactive_lr_ratio) == (0, "factored", 1)
    assert (bcd.frozen, bcd.bcd_embedding_update) == (set(), embedding_update)
    assert bcd.always_active == ({"norms"} if "--bcd-always-active" in words else {*ALWAYS_ACTIVE})


EXCLUDING = (
    "--fp16",
    "--loss-scale 8 --fp16",
    "--optimizer-cpu-offload --bcd-num-blocks 1",
    "--bcd-main-params drop --bf16",
    "--bcd-head-phase --untie-embeddings-and-output-weights",
    "--bcd-prefix-cache cache --bcd-sample-ratio 0.5 --hidden-dropout 0 --attention-dropout 0",
    "--group-query-attention --num-query-groups 1 --tensor-model-parallel-size 2",
    "--bcd-num-blocks 2",
    "--bcd-frozen none",
    "--bcd-layout strided",
    "--bcd-order ascending",
    "--bcd-steps-per-block 3",
    "--optimizer muon",
)


@pytest.mark.parametrize("words", EXCLUDING)
def test_preset_finetune_takes_blocks(words: str) -> None:
    """A flag that excludes inactive updates makes preset finetune train without them."""
    assert parse("--bcd-preset", "finetune", *words.split(), world_size=4).bcd.bcd_inactive_update == "none"


def test_every_conflict_takes_blocks() -> None:
    """Each flag that conflicts with inactive updates has a case in EXCLUDING."""
    conflicts = [flag for flag, others in CONFLICTS.items() if "--bcd-inactive-update" in others.split()]
    known = {words.split()[0] for words in EXCLUDING}
    assert {re.split("!?=", flag)[0] for flag in (*conflicts, *CONFLICTS["--bcd-inactive-update"].split())} <= known


def test_frozen_parts() -> None:
    """A tied head is frozen with its embedding, and frozen parts are not always active."""
    tied = parse("--bcd-frozen", "head", "--bcd-inactive-update", "orthogonal").bcd
    assert tied.frozen == {"embedding", "head"} and tied.always_active == {"norms", "biases"}
    untied = parse(
        "--bcd-frozen", "embedding", "--bcd-inactive-update", "orthogonal", "--untie-embeddings-and-output-weights"
    ).bcd
    assert untied.frozen == {"embedding"} and untied.always_active == {"norms", "biases", "head"}
    assert parse().bcd.frozen == frozenset()


def test_use_checkpoint_args(tmp_path: Path) -> None:
    """--use-checkpoint-args takes the checkpoint's network; a given dropout wins, a contradicting flag is refused."""
    network = ("--group-query-attention", "--num-query-groups", "2", "--swiglu", "--disable-bias-linear")
    more = ("--position-embedding-type", "rope", "--rotary-base", "5000", "--hidden-dropout", "0")
    config = parse(*network, *more)
    folder = tmp_path / "iter_0000007"
    folder.mkdir()
    (folder / RUN_STATE).write_text(state_of(run_config_to_dict(config)))
    (folder / "checksums.json").write_text("{}")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    left_out = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--tokenizer-type")
    load = ("--use-checkpoint-args", "--load", str(tmp_path))
    result = parse(*load, "--hidden-dropout", "0.5", without=left_out)
    assert result.transformer == config.transformer | {"hidden_dropout": 0.5}
    assert (result.model, result.tokenizer) == (config.model, config.tokenizer)
    (folder / RUN_STATE).write_text(state_of(run_config_to_dict(parse("--swiglu"))))
    with pytest.raises(ValueError, match="--group-query-attention contradicts --use-checkpoint-args"):
        parse(*load, "--group-query-attention", without=left_out)
    (folder / RUN_STATE).unlink()
    for words, word in (
        (load, "only checkpoints of this program"),
        (load[:1], "--use-checkpoint-args: there is no --load"),
    ):
        with pytest.raises(ValueError, match=word):
            parse(*words)


# LLaMA's defaults by field: the words that the GPT script needs for each, and those that undo it in the LLaMA script
WORDS: dict[str, tuple[str, str]] = {
    "normalization": ("--normalization RMSNorm", "--normalization LayerNorm"),
    "position_embedding_type": ("--position-embedding-type rope", "--position-embedding-type learned_absolute"),
    "swiglu": ("--swiglu", "--no-swiglu"),
    "add_bias_linear": ("--disable-bias-linear", "--add-bias-linear"),
    "untie_embeddings_and_output_weights": (
        "--untie-embeddings-and-output-weights",
        "--no-untie-embeddings-and-output-weights",
    ),
    "hidden_dropout": ("--hidden-dropout 0", "--hidden-dropout 0.1"),
    "attention_dropout": ("--attention-dropout 0", "--attention-dropout 0.1"),
}


def parse_as(form: str, *words: str) -> RunConfig:
    return parse(*" ".join(words).split(), defaults=dict(FAMILY_DEFAULTS[form]))


@pytest.mark.parametrize("field", WORDS)
def test_each_default_can_be_undone(field: str) -> None:
    """Each default of LLaMA's can be undone alone."""
    undone = parse_as("llama", WORDS[field][1])
    assert undone == parse_as("gpt", *(on for name, (on, _) in WORDS.items() if name != field))
    assert undone != parse_as("llama")


@pytest.mark.parametrize(
    ("words", "on_cpu", "on_gpu"),
    [
        ((), "GELU", "GELU (tanh form)"),
        (("--no-bias-gelu-fusion",), "GELU", "GELU"),
        (("--disable-bias-linear",), "GELU", "GELU"),
        (("--openai-gelu",), "GELU (tanh form)", "GELU (tanh form)"),
        (("--openai-gelu", "--no-bias-gelu-fusion"), "GELU (tanh form)", "GELU (tanh form)"),
        (("--openai-gelu", "--disable-bias-linear"), "GELU (tanh form)", "GELU (tanh form)"),
        (("--swiglu",), "SwiGLU", "SwiGLU"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_gelu(words: tuple[str, ...], on_cpu: str, on_gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GELU has the form and the fusion that were asked for, and the run summary names its form."""
    for has_gpu, said in ((False, on_cpu), (True, on_gpu)):
        monkeypatch.setattr(device, "has_cuda", lambda has_gpu=has_gpu: has_gpu)
        monkeypatch.setattr(packages, "has_transformer_engine", lambda: False)
        config = parse(*words)
        built = build_transformer_config(config, available_implementation(config))
        function, is_fused = built.activation_func, built.bias_activation_fusion
        assert describe_activation(built) == said
        if "GELU" in said and not said.startswith("SwiGLU"):
            assert is_fused == (has_gpu and not {"--no-bias-gelu-fusion", "--disable-bias-linear"} & set(words))
            assert (function is tanh_gelu) == ("--openai-gelu" in words and not is_fused)
            assert function in (tanh_gelu, torch.nn.functional.gelu)
