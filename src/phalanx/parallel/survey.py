"""What each rank of a plan holds of a model's tensors: found in this process alone, before any other starts.

It asks what the techniques themselves ask: ``split.look`` for what can be cut, ``pipeline.cut`` for stages,
``expert.rows_of`` for experts. What is left to know is arithmetic: rows over ``fsdp`` are cut as ``torch.chunk`` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import nn

from phalanx.config import Plan
from phalanx.parallel.example import Example

if TYPE_CHECKING:  # loaded by plans that split a model
    from phalanx.parallel.found import SplitParts
    from phalanx.parallel.pipeline import CutPipeline

Ranges = tuple[tuple[int, int], ...]
"""Elements [start, stop) of one dimension, in order, none empty."""


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """Part of a tensor.

    Attributes:
        ranges: for each dimension the elements of the whole tensor that are in it.
    """

    ranges: tuple[Ranges, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> TensorPiece:
        """All of a tensor."""
        return cls(tuple(((0, size),) if size else () for size in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Its own."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.ranges)

    @property
    def elements(self) -> int:
        """How many."""
        return prod(self.shape)

    def part(self, dim: int, kept: Ranges) -> TensorPiece:
        """What is left of it if of its own elements along ``dim`` only ``kept`` are."""
        found: list[tuple[int, int]] = []
        begins = accumulate((stop - start for start, stop in self.ranges[dim]), initial=0)
        for at, (start, stop) in zip(begins, self.ranges[dim], strict=False):
            for first, last in kept:
                a, b = max(start, start + first - at), min(stop, start + last - at)
                if a < b:
                    found.append((a, b))
        return TensorPiece((*self.ranges[:dim], tuple(found), *self.ranges[dim + 1 :]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """A tensor of the model, as one device holds it.

    Attributes:
        name: in the model, the first where it has several.
        shape: of it.
        dtype: of its elements.
        learns: whether the optimizer steps it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    learns: bool

    @property
    def elements(self) -> int:
        """How many."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Of the whole."""
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class DimensionShare:
    """One dimension of a tensor dealt out over ranks.

    Attributes:
        axes: of the mesh, such as ``("tp",)``.
        dim: dimension of the tensor.
        ranges: for each rank along these axes what it keeps of what it had.
    """

    axes: tuple[str, ...]
    dim: int
    ranges: tuple[Ranges, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterShard:
    """What one rank holds of one parameter between steps.

    Attributes:
        tensor: the whole.
        parameter: its values.
        gradient: what of the gradient is kept from micro-batch to micro-batch, or of a single one until it is stepped;
            ``None`` where it gets none.
        stepped: what the optimizer steps and keeps state of; ``None`` where it does not.
        shares: how it is cut over which dimensions of the mesh, in this order.
    """

    tensor: Tensor
    parameter: TensorPiece
    gradient: TensorPiece | None
    stepped: TensorPiece | None
    shares: tuple[DimensionShare, ...] = ()

    @property
    def bytes(self) -> int:
        """Of the values."""
        return self.parameter.elements * self.tensor.dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        """Of the gradient."""
        return self.gradient.elements * self.tensor.dtype.itemsize if self.gradient else 0

    @property
    def stepped_elements(self) -> int:
        """Elements that the optimizer keeps state of."""
        return self.stepped.elements if self.stepped else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSurvey:
    """One stage of a pipeline.

    Attributes:
        index: from 0.
        rank: the rank along ``pp`` that runs it.
        units: names of the modules it runs, in order.
        parameters: names of what it uses.
        elements: of these.
        cost: of a forward of the example, in floating-point operations or what takes as long.
    """

    index: int
    rank: int
    units: tuple[str, ...]
    parameters: tuple[str, ...]
    elements: int
    cost: float


@dataclass(frozen=True, kw_only=True)
class Survey:
    """A model as a plan lays it out.

    Attributes:
        plan: the plan.
        parameters: of the whole model, each once, in its order.
        buffers: of the whole model; every rank holds all of them.
        stages: of the pipeline; none without one.
        tied: names of parameters that several stages use → these stages.
        whole: names of weights of two or more dimensions that ``tp`` had nothing to split for.
        parts: of a model that is split, all that was found of it.
        recomputes: whether stages compute activations again by the model's own doing.
    """

    plan: Plan
    parameters: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]
    stages: tuple[StageSurvey, ...] = ()
    tied: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    whole: tuple[str, ...] = ()
    parts: SplitParts | None = None
    recomputes: bool = False
    _shares: tuple[
        Mapping[str, DimensionShare], ...
    ] = ()  # for each rank along pp: name → how the splitting axes cut it

    @property
    def elements(self) -> int:
        """Of all parameters."""
        return sum(tensor.elements for tensor in self.parameters)

    def shards_of(self, rank: int) -> tuple[ParameterShard, ...]:
        """What ``rank`` holds of each parameter, in the model's order; those of which it holds nothing are not there.

        Ranks of equal ``place`` get the same object.
        """
        place = self.place(rank)
        if place not in self._known:
            self._known[place] = self._held(rank)
        return self._known[place]

    def place(self, rank: int) -> tuple[int, ...]:
        """Where ``rank`` stands along the dimensions that decide what it holds; others hold copies."""
        at = self.plan.coordinate(rank)
        return tuple(at[axis] for axis in ("pp", "fsdp", "ep", "tp"))

    def names(self, pipe: int) -> set[str]:
        """Names of the parameters of which the ranks at ``pipe`` along ``pp`` hold something."""
        return self._owned[pipe]

    @cached_property
    def _known(self) -> dict[tuple[int, ...], tuple[ParameterShard, ...]]:
        return {}

    @cached_property
    def _owned(self) -> list[set[str]]:
        if not self.stages:
            return [{tensor.name for tensor in self.parameters}]
        owned: list[set[str]] = [set() for _ in range(self.plan.pp)]
        for stage in self.stages:
            owned[stage.rank] |= set(stage.parameters)
        return owned

    def _held(self, rank: int) -> tuple[ParameterShard, ...]:
        at = self.plan.coordinate(rank)
        shares = self._shares[at["pp"]] if self._shares else {}
        names = self.names(at["pp"])
        return tuple(
            self._one(tensor, shares.get(tensor.name), at) for tensor in self.parameters if tensor.name in names
        )

    def _one(self, tensor: Tensor, share: DimensionShare | None, at: Mapping[str, int]) -> ParameterShard:
        mine, shares = TensorPiece.whole(tensor.shape), (share,) if share else ()
        for one in shares:
            mine = mine.part(one.dim, one.ranges[_index(self.plan, one.axes, at)])
        zero, learns = self.plan.zero, tensor.learns
        if not zero or not tensor.shape:
            return ParameterShard(
                tensor=tensor,
                parameter=mine,
                gradient=mine if learns else None,
                stepped=mine if learns else None,
                shares=shares,
            )
        rows = DimensionShare(axes=("fsdp",), dim=0, ranges=chunks(mine.shape[0], self.plan.fsdp))
        own = mine.part(0, rows.ranges[at["fsdp"]])
        accumulates = self.plan.micro is not None or self.plan.pp > 1  # several micro-batches, or no time to scatter
        return ParameterShard(
            tensor=tensor,
            parameter=own if zero == 3 else mine,
            gradient=(mine if zero == 1 and accumulates else own) if learns else None,
            stepped=own if learns else None,
            shares=(*shares, rows) if zero == 3 or learns else shares,
        )


