"""ResNet-50 v1.5 with the recipe for large batches of Goyal et al. 2017, on small images.

The model is the real one of 23.5 million parameters (25.6 with ImageNet's 1,000 classes); only the images are small:
Debian's ``dataset-fashion-mnist`` where it is installed (``apt install dataset-fashion-mnist``), else scikit-learn's
digits, both brought to 32 x 32. It needs ``pip install scikit-learn``. A short run by default:

    phalanx train examples/resnet50.py -n 2
    phalanx train examples/resnet50.py:large_batch -n 2

BatchNorm takes its statistics from what one device sees at once, so this model does depend on how a batch is split.
Phalanx says so before the run.

Shapes: B samples, C channels, H and W pixels.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import phalanx as px

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
CLASSES = 10
HELD_OUT = 256  # images for evaluation
# How fast BatchNorm's running averages follow. 0.1 is usual, and too slow for evaluation after two dozen steps.
FOLLOW = 0.3
STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # width, blocks


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3, 1 x 1 convolutions around a shortcut; v1.5 has the stride in the 3 x 3."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            nn.BatchNorm2d(width, momentum=FOLLOW),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width, momentum=FOLLOW),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width, momentum=FOLLOW),
        )
        # A block that starts as the identity trains better with large batches: Goyal et al. 2017, section 5.1.
        nn.init.zeros_(self.residual[-1].weight)
        self.shortcut = nn.Sequential()
        if stride > 1 or channels != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width, momentum=FOLLOW)
            )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """(B, 4 * width, H / stride, W / stride)."""
        return F.relu(self.residual(x_BCHW) + self.shortcut(x_BCHW))


class ResNet50(nn.Module):
    """He et al. 2015, in the form v1.5."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(64, momentum=FOLLOW),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        channels, blocks = 64, []
        for width, depth in STAGES:
            for index in range(depth):
                blocks.append(Bottleneck(channels, width, stride=2 if index == 0 and width > 64 else 1))
                channels = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.classify = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.normal_(self.classify.weight, std=0.01)
        nn.init.zeros_(self.classify.bias)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Logits of shape (B, classes)."""
        features_BCHW = self.blocks(self.stem(image_BCHW))
        return self.classify(features_BCHW.mean(dim=(2, 3)))


def images(*, training: bool) -> px.Table:
    """Grey images (N, 32, 32) of bytes, and their labels; the last ``HELD_OUT`` are for evaluation."""
    if FASHION_MNIST.is_dir():
        pixels = _idx("train-images-idx3-ubyte.gz", header=16).view(-1, 28, 28)
        labels = _idx("train-labels-idx1-ubyte.gz", header=8).long()
        pixels = F.pad(pixels, (2, 2, 2, 2))
    else:
        flat, classes = load_digits(return_X_y=True)
        pixels = torch.tensor(flat * 15.9375).byte().view(-1, 8, 8).repeat_interleave(4, 1).repeat_interleave(4, 2)
        labels = torch.tensor(classes)
    part = slice(None, -HELD_OUT) if training else slice(-HELD_OUT, None)
    return px.Table(image=pixels[part], label=labels[part])


def _idx(name: str, *, header: int) -> Tensor:
    with gzip.open(FASHION_MNIST / name) as file:
        return torch.from_numpy(np.frombuffer(file.read(), dtype=np.uint8, offset=header).copy())


def normalised(batch: dict[str, Tensor]) -> Tensor:
    """Grey bytes (B, H, W) to what the model takes: (B, 3, H, W), about -1 to 1."""
    grey_BHW = batch["image"].float() / 127.5 - 1
    return grey_BHW.unsqueeze(1).expand(-1, 3, -1, -1)


def job() -> px.Job:
    """SGD with momentum as in Goyal et al. 2017: lr 0.1 at a batch of 256, in proportion at any other; warm-up.

    In full that is 90 epochs, 5 of them warm-up, and a tenth of the learning rate after 30, 60 and 80:
    ``px.Schedule(decay="step", warmup_samples=5 * images, milestones=(30 * per_epoch, ...))``.
    """
    batch = 64
    lr = px.linear_scaling(0.1, batch=batch, base_batch=256)

    def sgd(params: list[Tensor]) -> torch.optim.Optimizer:
        groups = [
            {"params": [p for p in params if p.ndim > 1], "weight_decay": 1e-4},
            {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},  # BatchNorm and bias
        ]
        return torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True)

    return px.Job(
        name="resnet50",
        model=lambda: ResNet50(CLASSES),
        data=lambda: images(training=True),
        inputs=normalised,
        loss=lambda output, batch: px.cross_entropy(output, batch["label"], label_smoothing=0.1),
        optimizer=sgd,
        schedule=px.Schedule(decay="cosine", warmup_steps=4),
        batch=batch,
        steps=24,
        evaluate=lambda: images(training=False),
        metrics=lambda output, batch: {"accuracy": px.accuracy(output, batch["label"])},
    )


def large_batch() -> px.Job:
    """The same with LARS (You et al. 2017), which trained ResNet-50 with batches up to 32,768."""
    base = job()
    return px.Job(
        name="resnet50-lars",
        model=base.model,
        data=base.data,
        inputs=base.inputs,
        loss=base.loss,
        optimizer=lambda params: px.LARS(params, lr=2.0, weight_decay=1e-4, trust_coefficient=0.01),
        schedule=px.Schedule(decay="cosine", warmup_steps=4),
        batch=256,
        steps=4,
        evaluate=base.evaluate,
        metrics=base.metrics,
    )
