"""Stand-ins for units on stages that do not run them: the form of their output, and their cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import flop_registry

from phalanx.trace.fake_tensors import fake


@dataclass(frozen=True, slots=True)
class LeafOrigin:
    """The origin of one leaf of an output: a new tensor, an argument returned, or not a tensor."""

    made: bool  # whether it is a new tensor
    argument: int = -1  # which tensor among the arguments it is, or has the shape of
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    other: Any = None  # what is no tensor


@dataclass(frozen=True, slots=True)
class Outline:
    """The leaves of an output, and their structure."""

    ways: tuple[LeafOrigin, ...]
    spec: TreeSpec


def outline(output: Any, args: Any, kwargs: Any, fakes: FakeTensorMode) -> tuple[Outline, Any]:
    """Return the form of ``output``, given the arguments, and the output with every new tensor a fake."""
    leaves, spec = tree_flatten(output)
    given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    places = {id(leaf): index for index, leaf in enumerate(given)}
    shapes = {(tuple(leaf.shape), leaf.dtype): index for index, leaf in reversed(list(enumerate(given)))}
    ways: list[LeafOrigin] = []
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            ways.append(LeafOrigin(False, other=leaf))
        elif id(leaf) in places:
            ways.append(LeafOrigin(False, argument=places[id(leaf)]))
        else:
            shape, stride = tuple(leaf.shape), tuple(leaf.stride()) if leaf.layout == torch.strided else ()
            ways.append(LeafOrigin(True, shapes.get((shape, leaf.dtype), -1), shape, stride, leaf.dtype, leaf.device))
            if not isinstance(leaf, FakeTensor):
                leaves[index] = fake(fakes, leaf.detach())
    return Outline(tuple(ways), spec), tree_unflatten(leaves, spec)


def drawn(form: Outline, args: Any, kwargs: Any, fakes: FakeTensorMode) -> Any:
    """Return an output of this form, its new tensors fakes."""
    given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    leaves: list[Any] = []
    for way in form.ways:
        if way.made:
            meta = torch.empty_strided(way.shape, way.stride, dtype=way.dtype, device="meta")
            leaves.append(FakeTensor(fakes, meta, way.device))
        else:
            leaves.append(given[way.argument] if way.argument >= 0 else way.other)
    return tree_unflatten(leaves, form.spec)


def like_arguments(form: Outline, args: Any, kwargs: Any) -> Outline | None:
    """Return the form with new tensors shaped like arguments; ``None`` if one was not shaped like any."""
    given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    ways: list[LeafOrigin] = []
    for way in form.ways:
        if way.made:
            if way.argument < 0:
                return None
            model = given[way.argument]
            shape = tuple(model.shape)
            stride = torch.empty(shape, device="meta").stride()
            way = LeafOrigin(True, way.argument, shape, stride, model.dtype, model.device)
        ways.append(way)
    return Outline(tuple(ways), form.spec)


def signature(args: Any, kwargs: Any) -> Any:
    """Return a key for the form of an output: equal for calls with equal forms."""
    leaves, _ = tree_flatten((args, kwargs))
    each = tuple(
        (tuple(leaf.shape), leaf.dtype)
        if isinstance(leaf, Tensor)
        else (leaf if isinstance(leaf, int | float | bool | str | None | torch.dtype) else type(leaf))
        for leaf in leaves
    )
    return each, len(args), tuple(kwargs)


_PER_ELEMENT = 16.0  # of floating-point operations that take as long as writing one element
_aten = torch.ops.aten


class Flops(TorchDispatchMode):
    """A counter of the operations' cost in FLOPs, or equivalent time, by the current ``place``."""

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
