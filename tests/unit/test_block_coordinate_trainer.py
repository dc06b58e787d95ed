"""BlockCoordinate as the optimizer of transformers' Trainer. Switches and resuming: e2e/test_accelerate.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatron.bcd import BlockCoordinate

pytest.importorskip("accelerate")  # Trainer needs it


def new_model() -> Any:
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=20, n_positions=8, n_embd=8, n_layer=3, n_head=2, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def new_trainer(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> Any:
    tokens = torch.randint(20, (64, 8), generator=torch.Generator().manual_seed(5))
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, max_steps=8, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, learning_rate=0.01, warmup_steps=2, save_steps=5, report_to=[],
        disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in tokens]
    return transformers.Trainer(model=model, args=arguments, train_dataset=data, optimizers=(optimizer, None))


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def test_one_block_is_the_trainers_own_adamw(tmp_path: Path) -> None:
    """A scheduler, clipping or accumulation of Trainer that passes the wrapped optimizer by."""
    plain, model = new_model(), new_model()
    alone = torch.optim.AdamW(plain.parameters(), lr=0.01)
    new_trainer(tmp_path / "plain", plain, alone).train()
    wrapped = BlockCoordinate(model, torch.optim.AdamW, lr=0.01, num_blocks=1, steps_per_block=2, keep_state="host")
    new_trainer(tmp_path / "wrapped", model, wrapped).train()
    assert same(plain, model) and not same(plain, new_model())
    assert alone.param_groups[0]["lr"] == wrapped.param_groups[0]["lr"] == 0.0
