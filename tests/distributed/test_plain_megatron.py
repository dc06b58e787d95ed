"""Other programs read this program's weights: Megatron Core alone, and Transformer Engine's layers, and vice versa."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import worlds
from support.dist import World

from megatron.bcd.config import RunConfig

NUM_TOKENS, LENGTH = 257, 32
NETWORK = {
    "transformer": {"num_layers": 6, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2}
    | {"ffn_hidden_size": 88, "normalization": "RMSNorm", "add_bias_linear": False},
    "model": {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False}
    | {"vocab_size": worlds.PADDED_VOCABULARY, "max_sequence_length": LENGTH},
    "vocab_size": NUM_TOKENS,
}
FLAGS: dict[str, Any] = {"num_query_groups": 2, "group_query_attention": True, "ffn_hidden_size": 88, "swiglu": True}
FLAGS |= {"normalization": "RMSNorm", "disable_bias_linear": True, "position_embedding_type": "rope"}
FLAGS |= {"untie_embeddings_and_output_weights": True}


def loss_of(config: Any) -> float:
    """Return the mean loss of the loaded model on the same synthetic tokens as plain_megatron.py."""
    with worlds.started(config) as run, torch.no_grad():
        run.model.eval()
        tokens = (torch.arange(2 * (LENGTH + 1)) * 7919 % NUM_TOKENS).view(2, LENGTH + 1)
        positions = torch.arange(LENGTH).expand(2, LENGTH)
        losses = run.model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
        return float(losses.double().mean())


def test_plain_megatron_core_reads_our_weights(
    world1: World, world2: World, text_data: str, repo_root: Path, tmp_path: Path
) -> None:
    """Megatron Core alone loads a checkpoint of two tensor-parallel ranks and computes the run's loss."""
    saved, flags = tmp_path / "saved", FLAGS | {"data_path": text_data}
    world2.run(worlds.train_run, worlds.run_config(save=saved, **flags | worlds.CUTS["tensor2"]))
    (ours,) = world1.run(loss_of, worlds.run_config(**flags, load=saved, finetune=True))
    (fresh,) = world1.run(loss_of, worlds.run_config(**flags))
    assert abs(ours - fresh) > 1e-2, "the loss would not tell trained weights from new ones"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, str(repo_root / "tests" / "support" / "plain_megatron.py"), str(saved / "iter_0000006")]
    done = subprocess.run(
        [*command, json.dumps(NETWORK)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout.splitlines()[-1]) == pytest.approx(ours, rel=1e-5)


@contextlib.contextmanager
def extra_states() -> Iterator[None]:
    """Give norms a state in addition to their parameters, as Transformer Engine does."""
    norms = torch.nn.LayerNorm
    with (
        mock.patch.object(norms, "get_extra_state", lambda self: torch.zeros(2, dtype=torch.uint8)),
        mock.patch.object(norms, "set_extra_state", lambda self, state: None),
    ):
        yield


def saved(config: RunConfig, folder: str, *, has_extra: bool) -> None:
    with extra_states() if has_extra else contextlib.nullcontext():
        worlds.save_initial_weights(config, folder)


def loaded(config: RunConfig, *, has_extra: bool) -> dict[str, torch.Tensor]:
    with extra_states() if has_extra else contextlib.nullcontext():
        return worlds.initial_weights(config)


@pytest.mark.parametrize("is_saved_with", [False, True])
def test_other_implementations_read_it(world1: World, text_data: str, tmp_path: str, is_saved_with: bool) -> None:
    """Weights saved with an extra state of the norms load without it, and vice versa, bit for bit."""
    config = worlds.run_config(data_path=text_data, num_layers=3)
    world1.run(saved, config, str(tmp_path), has_extra=is_saved_with)
    [weights] = world1.run(worlds.initial_weights, config)
    other = worlds.run_config(data_path=text_data, num_layers=3, load=str(tmp_path), finetune=True, seed=7)
    [read] = world1.run(loaded, other, has_extra=not is_saved_with)
    assert worlds.same_bits(read, weights) == []
