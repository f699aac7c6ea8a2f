"""Trials on fake tensors of cuts of a layer's weights, by the job's wishes or the model's own plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.config.job import Cutting
from phalanx.config.phases import fits, fits_nothing
from phalanx.errors import Problem, RefusedError
from phalanx.parallel.layout import TensorShard
from phalanx.parallel.local_shards import Cut
from phalanx.parallel.local_shards.axis import Axis, Placed, added_later, kept
from phalanx.parallel.local_shards.tensor import Sliced


@dataclass(frozen=True, slots=True)
class WeightCut:
    """A cut of a weight, or of a value that is not a parameter but belongs to a cut product."""

    weight: Any
    dim: int
    cut: Cut


class Trial:
    """The observations of a dry run."""

    def __init__(self) -> None:
        self.met: list[WeightCut] = []  # other weights of products in which the cut ended, in one sum over the ranks
        self.beside: list[WeightCut] = []  # parameters added to a cut result, cut the same way: biases
        self.sent: list[str] = []  # kinds of collectives, in order
        # Ways of reading the cut dimension that a view or split of the model asked for: (repeats, elements of a unit).
        self.grains: list[tuple[int, int]] = []
        self.tokens = self.causal = False  # whether attention was asked for, cut along the tokens; whether causal
        self.late: set[int] = set()  # ids of parameters whose gradients are added up over ranks at the end of a step

    def meets(self, weight: Any, cut: Cut, dim: int) -> None:
        self.met.append(WeightCut(weight, dim, cut))

    def adds(self, bias: Any, cut: Cut) -> None:
        """Record a whole bias of a cut result."""
        if isinstance(bias, nn.Parameter):
            self.beside.append(WeightCut(bias, 0, cut))

    def viewed(self, cut: Cut, sizes: list[int]) -> None:
        """Record a view of a cut dimension as ``sizes``, which these slices cannot follow."""
        for index, size in enumerate(sizes):
            if size > 1:
                self.grains.append((prod(sizes[:index]), prod(sizes[index + 1 :])))

    def attends(self, causal: bool = False) -> None:
        """Record attention over tokens that are shared out."""
        self.tokens = True
        self.causal = self.causal or causal


@contextmanager
def fixed(table: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Replace the forwards of some modules in the block."""
    before = {module: module.__dict__.get("forward") for module in table}
    for module, forward in table.items():
        module.__dict__["forward"] = forward  # past setters of the module's own, and quicker than torch's
    try:
        yield
    finally:
        for module, forward in before.items():
            if forward is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = forward


Places = list[tuple[nn.Module, str, tuple[Placed, ...]]]
"""Which module's parameter of which name is cut how."""


def places_of(module: nn.Module, ways: Mapping[int, tuple[Placed, ...]]) -> Places:
    """Return the places in ``module`` of the parameters with these ids."""
    named = ((child, name, id(tensor)) for child in module.modules() for name, tensor in child._parameters.items())
    return [(child, name, ways[key]) for child, name, key in named if key in ways]


def split_weights(module: nn.Module, cuts: Mapping[str, tuple[Placed, ...]]) -> tuple[dict[str, TensorShard], Places]:
    """Keep only this rank's slice of each parameter in ``cuts``, in place; return slices by name, and places.

    ``show_slices`` makes the model's own code read them as wholes again.
    """
    whole = dict(module.named_parameters())
    holdings = {name: TensorShard(shape=whole[name].shape, placed=placed) for name, placed in cuts.items()}
    places = places_of(module, {id(whole[name]): placed for name, placed in cuts.items()})
    _keep_slices(places, torch.clone)
    return holdings, places


def _keep_slices(places: Places, copy: Callable[[Tensor], Tensor]) -> None:
    made: dict[int, nn.Parameter] = {}
    for child, name, placed in places:
        tensor = child._parameters[name]
        assert tensor is not None
        if id(tensor) not in made:
            made[id(tensor)] = nn.Parameter(copy(kept(tensor.detach(), placed)), requires_grad=tensor.requires_grad)
        child._parameters[name] = made[id(tensor)]


def show_slices(places: Places) -> None:
    """Make the model's own code read these parameters as wholes everywhere."""
    _show((child, name, lambda tensor, placed=placed: Sliced(tensor, placed)) for child, name, placed in places)


def show_added_later(module: nn.Module, names: Collection[str], axis: Axis) -> None:
    """Make the model's own code read these whole parameters through ``added_later`` over ``axis``."""
    later = {id(tensor) for name, tensor in module.named_parameters() if name in names}
    every = ((child, name, tensor) for child in module.modules() for name, tensor in child._parameters.items())
    _show((child, name, partial(added_later, axis=axis)) for child, name, tensor in every if id(tensor) in later)


def _show(reads: Iterable[tuple[nn.Module, str, Callable[[nn.Parameter], Tensor]]]) -> None:
    by_module: dict[nn.Module, dict[str, Any]] = {}
    for child, name, how in reads:
        by_module.setdefault(child, {})[name] = property(partial(_read, name=name, how=how))
    for child, made in by_module.items():
        kind = type(child)
        child.__class__ = type(kind.__name__, (kind,), {**made, "__module__": kind.__module__})


def _read(module: nn.Module, name: str, how: Callable[[nn.Parameter], Tensor]) -> Any:
    tensor = module._parameters[name]
    return tensor if tensor is None else how(tensor)


