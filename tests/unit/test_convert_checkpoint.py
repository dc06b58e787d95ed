"""tools/convert_checkpoint.py: models to checkpoints and back, refused input, and the state after full disks and
kills."""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import convert_checkpoint
import pytest
import torch
import transformers
from safetensors.torch import save_file
from support import huggingface_models as models

Edit = Callable[[Path], None]


def convert(source: str, source_folder: Path, written: Path, *more: str) -> int:
    target = "hf" if source == "bcd" else "bcd"
    arguments = ["--from", source, "--to", target, "--input", str(source_folder), "--output", str(written)]
    return convert_checkpoint.main([*arguments, *more])


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
def test_there_and_back(name: str, written: Callable[..., Path], tmp_path: Path) -> None:
    """A model that is converted to a checkpoint and back has the same tensors and files, in several shards or one."""
    source_folder = written(name)
    (source_folder / "tokenizer.json").write_text("not read")
    assert len(list(source_folder.glob("*.safetensors"))) > 1
    assert convert("hf", source_folder, tmp_path / "bcd") == 0
    assert convert("bcd", tmp_path / "bcd", tmp_path / "back", "--max-shard-size", "50KB") == 0
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    assert models.differing(models.tensors_of(source_folder), models.tensors_of(tmp_path / "back")) == []
    for kept in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / "back" / kept).read_bytes() == (source_folder / kept).read_bytes()
    assert convert("bcd", tmp_path / "bcd" / "iter_0000000", tmp_path / "again") == 0
    assert len(list((tmp_path / "again").glob("*.safetensors"))) == 1
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert models.differing(loaded.state_dict(), models.model_of(name).state_dict()) == []


