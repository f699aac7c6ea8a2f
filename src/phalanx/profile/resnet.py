"""ResNet-50 version 1.5 (He et al. 2016, table 1; the stride of a stage lies in its first 3x3 convolution)."""

from __future__ import annotations

from torch import Tensor, nn


class Bottleneck(nn.Module):
    """Three convolutions, added to what came in."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        out = 4 * inner
        self.conv_1 = nn.Conv2d(channels, inner, 1, bias=False)
        self.conv_2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
        self.conv_3 = nn.Conv2d(inner, out, 1, bias=False)
        self.norm_1, self.norm_2, self.norm_3 = nn.BatchNorm2d(inner), nn.BatchNorm2d(inner), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        changes = stride != 1 or channels != out
        projection = (nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.shortcut = nn.Sequential(*projection) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        """The images (B, channels, height, width) after this block."""
        y = self.relu(self.norm_1(self.conv_1(x)))
        y = self.relu(self.norm_2(self.conv_2(y)))
        y = self.norm_3(self.conv_3(y))
        y += x if self.shortcut is None else self.shortcut(x)
        return self.relu(y)


class ResNet50(nn.Module):
    """Images (B, 3, height, width) to logits (B, classes)."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(3, 2, 1)
        blocks: list[nn.Module] = []
        channels = 64
        for count, inner, stride in ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2)):
            for index in range(count):
                blocks.append(Bottleneck(4 * inner if index else channels, inner, 1 if index else stride))
            channels = 4 * inner
        self.blocks = nn.Sequential(*blocks)
        self.mean = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the classes."""
        x = self.pool(self.relu(self.norm(self.stem(x))))
        return self.head(self.mean(self.blocks(x)).flatten(1))
