"""Flags: generated ones, what follows from them, presets, help."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from support.command_line import BASE, PROG, parse

from megatron.bcd.arguments import parse_run_config, run_config_from_dict, run_config_to_dict
from megatron.bcd.arguments.flag_tables import flag_tables
from megatron.bcd.arguments.flags import CORE_SECTIONS, dashed, generate_flags
from megatron.bcd.arguments.stock import UNSUPPORTED, stock_flags, why_unsupported
from megatron.bcd.config import RunConfig, core_keywords

# examples/gpt3/train_gpt3_175b_distributed.sh of Megatron-LM, with --rampup-batch-size as there
GPT3_RECIPE = """
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048
    --max-position-embeddings 2048 --attention-backend auto
    --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375 --train-iters 500000
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16
    --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16
    --data-path DATA --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --split 949,50,1
    --log-interval 100 --save-interval 10000 --eval-interval 1000 --save FOLDER --load FOLDER --eval-iters 10
    --tensorboard-dir FOLDER
"""

LLAMA_RECIPE = """
    --use-mcore-models --swiglu --normalization RMSNorm --position-embedding-type rope --rotary-base 500000
    --untie-embeddings-and-output-weights --disable-bias-linear --group-query-attention --num-query-groups 2
    --no-position-embedding --attention-dropout 0 --hidden-dropout 0 --bf16 --use-distributed-optimizer
    --overlap-grad-reduce --overlap-param-gather --ckpt-format torch_dist --manual-gc
    --no-create-attention-mask-in-dataloader --cross-entropy-loss-fusion --calculate-per-token-loss
    --norm-epsilon 1e-6 --no-load-optim --no-load-rng
"""


def values_of(config: RunConfig) -> dict[str, Any]:
    return {
        (section, field): value
        for section, values in run_config_to_dict(config).items()
        for field, value in values.items()
    }


def test_gpt3_recipe_parses_with_bcd_flags(tmp_path: Path) -> None:
    """A flag of Megatron-LM's own GPT-3 example that is missing, or a rule that refuses it."""
    words = GPT3_RECIPE.replace("FOLDER", str(tmp_path / "run")).split()
    config = parse_run_config([*words, "--bcd-num-blocks", "2"], prog=PROG, world_size=128)
    assert config.precision == "fp16" and config.optimizer.fp16 is True
    assert config.tokenizer.tokenizer_type == "GPT2BPETokenizer"
    assert config.training.rampup_batch_size == (16, 16, 5859375)
    assert config.schedule.lr_decay_iters == 430000 and config.schedule.lr_warmup_fraction == 0.001
    assert config.training.check_for_nan_in_loss_and_grad is False  # dynamic loss scaling
    assert config.bcd.bcd_num_blocks == 2
    assert not list(tmp_path.iterdir())


def test_llama_recipe_parses() -> None:
    """A missing flag of LLaMA-style recipes, or stock's rule for the inner width of SwiGLU."""
    config = parse(*LLAMA_RECIPE.split())
    transformer = config.transformer
    assert transformer["ffn_hidden_size"] == int(4 * 64 * 2 / 3 / 64) * 64 == 128
    assert transformer["num_query_groups"] == 2 and transformer["normalization"] == "RMSNorm"
    assert transformer["add_bias_linear"] is False and transformer["add_qkv_bias"] is False
    assert transformer["bias_activation_fusion"] is True and transformer["apply_rope_fusion"] is True
    assert transformer["layernorm_epsilon"] == 1e-6
    assert config.model.rotary_base == 500000 and not config.tied
    assert config.ddp.overlap_param_gather is config.optimizer.overlap_param_gather is True
    assert config.ddp.grad_reduce_in_fp32 is True


def test_stock_defaults() -> None:
    """A default that differs from stock Megatron-LM core_v0.16.1, and so another curve."""
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
    optimizer = {
        "weight_decay": 0.01,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_eps": 1e-8,
        "clip_grad": 1.0,
    }
    optimizer |= {"min_lr": 0.0, "initial_loss_scale": 2.0**32, "min_loss_scale": 1.0, "hysteresis": 2}
    assert {field: getattr(config.optimizer, field) for field in optimizer} == optimizer
    assert config.ddp.grad_reduce_in_fp32 is False and config.ddp.check_for_nan_in_grad is False
    assert config.training.global_batch_size == 2 and config.training.seed == 1234
    assert config.training.eval_iters == 100 and config.data.num_workers == 2
    assert config.schedule.lr_decay_style == "linear" and config.schedule.lr_decay_iters == 10
    assert config.schedule.start_weight_decay == config.schedule.end_weight_decay == 0.01
    assert config.model.max_position_embeddings == 32


