"""The assignment of parameters to servers, contiguous in memory.

Tensors larger than a quarter of an even share are cut by rows, if the optimizer treats each element by itself; the
others stay whole and go, the largest first, to the server with the least. The rows of the large ones then fill every
server up to an even share. So no server holds more than 1.25 times an even share, or than an even share and a row of
the largest tensor. If the optimizer looks at whole tensors, none is cut, and no server holds more than an even share
and the largest tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import final

import torch

from phalanx.comm.frames import views
from phalanx.config import Plan
from phalanx.errors import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSlice:
    """Rows [start, stop) of a parameter, along its first dimension."""

    name: str
    start: int
    stop: int  # 0 for a parameter of no dimension, which is here whole
    whole: bool  # whether these are all rows


def partition(tensors: Mapping[str, torch.Tensor], servers: int, *, cut: bool) -> list[list[RowSlice]]:
    """Return each server's rows, in the order of ``tensors``; a server may get none.

    Only shape and dtype of ``tensors`` are used; ``cut``: whether they may be cut by rows.
    """
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    even = sum(sizes.values()) / servers
    large = {name for name, size in sizes.items() if cut and size > even / 4 and tensors[name].dim() and servers > 1}
    loads = [0.0] * servers
    held: list[dict[str, RowSlice]] = [{} for _ in range(servers)]
    for name in sorted(sizes.keys() - large, key=lambda one: (-sizes[one], one)):
        at = loads.index(min(loads))
        held[at][name] = _whole(name, tensors[name])
        loads[at] += sizes[name]
    for name in sorted(large):
        rows, row = tensors[name].shape[0], sizes[name] / tensors[name].shape[0]
        start = 0
        for at in sorted(range(servers), key=lambda one: loads[one]):
            stop = min(rows, start + max(0, ceil((even - loads[at]) / row - 1e-9)))
            if stop > start:
                held[at][name] = RowSlice(name=name, start=start, stop=stop, whole=stop - start == rows)
                loads[at] += (stop - start) * row
                start = stop
        assert start == rows, "even shares leave room for every row"
    return [[mine[name] for name in tensors if name in mine] for mine in held]


def cut_out(tensor: torch.Tensor, part: RowSlice) -> torch.Tensor:
    """Return the rows of ``tensor`` named by ``part``: a view."""
    return tensor if part.whole else tensor[part.start : part.stop]


def check(plan: Plan) -> list[Problem]:
    """Return the problems of the plan with servers."""
    if not plan.server or plan.precision != "fp16":
        return []
    given, fix = f"precision=fp16 with server={plan.server}", str(replace(plan, precision="bf16"))
    why = "which loss scale overflows is known only when gradients of other scales are on their way"
    return [Problem(where="plan.precision", given=given, allowed=f"fp32 or bf16: {why}", fix=fix)]


def starved(tensors: Mapping[str, torch.Tensor], plan: Plan, *, cut: bool) -> list[Problem]:
    """Return a problem for servers left without parameters."""
    empty = sum(not mine for mine in partition(tensors, plan.server, cut=cut))
    if not empty:
        return []
    given = f"server={plan.server} for {len(tensors)} parameters{'' if cut else ', which the optimizer needs whole'}"
    most = plan.server - empty
    allowed = f"at most {most}: {empty} would hold nothing"
    return [Problem(where="plan.server", given=given, allowed=allowed, fix=f"server={most} dp={max(2, plan.dp)}")]


def _whole(name: str, tensor: torch.Tensor) -> RowSlice:
    return RowSlice(name=name, start=0, stop=tensor.shape[0] if tensor.dim() else 0, whole=True)


Form = dict[str, tuple[torch.Size, torch.dtype]]
"""Name → shape and dtype, in the order of the wire: tensors of one dtype follow each other."""


def form_of(tensors: Mapping[str, torch.Tensor]) -> Form:
    """Return the form of ``tensors``."""
    dtypes = list(dict.fromkeys(tensor.dtype for tensor in tensors.values()))
    names = sorted(tensors, key=lambda name: dtypes.index(tensors[name].dtype))
    return {name: (tensors[name].shape, tensors[name].dtype) for name in names}


@final
class Flat:
    """Memory for tensors of a form, first zeros: one tensor for each dtype, and views of it by name."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self.whole: list[torch.Tensor] = []  # the memory, a tensor of one dimension for each dtype
        self.named: dict[str, torch.Tensor] = {}
        for dtype in dict.fromkeys(dtype for _, dtype in form.values()):
            mine = {name: shape for name, (shape, kind) in form.items() if kind == dtype}
            memory = torch.zeros(sum(shape.numel() for shape in mine.values()), dtype=dtype)
            pieces = memory.split([shape.numel() for shape in mine.values()])
            self.named |= {name: piece.view(mine[name]) for name, piece in zip(mine, pieces, strict=True)}
            self.whole.append(memory)
        self.wire = views(self.whole)  # the memory as it travels

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.whole)

    def copy(self, other: Flat) -> None:
        """Copy the values of ``other``, of the same form."""
        for mine, theirs in zip(self.whole, other.whole, strict=True):
            mine.copy_(theirs)

    def add(self, other: Flat) -> None:
        """Add ``other``, of the same form."""
        for mine, theirs in zip(self.whole, other.whole, strict=True):
            mine.add_(theirs)

    def scale(self, factor: float) -> None:
        if factor != 1.0:
            for mine in self.whole:
                mine.mul_(factor)

    def clip(self, largest: float) -> None:
        """Clip every element to the range from ``-largest`` to ``largest``."""
        for mine in self.whole:
            mine.clamp_(-largest, largest)

    def square(self) -> float:
        """Return the sum of all squares, in fp64."""
        return sum(float(torch.linalg.vector_norm(one, dtype=torch.float64)) ** 2 for one in self.whole)
