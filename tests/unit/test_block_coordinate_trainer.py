"""BlockCoordinate as the optimizer of transformers' Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.bcd import BlockCoordinate

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")  # Trainer needs it

STEPS, STEPS_PER_BLOCK = 8, 2


def new_model() -> Any:
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=20, n_positions=8, n_embd=8, n_layer=3, n_head=2, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def new_trainer(folder: Path, model: Any, optimizer: torch.optim.Optimizer, *callbacks: Any) -> Any:
    tokens = torch.randint(20, (64, 8), generator=torch.Generator().manual_seed(5))
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, max_steps=STEPS, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, learning_rate=0.01, warmup_steps=2, save_steps=5, report_to=[],
        disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in tokens]
    return transformers.Trainer(
        model=model, args=arguments, train_dataset=data, optimizers=(optimizer, None), callbacks=list(callbacks)
    )


def new_optimizer(model: Any, num_blocks: int = 3) -> BlockCoordinate:
    return BlockCoordinate(
        model,
        torch.optim.AdamW,
        lr=0.01,
        num_blocks=num_blocks,
        steps_per_block=STEPS_PER_BLOCK,
        keep_state="host",
        always_active=("norms",),
        resting_update="orthogonal" if num_blocks > 1 else "none",
    )


class ActiveBlocks(transformers.TrainerCallback):
    """The active block at the start of every step."""

    def __init__(self, optimizer: BlockCoordinate) -> None:
        self.optimizer = optimizer
        self.seen: list[int] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.seen.append(self.optimizer.block)


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def test_one_block_is_the_trainers_own_adamw(tmp_path: Path) -> None:
    """A scheduler, clipping or accumulation of Trainer that passes the wrapped optimizer by."""
    plain, model = new_model(), new_model()
    alone = torch.optim.AdamW(plain.parameters(), lr=0.01)
    new_trainer(tmp_path / "plain", plain, alone).train()
    wrapped = new_optimizer(model, num_blocks=1)
    new_trainer(tmp_path / "wrapped", model, wrapped).train()
    assert same(plain, model) and not same(plain, new_model())
    assert alone.param_groups[0]["lr"] == wrapped.param_groups[0]["lr"] == 0.0


def test_trainer_switches_and_resumes_exactly(tmp_path: Path) -> None:
    """Trainer calls `step` through two wrappers and loads a state dict twice: a lost phase would train other blocks."""
    model = new_model()
    optimizer = new_optimizer(model)
    blocks = ActiveBlocks(optimizer)
    new_trainer(tmp_path / "run", model, optimizer, blocks).train()
    assert blocks.seen == [0, 0, 1, 1, 2, 2, 0, 0]
    resumed = new_model()
    optimizer = new_optimizer(resumed)
    blocks = ActiveBlocks(optimizer)
    new_trainer(tmp_path / "run", resumed, optimizer, blocks).train(
        resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-5")
    )
    assert blocks.seen == [2, 0, 0]
    assert same(resumed, model)
