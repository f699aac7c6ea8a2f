"""Parameters of which this rank holds a slice, shown to the model's own code as wholes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from phalanx.parallel.holding import Holding
from phalanx.parallel.sliced.axis import Placed, piece
from phalanx.parallel.sliced.tensor import Sliced

Places = list[tuple[nn.Module, str, tuple[Placed, ...]]]
"""Which module's parameter of which name is cut how."""


def split_weights(module: nn.Module, cuts: Mapping[str, tuple[Placed, ...]]) -> tuple[dict[str, Holding], Places]:
    """Keep of each parameter named in ``cuts`` this rank's slice only, in place; what is held then, by name, and where.

    ``show_slices`` makes the model's own code read them as wholes again.
    """
    holdings: dict[str, Holding] = {}
    locals_: dict[int, nn.Parameter] = {}
    whole = dict(module.named_parameters())
    for name, placed in cuts.items():
        tensor = whole[name]
        local: Tensor = tensor.detach()
        for one in placed:
            local = piece(local, one.dim, one.cut, one.axis.rank)
        locals_[id(tensor)] = nn.Parameter(local.clone(), requires_grad=tensor.requires_grad)
        holdings[name] = Holding(shape=tensor.shape, placed=placed)
    ways = {id(whole[name]): placed for name, placed in cuts.items()}
    places: Places = []
    for child in module.modules():
        for name, tensor in child._parameters.items():
            if id(tensor) in locals_:
                places.append((child, name, ways[id(tensor)]))
                child._parameters[name] = locals_[id(tensor)]
    return holdings, places


def show_slices(places: Places) -> None:
    """Make the model's own code read these parameters as wholes, wherever it reads them."""
    by_module: dict[nn.Module, dict[str, tuple[Placed, ...]]] = {}
    for child, name, placed in places:
        by_module.setdefault(child, {})[name] = placed
    for child, shown in by_module.items():
        _show(child, shown)


def _show(module: nn.Module, placed: Mapping[str, tuple[Placed, ...]]) -> None:
    """Make ``module`` give slices of wholes where its own code reads these parameters."""
    made = {name: property(partial(_read, name=name, placed=where)) for name, where in placed.items()}
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {**made, "__module__": kind.__module__})


def _read(module: nn.Module, name: str, placed: tuple[Placed, ...]) -> Any:
    tensor = module._parameters[name]
    return tensor if tensor is None else Sliced(tensor, placed)


@contextmanager
def shown_as_slices(places: Places) -> Iterator[None]:
    """The parameters cut and shown as slices, of whole ones, for a dry run; afterwards as they were."""
    kinds = [(child, type(child)) for child, _, _ in places]
    kept = [(child, name, child._parameters[name]) for child, name, _ in places]
    try:
        cut: dict[int, nn.Parameter] = {}
        for child, name, placed in places:
            tensor = child._parameters[name]
            assert tensor is not None
            if id(tensor) not in cut:
                local: Tensor = tensor.detach()
                for one in placed:
                    local = piece(local, one.dim, one.cut, one.axis.rank)
                cut[id(tensor)] = nn.Parameter(local, requires_grad=tensor.requires_grad)
            child._parameters[name] = cut[id(tensor)]
        show_slices(places)
        yield
    finally:
        for child, kind in kinds:
            child.__class__ = kind
        for child, name, tensor in kept:
            child._parameters[name] = tensor
