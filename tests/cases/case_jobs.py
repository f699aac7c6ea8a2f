"""Jobs around the models, with data, losses and optimizers that plans must cope with."""

from __future__ import annotations

import random
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import case_models as models
import numpy as np
import torch
import torch.nn.functional as F
from case_models import CLASSES, FEATURES, WORDS
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

import phalanx as px

BATCH, STEPS, SAMPLES = 16, 3, 96
LENGTHS = (3, 9, 5, 12, 4, 7, 2, 10)
CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 4.0, 8.0])


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(length: int = SAMPLES) -> px.Table:
    x = torch.randn(length, FEATURES, generator=drawn(0))
    return px.Table(x=x, y=x[:, :CLASSES].argmax(1), ids=(x[:, :5].abs() * 8).long().clamp(max=WORDS - 1))


def job(**how: Any) -> px.Job:
    given: dict[str, Any] = {
        "model": models.Residual,
        "data": rows,
        "loss": lambda output, batch: px.cross_entropy(output, batch["y"]),
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-3),
        "batch": BATCH,
        "steps": STEPS,
        **how,
    }
    return px.Job(**given)


def with_penalty(output: Any, batch: Any) -> px.Loss:
    logits, more, _ = output
    return px.Loss(
        F.cross_entropy(logits, batch["y"], reduction="sum") + more["penalty"].sum(), torch.tensor(len(logits))
    )


def distilled(output: Any, batch: Any) -> px.Loss:
    towards = F.mse_loss(output["found"], output["taught"], reduction="sum")
    return px.Loss(towards + F.cross_entropy(output["found"], batch["y"], reduction="sum"), len(batch["y"]))


# What a batch is made of


class Sentences(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return 1 + (torch.arange(LENGTHS[index % 8]) * 5 + index) % (WORDS - 1)


def padded(samples: list[Tensor]) -> UserDict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return UserDict(ids=ids, mask=(ids > 0).long(), labels=ids.masked_fill(ids == 0, -100))


class Sentence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, models.WIDTH)
        self.branches = nn.ModuleList([models.Branch() for _ in range(2)])
        self.head = nn.Linear(models.WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for branch in self.branches:
            x = x + branch(x)
        return self.head(x)


def sentences(**how: Any) -> px.Job:
    return job(**{"model": Sentence, "data": Sentences, "collate": padded, "loss": counted_tokens, **how})


def counted_tokens(output: Tensor, batch: Any) -> px.Loss:
    return px.cross_entropy(output, batch["labels"])


def mean_over_tokens(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def mean_over_padding(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["ids"].flatten())


class Stream(torch.utils.data.IterableDataset[Any]):
    """Samples in an order of their own, and an epoch that is no whole number of batches."""

    def __iter__(self) -> Iterator[Any]:
        generator = drawn(3)
        for _ in range(40):
            x = torch.randn(FEATURES, generator=generator)
            yield {"x": x, "y": x[:CLASSES].argmax()}


class Resampled(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        table = rows()
        weights = torch.rand(len(table), generator=drawn(4))
        for index in torch.utils.data.WeightedRandomSampler(weights, 40, generator=drawn(5)):
            yield table[index]


class Noisy(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        x = torch.randn(FEATURES, generator=drawn(index))
        noise = 0.1 * torch.randn(FEATURES) + 0.1 * float(np.random.randn()) + 0.1 * random.random()
        return {"x": x + noise, "y": x[:CLASSES].argmax()}


class OneRanksShare(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.table = rows()
        self.places = list(torch.utils.data.DistributedSampler(range(SAMPLES), 2, 0))

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Any:
        return self.table[self.places[index]]


def masked(samples: list[Any]) -> dict[str, Tensor]:
    x, y = (torch.stack([torch.as_tensor(one[key]) for one in samples]) for key in ("x", "y"))
    return {"x": x * (torch.rand_like(x) > 0.25), "y": y}


def tuples() -> torch.utils.data.Dataset[Any]:
    table = rows()
    every = table.__getitems__(np.arange(SAMPLES))
    return torch.utils.data.TensorDataset(every["x"], every["y"])


# Losses that look at more than samples


def by_class(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch["y"], weight=CLASS_WEIGHTS)


def by_class_counted(output: Tensor, batch: Any) -> px.Loss:
    weight = CLASS_WEIGHTS[batch["y"]].sum()
    return px.Loss(F.cross_entropy(output, batch["y"], weight=CLASS_WEIGHTS, reduction="sum"), weight)


def contrastive(output: tuple[Tensor, Tensor], batch: Any) -> Tensor:
    left, right = (F.normalize(one, dim=-1) for one in output)
    return F.cross_entropy(4.0 * left @ right.T, torch.arange(len(left)))


# Optimizers


def by_dimensions(params: Any) -> torch.optim.Optimizer:
    every = list(params)
    matrices, rest = [one for one in every if one.ndim > 1], [one for one in every if one.ndim < 2]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 1e-2}], lr=1e-3)


class Averaging(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for one in [one for group in self.param_groups for one in group["params"]]:
                state = self.state[one]
                if "average" in state:
                    state["average"].lerp_(one.detach(), 0.1)
                else:
                    state["average"] = one.detach().clone()
        return loss


class Matrices(models.Residual):
    def __init__(self) -> None:
        super().__init__()
        for one in self.parameters():
            one.requires_grad_(one.ndim == 2)


def cyclic(params: Any, *, hooked: bool = True) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params, lr=0.1)
    scheduler = OneCycleLR(optimizer, max_lr=0.4, total_steps=12)
    if hooked:
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


STRANGER = models.Residual()


def of_a_stranger(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(STRANGER.parameters(), lr=0.1)
