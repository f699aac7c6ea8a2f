"""How a model was trained on growing numbers of devices, and the forecast for each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from phalanx.config import Plan
from phalanx.forecast import PHALANX, Forecast, Work, forecast
from phalanx.hardware import cluster
from phalanx.trace import ModelCall, Profile, Shape
from published.subject import NAMED

Model = Literal["alexnet", "vgg16", "resnet50", "resnet101", "bert-large"]

_STANDARD: Mapping[str, Shape] = {
    "resnet50": Shape(family="resnet50", vocabulary=1000),
    "bert-large": Shape(
        family="bert", layers=24, hidden=1024, heads=16, ffn=4096, vocabulary=30522, length=128, places=512, dropout=0.1
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One model on growing numbers of equal devices, data-parallel.

    Attributes:
        name: as a chart shows it.
        model: what is trained.
        device: name in the catalog.
        per_node: devices in a full node.
        network: what a node can send, such as ``50Gb/s``; empty for the catalog's.
        counts: numbers of devices, the first of which speed-ups are over.
        share: samples of a device in one step; 0 where ``batch`` is fixed.
        batch: samples of all devices in one step; 0 where ``share`` is fixed.
        micro: samples in one forward; 0 for all of a device's.
        precision: computed in.
        optimizer: in lower case.
        state: bytes of optimizer state for each parameter.
        preset: name of the framework's preset; Phalanx's own where not given.
    """

    name: str
    model: Model
    device: str
    per_node: int
    network: str = ""
    counts: tuple[int, ...]
    share: int = 0
    batch: int = 0
    micro: int = 0
    precision: Literal["fp32", "fp16", "bf16"] = "fp32"
    optimizer: str = "sgd"
    state: float = 4.0
    preset: str = PHALANX.name

    def samples(self, devices: int) -> int:
        """In one step of that many devices."""
        return self.batch or self.share * devices

    def place(self, devices: int) -> str:
        """The cluster of that many devices, as ``hardware.cluster`` reads it."""
        nodes, inside = max(1, devices // self.per_node), min(devices, self.per_node)
        rate = f"@{self.network}" if self.network else ""
        return f"{nodes}x{inside}x{self.device}{rate}"

    def forecast(self, devices: int) -> Forecast:
        """The future of one step on that many devices."""
        work = Work(
            profile=profile(self.model), batch=self.samples(devices), state=self.state, optimizer=self.optimizer
        )
        plan = Plan(dp=devices, precision=self.precision, micro=self.micro or None)
        return forecast(work, plan, cluster(self.place(devices)), NAMED[self.preset])


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """The forecasts of a setting.

    Attributes:
        setting: what was forecast.
        forecasts: one for each of its counts.
    """

    setting: Setting
    forecasts: tuple[Forecast, ...]

    @classmethod
    def of(cls, setting: Setting) -> Curve:
        """The forecasts for all counts of ``setting``."""
        return cls(setting=setting, forecasts=tuple(setting.forecast(count) for count in setting.counts))

    def speed_up(self, devices: int) -> float:
        """Throughput on one of the counts over that on the first."""
        return self.forecasts[self.setting.counts.index(devices)].throughput / self.forecasts[0].throughput

    def efficiency(self, devices: int) -> float:
        """Speed-up over what as many more devices could give at most; 1 is linear."""
        return self.speed_up(devices) * self.setting.counts[0] / devices

    def range(self, devices: int) -> tuple[float, float]:
        """The efficiencies at both ends of the interval of the step on one of the counts, the first being right."""
        found = self.forecasts[self.setting.counts.index(devices)]
        at = self.efficiency(devices)
        return at * found.step / found.high, at * found.step / found.low


@cache
def profile(model: Model) -> Profile:
    """The costs of a model; traced once."""
    if model in _STANDARD:
        return _STANDARD[model].profile()
    if model == "resnet101":
        return _deeper(profile("resnet50"), 17)
    return described(model).profile()


def _deeper(found: Profile, blocks: int) -> Profile:
    """With so many blocks more in the longest run of equal ones: all that ResNet-101 has beyond ResNet-50."""
    longest = max(found.parts, key=lambda part: part.count)
    parts = [replace(part, count=part.count + blocks) if part is longest else part for part in found.parts]
    return replace(found, parts=tuple(parts))


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


def described(name: str) -> ModelCall:
    """A network of ``NETWORKS`` on the meta device, with one image and its loss."""
    with torch.device("meta"):
        image, label = torch.empty(1, 3, _PIXELS, _PIXELS), torch.empty(1, dtype=torch.int64)
        return ModelCall(module=NETWORKS[name](), args=(image,), batch=label, loss=F.cross_entropy)


def _convolution(channels: int, width: int, kernel: int, *, stride: int = 1, padding: int = 0) -> list[nn.Module]:
    return [nn.Conv2d(channels, width, kernel, stride, padding), nn.ReLU(inplace=True)]


def _classifier(inputs: int) -> list[nn.Module]:
    layers: list[nn.Module] = [nn.Flatten()]
    for width in (inputs, 4096):
        layers += [nn.Linear(width, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    return [*layers, nn.Linear(4096, _CLASSES)]
