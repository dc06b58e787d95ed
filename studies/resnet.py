"""ResNets for CIFAR (He et al., arXiv 1512.03385, sections 3 and 4.2), built from transformers' blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

BASIC_DEPTHS = {"resnet8": 1, "resnet14": 2, "resnet20": 3}
"""Blocks in each of three stages with 16, 32 and 64 channels: 6 n + 2 layers with weights."""
BOTTLENECK_DEPTHS = {"resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3)}
MODELS = (*BASIC_DEPTHS, *BOTTLENECK_DEPTHS)


def build_resnet(name: str, num_classes: int) -> Any:
    """Build one of MODELS with a first convolution of 3 x 3 that keeps the size, because images are small.

    Shortcuts that change the shape are 1 x 1 convolutions: ResNet-14 for 10 classes has 175,258 parameters, as in the
    paper (arXiv 2506.12037, table 10: at 12 bytes each, 2.01 MiB).
    """
    import transformers

    if name in BASIC_DEPTHS:
        shape: dict[str, Any] = {
            "embedding_size": 16,
            "hidden_sizes": [16, 32, 64],
            "depths": [BASIC_DEPTHS[name]] * 3,
            "layer_type": "basic",
        }
    else:
        shape = {
            "embedding_size": 64,
            "hidden_sizes": [256, 512, 1024, 2048],
            "depths": list(BOTTLENECK_DEPTHS[name]),
            "layer_type": "bottleneck",
        }
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=num_classes, **shape))
    stem = model.resnet.embedder
    stem.embedder.convolution = nn.Conv2d(3, shape["embedding_size"], kernel_size=3, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.embedder.convolution.weight, mode="fan_out", nonlinearity="relu")
    stem.pooler = nn.Identity()
    return model.to(memory_format=torch.channels_last)


def residual_blocks(model: Any) -> list[nn.Module]:
    """Return the layers that block coordinate descent divides into blocks, in depth order."""
    return [layer for stage in model.resnet.encoder.stages for layer in stage.layers]
