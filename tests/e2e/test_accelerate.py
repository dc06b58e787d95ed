"""BlockCoordinate in transformers' Trainer and TRL's SFTTrainer."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.dist import World

from megatron.bcd import BlockCoordinate

if any(importlib.util.find_spec(name) is None for name in ("accelerate", "trl")):
    pytest.skip("needs accelerate and trl", allow_module_level=True)

STEPS, STEPS_PER_BLOCK, SAVED_AT, GLOBAL_BATCH, VOCABULARY = 8, 2, 5, 8, 20


def new_trainer(client: str, folder: Path) -> Any:
    """Build a trainer with two backward passes per global batch, for any number of ranks."""
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=8, n_embd=8, n_layer=3, n_head=2, attn_pdrop=0.0, embd_pdrop=0.0,
        resid_pdrop=0.0, bos_token_id=0, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    # biases of keys have no gradient but rounding, which differs by CPU and which Adam with a smaller eps would amplify
    optimizer = BlockCoordinate(
        model, torch.optim.AdamW, lr=0.01, eps=1e-4, steps_per_block=STEPS_PER_BLOCK, order="random", keep_state="host"
    )
    settings: dict[str, Any] = {"output_dir": str(folder), "use_cpu": True, "bf16": False, "max_steps": STEPS}
    settings |= {"gradient_accumulation_steps": 2, "learning_rate": 0.01, "save_steps": SAVED_AT, "logging_steps": 1}
    settings |= {"report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False}
    ranks = int(transformers.TrainingArguments(str(folder), use_cpu=True).world_size)
    settings["per_device_train_batch_size"] = GLOBAL_BATCH // 2 // ranks
    tokens = torch.randint(2, VOCABULARY, (64, 8), generator=torch.Generator().manual_seed(5)).tolist()
    if client == "Trainer":
        data: Any = [{"input_ids": row, "labels": row} for row in tokens]
        parts = transformers.Trainer, transformers.TrainingArguments(**settings), {}
    else:
        import datasets
        import trl
        from tokenizers import Tokenizer, models

        words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="1"))
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="0", pad_token="1")
        data = datasets.Dataset.from_dict({"input_ids": tokens})
        parts = trl.SFTTrainer, trl.SFTConfig(**settings), {"processing_class": tokenizer}
    kind, arguments, more = parts
    return kind(model=model, args=arguments, train_dataset=data, optimizers=(optimizer, None), **more)


def run(client: str, folder: Path) -> dict[str, Any]:
    """Return a run's losses by step and weights, and the weights of one that continues from its checkpoint."""
    trainer = new_trainer(client, folder)
    trainer.train()
    resumed = new_trainer(client, folder)
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED_AT}"))
    return {
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "weights": trainer.accelerator.unwrap_model(trainer.model_wrapped).state_dict(),
        "resumed": resumed.accelerator.unwrap_model(resumed.model_wrapped).state_dict(),
        "world_size": trainer.args.world_size,
    }


def test_trl_on_two_ranks_and_trainer(tmp_path: Path) -> None:
    """TRL's SFTTrainer on two ranks has the losses and weights of transformers' Trainer in one process, and both ranks
    resume from a checkpoint."""
    world = World(2, HF_HOME=str(tmp_path))  # with the environment of `accelerate launch`
    try:
        results = world.run(run, "SFTTrainer", tmp_path / "both")
    finally:
        world.close()
    reference = run("Trainer", tmp_path / "alone")
    assert reference["world_size"] == 1
    for result in results:
        assert result["world_size"] == 2
        torch.testing.assert_close(result["weights"], reference["weights"], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(result["resumed"], result["weights"], rtol=0, atol=0)
        assert result["losses"] == pytest.approx(reference["losses"], rel=1e-4)
