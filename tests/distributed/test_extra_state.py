"""Weights saved with Transformer Engine load without it, and vice versa."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from support import worlds
from support.dist import World

from megatron.bcd.config import RunConfig


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
