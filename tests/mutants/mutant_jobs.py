"""Small jobs in which many faults show: uneven batches, token counts, groups, a schedule, clipping, an evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import phalanx as px
from phalanx.demo.jobs import gpt

STEPS, BATCH, LENGTH = 8, 14, 40  # the last batch of an epoch has 12


class Net(nn.Module):
    """Layers of unequal width, without a parameter that has no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 19), nn.Linear(19, 16)])
        self.gain = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x * self.gain)


def rows(length: int = LENGTH) -> px.Table:
    """Values, a class, and how much a sample counts."""
    generator = torch.Generator().manual_seed(1)
    return px.Table(
        x=torch.randn(length, 16, generator=generator),
        y=torch.randint(5, (length,), generator=generator),
        weight=torch.rand(length, generator=generator) + 0.1,
    )


def groups(params: Any) -> torch.optim.Optimizer:
    """Weight decay on matrices only."""
    named = list(params.named())
    parts = [
        {"params": [tensor for name, tensor in named if "weight" in name], "weight_decay": 0.3},
        {"params": [tensor for name, tensor in named if "weight" not in name], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(parts, lr=1e-2)


def weighted(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> px.Loss:
    """Cross entropy by the weights of the samples."""
    each = nn.functional.cross_entropy(output, batch["y"], reduction="none")
    return px.Loss((each * batch["weight"]).sum(), batch["weight"].sum())


def rich(**how: Any) -> px.Job:
    """A sum and a count that differs by sample."""
    given: dict[str, Any] = {
        "model": Net,
        "data": rows,
        "inputs": lambda batch: batch["x"],
        "loss": weighted,
        "optimizer": groups,
        "schedule": px.Schedule(decay="cosine", warmup_samples=30, floor=0.1),
        "clip": 0.3,
        "evaluate": lambda: rows(29),  # the last batch has one sample
        "metrics": lambda output, batch: {"accuracy": px.accuracy(output, batch["y"])},
        "evaluate_every": 3,
        "batch": BATCH,
        "steps": STEPS,
        **how,
    }
    return px.Job(**given)


def mean() -> px.Job:
    """A plain mean as loss, plain SGD."""
    return rich(
        loss=lambda output, batch: nn.functional.cross_entropy(output, batch["y"]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
        clip=None,
    )


def tokens() -> px.Job:
    """A GPT over sentences of unequal length."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 64, (LENGTH, 12), generator=generator)
    real = torch.arange(12)[None] < 3 + torch.arange(LENGTH)[:, None] % 10
    shape = gpt.gpt_job(layers=2, width=32, heads=2, context=12, batch=BATCH, steps=STEPS)
    return rich(
        model=shape.model,
        data=lambda: px.Table(input_ids=ids * real, labels=torch.where(real, ids, -100)),
        inputs=lambda batch: batch["input_ids"],
        loss=lambda output, batch: px.cross_entropy(output[:, :-1], batch["labels"][:, 1:]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        evaluate=None,
        metrics=None,
        evaluate_every=0,
    )


def experts() -> px.Job:
    """transformers' Mixtral with four experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = MixtralConfig(
        vocab_size=64, max_position_embeddings=12, num_key_value_heads=1, num_local_experts=4, **sizes
    )
    one = tokens()
    return px.Job(
        model=lambda: MixtralForCausalLM(config),
        data=one.data,
        inputs=one.inputs,
        loss=lambda output, batch: px.cross_entropy(output.logits[:, :-1], batch["labels"][:, 1:]),
        optimizer=one.optimizer,
        clip=0.3,
        batch=BATCH,
        steps=4,
    )


def overflow() -> px.Job:
    """Values so large that fp16's loss scale has to come down."""
    model = lambda: nn.Linear(16, 5)  # noqa: E731
    return rich(model=model, inputs=lambda batch: batch["x"] * 3e3, evaluate=None, metrics=None, evaluate_every=0)


def norm() -> px.Job:
    """Running statistics: not equal to one device, but the same on all ranks."""
    return rich(model=lambda: nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)))


class Drawing(torch.utils.data.Dataset[Any]):
    """Samples that draw from the global generators."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        noise = torch.randn(16) * 0.1 + float(np.random.rand())
        return {"x": noise + index % 5, "y": index % 5, "weight": 1.0 + index % 3}


def noisy() -> px.Job:
    """Dropout, and augmented samples."""
    model = lambda: nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 5))  # noqa: E731
    return rich(model=model, data=Drawing)


class Dropping(nn.Module):
    """Layers of one width that drop at one rate, so that masks of one stream would be the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, 32), nn.Linear(32, 5)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.3)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def drops() -> px.Job:
    """Dropout in every layer."""
    return rich(model=Dropping, evaluate=None, metrics=None, evaluate_every=0)


def gentle() -> px.Job:
    """A limit that no gradient comes near."""
    return rich(clip=1e3, evaluate=None, metrics=None, evaluate_every=0)


JOBS: dict[str, Callable[[], px.Job]] = {
    "rich": rich,
    "mean": mean,
    "tokens": tokens,
    "experts": experts,
    "overflow": overflow,
    "norm": norm,
    "noisy": noisy,
    "drops": drops,
    "gentle": gentle,
}
