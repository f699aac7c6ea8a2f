"""Each rank's part of a model's tensors under a plan, with its exact number of elements.

The cuts by the axes that split a model are given (``Survey.shares``); the rest is arithmetic: rows over ``fsdp`` are
cut as ``torch.chunk`` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any, overload

from phalanx.config import Plan
from phalanx.placement.batch_split import micro_batches

Ranges = tuple[tuple[int, int], ...]
"""Elements [start, stop) of one dimension, in order, none empty."""


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A part of a tensor: for each dimension its ranges of the whole tensor's elements."""

    ranges: tuple[Ranges, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> TensorPiece:
        """Return all of a tensor."""
        return cls(tuple(((0, size),) if size else () for size in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return its own shape."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.ranges)

    @property
    def elements(self) -> int:
        """Return its number of elements."""
        return prod(self.shape)

    def part(self, dim: int, kept: Ranges) -> TensorPiece:
        """Return the part with only ``kept`` of its own elements along ``dim``."""
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
    """A tensor of the model, as on one device."""

    name: str  # in the model, the first where it has several
    shape: tuple[int, ...]
    dtype: str  # such as float32
    itemsize: int  # bytes of an element
    learns: bool  # whether the optimizer steps it

    @property
    def elements(self) -> int:
        """Return its number of elements."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Return the bytes of the whole."""
        return self.elements * self.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class DimensionShare:
    """Dimension ``dim`` of a tensor shared out over ranks.

    ``ranges`` are the kept elements for each rank along these ``axes`` of the mesh, such as ``("tp",)``.
    """

    axes: tuple[str, ...]
    dim: int
    ranges: Sequence[Ranges]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterShard:
    """One rank's part of one parameter between steps.

    Attributes:
        tensor: the whole.
        parameter: its values.
        gradient: the part of the gradient kept from micro-batch to micro-batch, or of a single one until the update;
            ``None`` without gradient.
        stepped: the part that the optimizer steps and keeps state for, or ``None``.
        shares: its cuts over dimensions of the mesh, in this order.
    """

    tensor: Tensor
    parameter: TensorPiece
    gradient: TensorPiece | None
    stepped: TensorPiece | None
    shares: tuple[DimensionShare, ...] = ()

    @property
    def bytes(self) -> int:
        """Return the bytes of the values."""
        return self.parameter.elements * self.tensor.itemsize

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of the gradient."""
        return self.gradient.elements * self.tensor.itemsize if self.gradient else 0

    @property
    def stepped_elements(self) -> int:
        """Return the elements with optimizer state."""
        return self.stepped.elements if self.stepped else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSurvey:
    """One stage of a pipeline."""

    index: int  # from 0
    rank: int  # along pp
    units: tuple[str, ...]  # names of the modules it runs, in order
    parameters: tuple[str, ...]  # names of the parameters it uses
    elements: int  # of these
    cost: float  # of a forward of the example, in floating-point operations or what takes as long


@dataclass(frozen=True, kw_only=True)
class Survey:
    """A model laid out by a plan.

    Attributes:
        plan: the plan.
        parameters: of the whole model, each once, in its order.
        buffers: of the whole model; every rank holds all of them.
        stages: of the pipeline; none without one.
        tied: names of parameters that several stages use → these stages.
        whole: names of weights of two or more dimensions without a cut for ``tp``.
        shares: for each rank along ``pp``: name → its cuts by the splitting axes; empty without a split.
    """

    plan: Plan
    parameters: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]
    stages: tuple[StageSurvey, ...] = ()
    tied: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    whole: tuple[str, ...] = ()
    shares: tuple[Mapping[str, DimensionShare], ...] = ()
    recomputes: bool = False  # whether stages compute activations again by the model's own doing
    micros: int = 1  # micro-batches of a rank in a step

    def for_batch(self, batch: int) -> Survey:
        """Return the survey for a step with this global batch."""
        return replace(self, micros=micro_batches(self.plan, batch))

    @property
    def elements(self) -> int:
        """Return the elements of all parameters."""
        return sum(tensor.elements for tensor in self.parameters)

    def shards_of(self, rank: int) -> tuple[ParameterShard, ...]:
        """Return the part of each parameter on ``rank``, in the model's order, without empty ones.

        Ranks of equal ``place`` get the same object.
        """
        place = self.place(rank)
        if place not in self._known:
            at = self.plan.coordinate(rank)
            shares, names = self.shares[at["pp"]] if self.shares else {}, self._owned[at["pp"]]
            here = (tensor for tensor in self.parameters if tensor.name in names)
            self._known[place] = tuple(self._shard(tensor, shares.get(tensor.name), at) for tensor in here)
        return self._known[place]

    def place(self, rank: int) -> tuple[int, ...]:
        """Return the place of ``rank`` along the dimensions that decide its part; along others are copies."""
        at = self.plan.coordinate(rank)
        return tuple(at[axis] for axis in ("pp", "fsdp", "ep", "tp"))

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

    def _shard(self, tensor: Tensor, share: DimensionShare | None, at: Mapping[str, int]) -> ParameterShard:
        mine, shares = TensorPiece.whole(tensor.shape), (share,) if share else ()
        if share:
            mine = mine.part(share.dim, share.ranges[_index(self.plan, share.axes, at)])
        zero, learns = self.plan.zero, tensor.learns
        if not zero or not tensor.shape:
            kept = mine if learns else None
            return ParameterShard(tensor=tensor, parameter=mine, gradient=kept, stepped=kept, shares=shares)
        rows = DimensionShare(axes=("fsdp",), dim=0, ranges=RowChunks(mine.shape[0], self.plan.fsdp))
        own = mine.part(0, rows.ranges[at["fsdp"]])
        stays = bool(keeps_whole_gradients(zero, self.micros, self.plan.pp))
        return ParameterShard(
            tensor=tensor,
            parameter=own if zero == 3 else mine,
            gradient=(mine if stays else own) if learns else None,
            stepped=own if learns else None,
            shares=(*shares, rows) if zero == 3 or learns else shares,
        )


def keeps_whole_gradients(zero: Any, micros: Any, pp: Any) -> Any:
    """Return True if a rank's gradients are whole until its last micro-batch, though it steps shards.

    Takes numbers, or arrays. With one micro-batch they are scattered on arrival, except in a pipeline: its stages run
    backward at different times.
    """
    return (zero == 1) & ((micros > 1) | (pp > 1))


def chunk_rows(rows: int, ranks: int) -> int:
    """Return the rows of the first of this many ranks; see ``RowChunks``."""
    return -(-rows // ranks)


@dataclass(frozen=True, slots=True)
class RowChunks(Sequence[Ranges]):
    """The ``rows`` cut as by ``torch.chunk``: as many to each as to the first, the last ones fewer or none.

    A rank's rows are computed on request: it does not list all others'.
    """

    rows: int
    ranks: int

    def __len__(self) -> int:
        return self.ranks

    @overload
    def __getitem__(self, index: int) -> Ranges: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Ranges, ...]: ...

    def __getitem__(self, index: int | slice) -> Ranges | tuple[Ranges, ...]:
        if isinstance(index, slice):
            return tuple(self[one] for one in range(self.ranks)[index])
        each, rank = chunk_rows(self.rows, self.ranks), range(self.ranks)[index]
        start, stop = min(rank * each, self.rows), min((rank + 1) * each, self.rows)
        return ((start, stop),) if start < stop else ()


def _index(plan: Plan, axes: Sequence[str], at: Mapping[str, int]) -> int:
    index = 0
    for axis, size in plan.mesh.items():
        if axis in axes:
            index = index * size + at[axis]
    return index
