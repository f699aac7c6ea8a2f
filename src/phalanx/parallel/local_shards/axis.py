"""One axis of the mesh along which tensors are sliced, and the exchanges of pieces on it, forward and backward.

A tensor that is whole on every rank can have two kinds of gradient. Along ``tp`` every rank has the same whole gradient
of a whole tensor (as in Megatron-LM; Shoeybi et al. 2019, section 3). Along ``cp`` the gradient of a whole tensor is
the *sum* over the ranks, and stays in parts until the parameters' gradients are added once, with those of the data-
parallel ranks. The first spares a reduction if most tensors are whole, the second if most are sliced. Each function
below states its backward under both.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm import all_gather_flat, reduce_scatter_sum
from phalanx.config.plan import Attention
from phalanx.parallel.local_shards.cut import Cut

Notice = Callable[[str, Tensor], None]
"""``notice(kind, tensor)``: a collective of this kind is about to send ``tensor``."""


@dataclass(eq=False, repr=False)
class Axis:
    """Ranks that hold slices of the same tensors."""

    name: str  # of the mesh dimension, such as tp
    _: KW_ONLY
    size: int  # ranks
    rank: int  # this process's, along the axis
    group: dist.ProcessGroup | None  # None for a dry run, in which nothing is sent
    sums: bool = False  # whether the gradient of a whole tensor is the sum over the ranks, not the same on each
    tokens: bool = False  # whether activations between products are sliced along their tokens (sequence parallelism)
    attention: Attention = "gather"  # how keys and values that are sliced along their tokens meet all queries
    notice: Notice | None = None  # called with each collective; for counting
    trial: Any = None  # the observer of a dry run; None in a real run
    length: int = field(default=0, init=False)  # tokens of a sample, once activations are sliced along them

    def __repr__(self) -> str:
        return f"Axis({self.name}, {self.rank} of {self.size})"

    def add_up(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Sum ``tensor`` over the ranks, in place if it is contiguous."""
        self.tell("all_reduce", tensor)
        if self.group is not None:
            tensor = tensor.contiguous()
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    def gather(self, local: Tensor, dim: int, cut: Cut) -> Tensor:
        """Return the whole tensor from each rank's ``cut`` along ``dim``."""
        self.tell("all_gather", local)
        longest = max(cut.lengths)
        if self.group is None:
            # Zeros: a dry run on values may use them as indices.
            return local.new_zeros((*local.shape[:dim], cut.size, *local.shape[dim + 1 :]))
        if local.shape[dim] < longest:
            missing = local.new_zeros((*local.shape[:dim], longest - local.shape[dim], *local.shape[dim + 1 :]))
            local = torch.cat([local, missing], dim)
        local = local.contiguous()
        flat = local.new_empty(self.size * local.numel())
        all_gather_flat(flat, local.view(-1), self.group)
        each = flat.view(self.size, *local.shape)
        pieces = [one.narrow(dim, 0, length) for one, length in zip(each, cut.lengths, strict=True)]
        return concatenated(pieces, dim, cut)

    def add_up_and_keep(self, tensor: Tensor, dim: int, cut: Cut) -> Tensor:
        """Return this rank's ``cut`` along ``dim`` of ``tensor`` summed over the ranks."""
        if self.group is not None and not cut.equal:
            whole = self.add_up(tensor.clone(memory_format=torch.contiguous_format))
            return piece(whole, dim, cut, self.rank).contiguous()
        self.tell("reduce_scatter", tensor)
        if self.group is None:
            return piece(tensor, dim, cut, self.rank)
        pieces = torch.stack([piece(tensor, dim, cut, rank) for rank in range(self.size)])
        out = torch.empty_like(pieces[0])
        reduce_scatter_sum(out.view(-1), pieces.view(-1), self.group).wait()
        return out

    def tell(self, kind: str, tensor: Tensor) -> None:
        """Notify the listener of a collective on ``tensor``."""
        if self.notice is not None:
            self.notice(kind, tensor)


@dataclass(frozen=True, slots=True)
class Placed:
    """Dimension ``dim`` (from the left) cut along ``axis``."""

    axis: Axis
    dim: int
    cut: Cut


def piece(whole: Tensor, dim: int, cut: Cut, rank: int) -> Tensor:
    """Return the part of ``whole`` that ``rank`` holds under ``cut`` along ``dim``; a view if it is one run."""
    ranges = cut.expanded()[rank]
    if len(ranges) == 1:
        start, stop = ranges[0]
        return whole.narrow(dim, start, stop - start)
    if not ranges:
        return whole.narrow(dim, 0, 0)
    return torch.cat([whole.narrow(dim, start, stop - start) for start, stop in ranges], dim)


def kept(whole: Tensor, placed: Iterable[Placed]) -> Tensor:
    """Return this rank's part of ``whole``."""
    for one in placed:
        whole = piece(whole, one.dim, one.cut, one.axis.rank)
    return whole


def concatenated(pieces: list[Tensor], dim: int, cut: Cut) -> Tensor:
    """Return the whole tensor from each rank's part, in rank order."""
    if cut.in_order:
        return torch.cat(pieces, dim)
    runs: list[tuple[int, Tensor]] = []
    for held, ranges in zip(pieces, cut.expanded(), strict=True):
        at = 0
        for start, stop in ranges:
            runs.append((start, held.narrow(dim, at, stop - start)))
            at += stop - start
    return torch.cat([run for _, run in sorted(runs, key=lambda pair: pair[0])], dim)


