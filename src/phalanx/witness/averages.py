"""The average of the weights in a plain loop, written out: of whole tensors, one by one."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from phalanx.config import Average


class PlainAverage:
    """The average of the parameters of ``model``, and its buffers as they were when that was made last."""

    def __init__(self, how: Average, model: nn.Module) -> None:
        self._how, self._model, self._made = how, model, 0
        self._values: dict[str, Tensor] = {}

    @torch.no_grad()
    def stepped(self, taken: int) -> None:
        """The update that makes ``taken`` steps was made."""
        how = self._how
        if taken < max(how.start, 1) or (taken - how.start) % how.every:
            return
        self._made += 1
        share = 1 / self._made if how.kind == "mean" else 1 - how.factor
        for name, tensor in self._model.named_parameters():
            before = self._values.get(name, tensor)
            self._values[name] = before + share * (tensor - before)
        self._values |= {name: tensor.clone() for name, tensor in self._model.named_buffers()}

    def copies(self, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Its values of these names, on the host; none before it has begun."""
        return {name: self._values[name].detach().cpu().clone() for name, _ in named if name in self._values}

    @contextmanager
    def evaluated(self) -> Generator[None]:
        """Around an evaluation: the model has the averaged weights, if there are any and they are to be evaluated."""
        if not (self._made and self._how.evaluate):
            yield
            return
        held = [*self._model.named_parameters(), *self._model.named_buffers()]
        own = [tensor.detach().clone() for _, tensor in held]
        with torch.no_grad():
            for name, tensor in held:
                tensor.copy_(self._values[name])
        yield
        with torch.no_grad():
            for (_, tensor), values in zip(held, own, strict=True):
                tensor.copy_(values)
