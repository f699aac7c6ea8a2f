"""What every contender trains: the same model, data, batch and optimizer, whoever owns the loop.

Data are random but fixed by a seed: benchmarks ask how long a step takes, not what it learns.
Shapes: B batch, T tokens of context, V vocabulary, C channels or model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

CLIP = 1.0
"""Norm that gradients are clipped to where a model is split over ranks."""


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    """Inputs and targets in memory. Asked for several samples at once it gives them as a batch, whoever loads.

    Torch's loader asks so (``__getitems__``), and so does Phalanx's. Of a ``TensorDataset`` Phalanx would read a batch
    at a time, and torch's loader a sample at a time.
    """

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self._columns = (inputs, targets)

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, index: int | slice) -> tuple[Tensor, Tensor]:
        inputs, targets = self._columns
        return inputs[index], targets[index]

    def __getitems__(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        index = torch.tensor(ids)
        inputs, targets = self._columns
        return inputs[index], targets[index]


def as_it_is(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Nothing to collate in what ``Pairs`` gives; for ``DataLoader(collate_fn=...)``."""
    return batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One training problem.

    Attributes:
        model: builds the module.
        data: builds a dataset of (input, target).
        batch: samples in one optimizer step, over all processes.
        lr: of AdamW.
    """

    model: Callable[[], nn.Module]
    data: Callable[[], Pairs]
    batch: int
    lr: float = 1e-3

    def optimizer(self, parameters: object) -> torch.optim.Optimizer:
        """AdamW over ``parameters``, in one kernel, as torch's documentation advises where it is supported."""
        return torch.optim.AdamW(parameters, lr=self.lr, fused=True)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy over samples, or over samples and tokens."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def mlp() -> nn.Module:
    """64-256-10: so small that what surrounds the step is what is measured."""
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def convnet() -> nn.Module:
    """Three convolutions and a classifier on 28 x 28 images: 0.4 M parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(128 * 16, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        batch, tokens, _ = x_BTC.shape
        parts = self.qkv(self.norm1(x_BTC)).view(batch, tokens, 3, -1, self.size)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BTC = x_BTC + self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        return x_BTC + self.down(F.gelu(self.up(self.norm2(x_BTC))))


class GPT(nn.Module):
    """Decoder-only transformer over bytes; 6 layers of width 384 have 10.8 M parameters."""

    def __init__(self, *, layers: int = 6, width: int = 384, heads: int = 6, context: int = 64) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTC = self.token(ids_BT) + self.position.weight[: ids_BT.shape[1]]
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return self.head(self.norm(x_BTC))


class Stack(nn.Module):
    """Equal blocks one after another: two depths differ by parameters alone, which is what memory is read from."""

    def __init__(self, depth: int, width: int = 1024) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x_BC: Tensor) -> Tensor:
        for block in self.blocks:
            x_BC = x_BC + block(x_BC)
        return self.head(x_BC)


def _vectors(count: int, width: int) -> Pairs:
    generator = torch.Generator().manual_seed(0)
    return Pairs(torch.randn(count, width, generator=generator), torch.randint(10, (count,), generator=generator))


def _images(count: int) -> Pairs:
    generator = torch.Generator().manual_seed(0)
    return Pairs(torch.randn(count, 1, 28, 28, generator=generator), torch.randint(10, (count,), generator=generator))


def _bytes(count: int, context: int) -> Pairs:
    text = torch.randint(256, (count, context + 1), generator=torch.Generator().manual_seed(0))
    return Pairs(text[:, :-1], text[:, 1:])


WORKLOADS: dict[str, Workload] = {
    "mlp": Workload(model=mlp, data=lambda: _vectors(4096, 64), batch=32),
    "convnet": Workload(model=convnet, data=lambda: _images(2048), batch=128),
    "gpt": Workload(model=GPT, data=lambda: _bytes(512, 64), batch=16, lr=3e-4),
    "gpt-split": Workload(
        model=lambda: GPT(layers=8, width=256, heads=8, context=32), data=lambda: _bytes(16, 32), batch=16, lr=3e-4
    ),
    "gpt-100m": Workload(
        model=lambda: GPT(layers=12, width=832, heads=16, context=32), data=lambda: _bytes(8, 32), batch=8, lr=3e-4
    ),
    "gpt-limit": Workload(
        model=lambda: GPT(layers=16, width=840, heads=8, context=16), data=lambda: _bytes(4, 16), batch=4, lr=3e-4
    ),
    "stack-8": Workload(model=lambda: Stack(8), data=lambda: _vectors(256, 1024), batch=8),
    "stack-24": Workload(model=lambda: Stack(24), data=lambda: _vectors(256, 1024), batch=8),
}
