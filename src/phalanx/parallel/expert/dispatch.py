"""Experts distributed over ranks, with tokens sent to them and back.

Every rank chooses experts for its own tokens. Rows (a hidden state for each chosen expert) are sorted by expert and go
to the ranks of these experts in one uneven all-to-all, none dropped; the module's own code runs there, on the local
experts; the results come back the same way and are added up token by token (Lepikhin et al. 2021, section 3.2; dropless
as Gale et al. 2023). Backward sends gradients along the same ways.

Under ``tp`` every rank has all tokens of its samples. There experts are distributed over ``ep`` × ``tp``, and each rank
of ``tp`` sends its share of the tokens, so that none is computed twice (Singh et al. 2023, section 5.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.comm import Mesh
from phalanx.config import Plan
from phalanx.errors import RunError
from phalanx.parallel.context.regions import unpacked
from phalanx.parallel.expert.find_experts import Experts, counting, or_alike, whole_call
from phalanx.parallel.layout import TensorShard
from phalanx.parallel.local_shards import Axis, Cut, Placed, is_sliced, sliced
from phalanx.parallel.local_shards.axis import taken, whole
from phalanx.parallel.local_shards.tensor import brought, local_of
from phalanx.parallel.tensor import split_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchedExperts:
    """Distributed experts, by name."""

    modules: tuple[str, ...] = ()  # that hold them
    inside: tuple[str, ...] = ()  # these modules' parameters
    slices: dict[str, TensorShard] = field(default_factory=dict[str, TensorShard])  # of those that are dealt out
    late: tuple[str, ...] = ()  # parameters whose gradients are to be added up over tp at the end of a step


def by_rows(module: nn.Module, found: Sequence[Experts]) -> None:
    """Make experts accept sliced tensors and work on the local rows, in place."""
    for experts in found:
        child = module.get_submodule(experts.name)
        if not isinstance(child.forward, _ExpertsForward):
            alone = Axis("ep", size=1, rank=0, group=None)
            child.forward = _ExpertsForward(child, experts, child.forward, alone, None)


def deal_out(module: nn.Module, found: Sequence[Experts], plan: Plan, mesh: Mesh, tensors: Axis) -> DispatchedExperts:
    """Keep this rank's experts only, in place, and route calls to all. ``tensors`` is the axis of ``tp``."""
    if not found:
        return DispatchedExperts()
    over = dealt_over(found, plan)
    group = mesh.group(*over)
    place = mesh.peers(*over).index(mesh.rank)
    owners = Axis("ep", size=mesh.size(*over), rank=place, group=group)
    spread = tensors if plan.tp > 1 else None
    cuts = {name: (Placed(owners, 0, cut),) for name, cut in rows_of(found, plan).items()}
    inside: list[str] = []
    for experts in found:
        child = module.get_submodule(experts.name)
        inside += [experts.whole_name(name) for name, _ in child.named_parameters()]
        forward = child.forward.forward if isinstance(child.forward, _ExpertsForward) else child.forward
        child.forward = _ExpertsForward(child, experts, forward, owners, spread)
    slices, _ = split_weights(module, cuts)
    late = [name for name in inside if name not in slices or "tp" not in over] if spread is not None else []
    modules = tuple(experts.name for experts in found)
    return DispatchedExperts(modules=modules, inside=tuple(inside), slices=slices, late=tuple(late))


def dealt_over(found: Sequence[Experts], plan: Plan) -> tuple[str, ...]:
    """Return the mesh dimensions whose ranks hold different experts: also ``tp``, if there are enough experts."""
    enough = all(experts.count >= plan.ep * plan.tp for experts in found)
    return ("ep", "tp") if enough else ("ep",)


def rows_of(found: Sequence[Experts], plan: Plan) -> dict[str, Cut]:
    """Map name to the cut of its rows (a row is an expert) over the ranks of ``dealt_over``; empty for one rank."""
    ranks = prod(plan.mesh[axis] for axis in dealt_over(found, plan))
    if ranks == 1:
        return {}
    return {
        experts.whole_name(name): Cut.even(experts.count, ranks) for experts in found for name in experts.parameters
    }


