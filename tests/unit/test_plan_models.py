"""tools/plan.py: models by config.json and by rows of the user, and what fits where a plan does not."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import plan
import pytest
import rtx4090
from plan import named_model

CARD = ("--gpu", "rtx4090", "--num-gpus", "1")
COLUMNS = "name,form,layers,hidden,heads,groups,ffn,vocabulary,sequence,source"


def config(kind: str, layers: int, hidden: int, heads: tuple[int, int], ffn: int, vocabulary: int, **more: Any) -> Any:
    """A config.json of LLaMA's form."""
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads[0]}
    sizes |= {"num_key_value_heads": heads[1], "intermediate_size": ffn, "vocab_size": vocabulary}
    name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[kind]
    names = {"architectures": [f"{name}ForCausalLM"], "model_type": kind, "max_position_embeddings": 4096}
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
    "Mistral-7B": (config("mistral", 32, 4096, (32, 8), 14336, 32000), 7_241_732_096),
}
"""Public architectures, and their parameters as transformers counts them on the meta device."""
BIASES = config("llama", 6, 64, (4, 4), 96, 500, attention_bias=True, mlp_bias=True)


def folder(tmp_path: Path, content: Any, *, name: str = "published") -> Path:
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(json.dumps(content))
    return tmp_path / name


