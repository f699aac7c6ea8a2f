"""Counts what a run on fake tensors would cost: products by their operations, the rest by what it writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_PER_ELEMENT = 16.0  # of floating-point operations that take as long as writing one element
_aten = torch.ops.aten


class Flops(TorchDispatchMode):
    """Adds up, under what ``place`` gives at the time, what operations cost.

    Attributes:
        found: place → floating-point operations, or what takes as long.
    """

    def __init__(self, place: Callable[[], int]) -> None:
        super().__init__()
        self.found: dict[int, float] = defaultdict(float)
        self._place = place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found[self._place()] += _cost(func, args, kwargs or {}, result)
        return result


def _cost(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    elements = _PER_ELEMENT * sum(prod(leaf.shape) for leaf in written)
    packet = getattr(func, "overloadpacket", None)
    if packet is _aten._scaled_dot_product_flash_attention_for_cpu:
        query, key, value = (tuple(leaf.shape) for leaf in args[:3])
        return elements + 2.0 * prod(query) * key[-2] + 2.0 * prod(query[:-1]) * prod(value[-2:])
    if packet in flop_registry:
        return elements + float(flop_registry[packet](*args, **kwargs, out_val=result))
    if func in (_aten.view.default, _aten.t.default, _aten.transpose.int, _aten.detach.default, _aten.expand.default):
        return 0.0
    return elements
