"""Dropout switched off for a while, in this process."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def dropout_off() -> Generator[None]:
    """Make every dropout of torch's functional interface the identity; training mode otherwise stays on.

    Modules call these functions, so theirs is off as well. Recurrent layers drop in compiled code, at the rate of their
    attribute ``dropout``, which reads as zero.
    """
    functional: Any = torch.nn.functional

    def identity(input: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return input

    attention = functional.scaled_dot_product_attention

    def without(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any, **named: Any
    ) -> Any:
        return attention(query, key, value, attn_mask, 0.0, *rest, **named)

    names = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    replaced: dict[str, Any] = {**dict.fromkeys(names, identity), "scaled_dot_product_attention": without}
    before = {name: getattr(functional, name) for name in replaced}
    vars(functional).update(replaced)
    layers: Any = nn.RNNBase
    layers.dropout = property(lambda layer: 0.0, lambda layer, rate: vars(layer).update(dropout=rate))
    try:
        yield
    finally:
        del layers.dropout
        vars(functional).update(before)
