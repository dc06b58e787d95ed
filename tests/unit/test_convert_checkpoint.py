"""Model folders and tools/convert_checkpoint.py: what is read and written, refused input, and full disks."""

from __future__ import annotations

import functools
import json
import re
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import convert_checkpoint
import pytest
import torch
import transformers
from safetensors.torch import save_file
from support import huggingface_models as models
from support.processes import disk_for

from megatron.bcd.huggingface import run_network
from megatron.bcd.huggingface.convert import to_hugging_face
from megatron.bcd.huggingface.core_format import CoreCheckpoint
from megatron.bcd.huggingface.folder import ModelFolder, locate

Edit = Callable[[Path], None]


def convert(checkpoint: Path, written: Path, *more: str) -> int:
    return convert_checkpoint.main(["--input", str(checkpoint), "--output", str(written), *more])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return the folder of a model, which is created once."""
    folders: dict[str, Path] = {}

    def model(name: str) -> Path:
        if name not in folders:
            folders[name] = models.write_model(name, tmp_path_factory.mktemp("models") / name, max_shard_size="60KB")
        return folders[name]

    return model


@pytest.mark.parametrize("name", models.SETTINGS)
def test_what_is_written(name: str, written: Callable[..., Path], tmp_path: Path) -> None:
    """A converted checkpoint has the tensors and files of the model that it was made of, in several shards or one."""
    source_folder = written(name)
    (source_folder / "tokenizer.json").write_text("not read")
    assert len(list(source_folder.glob("*.safetensors"))) > 1
    root = models.write_checkpoint(source_folder, tmp_path / "bcd")
    assert convert(root, tmp_path / "out", "--config", str(source_folder)) == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 1
    assert models.differing(models.tensors_of(source_folder), models.tensors_of(tmp_path / "out")) == []
    for kept in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / "out" / kept).read_bytes() == (source_folder / kept).read_bytes()
    described = run_network.describe_checkpoint(str(root), config_folder=str(source_folder))
    checkpoint, shards = CoreCheckpoint(str(root / "iter_0000001")), tmp_path / "shards"
    to_hugging_face(checkpoint, str(shards), described, max_shard_bytes=50_000)
    assert len(list(shards.glob("*.safetensors"))) > 1
    loaded = transformers.AutoModelForCausalLM.from_pretrained(shards)
    assert models.differing(loaded.state_dict(), models.model_of(name).state_dict()) == []


def test_older_files_of_gpt2(written: Callable[..., Path], tmp_path: Path) -> None:
    """The hub's first GPT-2 files are read: names without prefix, saved masks, and a copy of the tied head."""
    tensors = models.tensors_of(written("gpt2"))
    older = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    older |= {"h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8), "lm_head.weight": older["wte.weight"].clone()}
    (tmp_path / "older").mkdir()
    save_file(older, tmp_path / "older" / "model.safetensors")
    config = json.loads((written("gpt2") / "config.json").read_text())
    (tmp_path / "older" / "config.json").write_text(json.dumps(config))
    root = models.write_checkpoint(tmp_path / "older", tmp_path / "bcd")
    assert convert(root, tmp_path / "out", "--config", str(tmp_path / "older")) == 0
    assert models.differing(tensors, models.tensors_of(tmp_path / "out")) == []


# --- refusals


def edit_config(**values: Any) -> Edit:
    def edit(source_folder: Path) -> None:
        config = json.loads((source_folder / "config.json").read_text())
        (source_folder / "config.json").write_text(json.dumps(config | values))

    return edit


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Edit:
    def edit(source_folder: Path) -> None:
        tensors = models.tensors_of(source_folder)
        change(tensors)
        for file in source_folder.glob("*.safetensors*"):
            file.unlink()
        save_file(tensors, source_folder / "model.safetensors")

    return edit


def as_pickle(source_folder: Path) -> None:
    for file in source_folder.glob("*.safetensors*"):
        file.unlink()
    (source_folder / "pytorch_model.bin").write_bytes(b"")


def cut_short(source_folder: Path) -> None:
    file = sorted(source_folder.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-8])


def edit_weight(**weights: torch.Tensor) -> Edit:
    return edit_tensors(lambda t: t.update({f"model.{name.replace('__', '.')}": x for name, x in weights.items()}))


