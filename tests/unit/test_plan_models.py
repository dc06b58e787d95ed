"""tools/plan.py: models by config.json and by rows of the user, what fits where a plan does not, learning rates."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import plan
import pytest
import recipe
from plan import named_model
from support.fine_tuning import tokenizer_folder, write_records
from support.planned import CLUSTER, RUNS, recipe_of

from megatron.bcd.optim import update_rules
from megatron.bcd.planner import findings, state
from megatron.bcd.planner.cost import ModelShape
from megatron.bcd.planner.memory import fits, rank_memory
from megatron.bcd.planner.recipe import make_recipe
from megatron.bcd.planner.run_state import RunMemory
from megatron.bcd.planner.tensors import count_parameters

CARD = ("--gpu", "rtx4090", "--num-gpus", "1")
ON_DEVICE = ("--bcd-passes-on-host", "0")
COLUMNS = "name,form,layers,hidden,heads,groups,ffn,vocabulary,sequence,source"


def config(kind: str, layers: int, hidden: int, heads: tuple[int, int], ffn: int, vocabulary: int, **more: Any) -> Any:
    """A config.json of LLaMA's form."""
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads[0]}
    sizes |= {"num_key_value_heads": heads[1], "intermediate_size": ffn, "vocab_size": vocabulary}
    names = {"model_type": kind, "max_position_embeddings": 4096}
    return names | sizes | {"tie_word_embeddings": False} | more


GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_positions": 1024, "vocab_size": 50257}
PUBLISHED = {
    "GPT-2": (GPT2 | {"n_layer": 12, "n_embd": 768, "n_head": 12}, 124_439_808),
    "Llama-3-8B": (config("llama", 32, 4096, (32, 8), 14336, 128256), 8_030_261_248),
    "Qwen2.5-7B": (config("qwen2", 28, 3584, (28, 4), 18944, 152064), 7_615_616_512),
    "Qwen3-8B": (config("qwen3", 36, 4096, (32, 8), 12288, 151936, head_dim=128), 8_190_735_360),
    "Qwen3-0.6B": (
        config("qwen3", 28, 1024, (16, 8), 3072, 151936, head_dim=128, tie_word_embeddings=True),
        596_049_920,
    ),
    "SmolLM2-135M": (config("llama", 30, 576, (9, 3), 1536, 49152, tie_word_embeddings=True), 134_515_008),
    "Qwen3-30B-A3B": (
        config("qwen3_moe", 48, 2048, (32, 4), 6144, 151936, head_dim=128)
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        30_532_122_624,
    ),
    "Mixtral-8x7B": (
        config("mixtral", 32, 4096, (32, 8), 14336, 32000, num_local_experts=8, num_experts_per_tok=2),
        46_702_792_704,
    ),
    "gpt-oss-20b": (
        config("gpt_oss", 24, 2880, (64, 8), 2880, 201088, head_dim=64, num_local_experts=32, num_experts_per_tok=4)
        | {"quantization_config": {"quant_method": "mxfp4"}},
        20_914_757_184,
    ),
    "Mistral-7B": (config("mistral", 32, 4096, (32, 8), 14336, 32000), 7_241_732_096),
}
"""Public architectures, and their parameters as transformers counts them on the meta device."""
BIASES = config("llama", 6, 64, (4, 4), 96, 500, attention_bias=True, mlp_bias=True)


def folder(tmp_path: Path, content: Any, *, name: str = "published") -> Path:
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(json.dumps(content))
    return tmp_path / name


def shape_named(name: str, *, models: str | None) -> ModelShape:
    return make_recipe(model=named_model(name, models=models), cluster=CLUSTER, num_gpus=1).shape