def test_large_vocabularies_are_written_in_parts(
    written: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vocabulary that is written in parts comes back without a change."""
    monkeypatch.setattr("megatron.bcd.huggingface.convert._PIECE_BYTES", 32 * 4 * 100)
    assert convert("hf", written("llama2"), tmp_path / "bcd") == 0
    assert convert("bcd", tmp_path / "bcd", tmp_path / "back") == 0
    assert models.differing(models.tensors_of(written("llama2")), models.tensors_of(tmp_path / "back")) == []


def test_older_files_of_gpt2(written: Callable[..., Path], tmp_path: Path) -> None:
    """The hub's first GPT-2 files are converted: names without prefix, saved masks, and a copy of the tied head."""
    tensors = models.tensors_of(written("gpt2"))
    older = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    older |= {"h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8), "lm_head.weight": older["wte.weight"].clone()}
    (tmp_path / "older").mkdir()
    save_file(older, tmp_path / "older" / "model.safetensors")
    config = json.loads((written("gpt2") / "config.json").read_text())
    (tmp_path / "older" / "config.json").write_text(json.dumps(config))
    assert convert("hf", tmp_path / "older", tmp_path / "bcd") == 0
    assert convert("bcd", tmp_path / "bcd", tmp_path / "back") == 0
    assert models.differing(tensors, models.tensors_of(tmp_path / "back")) == []


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
    "pickle": ("llama2", as_pickle, "pytorch_model.bin"),
    "no_config": ("llama2", lambda source_folder: (source_folder / "config.json").unlink(), "config.json"),
    "no_size": ("llama2", edit_config(hidden_size=None), "hidden_size"),
    "class": ("llama2", edit_config(architectures=["FalconForCausalLM"]), "FalconForCausalLM"),
    "quantised": ("llama2", edit_config(quantization_config={"bits": 4}), "quanti"),
    "yarn": ("llama2", edit_config(rope_parameters={"rope_type": "yarn", "factor": 2.0}), "yarn"),
    "one_bias": ("llama2", edit_config(attention_bias=True), "attention_bias"),
    "activation": ("llama2", edit_config(hidden_act="gelu"), "hidden_act"),
    "scores": ("gpt2", edit_config(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx"),
    "tied_and_different": ("llama2", edit_config(tie_word_embeddings=True), "lm_head.weight"),
    "untied_and_absent": ("llama_tied", edit_config(tie_word_embeddings=False), "lm_head.weight"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(
    case: str, written: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that cannot be converted is refused in one line that names the cause, and no output folder remains."""
    name, edit, message = REFUSED[case]
    shutil.copytree(written(name), tmp_path / "given")
    edit(tmp_path / "given")
    assert convert("hf", tmp_path / "given", tmp_path / "bcd") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "bcd").exists()


def test_outputs_and_checkpoints_that_are_refused(
    written: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An existing output, a checkpoint of another network and a damaged one are refused, and no output is written."""
    source_folder = written("llama2")
    assert convert("hf", source_folder, tmp_path / "bcd") == 0
    capsys.readouterr()

    def refused(source: str, path: Path, output: Path, *more: str) -> str:
        assert convert(source, path, output, *more) == 2
        return capsys.readouterr().err

    assert "--output" in refused("hf", source_folder, tmp_path / "bcd")
    assert "--output" in refused("bcd", tmp_path / "bcd", source_folder)
    back = tmp_path / "back"
    tied, smaller = tmp_path / "tied", tmp_path / "smaller"
    for edited, values in ((tied, {"tie_word_embeddings": True}), (smaller, {"num_hidden_layers": 3})):
        shutil.copytree(source_folder, edited)
        edit_config(**values)(edited)
    assert "config.json" in refused("bcd", tmp_path / "bcd", back, "--config", str(tied))
    assert "[4, " in refused("bcd", tmp_path / "bcd", back, "--config", str(smaller))
    assert str(source_folder) in refused("bcd", source_folder, back)
    assert "--vocab-size" in refused("hf", source_folder, back, "--vocab-size", "3")
    assert "--max-shard-size" in refused("bcd", source_folder, back, "--max-shard-size", "many")
    file = tmp_path / "bcd" / "iter_0000000" / "__2_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    assert "__2_0.distcp" in refused("bcd", tmp_path / "bcd", back)
    assert not back.exists()


def test_names_on_the_hub(
    written: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name is downloaded from the hub without code; an unreachable hub and a missing folder are refused by name."""
    asked: list[Any] = []

    def download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        if name == "some/model":
            return str(written("llama2"))
        raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=download))
    assert convert("hf", Path("some/model"), tmp_path / "bcd") == 0
    assert asked[0][0] == "some/model" and not any(name.endswith((".py", ".bin", "*")) for name in asked[0][1])
    assert convert("hf", Path("other/model"), tmp_path / "none") == 2
    assert "other/model" in capsys.readouterr().err
    assert convert("hf", Path("/no/such/folder"), tmp_path / "none") == 2
    assert "/no/such/folder" in capsys.readouterr().err and len(asked) == 2


@contextlib.contextmanager
def disk_for(num_bytes: int) -> Iterator[None]:
    """Limit the size of this process's files to `num_bytes`, so that writes fail as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk(written: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A full disk ends with code 2 and one line, and no half of a checkpoint or model remains."""
    source_folder = written("qwen2")
    with disk_for(5000):
        assert convert("hf", source_folder, tmp_path / "bcd") == 2
    assert not list(tmp_path.iterdir())
    assert convert("hf", source_folder, tmp_path / "bcd") == 0
    capsys.readouterr()
    with disk_for(5000):
        assert convert("bcd", tmp_path / "bcd", tmp_path / "back") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "model.safetensors" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bcd"]


def test_what_a_killed_conversion_leaves(written: Callable[..., Path], tmp_path: Path) -> None:
    """A conversion replaces the unfinished folder of a killed one, and refuses to write over a whole checkpoint."""
    source_folder = written("qwen2")
    leftover = tmp_path / "bcd" / "iter_0000000.incomplete"
    (leftover / "huggingface").mkdir(parents=True)
    (leftover / "__0_0.distcp").write_bytes(b"half")
    assert convert("hf", source_folder, tmp_path / "bcd") == 0
    assert convert("bcd", tmp_path / "bcd", tmp_path / "back") == 0
    assert models.differing(models.tensors_of(source_folder), models.tensors_of(tmp_path / "back")) == []
    leftover.mkdir()
    assert convert("hf", source_folder, tmp_path / "bcd") == 2
    assert (tmp_path / "bcd" / "iter_0000000" / "checksums.json").exists()
