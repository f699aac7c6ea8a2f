"""Three models that forecasts are held against here, as jobs; a step takes at least 20 ms on one core."""

from __future__ import annotations

import torch
from torch import nn

import phalanx as px
from workloads import GPT, loss

_SAMPLES = 4096  # so that no epoch begins in a short run


def gpt() -> px.Job:
    """4 blocks of width 256 over 64 bytes, 3.3 M parameters: attention, and products over tokens."""

    def data() -> torch.utils.data.Dataset[tuple[torch.Tensor, ...]]:
        text = torch.randint(256, (_SAMPLES, 65), generator=torch.Generator().manual_seed(0))
        return torch.utils.data.TensorDataset(text[:, :-1], text[:, 1:])

    return _job("gpt", lambda: GPT(layers=4, width=256, heads=4, context=64), data, batch=16)


def mlp() -> px.Job:
    """8 blocks of width 512, 4.2 M parameters for 256 samples: products, and an update that counts."""

    def model() -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)) for _ in range(8)]
        return nn.Sequential(nn.Linear(64, 512), *blocks, nn.Linear(512, 10))

    return _job("mlp", model, lambda: _labelled(64), batch=256)


def convnet() -> px.Job:
    """Four convolutions of images of 28 x 28, 0.4 M parameters: traffic, pooling."""

    def model() -> nn.Module:
        return nn.Sequential(
            *[nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)],
            *[nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)],
            *[nn.Flatten(), nn.Linear(64 * 49, 64), nn.ReLU(), nn.Linear(64, 10)],
        )

    return _job("convnet", model, lambda: _labelled(1, 28, 28), batch=32)


def _labelled(*shape: int) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(_SAMPLES, *shape, generator=generator)
    return torch.utils.data.TensorDataset(inputs, torch.randint(10, (_SAMPLES,), generator=generator))


def _job(name: str, model: object, data: object, *, batch: int) -> px.Job:
    return px.Job(
        model=model,  # pyright: ignore
        data=data,  # pyright: ignore
        loss=lambda output, batch: loss(output, batch[1]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        batch=batch,
        epochs=100,
        name=name,
    )


JOBS = {"gpt": gpt, "mlp": mlp, "convnet": convnet}
