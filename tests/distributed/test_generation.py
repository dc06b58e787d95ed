"""A checkpoint becomes transformers' model in memory: its logits equal the run's, and it equals the exported model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import huggingface_models as models
from support import worlds
from support.dist import World

from megatron.bcd.huggingface.in_memory import open_model

TOKENS = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("form", ["gpt", "llama"])
def test_a_checkpoint(world1: World, world2: World, text_data: str, tmp_path: Path, form: str) -> None:
    """A checkpoint of a parallel run opens with the run's logits, the exported model's weights, and its tokenizer and
    end token."""
    layout: dict[str, Any] = {"tensor_model_parallel_size": 2} if form == "gpt" else {"pipeline_model_parallel_size": 2}
    flags: dict[str, Any] = {"form": form, "data_path": text_data, "train_iters": 2, "openai_gelu": form == "gpt"}
    saved = {"save": str(tmp_path / "run"), "save_hf": str(tmp_path / "exported")}
    world2.run(worlds.train_run, worlds.run_config(world_size=2, **flags, **saved, **layout))
    loaded = open_model(str(tmp_path / "run"))
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert models.differing(loaded.model.state_dict(), exported.state_dict()) == []
    load = {"load": str(tmp_path / "run"), "finetune": True}
    [expected] = world1.run(worlds.logits_of, worlds.run_config(**flags, **load), TOKENS)
    with torch.no_grad():
        logits = loaded.model(TOKENS).logits
        assert torch.equal(logits, exported(TOKENS).logits)
    assert (logits - expected[..., : logits.size(-1)]).abs().max() < 1e-4
    assert loaded.tokenizer.encode("sky") == [*b"sky"] and loaded.tokenizer.eos_token_id == 256
    assert loaded.model.generation_config.eos_token_id == 256
    assert open_model(str(tmp_path / "run"), precision="bf16").model.dtype == torch.bfloat16
