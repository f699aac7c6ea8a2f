"""ResNet as He et al. (2016) have it, with the stride in a block's 3 × 3 convolution: ``[3, 4, 6, 3]`` is ResNet-50."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)),
        )
        self.beside: nn.Module = nn.Identity()
        if stride > 1 or channels != 4 * width:
            across = nn.Conv2d(channels, 4 * width, 1, stride, bias=False)
            self.beside = nn.Sequential(across, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.beside(x))


class ResNet(nn.Module):
    """Pictures (B, 3, H, W) → logits (B, classes); ``stages`` are the blocks of each."""

    def __init__(self, stages: Sequence[int], *, classes: int, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        blocks: list[nn.Module] = []
        channels = width
        for at, count in enumerate(stages):
            for index in range(count):
                blocks.append(Bottleneck(channels, width << at, 2 if at and not index else 1))
                channels = 4 * (width << at)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))