def _words(flags: dict[str, Any]) -> list[str]:
    """A stock run's argument names and values as its command line."""
    words: list[str] = []
    for name, value in flags.items():
        if value is True:
            words.append(dashed(name))
        elif value is False:
            words.append("--no-" + dashed(name)[2:].replace("apply-", ""))
        else:
            words += [dashed(name), str(value)]
    return words


def test_flags_of_the_reference_runs(reference: dict[str, Any]) -> None:
    """A flag of the runs that this project must equal that is missing, or sets another value."""
    platform = {name: value for name, value in reference["platform_flags"].items() if name != "note"}
    for run in reference["runs"].values():
        flags = {**reference["flags"], **platform, **run["extra_flags"]}
        words = [*_words(flags), "--data-path", "x", "--bcd-num-blocks", "1"]
        words += ["--vocab-file", "v", "--merge-file", "m"]
        config = parse_run_config(words, prog=PROG, world_size=run["world_size"])
        values = {field: value for (_, field), value in values_of(config).items()}
        special = {"legacy_tokenizer", "bias_gelu_fusion", "bias_swiglu_fusion", "disable_bias_linear"}
        special |= {"group_query_attention"}
        assert {name: values[name] for name in flags if name not in special} == {
            name: value for name, value in flags.items() if name not in special
        }
        assert values["bias_activation_fusion"] is False
        assert values["add_bias_linear"] is not flags.get("disable_bias_linear", False)