class _ExpertsForward:
    """The replacement forward of a module that holds experts."""

    def __init__(
        self, module: nn.Module, experts: Experts, forward: Callable[..., Tensor], owners: Axis, spread: Axis | None
    ) -> None:
        self._module, self._experts, self.forward = module, experts, forward
        self._owners, self._cut, self._spread = owners, Cut.even(experts.count, owners.size), spread

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = unpacked(args, kwargs)
        given, with_others = whole_call(self._experts, args, kwargs)
        placed, tensors = _alike(*given)
        before = tensors[0].shape[:-1]
        tensors = [tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]
        share = self._share(placed, len(tensors[0]))
        if share is not None:
            cut, spread = share
            tensors = [taken(tensor, 0, cut, spread) for tensor in tensors]

        def run(*rows: Tensor) -> Tensor:
            # As many dimensions as the module is called with.
            args, kwargs = with_others(*(one.view(*(1,) * (len(before) - 1), *one.shape) for one in rows))
            return or_alike(lambda: self.forward(*args, **kwargs), rows[0], rows[2]).flatten(0, -2)

        result = self._through_owners(run, *tensors) if self._owners.size > 1 else run(*tensors)
        if share is not None:
            result = whole(result, 0, *share)
        return sliced(result.view(*before, result.shape[-1]), placed)

    def _share(self, placed: Sequence[Placed], rows: int) -> tuple[Cut, Axis] | None:
        if self._spread is None or any(one.axis is self._spread for one in placed):
            return None
        return Cut.even(rows, self._spread.size), self._spread

    def _through_owners(self, run: Callable[..., Tensor], hidden: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        slots = chosen.reshape(-1)
        order = slots.argsort(stable=True)
        post = self._post(slots)
        rows, factors = post.send(hidden[order // chosen.shape[1]], weight.reshape(-1)[order])
        arrived = len(rows)
        if arrived == 0:  # a row of nothing, so that the experts here get their gradients, of zero
            rows, factors = F.pad(rows, (0, 0, 0, 1)), F.pad(factors, (0, 1))
        with counting(self._module, self._experts, self._cut.lengths[self._owners.rank]):
            made = run(rows, post.local(arrived).to(chosen.dtype), factors.unsqueeze(1))
        (back,) = post.back().send(made[:arrived])
        in_place = torch.empty_like(order)
        in_place[order] = torch.arange(len(order), device=order.device)
        return back[in_place].view(*chosen.shape, back.shape[-1]).sum(1)

    def _post(self, slots: Tensor) -> _Post:
        counts = torch.bincount(slots, minlength=self._experts.count)
        if len(counts) != self._experts.count:
            raise RunError(
                f"{self._experts.name} was called with expert {len(counts) - 1} of {self._experts.count}.\n"
                "    try: experts from 0 on; a weight of 0 for a token that is to be left out"
            )
        axis, lengths = self._owners, self._cut.lengths
        here = lengths[axis.rank]
        arriving = counts.new_empty(axis.size * here)
        dist.all_to_all_single(arriving, counts, [here] * axis.size, list(lengths), group=axis.group)
        arriving = arriving.view(axis.size, here)
        sends = torch.stack([part.sum() for part in counts.split(lengths)])
        # The one place where the host waits for the device: it must know how many rows come.
        there, coming = torch.stack([sends, arriving.sum(1)]).tolist()
        return _Post(axis, there, coming, arriving)


@dataclass(frozen=True, slots=True)
class _Post:
    """One exchange of rows."""

    axis: Axis  # of the ranks
    sends: list[int]  # rows to each rank
    receives: list[int]  # rows from each rank
    arriving: Tensor  # how many of the rows from each rank are for each expert here

    def send(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return _Exchanged.apply(self, *tensors)

    def back(self) -> _Post:
        return _Post(self.axis, self.receives, self.sends, self.arriving)

    def exchanged(self, tensor: Tensor) -> Tensor:
        out = tensor.new_empty(sum(self.receives), *tensor.shape[1:])
        dist.all_to_all_single(out, tensor.contiguous(), self.receives, self.sends, group=self.axis.group)
        return out

    def local(self, rows: int) -> Tensor:
        """Return the local expert of each received row, shape (rows, 1); 0 for a padding row."""
        senders, here = self.arriving.shape
        if rows == 0:
            return self.arriving.new_zeros(1, 1)
        experts = torch.arange(here, device=self.arriving.device).repeat(senders)
        return experts.repeat_interleave(self.arriving.reshape(-1), output_size=rows).unsqueeze(1)


class _Exchanged(torch.autograd.Function):
    """An exchange of all its tensors in one autograd node, so that all ranks send gradients in the same order."""

    @staticmethod
    def forward(ctx: Any, post: _Post, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.post = post
        return tuple(post.exchanged(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        post = ctx.post.back()
        return None, *(post.exchanged(grad) for grad in grads)


def _alike(hidden: Tensor, *others: Tensor) -> tuple[tuple[Placed, ...], list[Tensor]]:
    if is_sliced(hidden):
        hidden = hidden.whole([one.axis for one in hidden.placed if one.dim == hidden.dim() - 1])
    placed = hidden.placed if is_sliced(hidden) else ()
    tensors: list[Tensor] = [hidden]
    for other in others:
        if is_sliced(other):
            other = other.whole([one.axis for one in other.placed if not any(one.axis is its.axis for its in placed)])
        for one in placed:
            other = brought(other, one.axis, one.dim - hidden.dim(), one.cut)
        tensors.append(other)
    return placed, [local_of(tensor) for tensor in tensors]