def run(capsys: pytest.CaptureFixture[str], *flags: str | Path, code: int = 0) -> str:
    assert plan.main([str(flag) for flag in flags]) == code
    captured = capsys.readouterr()
    return captured.err if code == 2 else captured.out


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_by_its_config(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    """Heads wider than hidden size / heads, a tied head, norms of queries and keys, or Qwen2's biases that a plan
    leaves out without a word."""
    content, parameters = PUBLISHED[name]
    where = folder(tmp_path, content, name=name)
    whole = json.loads(run(capsys, "--model", where, "--gpu", "a100", "--num-gpus", "16", "--json"))
    assert whole["model"]["parameters"] == parameters and whole["model"]["name"] == name
    assert named_model(str(where / "config.json"), models=None).shape().num_parameters == parameters


def test_a_row_says_what_a_config_says(tmp_path: Path) -> None:
    """Columns that are read and not used; an older file without them that is refused."""
    where = folder(tmp_path, PUBLISHED["Qwen3-0.6B"][0])
    (tmp_path / "new.csv").write_text(
        f"{COLUMNS},head_dim,tied,biases,qk_norm\nmine,llama,28,1024,16,8,3072,151936,2048,x,128,yes,none,yes\n"
        "G-1.6B,llama,28,1024,16,8,3072,151936,2048,x,,,qkv,\n"
    )
    (tmp_path / "old.csv").write_text(f"{COLUMNS}\nmine,llama,28,1024,16,8,3072,151936,2048,x\n")
    shapes = [
        asdict(named_model(name, models=str(tmp_path / file)).shape())
        for name, file in ((str(where), "new.csv"), ("mine", "new.csv"), ("mine", "old.csv"), ("g-1.6b", "new.csv"))
    ]
    assert shapes[0] == shapes[1]
    assert shapes[2] | {"qkv_bias": True} == shapes[3] and not shapes[2]["tied"]
    for cells in ("maybe,none", "yes,some"):  # not planned as the default
        (tmp_path / "m.csv").write_text(f"{COLUMNS},tied,biases\nmine,llama,2,64,4,4,96,500,64,x,{cells}\n")
        with pytest.raises(ValueError, match="m.csv, line 2"):
            named_model("mine", models=str(tmp_path / "m.csv"))


def test_bad_models_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A traceback for a config.json that is damaged, missing or of another family; a GPT beyond its positions; an error
    that does not say how else a model can be given, or that lists rows of the table for a folder or a hub's name."""
    broken = folder(tmp_path, {"architectures": ["T5Model"]})
    gpt = folder(tmp_path, GPT2 | {"n_layer": 6, "n_embd": 64, "n_head": 4, "n_positions": 96}, name="gpt")
    biases = folder(tmp_path, BIASES, name="biases")
    assert "--load-hf" in run(capsys, "--model", biases, *CARD, "--task", "sft")
    for flags, words in (
        (("--model", broken), ("T5Model",)),
        (("--model", tmp_path / "none" / "config.json"), ("config.json",)),
        (("--model", biases), ("--load-hf",)),
        (("--model", gpt, "--seq-length", "128"), ("--seq-length 128", "96")),
        (("--model", tmp_path), (f"--model {tmp_path}:", "config.json")),
        (("--model", "Qwen/Qwen3-8B"), ("--model Qwen/Qwen3-8B:", "hf download Qwen/Qwen3-8B")),
        (("--model", "Llama-3-8B"), ("--models", "config.json", "head_dim", "LLaMA-7B")),
    ):
        error = run(capsys, *flags, *CARD, code=2)
        assert error.count("\n") == 1 and all(word in error for word in words), error
        assert "/" not in str(flags[1]) or "LLaMA-7B" not in error


def test_what_fits_on_one_card(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Only more GPUs offered for what one card holds with frozen layers on the host, a frozen head or moments in 8
    bits; a setting that does not fit after all, or that another one makes needless."""
    large = folder(tmp_path, PUBLISHED["Llama-3-8B"][0], name="large")
    middle = folder(tmp_path, config("llama", 32, 4096, (32, 8), 13824, 128256), name="middle")
    seen: set[str] = set()
    for model in (large, middle):
        flags = ("--task", "sft", "--model", model, *CARD, "--seq-length", "2048", "--micro-batch-size", "2")
        flags += ("--bcd-frozen-weights", "device", "--bcd-head-phase")
        offered = json.loads(run(capsys, *flags, "--json", code=1))["what_fits"]
        names = [{word for word in each["flags"].split() if word[:2] == "--"} for each in offered]
        assert not any(one < other for one in names for other in names)
        seen |= set().union(*names)
        for each in offered:
            assert "torchrun" in run(capsys, *shlex.split(each["command"])[2:])
    assert {"--bcd-frozen-weights", "--bcd-frozen", "--adam-moments-dtype", "--num-gpus"} <= seen


def test_frozen_layers_on_the_host(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A published model that is told not to fit; copies that cost nothing, or that more tokens don't hide; memory that
    is left to micro-batches of one sequence; a node that runs out of memory."""
    large = folder(tmp_path, PUBLISHED["Llama-3-8B"][0], name="large")
    flags = ("--task", "sft", "--model", large, *CARD, "--bcd-always-active", "head", "--json")
    hidden = json.loads(run(capsys, *flags))
    flags += ("--micro-batch-size", "1")
    plan = json.loads(run(capsys, *flags))
    assert "--bcd-frozen-weights host" in plan["command"]
    assert hidden["recipe"]["micro_batch_size"] > 1 and hidden["time"]["copy_share"] < 0.01
    assert hidden["time"]["tokens_per_second"] > 1.5 * plan["time"]["tokens_per_second"]
    assert hidden["memory"]["peak_bytes"] <= 0.95 * hidden["memory"]["available_bytes"]
    whole = json.loads(run(capsys, *flags[:-2], "--recompute"))
    assert (whole["recipe"]["recompute"], whole["time"]["copy_share"] < 0.01) == ("full", True)
    searched = json.loads(run(capsys, *flags, "--search"))["best"]
    assert "--bcd-frozen-weights host" in searched["command"] and searched["recipe"]["micro_batch_size"] > 1
    weights = 2 * 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096)
    expected = 2 * weights + 2 * 128256 * 4096
    assert plan["memory"]["host_bytes"] == pytest.approx(expected, rel=1e-3), "low bits of main parameters; embedding"
    longer = json.loads(run(capsys, *flags, "--seq-length", "2048"))
    assert 0 < longer["time"]["copy_share"] < plan["time"]["copy_share"] < 1
    assert "--recompute-granularity full" in json.loads(run(capsys, *flags, "--recompute", "full"))["command"]
    resident = json.loads(run(capsys, *flags, "--bcd-frozen-weights", "host", "--bcd-resident-layers", "2"))
    assert resident["time"]["copy_share"] < plan["time"]["copy_share"]
    gb = plan["memory"]["host_bytes"] / 1e9
    assert json.loads(run(capsys, *flags, "--host-memory-gb", f"{gb + 0.1:.1f}")) == plan
    assert not json.loads(run(capsys, *flags, "--host-memory-gb", f"{gb - 0.1:.1f}", code=1))["memory"]["fits"]


def test_the_loss_without_logits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Layers that are recomputed for the sake of a large vocabulary's logits, or a plan that does not fit for them."""
    small = folder(tmp_path, PUBLISHED["Qwen3-0.6B"][0])
    flags = ("--task", "sft", "--model", small, *CARD, "--seq-length", "2048", "--micro-batch-size")
    native = ("--cross-entropy-fusion-impl", "native")
    assert "linear" not in run(capsys, *flags, "4")
    chosen, other = (json.loads(run(capsys, *flags, "8", "--json", *more)) for more in ((), native))
    assert "--cross-entropy-loss-fusion --cross-entropy-fusion-impl linear" in chosen["command"]
    assert [found["recipe"]["recompute"] for found in (chosen, other)] == ["none", "auto"]
    assert chosen["recipe"]["num_blocks"] < other["recipe"]["num_blocks"]
    text = ("--method", "bcd", "--precision", "bf16", *flags[2:], "8")
    offered = json.loads(run(capsys, *text, "--json", code=1))["what_fits"]
    assert any("--cross-entropy-fusion-impl linear" in each["flags"] for each in offered)


@pytest.mark.parametrize("more", ["1", "2 --recompute full", "4 --bcd-resident-layers 3"])
def test_timeline_of_copies(capsys: pytest.CaptureFixture[str], tmp_path: Path, more: str) -> None:
    """Copies that no run makes, or more than it makes; a layer that computes before it is there; another time than the
    planner's."""
    flags = ("--task", "sft", "--model", "LLaMA-7B", *CARD, "--adam-moments-dtype", "int8", "--bcd-num-blocks", "32")
    flags, device = (*flags, "--json", "--bcd-frozen-weights", "host", "--micro-batch-size", *more.split()), flags
    planned = json.loads(run(capsys, *flags, "--timeline", tmp_path / "trace.json"))
    phase = next(each for each in planned["time"]["phases"] if each["block"] == 16)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    end = {"computation": 0.0, "copies": 0.0}
    there = {f"layer {number}": 0.0 for number in range(32)}
    for event in events:
        assert event["ts"] >= end[event["tid"]] - 1e-6, "one after the other"
        end[event["tid"]] = event["ts"] + event["dur"]
        layer = event["name"].partition(" of ")[2]
        if event["cat"] == "copy":
            there[layer] = end["copies"]
        else:
            assert event["ts"] >= there.get(layer, 0.0) - 1e-6
    resident = 3 if "resident" in more else 0
    # test_frozen_weights.py counts the same in runs
    assert sum(event["cat"] == "copy" for event in events) == (31 - resident) + (15 - resident) - 2
    expected = 1e6 * phase["pipeline"] / (8 // int(more[0]))
    assert 0.93 * expected < end["computation"] < 1.001 * expected
    assert "one pipeline stage" in run(capsys, *device, "--timeline", tmp_path / "trace.json", code=2)
    assert ".png" in run(capsys, *flags, "--timeline", tmp_path / "trace.txt", code=2)
    if more == "1":
        run(capsys, *flags, "--timeline", tmp_path / "trace.svg")
        assert "milliseconds" in (tmp_path / "trace.svg").read_text()


@pytest.mark.parametrize("name", ["Llama-3-8B", "Qwen2.5-7B", "Qwen3-8B"])
def test_the_head_is_what_the_card_has_room_for(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    """A large vocabulary for which the layers leave the card, a choice that overrules a flag, or a head of another
    kind in the command than in the plan."""
    flags = ("--task", "sft", "--model", folder(tmp_path, PUBLISHED[name][0], name=name), *CARD, "--json")
    chosen = json.loads(run(capsys, *flags))
    assert chosen["memory"]["fits"] and ("--bcd-frozen-weights host" in chosen["command"]) == (name == "Qwen3-8B")
    heads = ("--bcd-head-phase", "--bcd-frozen embedding,head")
    assert [head in chosen["command"] for head in heads] == [True, False]
    always = json.loads(run(capsys, *flags, "--bcd-always-active", "head"))
    assert "--bcd-frozen-weights host" in always["command"] and not any(head in always["command"] for head in heads)


def test_the_documents_rows(repo_root: Path) -> None:
    """A table that an older planner has printed."""
    for num_gpus in (1, 4):
        line = " | ".join(rtx4090.row("Qwen2.5-14B", num_gpus))
        assert f"| {line} |" in (repo_root / "docs" / "planner.md").read_text()