def run(capsys: pytest.CaptureFixture[str], *flags: str | Path, code: int = 0) -> str:
    assert plan.main([str(flag) for flag in flags]) == code
    captured = capsys.readouterr()
    return captured.err if code == 2 else captured.out


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_by_its_config(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    """A plan by config.json has the parameters of the published model."""
    content, parameters = PUBLISHED[name]
    where = folder(tmp_path, content, name=name)
    if name == "GPT-2":
        whole = json.loads(run(capsys, "--model", where, *CARD, "--json"))
        assert whole["model"]["parameters"] == parameters and whole["model"]["name"] == name
    assert count_parameters(shape_named(str(where / "config.json"), models=None)) == parameters


def test_a_row_says_what_a_config_says(tmp_path: Path) -> None:
    """A row describes the model that its config.json describes, also in an older file; bad cells name their line."""
    where = folder(tmp_path, PUBLISHED["Qwen3-0.6B"][0])
    (tmp_path / "new.csv").write_text(
        f"{COLUMNS},head_dim,tied,biases,qk_norm\nmine,llama,28,1024,16,8,3072,151936,2048,x,128,yes,none,yes\n"
        "G-1.6B,llama,28,1024,16,8,3072,151936,2048,x,,,qkv,\n"
    )
    (tmp_path / "old.csv").write_text(f"{COLUMNS}\nmine,llama,28,1024,16,8,3072,151936,2048,x\n")
    shapes = [
        asdict(shape_named(name, models=str(tmp_path / file)))
        for name, file in ((str(where), "new.csv"), ("mine", "new.csv"), ("mine", "old.csv"), ("g-1.6b", "new.csv"))
    ]
    assert shapes[0] == shapes[1]
    assert shapes[2] | {"qkv_bias": True} == shapes[3] and not shapes[2]["tied"]
    for cells in ("maybe,none", "yes,some"):  # not planned as the default
        (tmp_path / "m.csv").write_text(f"{COLUMNS},tied,biases\nmine,llama,2,64,4,4,96,500,64,x,{cells}\n")
        with pytest.raises(ValueError, match="m.csv, line 2"):
            named_model("mine", models=str(tmp_path / "m.csv"))


def test_bad_models_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A model that cannot be planned is refused in one line that says why, or how else to give it."""
    broken = folder(tmp_path, {"model_type": "t5"})
    gpt = folder(tmp_path, GPT2 | {"n_layer": 6, "n_embd": 64, "n_head": 4, "n_positions": 96}, name="gpt")
    biases = folder(tmp_path, BIASES, name="biases")
    assert " --add-bias-linear " in run(capsys, "--model", biases, *CARD).replace("\n", " ")
    for flags, words in (
        (("--model", broken), ("t5 has an encoder",)),
        (("--model", tmp_path / "none" / "config.json"), ("config.json",)),
        (("--model", gpt, "--seq-length", "128"), ("--seq-length 128", "96")),
        (("--model", tmp_path), (f"--model {tmp_path}:", "config.json")),
        (("--model", "Qwen/Qwen3-8B"), ("--model Qwen/Qwen3-8B:", "hf download Qwen/Qwen3-8B")),
        (("--model", "/no/such/folder"), ("--model /no/such/folder:", "Give the folder of a model in Hugging Face")),
        (("--model", "Llama-3-8B"), ("--models", "config.json", "docs/planner.md", "LLaMA-7B")),
    ):
        error = run(capsys, *flags, *CARD, code=2)
        assert error.count("\n") == 1 and all(word in error for word in words), error
        assert "/" not in str(flags[1]) or "LLaMA-7B" not in error


def test_what_fits_on_one_card(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What fits on one card is offered beside more GPUs, every offer fits, and none contains another."""
    large = folder(tmp_path, PUBLISHED["Llama-3-8B"][0])
    flags = ("--task", "sft", "--model", large, *CARD, "--seq-length", "2048", "--micro-batch-size", "2")
    flags += ("--bcd-layers-on", "device", "--bcd-head-phase")
    offered = json.loads(run(capsys, *flags, "--json", code=1))["what_fits"]
    names = [{word for word in each["flags"].split() if word[:2] == "--"} for each in offered]
    assert not any(one < other for one in names for other in names)
    for each in offered:
        assert "torchrun" in run(capsys, *shlex.split(each["command"])[2:])
    assert {"--bcd-layers-on", "--bcd-frozen", "--adam-moments-dtype", "--num-gpus"} <= set().union(*names)


def test_frozen_layers_on_the_host(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A model with frozen layers on the host fits one card; copies take time only in short steps, and host memory is
    counted."""
    large = folder(tmp_path, PUBLISHED["Llama-3-8B"][0], name="large")
    flags = ("--task", "sft", *BLOCKS, "--model", large, *CARD, "--bcd-always-active", "head", "--json", *ON_DEVICE)
    found = json.loads(run(capsys, *flags))
    assert "--bcd-schedule breadth-first --bcd-layers-on host" in found["command"] and found["time"]["copy_share"] == 0
    assert found["memory"]["peak_bytes"] <= 0.95 * found["memory"]["available_bytes"]
    one, longer = (
        json.loads(run(capsys, *flags, "--global-batch-size", "1", "--seq-length", number))
        for number in ("512", "1024")
    )
    assert 0 < longer["time"]["copy_share"] < one["time"]["copy_share"] < 1
    searched = json.loads(run(capsys, *flags, "--search", "--method", "finetune"))["best"]
    assert "--bcd-layers-on host" in searched["command"]
    weights = 2 * 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096)
    expected = 2 * weights + 2 * 128256 * 4096
    assert found["memory"]["host_bytes"] == pytest.approx(expected, rel=1e-3), "low bits of main parameters; embedding"
    refused = run(capsys, *flags, "--bcd-layers-on", "host", "--recompute", "full", code=2)
    assert "--recompute full: --bcd-schedule breadth-first recomputes" in refused
    gb = (found["memory"]["host_bytes"] + found["memory"]["saving_bytes"]) / 1e9
    assert json.loads(run(capsys, *flags, "--host-memory-gb", f"{gb + 0.1:.1f}")) == found
    less = plan.parse_arguments([*map(str, flags), "--host-memory-gb", f"{gb / 2:.1f}"])
    assert not fits(plan.recipe_of(less))


def test_every_layer_with_layers_on_the_host(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A 14B model trains every layer if host memory suffices; only short steps wait for copies."""
    flags = ("--task", "sft", "--model", folder(tmp_path, LARGE["Qwen2.5-14B"][0]), *ON_DEVICE, *CARD, "--json")
    found = json.loads(run(capsys, *flags, "--host-memory-gb", "64"))
    command = found["command"].replace("\\\n    ", "")
    assert "--bcd-inactive-update factored --bcd-num-blocks 0" in command
    assert "--bcd-schedule breadth-first --bcd-layers-on host" in command and found["memory"]["fits"]
    layers = 48 * (2 * 5120 * 5120 + 2 * 5120 * 1024 + 3 * 5120 * 13824 + 7 * 1024)
    assert found["memory"]["host_bytes"] == pytest.approx(4 * layers, rel=1e-3)
    saving = 6 * 2 * 152064 * 5120 + 4 * 2 * 13824 * 5120  # embedding and head; the largest matrix of a layer in fp32
    assert found["memory"]["saving_bytes"] == pytest.approx(saving, rel=0.01)
    wide = (*flags[:-2], "4", "--json", "--bcd-inactive-update", "factored")
    four = json.loads(run(capsys, *wide, "--host-memory-gb", "128"))
    assert "--pipeline-model-parallel-size 4" in four["command"] and "breadth-first" in four["command"]
    shared = json.loads(run(capsys, *wide, "--pipeline-model-parallel-size", "1"))
    assert four["time"]["iteration_seconds"] < 0.8 * shared["time"]["iteration_seconds"], "gradients and weights"
    more, one = (
        json.loads(run(capsys, *flags, "--global-batch-size", number, "--bcd-saved-inputs", "host"))
        for number in ("32", "1")
    )
    assert more["time"]["copy_share"] == 0 < one["time"]["copy_share"]
    seconds = [each["time"]["iteration_seconds"] for each in (one, found, more)]
    copies = (2 + 4) * layers / 24e9  # to the device; those to host memory run at the same time
    assert copies < seconds[0] < 1.3 * copies + found["time"]["phases"][0]["optimizer"] + 1
    assert more["memory"]["host_bytes"] > found["memory"]["host_bytes"], "saved inputs"


def test_the_loss_without_logits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The linear loss, the run's default for large logits, saves recomputation. It is offered in place of another where
    a plan does not fit."""
    small = folder(tmp_path, PUBLISHED["Qwen3-0.6B"][0])
    flags = ("--task", "sft", *BLOCKS, "--model", small, *CARD, "--seq-length", "2048", "--micro-batch-size")
    native = ("--cross-entropy-fusion-impl", "native")
    assert "loss without logits" in run(capsys, *flags, "4") and "loss without" not in run(capsys, *flags, "4", *native)
    chosen, other = (json.loads(run(capsys, *flags, "8", "--json", *more)) for more in ((), native))
    assert "--cross-entropy" not in chosen["command"] and "--cross-entropy-fusion-impl native" in other["command"]
    assert [found["recipe"]["recompute"] for found in (chosen, other)] == ["none", "auto"]
    assert chosen["recipe"]["num_blocks"] < other["recipe"]["num_blocks"]
    text = ("--method", "bcd", "--precision", "bf16", *flags[4:], "8")
    offered = json.loads(run(capsys, *text, *native, "--json", code=1))["what_fits"]
    assert any("--cross-entropy-fusion-impl linear" in each["flags"] for each in offered)


@pytest.mark.parametrize("name", ["Llama-3-8B", "Qwen3-8B"])
def test_an_untied_head_is_always_active(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    """The head of blocks is always active; a separate phase in 8 bits, which flags ask for, needs less memory."""
    flags = ("--task", "sft", *BLOCKS, "--model", folder(tmp_path, PUBLISHED[name][0]), *CARD, *ON_DEVICE, "--json")
    small = ("--bcd-head-phase", "--adam-moments-dtype", "int8")
    always, phase = (json.loads(run(capsys, *flags, *more)) for more in ((), small))
    assert ["--bcd-layers-on host" in each["command"] for each in (always, phase)] == [True, name == "Qwen3-8B"]
    assert ["--bcd-head-phase" in each["command"] for each in (always, phase)] == [False, True]


BLOCKS = ("--bcd-inactive-update", "none")
LARGE = PUBLISHED | {"Qwen2.5-14B": (config("qwen2", 48, 5120, (40, 8), 13824, 152064), 0)}


def test_the_recipes_rate_is_the_plans(capsys: pytest.CaptureFixture[str]) -> None:
    """examples/finetune.sh and pretrain.sh train at the rate of the plan that they print."""
    for words in (("LLaMA-7B", "finetune", "rtx4090", "--num-gpus", "1"),
                  ("G-5.4B", "pretrain", "rtx4090"), ("G-5.4B", "paper", "rtx4090")):  # fmt: skip
        made = recipe.as_bash(*recipe.request_of(words, {}))
        [rate] = re.findall(r"^LEARNING_RATE=(\S+)$", made, re.MULTILINE)
        assert f"\nlearning rate {rate}, a guess: " in made


def test_no_cost_to_a_loss_that_was_not_reached(capsys: pytest.CaptureFixture[str]) -> None:
    """In fine-tuning only full training has a cost ratio; each other row names its loss, if measured."""
    flags = ("--task", "sft", "--model", "L-1.5B", "--gpu", "rtx4090", "--num-gpus", "4", "--compare")
    rows, text = json.loads(run(capsys, *flags, "--json")), run(capsys, *flags)
    names = {row["recipe"]["name"] for row in rows}
    streamed = {"full, streamed", "muon, streamed"}
    whole = {"finetune, factored", "finetune, orthogonal"}
    assert names == whole | {"full", "offload", "finetune", "paper", "pretrain"} | streamed
    for row in rows:
        assert (row["cost_ratio"] is None) == (row["recipe"]["method"] not in ("full", "offload"))
    for name in names - {"full", "offload", "full, streamed"}:
        result = (findings.FINE_TUNING | findings.LARGE_STEPS)[name.removesuffix(", streamed")]
        ends = f"loss {result.loss_text} at {result.place_text}" if result.loss else "not measured"
        assert any(line.startswith(f"{name} ") and line.endswith(ends) for line in text.splitlines()), name
        assert f"\n{name}, at equal epochs: " in text, "where it is from"


def test_a_loss_says_where_it_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """A plan sets the size and the steps of the measured model beside its own, and never says that a loss will be
    reached."""
    flags = ("--task", "sft", "--model", "L-1.5B", *CARD)
    text = run(capsys, *flags)
    assert "loss +0.8 % beside full training's, measured at 135M, 4,096 tokens a step (a new language" in text
    assert "; yours: 1.6B, 8,192\n" in text
    assert "measured at 135M, 256 to 512 tokens a step (" in run(capsys, *flags, "--global-batch-size", "1")
    assert "loss -7.1 % beside" in run(capsys, *flags, "--bcd-inactive-update", "orthogonal")
    view = plan.plan_view(plan.parse_arguments(flags))
    assert view["quality"][0] == "loss +0.8 % beside full training's"
    assert view["quality"][1].startswith("measured at 135M, ") and view["quality"][1].endswith("yours: 1.6B, 8,192")


def test_finetune_trains_every_layer_whatever_the_task(capsys: pytest.CaptureFixture[str]) -> None:
    """Preset finetune plans an inactive update of every layer whatever the task, and blocks only if flags ask."""
    flags = ("--model", "L-1.5B", *CARD, "--precision", "bf16", "--bcd-preset", "finetune")
    for more in ((), ("--search",)):
        text = run(capsys, *flags, *more).replace("\\\n    ", "")
        assert "--bcd-preset finetune --bcd-inactive-update factored --bcd-num-blocks 0" in text
    text = run(capsys, *flags, "--bcd-inactive-update", "orthogonal").replace("\\\n    ", "")
    assert "--bcd-embedding-update adam --bcd-inactive-lr-ratio 0.4" in text, "as it was measured"
    assert "--bcd-inactive-update none" in run(capsys, *flags, "--bcd-num-blocks", "6")
    large = ("--task", "sft", "--model", "LLaMA-7B", *CARD, "--method", "finetune", "--json")
    assert "--bcd-schedule breadth-first --bcd-layers-on host" in json.loads(run(capsys, *large))["command"]


def test_search_over_chunks_and_micro_batches(capsys: pytest.CaptureFixture[str]) -> None:
    """A search finds larger, faster chunks and micro-batches; given ones win, and without it memory stays free. What is
    left repeats fewer passes."""
    flags = ("--task", "sft", "--model", "LLaMA-7B", *CARD, "--method", "finetune", "--json")
    on_host, kept = (json.loads(run(capsys, *flags, *more)) for more in ((), ON_DEVICE))
    [number] = map(int, re.findall(r"--bcd-saved-activations auto --bcd-passes-on-host (\d+)", on_host["command"]))
    bytes_of_pass = (on_host["memory"]["host_bytes"] - kept["memory"]["host_bytes"]) / number
    assert 100e6 < bytes_of_pass < 1e9 and on_host["memory"]["peak_bytes"] < 0.951 * 23.6 * 2**30
    assert on_host["time"]["iteration_seconds"] < 0.98 * kept["time"]["iteration_seconds"]
    assert "--bcd-saved-activations auto --recompute-memory-gib 21.42" in kept["command"].replace("\\\n    ", "")
    flags = (*flags, "--bcd-saved-activations", "recompute")
    found = json.loads(run(capsys, *flags, "--search"))
    command = found["best"]["command"].replace("\\\n    ", "")
    assert "--bcd-schedule breadth-first --bcd-layers-on host --bcd-layers-per-pass 4" in command
    times = [row["time"]["iteration_seconds"] for row in found["methods"]]
    assert times == sorted(times) and {row["recipe"]["micro_batch_size"] for row in found["methods"]} != {1}
    usual = json.loads(run(capsys, *flags))
    assert usual["memory"]["peak_bytes"] < 0.7 * found["best"]["memory"]["peak_bytes"]
    assert times[0] < usual["time"]["iteration_seconds"] < 1.021 * times[0]
    assert kept["time"]["iteration_seconds"] < times[0] and kept["memory"]["peak_bytes"] < 0.951 * 23.6 * 2**30
    one = json.loads(run(capsys, *flags, "--bcd-layers-per-pass", "1", "--micro-batch-size", "2"))
    assert "layers-per-pass" not in one["command"] and one["recipe"]["micro_batch_size"] == 2


def test_the_host_limit_is_this_machines_memory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan must fit in this machine's memory, whatever its size, or in --host-memory-gb."""
    model = folder(tmp_path, LARGE["Qwen2.5-14B"][0] | {"num_hidden_layers": 12})
    flags = ("--task", "sft", "--model", model, *CARD, "--bcd-layers-on", "host")
    monkeypatch.setattr(plan, "memory_here", lambda: int(16e9))
    text = run(capsys, *flags, code=1)
    assert re.search(r"a node needs \d\d GB of host memory, also to save, more than this machine's 16", text)
    [enough] = re.findall(r"\n--host-memory-gb (\d\d) +1 ", text)
    memory = json.loads(run(capsys, *flags, "--host-memory-gb", enough, "--json"))["memory"]
    assert memory["fits"] and int(enough) == -int(-(memory["host_bytes"] + memory["saving_bytes"]) // 1e9)


def test_what_fits_on_the_same_gpus_comes_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A smaller micro-batch, more host memory and rounded main parameters are offered before more GPUs."""
    model = folder(tmp_path, PUBLISHED["Llama-3-8B"][0])
    flags = ("--task", "sft", "--model", model, *CARD, "--seq-length", "8192", "--micro-batch-size", "4")
    offered = json.loads(run(capsys, *flags, "--host-memory-gb", "48", "--json", code=1))["what_fits"]
    first = [each["flags"] for each in offered[: [each["flags"].split()[0] for each in offered].index("--num-gpus")]]
    assert first == ["--micro-batch-size 2", "--host-memory-gb 51", "--bcd-main-params drop"]


def test_dropped_main_parameters_need_no_host_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """--bcd-main-params drop saves 2 bytes per parameter of the blocks, is part of the command, and needs blocks."""
    flags = ("--task", "sft", "--model", "llama-7b", *CARD, "--bcd-layers-on", "host", *ON_DEVICE, "--json")
    kept = json.loads(run(capsys, *flags, *BLOCKS))
    dropped = json.loads(run(capsys, *flags, "--bcd-main-params", "drop"))
    layers = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    norms = (2 * 32 + 1) * 4096
    saved = kept["memory"]["host_bytes"] - dropped["memory"]["host_bytes"]
    assert saved == 2 * (layers + norms)
    assert "--bcd-main-params drop" in dropped["command"] and "--bcd-main-params" not in kept["command"]
    factored = ("--bcd-inactive-update", "factored", "--bcd-main-params", "drop")
    assert "--bcd-main-params drop: " in run(capsys, *flags, *factored, code=2)


def test_plans_with_experts_have_the_measured_time(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Time, speed and price are 5 times the formulas', as measured, and the micro-batch is the largest that fits."""
    model = folder(tmp_path, PUBLISHED["Qwen3-30B-A3B"][0] | {"num_hidden_layers": 4})
    flags = ("--model", model, "--gpu", "h200", "--num-gpus", "1", "--task", "sft")
    found = json.loads(run(capsys, *flags, "--json"))
    phases = [phase["total"] for phase in found["time"]["phases"]]
    seconds = 5 * sum(phases) / len(phases)
    assert found["time"]["iteration_seconds"] == pytest.approx(seconds)
    assert found["bill"]["days"] == pytest.approx(found["bill"]["iterations"] * seconds / 86400)
    assert found["recipe"]["micro_batch_size"] == found["memory"]["largest_micro_batch"] == 8
    assert "one H200 took for a quarter of Qwen3-30B-A3B; docs/experts.md" in run(capsys, *flags)
    dense = run(capsys, "--model", "G-1.6B", "--gpu", "a100", "--num-gpus", "1", "--json")
    time = json.loads(dense)["time"]
    assert time["iteration_seconds"] == pytest.approx(time["phases"][0]["total"])


def test_rows_of_an_update() -> None:
    """The planner counts the rows of an update as a run takes them."""
    assert state.ROWS_ELEMENTS == update_rules.ROWS_ELEMENTS


def test_places_that_the_trainer_chooses() -> None:
    """Saved inputs leave the device before layers do, as many layers stay as fit, and flags win."""
    flags = recipe_of({"num_layers": 12, "hidden_size": 256, "micro_batch_size": 1} | RUNS["breadth_first_streamed"])
    auto = flags.changed(bcd_layers_on="auto", bcd_saved_inputs="auto", bcd_resident_layers=0).memory

    def chosen(run: RunMemory, memory_bytes: float) -> tuple[str, int, str]:
        bcd = run.with_places(memory_bytes=memory_bytes).config.bcd
        return bcd.bcd_layers_on, bcd.bcd_resident_layers, bcd.bcd_saved_inputs

    def peak(*place: str | int) -> int:
        names = ("bcd_layers_on", "bcd_resident_layers", "bcd_saved_inputs")
        [rank] = rank_memory(flags.changed(**dict(zip(names, place, strict=True))))
        return rank.total - rank.framework

    order = [("device", 0, "device"), ("device", 0, "host"), ("host", 8, "device"), ("host", 0, "device")]
    order += [("host", 0, "host")]
    peaks = [peak(*place) for place in order]
    assert peaks == sorted(peaks, reverse=True) and [chosen(auto, size) for size in peaks] == order
    assert chosen(auto, peaks[0] - 1)[2] == "host" and chosen(auto, 0) == order[-1]
    on_host = flags.changed(bcd_saved_inputs="auto", bcd_resident_layers=2).memory
    assert chosen(on_host, peaks[0]) == ("host", 2, "device") and chosen(on_host, 0) == ("host", 2, "host")
    inputs = flags.changed(bcd_layers_on="auto", bcd_saved_inputs="device").memory
    assert chosen(inputs, peaks[1])[0] == "host"


def test_a_plan_of_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --data a plan takes three epochs of the records' sequences in place of Alpaca's, and prints the counts."""
    folder = tokenizer_folder(tmp_path / "model", None)
    (tmp_path / "model" / "config.json").write_text(json.dumps(config("llama", 2, 64, (4, 4), 128, 260)))
    good = [{"prompt": "p" * 20, "completion": "c" * 11, "id": i} for i in range(8)]
    data = write_records(tmp_path / "data.jsonl", [*good, {"prompt": "p", "completion": ""}])
    words = ["--task", "sft", "--model", folder, *CARD, "--seq-length", "64", "--global-batch-size", "2"]
    more = ["--data", data, "--sft-ignore-keys", "id"]
    assert plan.main([*words, *more]) == 0
    text = capsys.readouterr().out
    counts = "8 examples, 256 tokens in 4 sequences of 64; longest 32, 0 longer than a sequence, 1 bad"
    assert text.splitlines()[-1] == f"3 epochs of {data}: {counts}"
    assert "6 iterations" in text, "three epochs of four sequences, two a step"
    data = write_records(tmp_path / "data.jsonl", good[:7])  # a changed file is counted again
    assert plan.main([*words, *more]) == 0
    assert f"{data}: 7 examples" in capsys.readouterr().out
    for wrong, named in (
        ([*words, "--data", data], r"line 1 has 'id'.*--data needs at least one good record"),
        ([*words, *more, "--tokens", "1M"], r"--tokens 1e\+06: --data"),
        (["--model", "LLaMA-7B", *CARD, "--task", "sft", "--data", data], "--model LLaMA-7B has no tokenizer"),
        (["--model", folder, *CARD, "--data", data], "--task sft"),
        ([*words, "--data", "absent"], "--data absent: does not exist"),
    ):
        assert plan.main(wrong) == 2
        assert re.search(named, capsys.readouterr().err)
