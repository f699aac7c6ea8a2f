"""Networks of published claims that are no standard models: AlexNet and VGG-16, on images of 224."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import nn

from phalanx.trace import Described

_CLASSES = 1000
_PIXELS = 224


def alexnet() -> nn.Module:
    """The one-column AlexNet of Krizhevsky, "One weird trick", 2014; 61.1 million parameters."""
    return nn.Sequential(
        *_convolution(3, 64, 11, stride=4, padding=2),
        nn.MaxPool2d(3, 2),
        *_convolution(64, 192, 5, padding=2),
        nn.MaxPool2d(3, 2),
        *_convolution(192, 384, 3, padding=1),
        *_convolution(384, 256, 3, padding=1),
        *_convolution(256, 256, 3, padding=1),
        nn.MaxPool2d(3, 2),
        *_classifier(256 * 6 * 6),
    )


def vgg16() -> nn.Module:
    """VGG-16: Simonyan and Zisserman, 2014, table 1, column D; 138.4 million parameters."""
    layers: list[nn.Module] = []
    channels = 3
    for count, width in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(count):
            layers += _convolution(channels, width, 3, padding=1)
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, *_classifier(512 * 7 * 7))


NETWORKS: Mapping[str, Callable[[], nn.Module]] = {"alexnet": alexnet, "vgg16": vgg16}
"""How each is made."""


def described(name: str) -> Described:
    """A network of ``NETWORKS`` on the meta device, with one image and its loss."""
    with torch.device("meta"):
        image, label = torch.empty(1, 3, _PIXELS, _PIXELS), torch.empty(1, dtype=torch.int64)
        return Described(module=NETWORKS[name](), args=(image,), batch=label, loss=F.cross_entropy)


def _convolution(channels: int, width: int, kernel: int, *, stride: int = 1, padding: int = 0) -> list[nn.Module]:
    return [nn.Conv2d(channels, width, kernel, stride, padding), nn.ReLU(inplace=True)]


def _classifier(inputs: int) -> list[nn.Module]:
    layers: list[nn.Module] = [nn.Flatten()]
    for width in (inputs, 4096):
        layers += [nn.Linear(width, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    return [*layers, nn.Linear(4096, _CLASSES)]
