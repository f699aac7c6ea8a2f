"""The models of the parity table with dropout in them, for proofs with masks by sample and layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from models import MODELS
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd

import phalanx as px

RATES = (0.1, 0.5)


class AttentionDrops(nn.Module):
    """An own GPT's attention, which drops weights by torch's function."""

    def __init__(self, attention: Any, rate: float) -> None:
        super().__init__()
        self.inner, self.rate = attention, rate

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inner.query_key_value(x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.inner.heads, -1)).transpose(1, 2) for part in parts)
        rate = self.rate if self.training else 0.0
        gathered = functional.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        return self.inner.output(gathered.transpose(1, 2).flatten(2))


def with_dropout(job: px.Job) -> px.Job:
    """``job`` whose model drops: where transformers' own modules do, and after layers of the others."""

    def model() -> nn.Module:
        built, called = job.model(), False
        for child in list(built.modules()):
            if isinstance(child, nn.Dropout):
                child.p = RATES[0]
            for name in ("attention_dropout", "attn_dropout", "dropout_prob", "dropout_rate", "dropout"):
                if isinstance(getattr(child, name, None), float):  # a rate that a function is called with
                    setattr(child, name, RATES[1])
                    called = True
        _drop_after_layers(built)
        if not called and not any(isinstance(child, _DropoutNd) for child in built.modules()):
            raise NotImplementedError(f"{type(built).__name__} drops nowhere")
        return built

    return replace(job, model=model)


def _drop_after_layers(built: Any) -> None:
    kind = type(built).__name__
    if kind == "GPT":
        for block in built.blocks:
            block.attention = AttentionDrops(block.attention, RATES[1])
            block.down = nn.Sequential(block.down, nn.Dropout(RATES[0]))
        built.token = nn.Sequential(built.token, nn.Dropout(RATES[0]))
    elif kind == "Row":
        for index, layer in enumerate(built.layers):
            built.layers[index] = nn.Sequential(layer, nn.Dropout(RATES[index % 2]))
    elif kind == "Sequential":
        for stage in built[0]:
            stage.append(nn.Dropout2d(RATES[1]))
    elif kind == "Irregular":
        built.shared = nn.Sequential(built.shared, nn.Dropout(RATES[0]))  # called twice
        built.left.append(nn.Dropout(RATES[1]))


DROPPING: dict[str, Callable[[], px.Job]] = {
    name: lambda make=make: with_dropout(make()) for name, make in MODELS.items()
}
