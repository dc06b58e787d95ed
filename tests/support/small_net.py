"""A small deterministic network in plain PyTorch, for training loops that use `BlockCoordinate`."""

from __future__ import annotations

import torch
from torch import nn


class Net(nn.Module):
    """An embedding of 2 tokens per sample, layers with norms, and a head. With odd sizes, shards of two ranks
    differ."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(11, 6)
        layers = (nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh()) for _ in range(num_layers))
        self.layers = nn.ModuleList(layers)
        self.final_norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x_B2: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x_B2).sum(dim=1)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(self.final_norm(hidden))
