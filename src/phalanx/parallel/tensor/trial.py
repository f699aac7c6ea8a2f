"""Tries on fake tensors how weights of a layer can be shared out, as a job wishes or as a model says."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from typing import Any

from torch import Tensor, nn

from phalanx.config.job import Cutting
from phalanx.errors import Problem, RefusedError
from phalanx.parallel.local_shards import Axis, Cut
from phalanx.parallel.local_shards.axis import Placed, piece
from phalanx.parallel.local_shards.tensor import Sliced
from phalanx.parallel.tensor_shard import TensorShard


@dataclass(frozen=True, slots=True)
class PairedWeight:
    """A product that added up what a cut had dealt out: the other weight, and how it would be cut."""

    weight: Any
    dim: int
    cut: Cut


@dataclass(slots=True)
class Trial:
    """What a dry run saw.

    Attributes:
        met: products in which the cut ended, in one sum over the ranks.
        beside: parameters added to a cut result, cut the same way: biases.
        sent: kinds of collectives, in order.
        grains: ways of reading the cut dimension that a view or split of the model asked for: (repeats, elements of a
            unit).
        tokens: whether attention was asked for, cut along the tokens.
        causal: whether that was causal.
        late: ids of parameters whose gradients are to be added up over the ranks at the end of a step.
    """

    met: list[PairedWeight] = field(default_factory=list[PairedWeight])
    beside: list[PairedWeight] = field(default_factory=list[PairedWeight])
    sent: list[str] = field(default_factory=list[str])
    grains: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    tokens: bool = False
    causal: bool = False
    late: set[int] = field(default_factory=set[int])

    def meets(self, weight: Any, cut: Cut, dim: int) -> None:
        """A product adds over the cut dimension."""
        self.met.append(PairedWeight(weight, dim, cut))

    def adds(self, bias: Any, cut: Cut) -> None:
        """A whole bias goes with a cut result."""
        self.beside.append(PairedWeight(bias, 0, cut))

    def viewed(self, cut: Cut, sizes: list[int]) -> None:
        """A dimension cut so is to be viewed as ``sizes``, which these slices cannot follow."""
        for index, size in enumerate(sizes):
            if size > 1:
                self.grains.append((prod(sizes[:index]), prod(sizes[index + 1 :])))

    def attends(self, causal: bool = False) -> None:
        """Attention over tokens that are dealt out."""
        self.tokens = True
        self.causal = self.causal or causal


def tried(run: Callable[[], Any], places: Callable[[Axis], Places], ranks: int, *, sums: bool = False) -> Trial:
    """What happens if ``run`` runs with the parameters in ``places`` shown as slices over a dry axis.

    Raises:
        Exception: whatever the model raises on fake tensors.
    """
    trial = Trial()
    axis = Axis("dry", size=ranks, rank=0, group=None, sums=sums, trial=trial)
    axis.notice = lambda kind, _: trial.sent.append(kind)
    with shown_as_slices(places(axis)):
        run()
    return trial


@contextmanager
def fixed(table: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Other forwards in place of some modules' own."""
    before = {module: module.__dict__.get("forward") for module in table}
    for module, forward in table.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, forward in before.items():
            if forward is None:
                del module.forward
            else:
                module.forward = forward


Places = list[tuple[nn.Module, str, tuple[Placed, ...]]]
"""Which module's parameter of which name is cut how."""


def split_weights(module: nn.Module, cuts: Mapping[str, tuple[Placed, ...]]) -> tuple[dict[str, TensorShard], Places]:
    """Keep of each parameter named in ``cuts`` this rank's slice only, in place; what is held then, by name, and where.

    ``show_slices`` makes the model's own code read them as wholes again.
    """
    holdings: dict[str, TensorShard] = {}
    locals_: dict[int, nn.Parameter] = {}
    whole = dict(module.named_parameters())
    for name, placed in cuts.items():
        tensor = whole[name]
        local: Tensor = tensor.detach()
        for one in placed:
            local = piece(local, one.dim, one.cut, one.axis.rank)
        locals_[id(tensor)] = nn.Parameter(local.clone(), requires_grad=tensor.requires_grad)
        holdings[name] = TensorShard(shape=tensor.shape, placed=placed)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Overrides:
    """What is said of weights, by the id of the parameter.

    Attributes:
        of_job: by the job: the dimension to cut, or ``None`` for a weight that is to stay whole.
        of_model: by the model's own plan: the dimension to cut. Followed where it goes well.
    """

    of_job: Mapping[int, int | None]
    of_model: Mapping[int, int]

    def dims(self, weight: Tensor, *, own: bool = True) -> Sequence[int]:
        """The dimensions of ``weight`` to try; ``own=False`` leaves the model's own plan aside."""
        if id(weight) in self.of_job:
            dim = self.of_job[id(weight)]
            return () if dim is None else (dim,)
        if own and id(weight) in self.of_model:
            return (self.of_model[id(weight)],)
        return range(2) if weight.dim() == 2 else ()


def wishes(module: nn.Module, told: Mapping[str, Cutting]) -> Overrides:
    """What the job says, by patterns of names, and what the model says of itself.

    Of the job's patterns the last that fits counts.

    Raises:
        RefusedError: if a pattern fits no weight, or one that cannot be cut so.
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
    return Overrides(of_job=found, of_model=_own(module))


_UNKNOWN = -1


def _fitting(module: nn.Module, pattern: str) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Owner, name and value of the parameters whose own or whose module's name fits."""
    found: list[tuple[nn.Module, str, nn.Parameter]] = []
    for prefix, owner in module.named_modules():
        for own, weight in owner.named_parameters(recurse=False):
            name = f"{prefix}.{own}" if prefix else own
            if fnmatchcase(name, pattern) or (prefix and fnmatchcase(prefix, pattern)):
                found.append((owner, name, weight))
    return found


def _dim(owner: nn.Module, how: Cutting) -> int | None:
    """The dimension that is cut: columns of y = xA are output features (Shoeybi et al. 2019, section 3)."""
    if how == "whole":
        return None
    if isinstance(how, int):
        return how
    if isinstance(owner, nn.Linear):
        return 0 if how == "colwise" else 1
    if isinstance(owner, nn.Embedding):
        return 0 if how == "rowwise" else 1
    return _UNKNOWN


def _own(module: nn.Module) -> dict[int, int]:
    """What a model of ``transformers`` says of itself (``base_model_tp_plan``), as far as it is said of matrices."""
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
    near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0) or ["blocks.*.up"]
    return Problem(
        where="job.tensor_parallel",
        given=f"{pattern!r}, which no weight of the model is called",
        allowed="names of layers or of their weights; * stands for any text",
        fix=f"tensor_parallel={{{near[0]!r}: {how!r}}}",
    )


def _unfit(name: str, weight: Tensor, pattern: str, how: Cutting) -> Problem:
    given = f"{how!r} for {name} of shape {tuple(weight.shape)}"
    if weight.dim() != 2:
        allowed = "weights of two dimensions; biases go with theirs, experts are dealt out by ep"
        fix = "no entry for it: what is not named is cut as found"
        return Problem(where="job.tensor_parallel", given=given, allowed=allowed, fix=fix)
    return Problem(
        where="job.tensor_parallel",
        given=f"{given}, of which nobody knows which are its columns",
        allowed="colwise and rowwise for nn.Linear and nn.Embedding; for others the dimension, 0 or 1",
        fix=f"tensor_parallel={{{pattern!r}: 0}}",
    )