def survey(module: nn.Module, plan: Plan, example: Example | None = None) -> Survey:
    """Look at ``module``, which needs no values; a plan that splits the model needs an ``example``.

    Raises:
        RefusedError: if the plan asks for what the model has not.
    """
    parameters, buffers = _tensors(module.named_parameters()), _tensors(module.named_buffers())
    if plan.kind != "split":
        return Survey(plan=plan, parameters=parameters, buffers=buffers)
    from phalanx.parallel.split import look

    assert example is not None
    found = look(module, plan, example)
    pipeline: CutPipeline | None = None
    if plan.pp > 1:
        from phalanx.parallel.pipeline import cut

        pipeline = cut(module, example, plan)
    sizes = {tensor.name: tensor.elements for tensor in parameters}
    here = [set(pipeline.owned(rank)) if pipeline else set(sizes) for rank in range(plan.pp)]
    shares = tuple(_shares(found, plan, names) for names in here)
    return Survey(
        plan=plan,
        parameters=parameters,
        buffers=buffers,
        stages=_stages(pipeline, sizes) if pipeline else (),
        tied={name: tuple(stages) for name, stages in pipeline.tied.items()} if pipeline else {},
        whole=tuple(found.whole),
        parts=replace(found, stages=pipeline.cuts if pipeline else None),
        recomputes=pipeline is not None and pipeline.program.recomputes,
        _shares=shares,
    )


def chunks(rows: int, ranks: int) -> tuple[Ranges, ...]:
    """Rows dealt out as ``torch.chunk`` does: as many to each as the first gets, the last ones fewer or none."""
    each = -(-rows // ranks)
    edges = [min(rank * each, rows) for rank in range(ranks + 1)]
    return tuple(((a, b),) if a < b else () for a, b in pairwise(edges))


def _index(plan: Plan, axes: Sequence[str], at: Mapping[str, int]) -> int:
    index = 0
    for axis, size in plan.mesh.items():
        if axis in axes:
            index = index * size + at[axis]
    return index


def _tensors(named: Iterable[tuple[str, torch.Tensor]]) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, learns=tensor.requires_grad)
        for name, tensor in named
    )


def _shares(found: SplitParts, plan: Plan, here: set[str]) -> dict[str, DimensionShare]:
    """How the ranks of one place along ``pp``, which hold the parameters named ``here``, cut them."""
    from phalanx.parallel.expert import dealt_over, rows_of

    shares = {
        name: DimensionShare(axes=("tp",), dim=dim, ranges=cut.expanded())
        for name, (dim, cut) in found.weights.items()
        if name in here
    }
    experts = [one for one in found.experts if one.whole_name(one.parameters[0]) in here]
    over = tuple(axis for axis in dealt_over(experts, plan) if plan.mesh[axis] > 1)
    for name, cut in rows_of(experts, plan).items():
        shares[name] = DimensionShare(axes=over, dim=0, ranges=cut.expanded())
    return shares


def _stages(pipeline: CutPipeline, sizes: Mapping[str, int]) -> tuple[StageSurvey, ...]:
    made: list[StageSurvey] = []
    for index, regions in enumerate(pipeline.regions):
        names = tuple(name for name, stages in pipeline.stages_of.items() if index in stages)
        made.append(
            StageSurvey(
                index=index,
                rank=pipeline.rank_of[index],
                units=tuple(dict.fromkeys(pipeline.names(index))),
                parameters=names,
                elements=sum(sizes[name] for name in names),
                cost=sum(pipeline.program.costs[region] for region in regions),
            )
        )
    return tuple(made)
