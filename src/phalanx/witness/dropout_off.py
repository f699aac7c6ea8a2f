"""Dropout switched off for a while, in this process."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(slots=True)
class SwitchedOff:
    """How often dropout was asked for that is off."""

    calls: int = 0


@contextmanager
def dropout_off(*, recurrent_alone: bool = False) -> Generator[SwitchedOff]:
    """Within, every dropout of torch's functional interface is the identity; training mode otherwise stays on.

    Modules call these functions, so that theirs is off as well. Recurrent layers drop in compiled code, at the rate of
    their attribute ``dropout``, which reads as zero; with ``recurrent_alone`` nothing else is off.
    """
    functional: Any = torch.nn.functional
    off = SwitchedOff()

    def identity(input: torch.Tensor, p: float = 0.5, training: bool = True, *_: Any, **__: Any) -> torch.Tensor:
        off.calls += training and p > 0.0
        return input

    attention = functional.scaled_dot_product_attention

    def without(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any, **named: Any
    ) -> Any:
        off.calls += dropout_p > 0.0
        return attention(query, key, value, attn_mask, 0.0, *rest, **named)

    names = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    replaced: dict[str, Any] = {**dict.fromkeys(names, identity), "scaled_dot_product_attention": without}
    replaced = {} if recurrent_alone else replaced
    before = {name: getattr(functional, name) for name in replaced}
    vars(functional).update(replaced)
    layers: Any = nn.RNNBase
    layers.dropout = property(lambda layer: 0.0, lambda layer, rate: vars(layer).update(dropout=rate))
    try:
        yield off
    finally:
        del layers.dropout
        vars(functional).update(before)