@pytest.mark.parametrize(
    ("extra", "section", "field", "value"),
    [
        (["--bf16"], "ddp", "grad_reduce_in_fp32", True),
        (["--bf16", "--grad-reduce-in-bf16"], "ddp", "grad_reduce_in_fp32", False),
        (["--bf16"], "optimizer", "bf16", True),
        (["--fp16"], "ddp", "grad_reduce_in_fp32", False),
        (["--fp16"], "training", "check_for_nan_in_loss_and_grad", False),
        (["--fp16", "--loss-scale", "128"], "training", "check_for_nan_in_loss_and_grad", True),
        (["--no-use-distributed-optimizer"], "optimizer", "use_distributed_optimizer", False),
        (["--no-use-distributed-optimizer"], "ddp", "use_distributed_optimizer", False),
        (["--disable-bias-linear"], "transformer", "bias_activation_fusion", False),
        (["--no-bias-gelu-fusion"], "transformer", "bias_activation_fusion", False),
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
    """A flag that sets one of several fields only, or the wrong one."""
    without = ("--data-path", "--tokenizer-type") if "--mock-data" in extra else ()
    assert values_of(parse(*extra, without=without))[section, field] == value


def test_script_defaults_can_be_switched_back() -> None:
    """A script's default (LLaMA's SwiGLU) that no flag can undo."""
    defaults: dict[str, object] = {"swiglu": True, "normalization": "RMSNorm", "add_bias_linear": False}
    config = parse(defaults=defaults)
    assert config.model.swiglu and config.transformer["normalization"] == "RMSNorm"
    assert config.transformer["add_bias_linear"] is False
    config = parse("--no-swiglu", "--add-bias-linear", "--normalization", "LayerNorm", defaults=defaults)
    assert not config.model.swiglu and config.transformer["add_bias_linear"] is True
    with pytest.raises(ValueError, match="no_such_field"):
        parse(defaults={"no_such_field": 1})


def test_core_flags_set_their_fields() -> None:
    """A flag whose values have another type than Megatron Core's field, or miss it."""
    texts = {int: "3", float: "0.5", str: "text"}
    for flag in generate_flags():
        if flag.section not in CORE_SECTIONS or flag.type is bool:
            continue
        value = flag.type(str(flag.choices[-1]) if flag.choices else texts[flag.type])
        default = CORE_SECTIONS[flag.section][0].__dataclass_fields__[flag.field].default
        assert default is None or isinstance(default, (int, float) if flag.type in (int, float) else object)
        assert flag.help and isinstance(value, flag.type)


OURS = {name for flag in generate_flags() for name in (*flag.names, *flag.off_names)}


def test_every_flag_of_stock_is_accepted_or_in_the_table() -> None:
    """A flag of the list that is taken for a typing error, or one of the table that nobody can give."""
    for name in sorted(stock_flags() - OURS)[::7]:
        if why_unsupported(name) is None:
            assert parse(name, "1") == parse(), name
        else:
            with pytest.raises(ValueError, match=f"^{name} "):
                parse(name, "9")
    starts = " ".join(UNSUPPORTED.values()).split()
    fields = [dashed(field.name) for core, _ in CORE_SECTIONS.values() for field in dataclasses.fields(core)]
    assert [start for start in starts if not any(name.startswith(start) for name in (*stock_flags(), *fields))] == []


def test_flag_names_are_stocks() -> None:
    """A misspelt name: every flag is stock Megatron-LM's, a --bcd- one, or listed here."""
    ours = {
        "--adam-moments-dtype",
        "--cpu-kernels",
        "--eval-fixed",
        "--keep-last-checkpoints",
        "--load-hf",
        "--max-skipped-steps",
        "--metrics-file",
        "--muon-grad-dtype",
        "--muon-momentum-dtype",
        "--no-sft-packing",
        "--no-use-distributed-optimizer",
        "--num-epochs",
        "--overwrite-checkpoints",
        "--pipeline-cut",
        "--recompute",
        "--recompute-memory-gib",
        "--save-hf",
        "--save-hf-interval",
        "--sft-drop-long",
        "--sft-prompt-format",
    }
    ours.add("--no-decoupled-weight-decay")  # not among the flags of core_v0.16.1, which has the field
    shown = {flag.shown for flag in generate_flags()}
    unknown = {name for name in shown - stock_flags() - ours if not name.startswith("--bcd-")}
    assert unknown == set()


def test_run_config_survives_json() -> None:
    """A value that is not plain, or a tuple that comes back as a list."""
    config = parse("--global-batch-size", "4", "--rampup-batch-size", "2", "2", "8", "--data-path", "1", "a", "2", "b")
    assert run_config_from_dict(json.loads(json.dumps(run_config_to_dict(config)))) == config
    broken = run_config_to_dict(config)
    broken["bcd"]["bcd_flavour"] = 1
    with pytest.raises(ValueError, match="bcd has no field bcd_flavour"):
        run_config_from_dict(broken)
    del broken["bcd"]
    with pytest.raises(ValueError, match="must have the sections"):
        run_config_from_dict(broken)


@pytest.mark.parametrize("extra", [(), ("--fp16", "--loss-scale", "128", "--decoupled-lr", "0.1"), ("--skip-train",)])
def test_core_keywords_are_what_the_flags_set(extra: tuple[str, ...]) -> None:
    """A typed section with another set of fields than its flags, or a None that hides Megatron Core's
    default."""
    config = parse(*extra)
    written = json.loads(json.dumps(run_config_to_dict(config)))
    derived = {
        "optimizer": {"use_distributed_optimizer", "use_precision_aware_optimizer", "fp16", "bf16"}
        | {"overlap_param_gather"},
        "ddp": {"use_distributed_optimizer", "check_for_nan_in_grad"},
    }
    for section, settings in (("optimizer", config.optimizer), ("ddp", config.ddp)):
        core, keywords = CORE_SECTIONS[section][0], core_keywords(settings)
        set_by_flags = {flag.field for flag in generate_flags() if flag.section == section}
        assert {field.name for field in dataclasses.fields(settings)} == set_by_flags | derived[section]
        assert keywords == written[section] and None not in keywords.values()
        built = core(**keywords)
        assert {field: getattr(built, field) for field in keywords} == keywords


def test_world_size_comes_from_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """A data parallel size that ignores torchrun."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    words = [word for item in BASE.items() for word in item]
    assert parse_run_config(words, prog=PROG).training.global_batch_size == 6


def test_help_shows_every_flag(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag without a group or help, or help that fails in a narrow terminal."""
    for columns in ("60", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        with pytest.raises(SystemExit) as left:
            parse_run_config(["--foo", "--help"], prog=PROG)
        assert left.value.code == 0
        text = capsys.readouterr().out
        assert all(flag.shown in text for flag in generate_flags())
        assert max(len(line) for line in text.splitlines()) <= 120


def test_field_names_are_unique() -> None:
    """Two sections with a field of one name, of which one flag could set only one."""
    names = [flag.field for flag in generate_flags()]
    assert len(names) == len(set(names))


def test_the_whole_validation_split_by_its_other_name() -> None:
    """An evaluation without end, or none."""
    assert parse("--eval-iters", "-1") == parse("--full-validation")
    assert parse("--eval-iters", "-1", "--split", "100,0,0") == parse("--split", "100,0,0")


def test_the_whole_validation_split_beside_weights() -> None:
    """A refusal of weights that are for the training data alone."""
    paths = ("--train-data-path", "1", "a", "2", "b", "--valid-data-path", "c", "d")
    assert parse("--full-validation", *paths, without=("--data-path",)).training.full_validation


def test_preset_sets_what_is_not_given() -> None:
    """A preset that overrules a flag, or that is given up as a whole where one flag differs."""
    plain, pretrain = parse().bcd, parse("--bcd-preset", "pretrain")
    assert (plain.bcd_preset, plain.bcd_resting_update) == (None, "none")
    assert pretrain.bcd.bcd_resting_update == "orthogonal" and pretrain.optimizer.optimizer == "muon"
    assert pretrain.bcd.always_active == {"norms", "biases", "embedding", "head"}
    own = parse("--bcd-preset", "pretrain", "--optimizer", "adam", "--bcd-steps-per-block", "7")
    assert (own.optimizer.optimizer, own.bcd.bcd_steps_per_block) == ("adam", 7)
    assert own.bcd.bcd_resting_update == "orthogonal" and not own.optimizer.muon_use_nesterov
    full = parse("--bcd-preset", "pretrain", "--bcd-num-blocks", "1")
    assert full.bcd.bcd_resting_update == "none" and full.optimizer.optimizer == "muon"


def test_paper_preset_is_the_default() -> None:
    """A changed default that silently changes the published method."""
    named = parse("--bcd-preset", "paper")
    assert (
        dataclasses.replace(named, bcd=dataclasses.replace(named.bcd, bcd_preset=None, bcd_always_active=None))
        == parse()
    )


def test_preset_finetune() -> None:
    """A number of blocks that is not the layers of a stage, or that overrules a given one; an active head that is tied
    to the frozen embedding, or that a given flag freezes."""
    finetune = parse("--bcd-preset", "finetune", "--num-layers", "8")
    assert finetune.bcd.bcd_num_blocks == 8 and finetune.bcd.frozen == {"embedding", "head"}
    assert finetune.bcd.always_active == set()
    untied = parse("--bcd-preset", "finetune", "--untie-embeddings-and-output-weights").bcd
    assert untied.frozen == {"embedding"} and untied.always_active == {"head"}
    words = ("--bcd-preset", "finetune", "--untie-embeddings-and-output-weights", "--bcd-frozen", "embedding,head")
    assert parse(*words).bcd.always_active == set()
    assert (finetune.bcd.bcd_order, finetune.bcd.bcd_optimizer_state) == ("random", "reset")
    words = ("--bcd-preset", "finetune", "--num-layers", "7", "--pipeline-model-parallel-size", "2")
    assert parse(*words, world_size=2).bcd.bcd_num_blocks == 3
    assert parse("--bcd-preset", "finetune", "--bcd-num-blocks", "2").bcd.bcd_num_blocks == 2


def test_frozen_parts() -> None:
    """A tied head that stays trained without its embedding; a default of always-active parts that contradicts."""
    tied = parse("--bcd-frozen", "head", "--bcd-resting-update", "sign").bcd
    assert tied.frozen == {"embedding", "head"} and tied.always_active == {"norms", "biases"}
    untied = parse(
        "--bcd-frozen", "embedding", "--bcd-resting-update", "sign", "--untie-embeddings-and-output-weights"
    ).bcd
    assert untied.frozen == {"embedding"} and untied.always_active == {"norms", "biases", "head"}
    assert parse().bcd.frozen == frozenset()


def test_a_conflict_with_a_preset_names_it() -> None:
    """A message about a flag that nobody typed."""
    with pytest.raises(ValueError, match="--bcd-resting-update orthogonal and --fp16") as error:
        parse("--bcd-preset", "pretrain", "--optimizer", "adam", "--fp16")
    assert "--bcd-resting-update from --bcd-preset pretrain" in str(error.value)


def test_document_has_the_tables(repo_root: Path) -> None:
    """A flag that was added to a table, or removed, and docs/flags.md that still says otherwise."""
    text = (repo_root / "docs" / "flags.md").read_text(encoding="utf-8")
    assert text.endswith(flag_tables() + "\n")
