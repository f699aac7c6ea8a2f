"""Dropout switched off for a while, in this process."""

from __future__ import annotations

from collections.abc import Callable, Generator
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
def dropout_off() -> Generator[SwitchedOff]:
    """Within, every dropout of torch's functional interface is the identity; training mode otherwise stays on.

    Modules call these functions, so that theirs is off as well, but for those of recurrent layers: see ``no_rates``.
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
    before = {name: getattr(functional, name) for name in replaced}
    vars(functional).update(replaced)
    try:
        yield off
    finally:
        vars(functional).update(before)


def no_rates(model: Callable[[], Any]) -> Callable[[], Any]:
    """``model`` with the rates of recurrent layers at zero: compiled code drops there."""

    def built() -> Any:
        made = model()
        for child in made.modules() if isinstance(made, nn.Module) else ():
            if isinstance(child, nn.RNNBase):
                child.dropout = 0.0
        return made

    return built