REFUSED: dict[str, tuple[str, Edit, str]] = {
    "missing": ("llama2", edit_tensors(lambda t: t.pop("model.layers.2.mlp.up_proj.weight")), "up_proj.weight"),
    "extra": ("llama2", edit_weight(layers__0__self_attn__q_proj__bias=torch.ones(32)), "q_proj.bias"),
    "shape": ("llama2", edit_weight(norm__weight=torch.ones(31)), "model.norm.weight"),
    "dtypes": ("llama2", edit_weight(layers__0__mlp__up_proj__weight=torch.ones(48, 32).half()), "dtype"),
    "no_shard": ("llama2", lambda source_folder: sorted(source_folder.glob("*.safetensors"))[1].unlink(), "index.json"),
    "cut_short": ("llama2", cut_short, "safetensors"),
    "pickle": ("llama2", as_pickle, "Pickles are not read"),
    "no_config": ("llama2", lambda source_folder: (source_folder / "config.json").unlink(), "config.json"),
    "no_size": ("llama2", edit_config(hidden_size=None), "hidden_size"),
    "class": ("llama2", edit_config(model_type="smollm3", pad_token_id=None), "architecture smollm3"),
    "quantised": ("llama2", edit_config(quantization_config={"bits": 4}), "quanti"),
    "yarn": ("llama2", edit_config(rope_parameters={"rope_type": "yarn", "factor": 2.0}), "yarn"),
    "one_bias": ("llama2", edit_config(attention_bias=True), "attention_bias"),
    "activation": ("llama2", edit_config(hidden_act="gelu"), "hidden_act"),
    "scores": ("gpt2", edit_config(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx"),
    "tied_and_different": ("llama2", edit_config(tie_word_embeddings=True), "lm_head.weight"),
    "untied_and_absent": ("llama_tied", edit_config(tie_word_embeddings=False), "lm_head.weight"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, written: Callable[..., Path], tmp_path: Path) -> None:
    """A model that cannot be read is refused in one line that names the cause."""
    name, edit, message = REFUSED[case]
    shutil.copytree(written(name), tmp_path / "given")
    edit(tmp_path / "given")
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        ModelFolder(str(tmp_path / "given"), transformer_impl="local")
    assert len(str(refusal.value).splitlines()) == 1


def test_outputs_and_checkpoints_that_are_refused(
    written: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An existing output, a checkpoint of another network and a damaged one are refused, and no output is written."""
    source_folder, back = written("llama2"), tmp_path / "back"
    root = models.write_checkpoint(source_folder, tmp_path / "bcd")

    def refused(path: Path, output: Path, *more: str) -> str:
        assert convert(path, output, *more) == 2
        return capsys.readouterr().err

    config = ("--config", str(source_folder))
    assert "--output" in refused(root, source_folder, *config)
    tied, smaller = tmp_path / "tied", tmp_path / "smaller"
    for edited, values in ((tied, {"tie_word_embeddings": True}), (smaller, {"num_hidden_layers": 3})):
        shutil.copytree(source_folder, edited)
        edit_config(**values)(edited)
    assert "config.json" in refused(root, back, "--config", str(tied))
    assert "[4, " in refused(root, back, "--config", str(smaller))
    assert "--config" in refused(root, back)
    assert str(source_folder) in refused(source_folder, back)
    [file] = (root / "iter_0000001").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1])
    assert str(root) in refused(root, back, *config)
    assert not back.exists()


def test_names_on_the_hub(written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A name is downloaded from the hub without code; an unreachable hub and a folder without a model are refused."""
    asked: list[Any] = []

    def download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        if name == "some/model":
            return str(written("llama2"))
        raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=download))
    assert locate("some/model", flag="--load-hf") == str(written("llama2"))
    assert asked[0][0] == "some/model" and not any(name.endswith((".py", ".bin", "*")) for name in asked[0][1])
    for name in ("other/model", "/no/such/folder", str(tmp_path)):
        with pytest.raises(ValueError, match=f"--load-hf {name}"):
            locate(name, flag="--load-hf")


def test_a_full_disk(
    written: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk ends with code 2 and one line, and no half of a model remains: here the first of four files was
    written."""
    source_folder = written("qwen2")
    root = models.write_checkpoint(source_folder, tmp_path / "bcd")
    in_shards = functools.partial(to_hugging_face, max_shard_bytes=50_000)
    monkeypatch.setattr("megatron.bcd.huggingface.convert.to_hugging_face", in_shards)
    with disk_for(48_000):  # the first file has 46,200 bytes, the second one 51,744
        assert convert(root, tmp_path / "back", "--config", str(source_folder)) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "model-00002-of-00004.safetensors" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bcd"]