@contextmanager
def shown_as_slices(places: Places) -> Iterator[None]:
    """Cut whole parameters and show them as slices for a dry run; restore them afterwards."""
    before = [(child, type(child), name, child._parameters[name]) for child, name, _ in places]
    try:
        _keep_slices(places, lambda local: local)
        show_slices(places)
        yield
    finally:
        for child, kind, name, tensor in before:
            child.__class__ = kind
            child._parameters[name] = tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Overrides:
    """Requested cuts of weights: dimension by the id of the parameter."""

    of_job: Mapping[int, int | None]  # the dimension to cut, or None for a weight that is to stay whole
    of_model: Mapping[int, int]  # by its own plan; followed where it goes well
    of_heads: frozenset[int] = frozenset()  # weights of three dimensions, of which any may be cut

    def dims(self, weight: Tensor, *, own: bool = True) -> Sequence[int]:
        """Return the dimensions of ``weight`` to try; ``own=False`` ignores the model's own plan."""
        if id(weight) in self.of_job:
            dim = self.of_job[id(weight)]
            return () if dim is None else (dim,)
        if own and id(weight) in self.of_model:
            return (self.of_model[id(weight)],)
        return range(weight.dim()) if weight.dim() == 2 or id(weight) in self.of_heads else ()


def wishes(module: nn.Module, told: Mapping[str, Cutting]) -> Overrides:
    """Return the cuts requested by the job, by name patterns, and by the model.

    The last matching pattern of the job counts.

    Raises:
        RefusedError: if a pattern matches no weight, or one that cannot be cut so.
    """
    found: dict[int, int | None] = {}
    problems: list[Problem] = []
    for pattern, how in told.items():
        fitting = _fitting(module, pattern)
        matrices = [one for one in fitting if one[2].dim() == 2]
        unclear = [one for one in matrices if _dim(one[0], how) == _UNKNOWN]
        if not fitting:
            problems.append(_unknown(module, pattern, how))
        elif unclear or not matrices:
            problems.append(_unfit(*(unclear or fitting)[0][1:], pattern, how))
        else:
            found |= {id(weight): _dim(owner, how) for owner, _, weight in matrices}
    if problems:
        raise RefusedError(problems)
    return Overrides(of_job=found, of_model=_own(module), of_heads=_of_heads(module))


def _of_heads(module: nn.Module) -> frozenset[int]:
    named = ((one, name) for one in module.modules() for name in getattr(type(one), "weights_by_heads", ()))
    found = (one._parameters.get(name) for one, name in named)
    return frozenset(id(weight) for weight in found if weight is not None and weight.dim() == 3)


_UNKNOWN = -1


def _fitting(module: nn.Module, pattern: str) -> list[tuple[nn.Module, str, nn.Parameter]]:
    found: list[tuple[nn.Module, str, nn.Parameter]] = []
    for prefix, owner in module.named_modules():
        for own, weight in owner.named_parameters(recurse=False):
            name = f"{prefix}.{own}" if prefix else own
            if fits(name, (pattern,)) or (prefix and fits(prefix, (pattern,))):
                found.append((owner, name, weight))
    return found


def _dim(owner: nn.Module, how: Cutting) -> int | None:
    """Return the dimension to cut: columns of y = xA are output features (Shoeybi et al. 2019, section 3)."""
    if how == "whole":
        return None
    if isinstance(how, int):
        return how
    columns = getattr(type(owner), "column_dimension", None)  # of a layer of another library, which says so itself
    if columns is not None:
        return columns if how == "colwise" else 1 - columns
    if isinstance(owner, nn.Linear):
        return 0 if how == "colwise" else 1
    if isinstance(owner, nn.Embedding):
        return 0 if how == "rowwise" else 1
    return _UNKNOWN


def _own(module: nn.Module) -> dict[int, int]:
    plan: Any = getattr(module, "tp_plan", None) or {}
    found: dict[int, int] = {}
    for pattern, style in plan.items() if isinstance(plan, dict) else ():
        if "colwise" not in str(style) and "rowwise" not in str(style):
            continue
        for owner, _, weight in _fitting(module, pattern):
            dim = _dim(owner, "colwise" if "colwise" in str(style) else "rowwise")
            if weight.dim() == 2 and dim is not None and dim != _UNKNOWN:
                found[id(weight)] = dim
    return found


def _unknown(module: nn.Module, pattern: str, how: Cutting) -> Problem:
    names = [name for name, tensor in module.named_parameters() if tensor.dim() == 2]
    fix = partial(_one_cut, how=how)
    return fits_nothing("job.tensor_parallel", pattern, names, kind="weight or layer of the model", fix=fix)


def _one_cut(pattern: str, how: Cutting) -> str:
    return f"tensor_parallel={{{pattern!r}: {how!r}}}"


def _unfit(name: str, weight: Tensor, pattern: str, how: Cutting) -> Problem:
    given = f"{how!r} for {name} of shape {tuple(weight.shape)}"
    if weight.dim() != 2:
        allowed = "weights of two dimensions; biases go with theirs, ep distributes experts"
        fix = "no entry for it: what is not named is cut as found"
        return Problem(where="job.tensor_parallel", given=given, allowed=allowed, fix=fix)
    return Problem(
        where="job.tensor_parallel",
        given=f"{given}, whose columns are unknown",
        allowed="colwise and rowwise for nn.Linear and nn.Embedding; for others the dimension, 0 or 1",
        fix=f"tensor_parallel={{{pattern!r}: 0}}",
    )
