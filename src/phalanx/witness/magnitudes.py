"""What the rounding of a gradient is relative to: found by changing at random everything that backward reads.

A gradient is added up from many terms, each rounded relative to itself. Where the terms are of one sign, or small one
and all, as those of an adapter whose other half is nearly zero, the sum is as exact as they are. Where they cancel, as
for the bias of attention's keys, the sum may be nothing but their rounding. Which it is cannot be seen from the sum. So
backward runs again with each signal that comes back, and each tensor kept from forward, multiplied element by element
with 1 + s or 1 - s, drawn at random: Monte Carlo arithmetic (Parker 1997). By how much a gradient then moves, over s,
is the root of the sum of squares of the terms it is added up from: rounding by u moves it by u times that.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

_DRAWS = 2
_SHARE, _HALF_SHARE = 2.0**-10, 2.0**-6
"""By which share things are changed: far above what is rounded, and small enough for backward to be linear in it."""
_SMALL, _HALF_SMALL = 1e-5, 0.02
"""Gradients below this share of the norm of all are looked at, and in half precision all of the first step; the others
are judged by their own size."""


class Magnitudes:
    """Looks at the gradients of losses whose forward ran inside ``forward()``, while their graph is still there."""

    def __init__(self, precision: str) -> None:
        self._half = precision in ("bf16", "fp16")
        self._share, self._small = (_HALF_SHARE, _HALF_SMALL) if self._half else (_SHARE, _SMALL)
        self._generators: dict[torch.device, torch.Generator] = {}
        self._changes = False

    def forward(self) -> AbstractContextManager[Any]:
        """Inside, what is saved for backward is saved by way of here."""
        return torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, self._read)

    def of(
        self, loss: Tensor, parameters: Mapping[str, Tensor], among: Collection[str], *, first: bool
    ) -> dict[str, float]:
        """Name → what the rounding of its gradient is relative to, ``among`` those with a small one in ``grad``.

        Nothing for gradients that are not there, and none at all where backward cannot run once more.
        """
        grads = {name: dense(tensor.grad) for name, tensor in parameters.items() if tensor.grad is not None}
        norms = {name: float(torch.linalg.vector_norm(grad, dtype=torch.float64)) for name, grad in grads.items()}
        total = math.hypot(*norms.values())
        below = math.inf if first and self._half else self._small * total
        names = [name for name, norm in norms.items() if name in among and norm <= below]
        if not names or not math.isfinite(total):
            return {}
        squares = dict.fromkeys(names, 0.0)
        hooks = [node.register_prehook(self._come_back) for node in _nodes(loss)]
        self._changes = True
        try:
            for _ in range(_DRAWS):
                wanted = [parameters[name] for name in names]
                found = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
                for name, changed in zip(names, found, strict=True):
                    moved = grads[name] if changed is None else dense(changed) - grads[name]
                    squares[name] += float(torch.linalg.vector_norm(moved, dtype=torch.float64)) ** 2
        except RuntimeError:  # such as code that checkpoints in a way that allows no second look
            return {}
        finally:
            self._changes = False
            for hook in hooks:
                hook.remove()
        sizes = {name: math.sqrt(square / _DRAWS) / self._share for name, square in squares.items()}
        return {name: size for name, size in sizes.items() if math.isfinite(size)}

    def _read(self, saved: Tensor) -> Tensor:
        return self._changed(saved) if self._changes else saved

    def _come_back(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if grad is None else self._changed(grad) for grad in grads)

    def _changed(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.layout != torch.strided:
            return tensor
        with torch.no_grad():
            signs = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
            signs.bernoulli_(0.5, generator=self._generator(tensor.device)).mul_(2.0).sub_(1.0)
            changed = (tensor * (1.0 + self._share * signs)).to(tensor.dtype)
            return torch.where(changed.isfinite(), changed, tensor)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(0)
        return self._generators[device]


def dense(tensor: Tensor) -> Tensor:
    """A sparse one with its zeros."""
    return tensor.to_dense() if tensor.is_sparse else tensor


def _nodes(loss: Tensor) -> list[Any]:
    """Every node of the graph but those that add to a parameter's ``grad``."""
    found: dict[Any, None] = {}
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in found or hasattr(node, "variable"):
            continue
        found[node] = None
        waiting += [before for before, _ in node.next_functions]
    return list(found)