def shared(tensor: Tensor, axis: Axis) -> Tensor:
    """Pass a whole tensor into sliced work, where each rank's gradient is a part.

    Backward: ``tp`` all-reduce, once for any number of products that read the tensor; ``cp`` nothing, the sum comes
    later. A parameter under sequence parallelism is also left for later, so that all of them are added up at once
    (``added_later``).
    """
    if axis.sums or not tensor.requires_grad:
        return tensor
    if axis.tokens:
        parameter = parameter_of(tensor)
        if parameter is not None:
            if axis.trial is not None:
                axis.trial.late.add(id(parameter))
            return parameter
    if tensor.is_leaf:
        return _Shared.apply(tensor, axis)  # it would be kept alive by its own cache
    memory = vars(tensor).setdefault("_shared_along", {})  # pyrefly: ignore
    if axis not in memory:
        memory[axis] = _Shared.apply(tensor, axis)
    return memory[axis]


def added_later(parameter: Tensor, axis: Axis) -> Tensor:
    """Pass ``parameter`` to a model whose gradients are added up over ``axis`` at the end of a step.

    Work on a rank's own tokens reads it through ``shared``, and gives a part of the gradient. All other work is equal
    on every rank, such as looking up all tokens in a table that is also the last layer: its gradient is whole on each
    rank, and every rank contributes its share of it.
    """
    if not (parameter.requires_grad and torch.is_grad_enabled()):
        return parameter
    with torch._C.DisableTorchFunction():  # no operation of the model's own, for those who record these
        view = _Share.apply(parameter, axis.size)
    setattr(view, _READ, parameter)
    return view


_READ = "_read_from"


def parameter_of(tensor: Tensor) -> Tensor | None:
    """Return the parameter that ``tensor`` is, or was read from by ``added_later``."""
    return tensor if isinstance(tensor, torch.nn.Parameter) else vars(tensor).get(_READ)


def total(tensor: Tensor, axis: Axis) -> Tensor:
    """Return the sum over ranks, whole on every rank; may use ``tensor``'s own memory.

    Backward: ``tp`` nothing; ``cp`` all-reduce.
    """
    return _Total.apply(tensor, axis)


def reduce_scattered(tensor: Tensor, dim: int, cut: Cut, axis: Axis) -> Tensor:
    """Return this rank's slice of the sum over ranks. Backward: all-gather."""
    return _Goes.apply(tensor, (_to_sum, _to_whole), dim, cut, axis)


def taken(whole: Tensor, dim: int, cut: Cut, axis: Axis) -> Tensor:
    """Return this rank's slice of a whole tensor. Backward: ``tp`` all-gather; ``cp`` nothing."""
    if axis.sums or not whole.requires_grad:
        return piece(whole, dim, cut, axis.rank)
    return _Goes.apply(whole, (_to_piece, _to_whole), dim, cut, axis)


def whole(local: Tensor, dim: int, cut: Cut, axis: Axis) -> Tensor:
    """Return a sliced tensor whole, for work that all ranks repeat. Backward: ``tp`` none; ``cp`` as ``opened``."""
    if axis.sums:
        return opened(local, dim, cut, axis)
    return _Goes.apply(local, (_to_whole, _to_piece), dim, cut, axis)


def opened(local: Tensor, dim: int, cut: Cut, axis: Axis) -> Tensor:
    """Return a sliced tensor whole, for work that is shared out. Backward: reduce-scatter.

    Gathered once for any number of products that read it.
    """
    memory: dict[Any, weakref.ref[Tensor]] = vars(local).setdefault("_opened_along", {})  # pyrefly: ignore
    key = (axis, torch.is_grad_enabled())
    known = memory.get(key)
    found = known() if known is not None else None
    if found is None:
        found = _Goes.apply(local, (_to_whole, _to_sum), dim, cut, axis)
        memory[key] = weakref.ref(found)  # weak: the gathered tensor is large, and lives as long as backward needs it
    return found


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.axis.add_up(grad.clone(memory_format=torch.contiguous_format)), None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad / ctx.ranks, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        # What is added up here may be a product that selective recompute keeps, for a second forward to add up again:
        # that counts each operation, of which both forwards must do the same.
        if not tensor.is_contiguous() or torch._C._len_torch_dispatch_stack() > 0:
            return axis.add_up(tensor.clone(memory_format=torch.contiguous_format))
        ctx.mark_dirty(tensor)
        return axis.add_up(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.axis.sums:
            grad = ctx.axis.add_up(grad.clone(memory_format=torch.contiguous_format))
        return grad, None


Way = Callable[[Tensor, int, Cut, Axis], Tensor]
"""One way that a tensor goes: from whole to slice or from slice to whole, along a dimension cut so over an axis."""


class _Goes(torch.autograd.Function):
    """Autograd node that moves a tensor one way and its gradient the other."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ways: tuple[Way, Way], dim: int, cut: Cut, axis: Axis) -> Tensor:
        there, ctx.back = ways
        ctx.where = dim, cut, axis
        return there(tensor, dim, cut, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.back(grad, *ctx.where), None, None, None, None


def _to_whole(local: Tensor, dim: int, cut: Cut, axis: Axis) -> Tensor:
    return axis.gather(local, dim, cut)


def _to_sum(tensor: Tensor, dim: int, cut: Cut, axis: Axis) -> Tensor:
    return axis.add_up_and_keep(tensor, dim, cut)


def _to_piece(whole: Tensor, dim: int, cut: Cut, axis: Axis) -> Tensor:
    return piece(whole, dim, cut, axis.rank).clone()
